"""Detection of unusual losses and gradient norms, and the action to take.

Pure, no torch here.

A loss or norm is compared with the median of the previous ones, in units of a robust
standard deviation: the median absolute deviation (MAD) times 1.4826, which estimates
sigma for normal values (Rousseeuw and Croux 1993).
"""

import dataclasses
import itertools
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from trainer.config.train_config import HealthSettings, Policy
from trainer.health.events import Action, Diagnosis, Kind

FLOOR_SHARE = 0.1
"""Smallest unusual excess over the median, as a share of the median: late in a run,
sigma of the loss is tiny."""
ENOUGH_VALUES, FEWEST_VALUES = 16, 8
"""Values required before one is judged; the lower number is for the shortest
windows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits above which the device skips an update.

    Infinite if not known yet, or if nothing is to be skipped.
    """

    loss: float = math.inf
    grad_norm: float = math.inf


NO_LIMITS = Limits()


class HealthMonitor:
    """Monitor that checks every step once, in order, and reports unusual ones."""

    def __init__(
        self,
        settings: HealthSettings,
        max_grad_norm: float,
        saved: Mapping[str, Any] | None = None,
    ) -> None:
        """Start from a saved state.

        Fields that it lacks get their defaults, so that older checkpoints can be read.
        """
        self._settings, self._clip = settings, max_grad_norm
        self.recovery = _restored(Recovery, (saved or {}).get("recovery", {}))
        self._look_back(saved or {})

    def _look_back(self, saved: Mapping[str, Any]) -> None:
        """Restore the history of usual values, or start it empty if none is saved."""
        settings = self._settings
        self._loss = _Series(
            Kind.SPIKE, settings.on_spike, settings, 0.0, saved.get("loss", {})
        )
        floor = settings.explosion_ratio * self._clip
        self._norm = _Series(
            Kind.EXPLOSION,
            settings.on_explosion,
            settings,
            floor,
            saved.get("grad_norm", {}),
        )
        self._plateau = _restored(
            Plateau,
            saved.get("plateau", {}),
            window_steps=settings.plateau_window_steps,
        )
        self._usual: bool = saved.get("usual", True)
        self._skipped_in_a_row: int = saved.get("skipped_in_a_row", 0)

    def limits(self) -> Limits:
        """Return the limits above which the device skips the coming updates."""
        loss, grad_norm = (
            one.limit if one.guarded else math.inf for one in (self._loss, self._norm)
        )
        return Limits(loss=loss, grad_norm=grad_norm)

    def check(
        self, step: int, *, loss: float, grad_norm: float, applied: bool
    ) -> list[Diagnosis]:
        """Return the findings of a step, counted from 1.

        Call it exactly once for each step, in order.

        ``loss`` is the mean over all ranks in nats, ``grad_norm`` is before clipping.
        The device has ``applied`` the update unless it is not finite or exceeds the
        limits.
        """
        furthest = self.recovery.furthest_trouble_step
        if furthest is not None and step > furthest + self._settings.easing_steps:
            self.recovery.without_progress = 0  # far enough past the last problem
        values = {"loss": loss, "grad_norm": grad_norm}
        named = (("loss", loss), ("gradient norm", grad_norm))
        if broken := [
            f"{name} is {value}" for name, value in named if not math.isfinite(value)
        ]:
            self._usual = False
            message = f"{' and '.join(broken)} in step {step}; the update was skipped"
            action = Action(self._settings.on_non_finite)
            found = [
                Diagnosis(
                    kind=Kind.NON_FINITE, action=action, message=message, values=values
                )
            ]
        else:
            found = self._unusual(step, values, applied=applied)
        skipped = any(one.action is Action.SKIP for one in found)
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if skipped else 0
        found = [self._escalated(one) for one in found]
        if applied and math.isfinite(loss):
            found += self._plateau.check(step, loss)
        return found

    @property
    def calm(self) -> bool:
        """True if a rollback may return to a checkpoint saved now."""
        is_open = self._loss.excursion or self._norm.excursion
        return self._usual and not is_open and self._skipped_in_a_row == 0

    def learning_rate_share(self, step: int) -> float:
        """Return the factor on the learning rate of the next step, counted from 0.

        Below 1 after a rollback.
        """
        before = self.recovery
        if before.eased_from_step is None or step < before.eased_from_step:
            return 1.0
        done = min(1.0, (step - before.eased_from_step) / self._settings.easing_steps)
        return before.eased_share + (1 - before.eased_share) * done

    def roll_back(
        self, saved: Mapping[str, Any], *, at_step: int, to_step: int
    ) -> None:
        """Restore the history at ``to_step`` after trouble at ``at_step``, and ease the learning rate."""
        self._look_back(saved)
        self._skipped_in_a_row = 0
        recovery = self.recovery
        recovery.rollbacks += 1
        recovery.without_progress += 1
        recovery.furthest_trouble_step = max(
            recovery.furthest_trouble_step or 0, at_step
        )
        recovery.eased_from_step = to_step
        recovery.eased_share = (
            self._settings.eased_learning_rate_share**recovery.without_progress
        )

    def reset_rollback_count(self) -> None:
        """Reset the count of rollbacks, after settings were changed since the run gave up."""
        self.recovery.without_progress = 0
        self.recovery.furthest_trouble_step = None

    def to_json(self) -> dict[str, Any]:
        """Return the whole state as JSON values; none of them is infinite."""
        return {
            "loss": self._loss.to_json(),
            "grad_norm": self._norm.to_json(),
            "plateau": dataclasses.asdict(self._plateau),
            "usual": self._usual,
            "skipped_in_a_row": self._skipped_in_a_row,
            "recovery": dataclasses.asdict(self.recovery),
        }

    def _unusual(
        self, step: int, values: dict[str, float], *, applied: bool
    ) -> list[Diagnosis]:
        pairs = ((self._loss, values["loss"]), (self._norm, values["grad_norm"]))
        above = [series for series, value in pairs if value > series.limit]
        blamed: _Series | None = None
        if not applied and not any(series.guarded for series in above):
            # An older limit caused the skip: that of the series nearest to its limit.
            near = {
                one: value / one.limit if one.limit > 0 else 1.0
                for one, value in pairs
                if one.guarded
            }
            blamed = max(near, key=near.__getitem__, default=None)
        self._usual = not above and blamed is None
        found = []
        for series, value in pairs:
            lagging = series is blamed
            action = Action.SKIP if lagging else series.judge(value, applied=applied)
            if action is not None:
                name, clip = (
                    ("loss", {})
                    if series is self._loss
                    else ("gradient norm", {"clip": self._clip})
                )
                limits = (
                    {}
                    if math.isnan(series.median)
                    else {"median": series.median, "limit": series.limit}
                )
                limit = (
                    f"{series.limit:.4g}; the median of the last {len(series.window)}"
                    f" steps is {series.median:.4g}"
                )
                limit = "the limit of an earlier step" if lagging else limit
                message = f"the {name} of step {step} is {value:.4g}, above {limit}; "
                message += f"the update was {'applied' if applied else 'skipped'}"
                found.append(
                    Diagnosis(
                        kind=series.kind,
                        action=action,
                        message=message,
                        values=values | limits | clip,
                    )
                )
            if not series.guarded or (series not in above and not lagging):
                series.window.append(value)
                series.measure()
        return found

    def _escalated(self, one: Diagnosis) -> Diagnosis:
        """Return a finding with a stronger action if skipping, or rolling back, did not help."""
        action, message = one.action, one.message
        if (
            action is Action.SKIP
            and self._skipped_in_a_row >= self._settings.patience_steps
        ):
            action = Action.ROLL_BACK
            message += f", as {self._skipped_in_a_row} in a row were"
        if action is not Action.ROLL_BACK:
            return one
        before, most = self.recovery.without_progress, self._settings.max_rollbacks
        if before < most:
            return dataclasses.replace(
                one, action=action, message=f"{message}; training rolls back"
            )
        message += f"; {before} earlier rollbacks did not help" if before else ""
        message += f"; training gives up, at train.health.max_rollbacks = {most}"
        return dataclasses.replace(one, action=Action.GIVE_UP, message=message)


class _Series:
    """Window of the last values of one metric, and the limit above which a value is unusual."""

    def __init__(
        self,
        kind: Kind,
        policy: Policy,
        settings: HealthSettings,
        floor: float,
        saved: Mapping[str, Any],
    ) -> None:
        self.kind = kind
        self.guarded = policy != "warn"
        """True if the device skips unusual steps, which it does unless the policy is
        ``warn``."""
        self.excursion: bool = saved.get("excursion", False)
        """True if unusual values were reported and none was usual since; only with the
        policy ``warn``."""
        self._policy, self._sigmas, self._floor = policy, settings.spike_sigmas, floor
        self._enough = max(FEWEST_VALUES, min(ENOUGH_VALUES, settings.window_steps))
        self.window: deque[float] = deque(
            saved.get("window", ()), maxlen=settings.window_steps
        )
        self.measure()

    def judge(self, value: float, *, applied: bool) -> Action | None:
        """Return the action for a value, or None if it is usual or already reported."""
        if value <= self.limit:
            self.excursion = False
            return None
        match self._policy:
            case "rollback":
                return Action.ROLL_BACK
            case "skip":
                # The device's limit is some steps old and can let through a value above
                # the current one.
                return Action.WARN if applied else Action.SKIP
            case "warn":
                is_known, self.excursion = self.excursion, True
                return None if is_known else Action.WARN

    def to_json(self) -> dict[str, Any]:
        return {"window": list(self.window), "excursion": self.excursion}

    def measure(self) -> None:
        """Derive the median and the limit from the window."""
        self.median, self.limit = math.nan, math.inf
        if len(self.window) >= self._enough:
            self.median, sigma = level_and_scatter(list(self.window))
            room = max(self._sigmas * sigma, FLOOR_SHARE * abs(self.median))
            self.limit = max(self.median + room, self._floor)


@dataclasses.dataclass(slots=True, kw_only=True)
class Recovery:
    """Number of rollbacks, in total and without progress, and the current easing of the learning rate."""

    rollbacks: int = 0
    without_progress: int = 0
    furthest_trouble_step: int | None = None
    eased_from_step: int | None = None
    eased_share: float = 1.0


SIGMAS_PER_MAD = 1.4826
MEDIAN_ERROR = 1.2533
"""Standard error of a median in units of sigma / sqrt(n): sqrt(pi / 2), asymptotically
and for normal values."""


def level_and_scatter(values: Sequence[float]) -> tuple[float, float]:
    """Return the current level of values and their robust standard deviation, both corrected for a falling trend."""
    whole, scatter = centre_and_scatter(sorted(values))
    half = len(values) // 2
    first, second = (
        median_of_sorted(sorted(values[:half])),
        median_of_sorted(sorted(values[-half:])),
    )
    if second >= first:
        return whole, scatter
    slope = (second - first) / (len(values) - half)
    middle_of_first = (half - 1) / 2
    around = [
        value - first - slope * (place - middle_of_first)
        for place, value in enumerate(values)
    ]
    return min(whole, second), min(scatter, centre_and_scatter(sorted(around))[1])


def median_and_error(blocks: Sequence[float]) -> tuple[float, float]:
    """Return the median of blocks of steps and its standard error, estimated from differences, so without a trend."""
    differences = sorted(
        [abs(one - other) for one, other in itertools.pairwise(blocks)]
    )
    sigma = (
        SIGMAS_PER_MAD * median_of_sorted(differences) / math.sqrt(2)
        if differences
        else 0.0
    )
    return median_of_sorted(sorted(blocks)), MEDIAN_ERROR * sigma / math.sqrt(
        len(blocks)
    )


def centre_and_scatter(ordered: Sequence[float]) -> tuple[float, float]:
    """Return the median and the robust standard deviation of sorted values."""
    centre = median_of_sorted(ordered)
    # Two runs in order, which sorting only has to merge.
    deviations = sorted([abs(value - centre) for value in ordered])
    return centre, SIGMAS_PER_MAD * median_of_sorted(deviations)


def median_of_sorted(ordered: Sequence[float]) -> float:
    """Return the median of sorted values."""
    half = len(ordered) // 2
    if len(ordered) % 2:
        return ordered[half]
    # Halved first: the sum of two finite values need not be finite.
    return ordered[half - 1] / 2 + ordered[half] / 2


ERRORS_THAT_TELL, ERRORS_OF_A_RISE = 2.0, 4.0
"""Standard errors above which a fall, or a rise, between two medians exceeds noise. A
rise is always reported."""
FEWEST_BLOCKS, MOST_BLOCKS = 20, 160
"""Number of blocks in the shortest window, and at most in the whole run."""
SMALLEST_CHANGE_SHARE = 0.001
"""Smallest relevant change in half a plateau window, as a share of the loss, even if it
is significant."""


@dataclass(slots=True, kw_only=True)
class Plateau:
    """Detector of a loss that stands still or rises: it compares block medians of both halves of a long window.

    The window is the last half of the run, at least ``window_steps``, and is checked
    each time half of it is new.
    """

    window_steps: int
    block_steps: int = 0
    blocks: list[float] = dataclasses.field(default_factory=list)
    block: list[float] = dataclasses.field(default_factory=list)
    judged_at: int = 0
    is_told: bool = False

    def __post_init__(self) -> None:
        self.block_steps = self.block_steps or max(
            1, self.window_steps // FEWEST_BLOCKS
        )
        self.blocks, self.block = list(self.blocks), list(self.block)

    def check(self, step: int, loss: float) -> list[Diagnosis]:
        """Return the findings for a step's loss, counted from 1.

        Call it once for each step, in order.
        """
        self.block.append(loss)
        if len(self.block) < self.block_steps:
            return []
        self.blocks.append(median_of_sorted(sorted(self.block)))
        self.block = []
        steps = len(self.blocks) * self.block_steps
        window_steps = max(self.window_steps, steps // 2)
        half = window_steps // 2 // self.block_steps
        if (
            steps < self.window_steps
            or steps - self.judged_at < window_steps // 2
            or not half
        ):
            return []
        self.judged_at = steps
        first, first_error = median_and_error(self.blocks[-2 * half : -half])
        second, second_error = median_and_error(self.blocks[-half:])
        improvement, error = first - second, math.hypot(first_error, second_error)
        values = {
            "first_median": first,
            "second_median": second,
            "improvement": improvement,
            "error": error,
        }
        smallest = SMALLEST_CHANGE_SHARE * abs(first)
        telling = max(ERRORS_THAT_TELL * error, smallest)
        medians = (
            f"median {first:.4g} in the first half and {second:.4g} in the second half"
            " of the last "
        )
        medians += f"{2 * half * self.block_steps} steps, at step {step}"
        # Join pairs; an odd first block is dropped.
        while len(self.blocks) > MOST_BLOCKS:
            even = self.blocks[len(self.blocks) % 2 :]
            self.blocks = [
                one / 2 + other / 2
                for one, other in zip(even[::2], even[1::2], strict=True)
            ]
            self.block_steps *= 2
            self.judged_at = len(self.blocks) * self.block_steps
        if improvement < -max(ERRORS_OF_A_RISE * error, smallest):
            message = f"the loss is rising: {medians}"
            return [
                Diagnosis(
                    kind=Kind.RISE, action=Action.WARN, message=message, values=values
                )
            ]
        was_told, self.is_told = self.is_told, improvement < telling
        if was_told or not self.is_told:
            return []
        message = (
            f"the loss has stopped falling: {medians} (a fall of {improvement:.2g};"
            f" noise is {telling:.2g})"
        )
        return [
            Diagnosis(
                kind=Kind.PLATEAU, action=Action.WARN, message=message, values=values
            )
        ]


StateT = TypeVar("StateT", Recovery, Plateau)


def _restored(kind: type[StateT], saved: Mapping[str, Any], **settings: Any) -> StateT:
    """Return a saved state under the given settings.

    Fields that are not saved get their defaults.
    """
    known = {field.name for field in dataclasses.fields(kind)}
    return kind(
        **{name: value for name, value in saved.items() if name in known} | settings
    )

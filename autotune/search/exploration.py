"""Search the settings of the step together for real tokens/s: Optuna asks, tells and prunes, a posterior proposes.

Every cell of the space keeps the global batch, and fits as far as memory can be predicted. A round reads the unexplored
settings beside the proposed ones, so that what a machine's minutes do to one they do to all; a cell is first read for a
short window, and goes on to a full one only if it may still be the best. The search stops when no cell is expected to
win more than the noise would let anybody see; until then those that may be the best are read again. What promises most
is then held against the unexplored settings window by window, and taken only where it is proven to be faster; where it
rounds differently its loss must be the same as well.

Windows are on batches from memory, as loaders are counted later, at whatever settings come out of this.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from autotune.core.knobs import EQUAL_TO_THE_BIT_OR_ORDER, KNOBS, Knobs
from autotune.core.outcome import Contaminated, Measured, Outcome, OutOfMemory, describe
from autotune.core.trial import FeedFigures, Trial
from autotune.decide.equal_loss import CHECK_WARM_UP_STEPS, LOSS_STEPS, compare_losses, fell_too_little
from autotune.decide.exploration import Posterior, Seen, expected_improvement, posterior
from autotune.decide.knob_space import useful_share
from autotune.decide.resampling import paired_ratio
from autotune.decide.statistics import Interval
from autotune.errors import Undecided
from autotune.search.trials import TrialRunner
from autotune.search.workers import ATTEMPTS, Asked, SweepRequest, feed_trial
from trainer.config import Layout, TrainConfig

if TYPE_CHECKING:
    import optuna

TOGETHER = 3
"""Proposed at once, and read beside one window of the unexplored settings."""
SHORT_PART = 0.25
"""Of a window: what a first look takes."""
PRUNE_SIGMAS = 2.0
"""A first look so far below the best rules a cell out."""
LEAST_TRIALS = 12
LEAST_IMPROVEMENT = 0.003
"""Of the logarithm: less is not worth a search, however sure."""
VISIBLE_SHARE = 0.1
"""Of a window's noise: what a dozen windows of both in turn can tell apart."""
FIRST_VERIFYING, MOST_VERIFYING = 4, 12
COMPILING_S = 60.0
"""What a window of compiled layers takes longer, until one was read: on a CPU a minute, on GPUs less."""
CRASHES = 2
"""Values of a knob that crashed so often, and never ran, are left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExploreRequest:
    """What to explore."""

    windows: SweepRequest
    """Its configuration is the unexplored one; its budget is for the search and what follows it."""
    cells: tuple[Knobs, ...]
    """The unexplored one first."""
    global_rows: Mapping[Layout, int]
    """The same global batch, by layout."""
    real_shares: Mapping[Layout, float | None]
    """Part of a row's places that holds real tokens, in the mean of the dataset; None where windows must tell."""
    most_trials: int
    left_out: tuple[str, ...] = ()
    fits: Callable[[Knobs], bool] = lambda knobs: True
    """By prediction; asked once a cell is proposed, as tracing takes seconds."""
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Explored:
    """What a search came to."""

    candidate: Knobs
    """What promised most; the unexplored settings where nothing did."""
    ratio: Interval
    """Of the candidate to the unexplored settings, with 98 % bounds."""
    equal_loss: str | None
    adopted: bool


@dataclass(slots=True, kw_only=True)
class Tried:
    """What is known of a cell."""

    ratios: list[float] = field(default_factory=list)
    """Logarithms, of full windows."""
    short: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    """Real tokens/s of full windows; of short ones where there is no full one."""
    outcome: str = "ran"

    @property
    def ran(self) -> bool:
        """Whether any window did."""
        return bool(self.ratios or self.short)


@dataclass(slots=True, kw_only=True)
class Exploration:
    """A search under way."""

    request: ExploreRequest
    runner: TrialRunner
    tried: dict[Knobs, Tried] = field(default_factory=dict)
    unfit: set[Knobs] = field(default_factory=set)
    """Predicted not to fit; never tried."""
    rounds: int = 0
    windows: int = 0
    seconds: float = 0.0
    stopped_because: str = ""
    taken_s: dict[bool, list[float]] = field(default_factory=lambda: {False: [], True: []})
    """Seconds of windows, start included, without and with compiled layers."""
    cells: tuple[Knobs, ...] = ()
    """Those that are left."""

    def __post_init__(self) -> None:
        self.cells = self.request.cells
        self.tried[self.unexplored] = Tried()

    @property
    def unexplored(self) -> Knobs:
        """What the profile has."""
        return self.request.cells[0]

    def run(self) -> "Explored":
        """Search, verify, and check the loss.

        Raises:
            Undecided: If the unexplored settings could not be measured.
        """
        study = self._study()
        while not (why := self._over()):
            self._round(study)
        self.stopped_because = why
        candidate = self._best()
        ratio, equal_loss = Interval(value=1.0, low=None, high=None), None
        if candidate != self.unexplored:
            ratio = self._verify(candidate)
        proven = ratio.low is not None and ratio.low > 1.0
        sound = True
        if proven and self._rounds_differently(candidate):
            sound, equal_loss = self._check_loss(candidate)
        return Explored(candidate=candidate, ratio=ratio, equal_loss=equal_loss, adopted=proven and sound)

    # What to read next.

    def _over(self) -> str:
        """Why the search ends; empty while it goes on."""
        tried = len(self.tried) - 1
        if len(self.cells) < 2:
            return "nothing else fits or runs"
        if tried >= self.request.most_trials:
            return f"{tried} cells are as many as were allowed"
        if self.rounds and self._searching_s_left() <= 0:
            return "half of the time is used up, and the other half is for proof"
        if tried < min(LEAST_TRIALS, len(self.cells) - 1):
            return ""
        found = self.posterior()
        gain = float(expected_improvement(found, self._best_mean(found)).max())
        least = max(LEAST_IMPROVEMENT, VISIBLE_SHARE * found.noise_sigma)
        if gain < least:
            return f"nothing is expected to win more than {math.expm1(gain):.1%}, which is below the noise"
        return ""

    def posterior(self) -> Posterior:
        """What is believed of all cells."""
        return posterior(self.cells, self._seen())

    def _seen(self) -> list[Seen]:
        place = {cell: number for number, cell in enumerate(self.cells)}
        # The unexplored settings are one, by definition, and as surely as many windows could tell.
        seen = [Seen(cell=place[self.unexplored], log_ratio=0.0) for _ in range(8)]
        for cell, tried in self.tried.items():
            if cell in place and cell != self.unexplored:
                seen += [Seen(cell=place[cell], log_ratio=one) for one in tried.ratios]
                seen += [Seen(cell=place[cell], log_ratio=one, short=True) for one in tried.short]
        return seen

    def _best_mean(self, found: Posterior) -> float:
        tried = {cell for cell, one in self.tried.items() if one.ran} | {self.unexplored}
        return max(float(found.mean[number]) for number, cell in enumerate(self.cells) if cell in tried)

    def propose(self, pending: Sequence[Knobs]) -> Knobs | None:
        """The cell that is expected to win most; those that are pending are taken to be as good as believed.

        None where nothing is left that fits, or that the time allows.
        """
        found = self.posterior()
        place = {cell: number for number, cell in enumerate(self.cells)}
        lies = [Seen(cell=place[cell], log_ratio=float(found.mean[place[cell]])) for cell in pending]
        if lies:
            found = posterior(self.cells, [*self._seen(), *lies])
        gains = expected_improvement(found, self._best_mean(found))
        # Gain per second, as Snoek, Larochelle and Adams, NeurIPS 2012, section 3.2: compiling takes a minute on a CPU.
        worth = {cell: gain / self.window_takes_s(cell) ** 0.5 for cell, gain in zip(self.cells, gains, strict=True)}
        for cell in sorted(worth, key=lambda one: -worth[one]):
            if cell in pending or cell == self.unexplored or self.window_takes_s(cell) > self._searching_s_left():
                continue
            if cell in self.tried or self.request.fits(cell):
                return cell
            self._rule_out(cell)
        return None

    def window_takes_s(self, cell: Knobs) -> float:
        """About so long, by those of its kind so far."""
        plain = statistics.median(self.taken_s[False] or [1.0])
        if not cell.compile_layers:
            return plain
        return statistics.median(self.taken_s[True] or [plain + COMPILING_S])

    def _searching_s_left(self) -> float:
        return self.request.windows.budget_s / 2 - self.seconds

    def _rule_out(self, unfit: Knobs) -> None:
        """A cell that does not fit, and those of its kind with more rows."""
        kind = replace(unfit, micro_batch_rows=1)
        more = {
            cell
            for cell in self.cells
            if replace(cell, micro_batch_rows=1) == kind and cell.micro_batch_rows >= unfit.micro_batch_rows
        }
        self.unfit |= more - {self.unexplored}
        self.cells = tuple(cell for cell in self.cells if cell not in self.unfit)

    def _study(self) -> "optuna.Study":
        import optuna

        from autotune.search.sampling import PosteriorSampler, VisiblePruner, distributions

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        return optuna.create_study(
            study_name="explore",
            direction="maximize",
            sampler=PosteriorSampler(distributions(self.request.cells), self.propose, seed=self.request.seed),
            pruner=VisiblePruner(self._hopeless),
        )

    def _hopeless(self, log_ratio: float) -> bool:
        """Whether a first look lies so far below the best that a full window could not mend it."""
        found = self.posterior()
        noise = found.noise_sigma * (1 + SHORT_PART**-0.5)
        return bool(log_ratio < self._best_mean(found) - max(PRUNE_SIGMAS * noise, LEAST_IMPROVEMENT))

    # Windows.

    def _round(self, study: "optuna.Study") -> None:
        """Ask, read short windows of what is new, and full ones of all that is not pruned."""
        asked = self._ask(study)
        if not asked:
            self.cells = tuple(cell for cell in self.cells if cell in self.tried)
            return
        fresh = [cell for cell in asked if cell not in self.tried]
        first = self._read([self.unexplored, *fresh], short=True) if fresh else {}
        going_on = [cell for cell in asked if cell not in fresh]
        for cell in fresh:
            if cell not in first:
                _tell_nothing(study, asked[cell], "fail")
                continue
            asked[cell].report(self._take(cell, first, short=True), step=0)
            if asked[cell].should_prune():
                self.tried[cell].outcome = "pruned"
                _tell_nothing(study, asked[cell], "pruned")
            else:
                going_on.append(cell)
        full = self._read([self.unexplored, *going_on], short=False) if going_on else {}
        for cell in going_on:
            if cell in full:
                self.tried[cell].outcome = "ran"
                study.tell(asked[cell], self._take(cell, full, short=False))
            else:
                _tell_nothing(study, asked[cell], "fail")

    def _ask(self, study: "optuna.Study") -> "dict[Knobs, optuna.Trial]":
        """Trials of different cells; fewer, or none, where few are left."""
        from autotune.search.sampling import distributions

        space = distributions(self.request.cells)
        found: dict[Knobs, optuna.Trial] = {}
        for trial in [study.ask(fixed_distributions=space) for _ in range(TOGETHER)]:
            cell = Knobs(**trial.params)
            if cell in self.cells and cell != self.unexplored and cell not in found:
                found[cell] = trial
            else:
                _tell_nothing(study, trial, "fail")
        return found

    def _take(self, cell: Knobs, found: Mapping[Knobs, float], *, short: bool) -> float:
        """Note a window's ratio to the unexplored settings of its round; gives its logarithm."""
        value = math.log(found[cell] / found[self.unexplored])
        tried = self.tried.setdefault(cell, Tried())
        (tried.short if short else tried.ratios).append(value)
        return value

    def _read(self, cells: Sequence[Knobs], *, short: bool) -> dict[Knobs, float]:
        """Real tokens/s of each, of those that ran; a round is taken from the ledger whole or not at all.

        Raises:
            Undecided: If the unexplored settings did not run.
        """
        number, names = self.rounds, [cell.name for cell in cells]
        self.rounds += 1
        trials = [self._trial(cell, number, names, short=short) for cell in cells]
        anew = not all(map(self.runner.knows, trials))
        found: dict[Knobs, float] = {}
        order = list(range(len(cells)))
        for place in order if number % 2 == 0 else reversed(order):
            cell = cells[place]
            what = "a first look" if short else f"round {number + 1}"
            outcome = self._run(trials[place], f"{cell.name}: {what}", anew=anew)
            self.taken_s[cell.compile_layers].append(self.runner.finished[-1].seconds)
            tried = self.tried.setdefault(cell, Tried())
            if isinstance(outcome, Measured):
                found[cell] = self.rate_of(cell, FeedFigures.of(outcome))
                tried.rates = [found[cell]] if short or not tried.ratios else [*tried.rates, found[cell]]
            elif cell == self.unexplored:
                raise self._unmeasured(outcome)
            else:
                self._failed(cell, outcome)
        return found

    def _trial(self, cell: Knobs, number: int, names: list[str], *, short: bool) -> Trial:
        windows = self.request.windows
        trial = feed_trial(windows, Asked(name=cell.name, config=self.config_of(cell), cached=True), number, names)
        length = {"window_s": windows.window_s * SHORT_PART, "min_steps": 1} if short else {"min_steps": 2}
        return replace(trial, measured=trial.measured | length)

    def _run(self, trial: Trial, label: str, *, anew: bool) -> Outcome:
        for attempt in range(ATTEMPTS):
            outcome = self.runner.run(trial, label + (f", try {attempt + 1}" if attempt else ""), anew=anew)
            self.seconds += self.runner.finished[-1].seconds
            if not isinstance(outcome, Contaminated):
                break
        self.windows += isinstance(outcome, Measured)
        return outcome

    def _failed(self, cell: Knobs, outcome: Outcome) -> None:
        """Note it; a kind that runs out of memory is not tried with more rows, a value that only crashes no more."""
        self.tried[cell].outcome = describe(outcome)
        self.cells = tuple(one for one in self.cells if one != cell)
        if isinstance(outcome, OutOfMemory):
            self._rule_out(cell)
            return
        for name in KNOBS:
            value = getattr(cell, name)
            of_value = [one for knobs, one in self.tried.items() if getattr(knobs, name) == value]
            if len(of_value) >= CRASHES and not any(one.ran for one in of_value):
                left = {one for one in self.cells if getattr(one, name) == value and one != self.unexplored}
                self.cells = tuple(one for one in self.cells if one not in left)

    def config_of(self, cell: Knobs) -> TrainConfig:
        """The unexplored configuration with the knobs of a cell, at the same global batch."""
        config = self.request.windows.config
        rows = {"global_batch_rows": self.request.global_rows[cell.layout]}
        other = {"global_batch_tokens": None, "global_batch_samples": None}
        return config.model_copy(update=cell.settings() | rows | other)

    def rate_of(self, cell: Knobs, figures: FeedFigures) -> float:
        """Real tokens/s of a window, as training has them at the global batch."""
        share = self.request.real_shares[cell.layout]
        real = figures.real_tokens_per_s if share is None else share * figures.slot_tokens_per_s
        return real * useful_share(cell, self.request.global_rows, self.request.windows.limits.local_ranks)

    def _unmeasured(self, outcome: Outcome) -> Undecided:
        detail = "" if isinstance(outcome, Measured) else outcome.detail
        return Undecided(
            f"the window of the unexplored settings {describe(outcome)}:\n{detail}".rstrip(),
            next_step=f"Mend that and run the same command: it resumes from {self.runner.ledger.directory}.",
        )

    # What it comes to.

    def _best(self) -> Knobs:
        """The cell that ran a full window and is believed to be the fastest."""
        found = self.posterior()
        place = {cell: number for number, cell in enumerate(self.cells)}
        ran = [cell for cell, one in self.tried.items() if one.ratios and cell in place]
        return max([self.unexplored, *ran], key=lambda cell: float(found.mean[place[cell]]))

    def _verify(self, candidate: Knobs) -> Interval:
        """Windows of both in turn, until they differ or enough of them do not."""
        pairs: list[tuple[float, float]] = []
        while True:
            found = self._read([candidate, self.unexplored], short=False)
            if candidate not in found:
                return Interval(value=1.0, low=None, high=None)
            self._take(candidate, found, short=False)
            pairs.append((found[candidate], found[self.unexplored]))
            ratio = paired_ratio(pairs)
            differs = ratio.low is not None and ratio.high is not None and not ratio.low <= 1.0 <= ratio.high
            late = self.seconds >= self.request.windows.budget_s
            if len(pairs) >= MOST_VERIFYING or (len(pairs) >= FIRST_VERIFYING and (differs or late)):
                return ratio

    def _rounds_differently(self, candidate: Knobs) -> bool:
        exact = EQUAL_TO_THE_BIT_OR_ORDER
        return any(getattr(candidate, name) != getattr(self.unexplored, name) for name in KNOBS if name not in exact)

    def _check_loss(self, candidate: Knobs) -> tuple[bool, str]:
        """Train both ways to round from one start on the same rows, at the unexplored micro-batch."""
        every: list[tuple[float, ...]] = []
        names = f"{self.unexplored.precision}", f"{candidate.precision}"
        for precision in (self.unexplored.precision, candidate.precision):
            cell = replace(self.unexplored, precision=precision)
            trial = self._trial(cell, 0, [f"equal loss, {precision}"], short=True)
            config = trial.measured["config"] | {"warmup_steps": CHECK_WARM_UP_STEPS}
            length = {"window_s": 0.0, "min_steps": LOSS_STEPS, "losses": True, "config": config}
            outcome = self._run(
                replace(trial, measured=trial.measured | length), f"equal loss, {precision}", anew=False
            )
            if not isinstance(outcome, Measured):
                return False, f"not checked: with {precision} the run {describe(outcome)}"
            every.append(FeedFigures.of(outcome).losses)
            if len(every) == 1 and (nothing := fell_too_little(every[0], names[0])) is not None:
                return False, nothing.told
        verdict = compare_losses(every[0], every[1], names)
        return verdict.equal, verdict.told


def _tell_nothing(study: "optuna.Study", trial: "optuna.Trial", state: Literal["fail", "pruned"]) -> None:
    from optuna.trial import TrialState

    study.tell(trial, state=TrialState.FAIL if state == "fail" else TrialState.PRUNED)

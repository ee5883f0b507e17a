"""Advice: a claim with its evidence, expected gain, cost, and the exact command."""

from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from autotune.base.interval import Interval
from autotune.base.severity import Severity

Cause = Literal[
    "data loading",
    "padding",
    "network",
    "straggler",
    "launch-bound",
    "memory",
    "optimizer step",
    "compute",
]
"""Causes of the parts of a step's time.

``data loading``: GPUs wait for batches. ``padding``: compute on padding. ``network``:
ranks wait for gradients. ``straggler``: ranks wait for the slowest one.
``launch-bound``: the GPU waits for the CPU (kernel launches, Python, transfers,
logging). ``memory``: kernels wait for GPU memory. ``optimizer step``: clipping and the
optimizer. ``compute``: the rest, forward and backward passes of non-padding tokens.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPart:
    """One part of a step's time."""

    cause: Cause
    share: float
    """Share of the step, 0 to 1; all parts of a step add up to 1."""
    low: float | None = None
    high: float | None = None
    """95 % confidence bounds; None if too few steps show a spread."""
    source: str = ""

    def scaled(self, factor: float) -> "StepPart":
        """Return the part times a positive factor, with its bounds."""
        low, high = (
            None if bound is None else bound * factor for bound in (self.low, self.high)
        )
        return replace(self, share=self.share * factor, low=low, high=high)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bottleneck:
    """Parts of a step's time, and the one that limits it."""

    limit: Cause
    """Largest part other than compute of at least 10 %, else ``compute``. Data loading
    and kernel launches that run concurrently with the GPU take precedence: if other
    parts shrink, the GPU waits longer for them."""
    decided: bool
    """True if the confidence interval rules out another bottleneck."""
    parts: tuple[StepPart, ...]
    """Parts of the step, largest first."""
    steps: int
    """Number of steps, or of timed windows, that were analysed."""
    source: str
    mfu: Interval | None = None
    """Model FLOP/s as a share of the device's dense peak; None if the peak is not
    known."""
    untold: tuple[str, ...] = ()
    """Causes that were not measured, each with the measurement that finds it."""

    def part(self, cause: Cause) -> StepPart | None:
        """Return the part of a cause; None if it could not be determined."""
        return next((one for one in self.parts if one.cause == cause), None)


Benefit = Literal[
    "throughput",
    "GPU memory",
    "host memory",
    "tokens to the same loss",
    "storage",
    "GPU-hours",
]
"""Quantities that a gain can be of. More of the first is better, less of all others.

``throughput`` is that of the training, without padding if it is known.
"""

Known = Literal["measured", "interpolated", "predicted", "assumed", "allocator"]
"""Origins of a figure. ``interpolated``: between two measured sizes. ``allocator``:
torch's allocator on a simulated GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvidenceFigure(Interval):
    """One figure of the evidence.

    Bounds without a confidence are the range of measurements.
    """

    name: str
    unit: str
    """Unit, such as ``share``, ``ratio``, ``bytes``, ``s``, ``count``; for a rate that
    of the subject, such as ``tokens/s``."""
    n: int | None = None
    """Number of measurements; None if the figure was computed."""
    known: Known = "measured"
    source: str


def figure(
    name: str,
    value: float | Interval,
    unit: str,
    source: str,
    *,
    n: int | None = None,
    known: Known = "measured",
) -> EvidenceFigure:
    """Return a figure of the evidence, with the bounds of its value if it has them."""
    one = value if isinstance(value, Interval) else Interval(value=float(value))
    return EvidenceFigure(
        name=name, unit=unit, source=source, **asdict(one), n=n, known=known
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """Gain that advice is expected to bring."""

    of: Benefit = "throughput"
    ratio: float
    """Ratio of the new to the present value: 1.3 is 30 % more throughput, 0.6 is 40 %
    less memory."""
    low: float | None = None
    high: float | None = None
    confidence: float | None = None
    """Confidence of the bounds, 0 to 1; None if they also rest on assumptions."""
    known: Literal["measured", "predicted"] = "predicted"

    @classmethod
    def between(cls, low: float, usual: float, high: float) -> "Gain":
        """Return a predicted gain in throughput."""
        return cls(ratio=usual, low=low, high=high)

    @classmethod
    def measured(cls, one: Interval) -> "Gain":
        """Return a measured gain in throughput with its bounds."""
        return cls(
            ratio=one.value,
            low=one.low,
            high=one.high,
            confidence=one.confidence,
            known="measured",
        )

    @property
    def speedup(self) -> float:
        """Factor by which the run gets shorter, for ranking; 1 if it does not."""
        if self.of == "throughput":
            return self.ratio
        return (
            1 / self.ratio
            if self.of == "tokens to the same loss" and self.ratio > 0
            else 1.0
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingChange:
    """Change of one setting that the advice proposes."""

    key: str
    """Name in the profile: in ``[settings]``, or for the bundled trainer the dotted key
    of ``[train]``, such as ``data.num_workers``."""
    old: Any
    new: Any
    argument: str | None = None
    """Name in your code or configuration, such as ``per_device_train_batch_size``; None
    if the bundled trainer reads the setting from the profile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NotJudged:
    """A part of training that advice cannot judge, and how to find out."""

    part: str
    """Part of training, such as ``data loading``."""
    reason: str
    """Missing evidence, in words."""
    command: str | None = None
    """Command that measures it; None if no command does."""
    remedy: str = ""
    """Other way to find out, in words; empty if the command is all."""
    is_basic: bool = False
    """True if most advice needs it, so that it should be measured first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """One recommendation."""

    rule: str = ""
    """Name of the rule, such as ``padding``; set by ``advise``."""
    severity: Severity = "warning"
    claim: str
    """One sentence with the key figure."""
    evidence: tuple[EvidenceFigure, ...] = ()
    gain: Gain | None = None
    """Expected gain; None if there is none, or if its size is not known."""
    cost: str
    changes: tuple[SettingChange, ...] = ()
    command: str | None = None
    would_change: str
    safe: bool = False
    """True if ``--apply`` writes the changes: same recipe, no more memory, and nothing
    to be measured first."""

    @property
    def target(self) -> tuple[str, ...]:
        """Settings that the advice changes, or else its rule.

        Advice with the same target is one recommendation.
        """
        if not self.changes:
            return (self.rule,)
        settings = [f"{change.key}={change.new}" for change in self.changes]
        return tuple(sorted(settings))

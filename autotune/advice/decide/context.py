"""Facts for the rules of advice, and the gain of a change with bounds.

Gains follow from Amdahl's law. Everything here is pure.
"""

import math
import shlex
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from autotune.base.interval import SHOWN_CONFIDENCE, Interval
from autotune.evidence.advice import (
    Bottleneck,
    Cause,
    EvidenceFigure,
    Gain,
    NotJudged,
    SettingChange,
    StepPart,
    figure,
)
from autotune.evidence.kernels import StepKernels
from autotune.evidence.probe import CurvePoint
from autotune.evidence.profile import (
    Evidence,
    Profile,
    SubjectTable,
    trainer_subject,
)
from autotune.evidence.workers import WorkersRow
from autotune.profiles.decide.batch_split import split_global_batch
from autotune.profiles.decide.follow_up import (
    command,
    exploring_command,
    probe_command,
    repeated_probe_command,
    tune_command,
    workers_command,
)
from autotune.subjects.subject import Setting
from autotune.trials.values import FinishedTrial
from trainer.formats.families import FAMILIES
from trainer.formats.run_record import Run
from trainer.formats.train_config import TrainConfig

PERSISTENT_SHARE = 0.6
"""Least share of steps in which the same rank is the slowest for it to count as
slow."""
Range = tuple[float, float, float]
"""Least, usual and highest value."""

PREDICTED_RANGE: Range = (0.25, 1.0, 1.6)
"""Least, usual and highest gain as a multiple of the predicted one. Compiled layers
gained 1.0 and 1.6 times as much as predicted for two models on an H100, and 0.3 times
at its power limit."""
MOST_SHARE = 0.98
"""Largest share of a step that a part counts as, so that no gain is infinite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFacts:
    """Facts about a directory with data."""

    path: str
    prepared: bool
    """True if it holds token ids; otherwise raw files would have to be read and
    tokenised in every epoch."""
    kinds: tuple[str, ...] = ()
    raw_bytes: int | None = None
    token_bytes: int | None = None
    filesystem: str | None = None
    on_network: bool = False
    vocab_size: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class IntendedNodes:
    """Prediction of training on the intended number of nodes."""

    nodes: int
    efficiency: Interval
    """Speed relative to that of one node times the number of nodes."""
    useful_nodes: int
    """Largest number of nodes that is at least 90 % efficient."""
    useful_efficiency: float
    tokens_per_rank: float
    least_tokens_per_rank: float
    """T_min: below it, the backward pass is too short to overlap the synchronisation of
    fp32 gradients."""
    twice_the_batch_efficiency: float
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingContext:
    """Facts about one training, past or planned."""

    train: TrainConfig | None
    """Settings of the bundled trainer; None for code of yours, or if only data was
    given."""
    profile: Profile | None = None
    profile_path: str = "PROFILE"
    intact: bool = True
    """True if the profile's content still has the hash it was written with."""
    run: Run | None = None
    bottleneck: Bottleneck | None = None
    trials: tuple[FinishedTrial, ...] = ()
    data: DataFacts | None = None
    spread: IntendedNodes | None = None
    not_judged: tuple[NotJudged, ...] = ()
    """Parts of training that cannot be judged, as their evidence is missing."""
    arguments: Mapping[str, str] = field(default_factory=dict)
    """Names of settings in your code or configuration, by their names in the profile;
    empty for the bundled trainer."""
    untried: tuple[Setting, ...] = ()
    """Settings of the subject that no search has varied."""
    predicted_gains: Mapping[str, float] = field(default_factory=dict)
    """Ratio of predicted tokens/s with a change of one setting to those without it, by
    setting."""

    @property
    def evidence(self) -> Evidence:
        """Measurements in the profile."""
        return Evidence() if self.profile is None else self.profile.evidence

    @property
    def step_kernels(self) -> StepKernels | None:
        """Kernels of a step with the profile's settings; None if not profiled."""
        confirm = self.evidence.confirm
        return None if confirm is None else confirm.kernels

    @property
    def gpu_name(self) -> str | None:
        """Name of the GPU as its driver reports it.

        It is None on a CPU, or if it was not recorded.
        """
        if self.profile is not None and self.profile.fingerprint.gpu_name is not None:
            return self.profile.fingerprint.gpu_name
        on_gpu = self.train is not None and self.train.device == "cuda"
        return self.run.header.device if self.run is not None and on_gpu else None

    @property
    def data_path(self) -> str:
        """Path of the data for commands; ``DIR`` if it is not known."""
        return self.data.path if self.data is not None else "DIR"

    def command(self, command: str, *words: str) -> str:
        """Return a command of this program for the profile."""
        return shlex.join(["autotune", *command.split(), self.profile_path, *words])

    def workers_command(self, **options: object) -> str:
        """Return the command that sweeps the DataLoader workers."""
        if self.profile is None:
            return command("workers", self.profile_path, **options)
        return workers_command(self.profile, self.profile_path, **options)

    @property
    def use_command(self) -> str | None:
        """Command that uses the profile: trains, or shows the values for your code."""
        if self.profile is None:
            return None
        if self.profile.has_train:
            return self.command("train")
        return self.command("profile show")

    def probe_command(self, **changes: object) -> str:
        """Return the probe command for the same settings except for these changes.

        Code of yours is probed as it is: make the changes there first.
        """
        if self.train is None:
            assert self.profile is not None
            return probe_command(self.profile, self.profile_path)
        batch = {"global_batch_tokens": self.global_batch_tokens}
        return repeated_probe_command(
            self.train, self.profile, data=self.data_path, **(batch | changes)
        )

    @property
    def search_command(self) -> str | None:
        """Command that searches the settings of the step.

        None if none are declared, and after a search.
        """
        if self.evidence.explore is not None:
            return None
        if self.train is not None:
            return tune_command(self.train.model, self.data_path, explore=True)
        if self.profile is None or not self.untried:
            return None
        return exploring_command(self.profile)

    @property
    def subject(self) -> SubjectTable | None:
        """The training step; None if only data was given."""
        if self.train is not None:
            return trainer_subject(self.train)
        return None if self.profile is None else self.profile.subject

    @property
    def on_gpu(self) -> bool:
        """True if the training runs on GPUs."""
        if self.train is not None:
            return self.train.device == "cuda"
        return self.profile is not None and self.profile.fingerprint.device == "cuda"

    @property
    def size(self) -> int | None:
        """Micro-batch size of the training; None if it is not known."""
        if self.train is not None:
            return self.train.micro_batch_size
        size = None if self.profile is None else self.profile.size
        return size if isinstance(size, int) else None

    @property
    def num_workers(self) -> int | None:
        """DataLoader workers of a rank; None if they are not known."""
        if self.train is not None:
            return self.train.data.num_workers
        return None if self.profile is None else self.profile.num_workers

    @property
    def rate_unit(self) -> str:
        """Unit of throughput, such as ``tokens/s``."""
        return "tokens/s" if self.subject is None else f"{self.subject.unit}/s"

    def size_words(self, size: int) -> str:
        """Return a micro-batch size in words, such as ``16 sequences``."""
        return f"size {size}" if self.subject is None else self.subject.size_words(size)

    def size_change(self, new: int) -> SettingChange:
        """Return the change to another micro-batch size."""
        assert self.subject is not None
        return SettingChange(key=self.subject.size, old=self.size, new=new)

    def workers_change(self, new: int) -> SettingChange:
        """Return the change to another number of DataLoader workers."""
        prefix = "" if self.train is None else "data."
        return SettingChange(key=f"{prefix}num_workers", old=self.num_workers, new=new)

    @property
    def ranks(self) -> int:
        """Number of ranks of the run or, without one, of the profile's measurements."""
        if self.run is not None:
            return self.run.header.world_size
        return self.profile.local_ranks if self.profile is not None else 1

    @property
    def nodes(self) -> int:
        """Number of nodes: intended, or derived from the ranks.

        It is derived for runs, as they do not record it.
        """
        if self.spread is not None:
            return self.spread.nodes
        probe = self.evidence.probe
        return 1 if probe is None else max(1, self.ranks // max(1, probe.local_ranks))

    @property
    def global_batch_tokens(self) -> int | None:
        """Non-padding tokens of an optimizer step over all ranks."""
        if self.profile is not None:
            return self.profile.constraints.global_batch_tokens
        if self.run is not None and self.run.steps:
            return round(
                statistics.median(row.non_padding_tokens for row in self.run.steps)
            )
        return None

    @property
    def global_batch_size(self) -> int | None:
        """Sequences of an optimizer step over all ranks.

        None for code of yours, whose global batch follows from the micro-batch size.
        """
        if self.run is not None:
            return self.run.header.global_batch_size
        return None if self.train is None else self.train.global_batch_size

    def split_micro_batch_size(self, micro_batch_size: int) -> int:
        """Return the micro-batch size after the batch split.

        It is below the setting if the global batch is too small.
        """
        if self.global_batch_size is None:
            return micro_batch_size
        if self.global_batch_size < self.ranks:
            return 1
        return split_global_batch(
            self.global_batch_size, micro_batch_size, self.ranks
        ).micro_batch_size

    def predicted_gain(self, setting: str) -> Gain | None:
        """Return the predicted gain of changing a setting, which shortens compute only.

        Returns:
            The gain, or None if there is no prediction.
        """
        ratio = self.predicted_gains.get(setting)
        if ratio is None:
            return None
        share = (
            1.0
            if self.bottleneck is None
            else 1 - self.share("data loading", "network", "straggler")
        )
        gain = 1 / (1 - share + share / ratio) - 1
        return Gain.between(*(1 + gain * part for part in PREDICTED_RANGE))

    def loss(self, cause: Cause, least: float) -> StepPart | None:
        """Return the part of a step that a cause takes.

        Returns:
            The part, or None if it is below ``least`` or not known.
        """
        part = self.bottleneck.part(cause) if self.bottleneck is not None else None
        return (
            None
            if part is None or (part.share if part.low is None else part.low) < least
            else part
        )

    def share(self, *causes: Cause) -> float:
        """Return the share of the step that these causes take together.

        Causes that are not known count as 0.
        """
        parts = self.bottleneck.parts if self.bottleneck is not None else ()
        return sum(part.share for part in parts if part.cause in causes)

    def part_figure(
        self, part: StepPart, name: str, n: int | None = None
    ) -> EvidenceFigure:
        """Return a part of the step as evidence.

        Without ``n``, the figure counts all steps that were analysed.
        """
        if n is None and self.bottleneck is not None:
            n = self.bottleneck.steps
        value = Interval.from_bounds(part.share, part.low, part.high, SHOWN_CONFIDENCE)
        return figure(name, value, "share", part.source, n=n)

    def mfu_figure(self) -> EvidenceFigure | None:
        """Return the MFU as evidence; None if the device's peak is not known."""
        found = self.bottleneck
        if found is None or found.mfu is None:
            return None
        return figure("MFU", found.mfu, "share", found.source, n=found.steps)

    def workers_row(self, count: int | None = None) -> WorkersRow | None:
        """Return the measurement at a number of DataLoader workers.

        Args:
            count: Number of workers; None for the training's.

        Returns:
            The measurement, or None if there is none.
        """
        workers = self.evidence.workers
        count = self.num_workers if count is None else count
        return (
            next((row for row in workers.rows if row.num_workers == count), None)
            if workers
            else None
        )

    def point(self, rows: int) -> CurvePoint | None:
        """Return the probe's measurement at this micro-batch size.

        Returns:
            The point of the curve, or None if the size was not measured.
        """
        curve = self.evidence.probe.curve if self.evidence.probe else []
        return next((point for point in curve if point.size == rows), None)

    def peak_bytes(self, rows: int) -> int | None:
        """Return the highest peak memory of trials at this micro-batch size.

        Returns:
            The peak in bytes, or None if none was measured.
        """
        probe = self.evidence.probe
        for row in () if probe is None else probe.sizes:
            if row.size == rows and row.peak_bytes is not None:
                return row.peak_bytes
        steps = (one for one in self.trials if one.trial.job == "step")
        alike = (
            one.outcome
            for one in steps
            if one.trial.config.get("micro_batch_size") == rows
        )
        return max(
            (
                found.figures["peak_bytes"]
                for found in alike
                if found.kind == "measured"
            ),
            default=None,
        )

    @property
    def knows_the_model(self) -> bool:
        """True if the architecture is known to this project.

        Only such models can be packed or have a sparse head.
        """
        return (
            self.train is not None and self.train.model.config["model_type"] in FAMILIES
        )

    @property
    def knows_the_layers(self) -> bool:
        """True if the layout of the model's layers is known.

        Only such models can have a sparse last layer.
        """
        return (
            self.train is not None
            and FAMILIES.get(self.train.model.config["model_type"]) is not None
        )

    @property
    def parameters(self) -> int | None:
        """Number of parameters of the model; None if it is not known."""
        if self.run is not None:
            return self.run.header.parameters
        return self.profile.parameters if self.profile is not None else None


def on_host(hosts: Sequence[str], rank: int | None) -> str:
    """Return the host of a rank as words to append; empty if it was not recorded."""
    return f" on {hosts[rank][:64]}" if rank is not None and rank < len(hosts) else ""


def without(part: StepPart, left: Range | None = None) -> Gain:
    """Return the gain in throughput if only these shares of a part are left.

    Without ``left``, nothing is left of the part.
    """
    least, usual, most = left or (0.0, 0.0, 0.0)
    low, high = (
        part.share if bound is None else bound for bound in (part.low, part.high)
    )
    ends = ((low, most), (part.share, usual), (high, least))
    gain = Gain.between(
        *(1 / (1 - min(MOST_SHARE, share) * (1 - stays)) for share, stays in ends)
    )
    if left is not None:  # the shares that are left are assumed
        return gain
    return (
        Gain(ratio=gain.ratio)
        if part.low is None
        else replace(gain, confidence=SHOWN_CONFIDENCE)
    )


def times(gain: Gain, factors: Range) -> Gain:
    """Return the gain combined with another one.

    ``factors`` are the least, the usual and the largest speedup that the other one
    brings.
    """
    low, high = (
        gain.ratio if bound is None else bound for bound in (gain.low, gain.high)
    )
    return Gain.between(low * factors[0], gain.ratio * factors[1], high * factors[2])


def faster_with(now: TrainingContext, old_rows: float, new_rows: float) -> Range | None:
    """Return the ratio of new to old throughput for two micro-batch sizes.

    Returns:
        The range of the ratio, or None if too few sizes were measured.
    """
    curve = now.evidence.probe.curve if now.evidence.probe else []
    if len(curve) < 2:
        return None
    fixed, per_row = line(
        [point.size for point in curve], [point.step_s for point in curve]
    )

    def rate(micro: float, update: float) -> float:
        # Without a global batch, each micro-batch is an optimizer step.
        rows = micro
        if now.global_batch_size is not None:
            rows = max(1.0, now.global_batch_size / now.ranks)
        count = max(1.0, rows / micro)
        return rows / (
            update * fixed + count * ((1 - update) * fixed + per_row * min(micro, rows))
        )

    # Share of the fixed time in the optimizer step: most, usual, least. The rest is
    # paid for every micro-batch.
    low, usual, high = (
        rate(new_rows, part) / rate(old_rows, part) for part in (0.5, 0.25, 0.0)
    )
    # Beyond the measured range, the line may not hold.
    if new_rows > max(point.size for point in curve):
        low, usual = min(1.0, low), math.sqrt(usual)
    return low, usual, high


def line(xs: Sequence[float], ys: Sequence[float]) -> tuple[float, float]:
    """Fit a line with the least squared relative errors.

    Returns:
        Intercept and slope, neither of them negative.
    """
    weights = 1 / np.array(ys)
    slope, intercept = np.polyfit(np.array(xs, dtype=float), ys, 1, w=weights)
    if slope < 0:
        slope, intercept = 0.0, np.average(ys, weights=weights**2)
    return max(0.0, float(intercept)), float(slope)

"""What rules look at, as far as each is known; and what a change brings: Amdahl's law, with bounds. Pure."""

import math
import shlex
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from autotune.advice.values import Bottleneck, Cause, EvidenceFigure, Gain, StepPart, figure
from autotune.base.interval import SHOWN_CONFIDENCE, Interval
from autotune.base.model_work import HIDDEN_SIZE, of_model
from autotune.memory.values import CurvePoint, ProbeEvidence
from autotune.network.values import NetworkEvidence
from autotune.profiles.decide.batch_split import split_global_batch
from autotune.profiles.decide.follow_up import command, probe_again
from autotune.profiles.values import Profile
from autotune.trials.values import FinishedTrial
from autotune.workers.values import WorkersEvidence, WorkersRow
from trainer.config.train_config import TrainConfig
from trainer.model.families import FAMILIES
from trainer.record.run_record import Run

PERSISTENT_SHARE = 0.6
"""Of all steps in which the same rank is behind, before it is called slow."""
Range = tuple[float, float, float]
"""Least, usual, most."""

MOST_SHARE = 0.98
"""A part never counts as more of the step than this: no gain is without end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFacts:
    """A directory with data."""

    path: str
    prepared: bool
    """Whether it holds token ids; else files that would have to be read and cut up in every epoch."""
    kinds: tuple[str, ...] = ()
    """Of raw files that this project reads: ``elf``, ``text``, ``jsonl``, ``parquet``."""
    raw_bytes: int | None = None
    token_bytes: int | None = None
    filesystem: str | None = None
    on_network: bool = False
    vocab_size: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class IntendedNodes:
    """What is predicted of training on as many nodes as are meant."""

    nodes: int
    efficiency: Interval
    """Against as many times one node."""
    useful_nodes: int
    """Largest number that is at least 90 % efficient."""
    useful_efficiency: float
    tokens_per_rank: float
    least_tokens_per_rank: float
    """T_min: below it not even all of backward hides the exchange of 32-bit gradients."""
    twice_the_batch_efficiency: float | None
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignSettings:
    """Settings of another trainer, as its user gave them."""

    precision: str = "fp32"
    is_foreach: bool = False
    """Whether its optimizer makes a copy of all weights at its step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingContext:
    """Everything that is known of one training, past or to come."""

    train: TrainConfig | None
    """None where only data was looked at."""
    profile: Profile | None = None
    profile_path: str = "PROFILE"
    intact: bool = True
    """Whether the profile's content still has the hash it was written with."""
    run: Run | None = None
    bottleneck: Bottleneck | None = None
    trials: tuple[FinishedTrial, ...] = ()
    data: DataFacts | None = None
    spread: IntendedNodes | None = None
    foreign: ForeignSettings | None = None
    missing: tuple[tuple[str, str], ...] = ()
    """What was not measured and the command that would, found by whoever put this together."""

    @property
    def probe(self) -> ProbeEvidence | None:
        """Probe of the profile."""
        return self.profile.evidence.probe if self.profile is not None else None

    @property
    def workers(self) -> WorkersEvidence | None:
        """Sweep of loader workers of the profile."""
        return self.profile.evidence.workers if self.profile is not None else None

    @property
    def network(self) -> NetworkEvidence | None:
        """Network tuning of the profile."""
        return self.profile.evidence.network if self.profile is not None else None

    @property
    def gpu_name(self) -> str | None:
        """As its driver calls it; None on a CPU, or where nobody wrote it down."""
        if self.profile is not None and self.profile.fingerprint.gpu_name is not None:
            return self.profile.fingerprint.gpu_name
        on_gpu = self.train is not None and self.train.device == "cuda"
        return self.run.header.device if self.run is not None and on_gpu else None

    @property
    def data_path(self) -> str:
        """For commands."""
        return self.data.path if self.data is not None else "DIR"

    def command(self, command: str, *words: str) -> str:
        """Return one of this program's commands on the profile."""
        return shlex.join(["autotune", *command.split(), "--profile", self.profile_path, *words])

    @property
    def network_command(self) -> str:
        """Measure the network on as many nodes as are meant."""
        return self.command("network", *(("--slurm",) if self.nodes > 1 else ()))

    @property
    def run_name(self) -> str:
        """Source of figures of the run."""
        return f"run {self.run.directory.name}" if self.run is not None else "run"

    def probe_command(self, **changes: object) -> str:
        """Probe with the same settings but for these."""
        if self.train is None:
            return command("probe", model="MODEL", data=self.data_path)
        batch = {"global_batch_tokens": self.global_batch_tokens}
        return probe_again(self.train, self.profile, data=self.data_path, **(batch | changes))

    @property
    def ranks(self) -> int:
        """All that train, or that trained when it was measured."""
        if self.run is not None:
            return self.run.header.world_size
        return self.profile.local_ranks if self.profile is not None else 1

    @property
    def nodes(self) -> int:
        """That are meant or were used, as far as that is known; of a run of several ranks nobody recorded it."""
        if self.spread is not None:
            return self.spread.nodes
        local = self.probe.local_ranks if self.probe is not None else self.ranks
        return max(1, self.ranks // max(1, local))

    @property
    def global_batch_tokens(self) -> int | None:
        """Real tokens of a step."""
        if self.profile is not None:
            return self.profile.constraints.global_batch_tokens
        if self.run is not None and self.run.steps:
            return round(statistics.median(row.non_padding_tokens for row in self.run.steps))
        return None

    @property
    def global_batch_size(self) -> int:
        """Rows of a step."""
        if self.run is not None:
            return self.run.header.global_batch_size
        return self.train.global_batch_size if self.train is not None else 1

    def split_micro_batch_size(self, micro_batch_size: int) -> int:
        """Rows of a micro-batch as they are dealt: fewer than the setting, where the global batch gives no more."""
        if self.global_batch_size < self.ranks:
            return 1
        return split_global_batch(self.global_batch_size, micro_batch_size, self.ranks).micro_batch_size

    def loss(self, cause: Cause, least: float) -> StepPart | None:
        """The part of a step that a cause takes; None below ``least``, or where it could not be told."""
        part = self.bottleneck.part(cause) if self.bottleneck is not None else None
        return None if part is None or (part.share if part.low is None else part.low) < least else part

    def share(self, *causes: Cause) -> float:
        """Share of the step that these causes take together; what could not be told counts as nothing."""
        parts = self.bottleneck.parts if self.bottleneck is not None else ()
        return sum(part.share for part in parts if part.cause in causes)

    def part_figure(self, part: StepPart, name: str, n: int | None = None) -> EvidenceFigure:
        """Return a part of the step as evidence, of so many steps; None takes all that were looked at."""
        if n is None and self.bottleneck is not None:
            n = self.bottleneck.steps
        value = Interval.of(part.share, part.low, part.high, SHOWN_CONFIDENCE)
        return figure(name, value, "share", part.source, n=n)

    def mfu_figure(self) -> EvidenceFigure | None:
        """Return the MFU as evidence; None if the device's peak is not known."""
        found = self.bottleneck
        if found is None or found.mfu is None:
            return None
        return figure("MFU", found.mfu, "share", found.source, n=found.steps)

    def workers_row(self, count: int) -> WorkersRow | None:
        """What was measured with so many loader workers."""
        return next((row for row in self.workers.rows if row.num_workers == count), None) if self.workers else None

    def point(self, rows: int) -> CurvePoint | None:
        """What was measured with such a micro-batch."""
        return (
            next((point for point in self.probe.curve if point.micro_batch_size == rows), None) if self.probe else None
        )

    def peak_bytes(self, rows: int) -> int | None:
        """The highest memory of trials with such a micro-batch; None where none ran."""
        steps = (one for one in self.trials if one.trial.job == "step")
        alike = (one.outcome for one in steps if one.trial.config.get("micro_batch_size") == rows)
        return max((found.figures["peak_bytes"] for found in alike if found.kind == "measured"), default=None)

    @property
    def knows_the_model(self) -> bool:
        """Whether its parts are known to this project: only such models can be packed, or have a narrow head."""
        return self.train is not None and self.train.model.config["model_type"] in FAMILIES

    def of_model(self, key: str, default: float) -> float:
        """Return a number of the model's config; the default if nothing is known of the model."""
        return default if self.train is None else of_model(self.train, key, default)

    @property
    def hidden_size(self) -> int:
        """Width of the model."""
        return int(self.of_model("hidden_size", HIDDEN_SIZE)) or HIDDEN_SIZE

    @property
    def attention_dropout(self) -> float:
        """In effect."""
        if self.train is not None and self.train.attention_dropout is not None:
            return self.train.attention_dropout
        modern = self.train is not None and self.train.model.config["model_type"] == "modernbert"
        name = "attention_dropout" if modern else "attention_probs_dropout_prob"
        return float(self.of_model(name, 0.0 if modern else 0.1))

    @property
    def parameters(self) -> int | None:
        """Of the model; None where nobody counted."""
        if self.run is not None:
            return self.run.header.parameters
        return self.profile.parameters if self.profile is not None else None


def on_host(hosts: Sequence[str], rank: int | None) -> str:
    """Where a rank runs, for people who go and look; nothing where that was not recorded."""
    return f" on {hosts[rank][:64]}" if rank is not None and rank < len(hosts) else ""


def without(part: StepPart, left: Range | None = None) -> Gain:
    """Return the gain in tokens/s if only these shares of a part are left; None leaves nothing of it."""
    least, usual, most = left or (0.0, 0.0, 0.0)
    low, high = (part.share if bound is None else bound for bound in (part.low, part.high))
    ends = ((low, most), (part.share, usual), (high, least))
    gain = Gain.between(*(1 / (1 - min(MOST_SHARE, share) * (1 - stays)) for share, stays in ends))
    if left is not None:  # what stays at best and at worst is assumed, and no noise
        return gain
    if part.low is None:
        return Gain(ratio=gain.ratio)
    return replace(gain, confidence=SHOWN_CONFIDENCE)


def times(gain: Gain, factors: Range) -> Gain:
    """Return the gain with another beside it, which brings at least, usually and at most these factors."""
    low, high = (gain.ratio if bound is None else bound for bound in (gain.low, gain.high))
    return Gain.between(low * factors[0], gain.ratio * factors[1], high * factors[2])


def faster_with(now: TrainingContext, old_rows: float, new_rows: float) -> Range | None:
    """Return the ratio of tokens/s with micro-batches of so many rows, new to old; None if too few were measured.

    With several micro-batches to a step only what each of them pays is saved.
    """
    curve = now.probe.curve if now.probe is not None else []
    if len(curve) < 2 or now.train is None:
        return None
    fixed, per_row = line([point.micro_batch_size for point in curve], [point.step_s for point in curve])
    rows = max(1.0, now.global_batch_size / now.ranks)

    def rate(micro: float, update: float) -> float:
        count = max(1.0, rows / micro)
        return rows / (update * fixed + count * ((1 - update) * fixed + per_row * min(micro, rows)))

    # Share of the fixed time that the update takes: most, usual, least. Every micro-batch pays the rest.
    low, usual, high = (rate(new_rows, part) / rate(old_rows, part) for part in (0.5, 0.25, 0.0))
    if new_rows > max(point.micro_batch_size for point in curve):  # nothing says how far the line goes on
        low, usual = min(1.0, low), math.sqrt(usual)
    return low, usual, high


def line(xs: Sequence[float], ys: Sequence[float]) -> tuple[float, float]:
    """Return intercept and slope of the line with the least squared relative errors; neither is negative."""
    weights = 1 / np.array(ys)
    slope, intercept = np.polyfit(xs, ys, 1, w=weights)
    if slope < 0:
        slope, intercept = 0.0, np.average(ys, weights=weights**2)
    return max(0.0, float(intercept)), float(slope)

"""What rules look at: settings, evidence, a run, its dataset and its cluster, as far as each is known."""

import math
import shlex
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from autotune.core.advice import Figure
from autotune.core.bottleneck import Bottleneck, Cause, Part
from autotune.core.evidence import CurvePoint, NetworkEvidence, ProbeEvidence, WorkersEvidence, WorkersRow
from autotune.core.interval import SHOWN_CONFIDENCE
from autotune.core.profile import Fingerprint, Profile
from autotune.core.trial import FinishedTrial
from autotune.decide.choose import deal
from autotune.decide.probe_command import command, probe_again
from autotune.decide.work import HIDDEN_SIZE, LAYERS, of_model
from trainer.config import TrainConfig
from trainer.families import FAMILIES
from trainer.record import Run

PERSISTENT_SHARE = 0.6
"""Of all steps in which the same rank is behind, before it is called slow."""


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
class Spread:
    """What is predicted of training on as many nodes as are meant."""

    nodes: int
    efficiency: float
    """Against as many times one node."""
    efficiency_low: float | None
    efficiency_high: float | None
    useful_nodes: int
    """Largest number that is at least 90 % efficient."""
    useful_efficiency: float
    tokens_per_rank: float
    """Real ones of a step."""
    least_tokens_per_rank: float
    """T_min: below it not even all of backward hides the exchange of 32-bit gradients."""
    twice_the_batch_efficiency: float | None
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Foreign:
    """Settings of another trainer, as its user gave them."""

    source: str
    precision: Literal["fp32", "bf16", "fp16"] | None = None
    optimizer: Literal["fused", "foreach", "for-loop"] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
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
    spread: Spread | None = None
    foreign: Foreign | None = None
    missing: tuple[tuple[str, str], ...] = field(default=())
    """What was not measured and the command that would, found by whoever put this together."""

    # Evidence, by name.

    @property
    def probe(self) -> ProbeEvidence | None:
        """Of the profile."""
        return self.profile.evidence.probe if self.profile is not None else None

    @property
    def workers(self) -> WorkersEvidence | None:
        """Of the profile."""
        return self.profile.evidence.workers if self.profile is not None else None

    @property
    def network(self) -> NetworkEvidence | None:
        """Of the profile."""
        return self.profile.evidence.network if self.profile is not None else None

    @property
    def fingerprint(self) -> Fingerprint | None:
        """Of the profile."""
        return self.profile.fingerprint if self.profile is not None else None

    @property
    def gpu_name(self) -> str | None:
        """As its driver calls it; None on a CPU, or where nobody wrote it down."""
        if self.fingerprint is not None and self.fingerprint.gpu_name is not None:
            return self.fingerprint.gpu_name
        on_gpu = self.train is not None and self.train.device == "cuda"
        return self.run.header.device if self.run is not None and on_gpu else None

    @property
    def budget_bytes(self) -> int | None:
        """Memory of one rank."""
        return self.profile.constraints.memory_budget_bytes if self.profile is not None else None

    @property
    def data_path(self) -> str:
        """For commands."""
        return self.data.path if self.data is not None else "DIR"

    # Commands, as a shell takes them.

    def command(self, *words: str) -> str:
        """One of this program's."""
        return shlex.join(["autotune", *words])

    def probe_command(self, **changes: object) -> str:
        """Probe with the same settings but for these."""
        if self.train is None:
            return command("probe", model="MODEL", data=self.data_path)
        batch = {"global_batch_tokens": self.global_batch_tokens}
        return probe_again(self.train, self.profile, data=self.data_path, **(batch | changes))

    # Ranks and rows.

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
            return round(statistics.median(row.real_tokens for row in self.run.steps))
        return None

    @property
    def global_batch_rows(self) -> int:
        """Rows of a step."""
        if self.run is not None:
            return self.run.header.global_batch_rows
        return self.train.global_batch_rows if self.train is not None else 1

    def dealt_rows(self, micro_batch_rows: int) -> int:
        """Rows of a micro-batch as they are dealt: fewer than the setting, where the global batch gives no more."""
        if self.global_batch_rows < self.ranks:
            return 1
        return deal(self.global_batch_rows, micro_batch_rows, self.ranks).rows_per_micro_batch

    # What was measured.

    def loss(self, cause: Cause, least: float) -> Part | None:
        """The part of a step that a cause takes; None below ``least``, or where it could not be told."""
        part = self.bottleneck.part(cause) if self.bottleneck is not None else None
        if part is None or (part.share if part.low is None else part.low) < least:
            return None
        return part

    def workers_row(self, count: int) -> WorkersRow | None:
        """What was measured with so many loader workers."""
        return next((row for row in self.workers.rows if row.loader_workers == count), None) if self.workers else None

    def point(self, rows: int) -> CurvePoint | None:
        """What was measured with such a micro-batch."""
        return next((point for point in self.probe.curve if point.rows == rows), None) if self.probe else None

    def peak_bytes(self, rows: int) -> int | None:
        """The highest memory of trials with such a micro-batch; None where none ran."""
        peaks = [
            trial.outcome.figures["peak_bytes"]
            for trial in self.trials
            if trial.trial.job == "step" and trial.outcome.kind == "measured" and _rows_of(trial.trial.measured) == rows
        ]
        return max(peaks, default=None)

    @property
    def mfu(self) -> float | None:
        """Of the run, real tokens only."""
        return self.bottleneck.mfu if self.bottleneck is not None else None

    # The model.

    @property
    def knows_the_model(self) -> bool:
        """Whether its parts are known to this project: only such models can be packed, or have a narrow head."""
        return self.train is not None and self.train.model.config["model_type"] in FAMILIES

    @property
    def hidden_size(self) -> int:
        """Width of the model."""
        return int(self._of_model("hidden_size", HIDDEN_SIZE))

    @property
    def layers(self) -> int:
        """How many it has."""
        return int(self._of_model("num_hidden_layers", LAYERS))

    @property
    def attention_dropout(self) -> float:
        """In effect."""
        if self.train is not None and self.train.attention_dropout is not None:
            return self.train.attention_dropout
        modern = self.train is not None and self.train.model.config["model_type"] == "modernbert"
        name = "attention_dropout" if modern else "attention_probs_dropout_prob"
        return float(self._of_model(name, 0.0 if modern else 0.1))

    @property
    def parameters(self) -> int | None:
        """Of the model; None where nobody counted."""
        if self.run is not None:
            return self.run.header.parameters
        return self.profile.parameters if self.profile is not None else None

    def _of_model(self, key: str, default: float) -> float:
        return default if self.train is None else of_model(self.train, key, default)

    # The step.

    @property
    def seconds_by_rows(self) -> tuple[float, float] | None:
        """What a step of one micro-batch takes: fixed, and for each row; None where fewer than two sizes were measured.

        A line through the points by least squares of relative errors. What is fixed holds the update as well, which
        several micro-batches of a step share.
        """
        curve = self.probe.curve if self.probe is not None else []
        if len(curve) < 2:
            return None
        rows, seconds = [point.rows for point in curve], [point.step_s for point in curve]
        return line(rows, seconds)


UPDATE_OF_FIXED = (0.5, 0.25, 0.0)
"""Part of what is fixed that the update takes: most, usual, least. What every micro-batch pays is the rest."""


def faster_with(now: Situation, old_rows: float, new_rows: float) -> tuple[float, float, float] | None:
    """Rates of micro-batches of so many rows, new to old: least, usual, most; None where nobody can say.

    With several micro-batches to a step only what each of them pays is saved.
    """
    seconds = now.seconds_by_rows
    if seconds is None or now.train is None:
        return None
    fixed, per_row = seconds
    rows = max(1.0, now.global_batch_rows / now.ranks)

    def rate(micro: float, update: float) -> float:
        count = max(1.0, rows / micro)
        return rows / (update * fixed + count * ((1 - update) * fixed + per_row * min(micro, rows)))

    low, usual, high = (rate(new_rows, part) / rate(old_rows, part) for part in UPDATE_OF_FIXED)
    assert now.probe is not None
    if new_rows > max(point.rows for point in now.probe.curve):  # nobody knows how far the line goes on
        low, usual = min(1.0, low), math.sqrt(usual)
    return low, usual, high


def line(xs: Sequence[float], ys: Sequence[float]) -> tuple[float, float]:
    """Intercept and slope of the line with the least squared relative errors; neither is negative."""
    weights = [1 / y**2 for y in ys]
    total = sum(weights)
    mean_x = sum(w * x for w, x in zip(weights, xs, strict=True)) / total
    mean_y = sum(w * y for w, y in zip(weights, ys, strict=True)) / total
    spread = sum(w * (x - mean_x) ** 2 for w, x in zip(weights, xs, strict=True))
    slope = sum(w * (x - mean_x) * (y - mean_y) for w, x, y in zip(weights, xs, ys, strict=True)) / spread
    slope = max(0.0, slope)
    return max(0.0, mean_y - slope * mean_x), slope


def part_figure(part: Part, name: str, steps: int) -> Figure:
    """A part of a step as evidence."""
    return Figure(
        name=name, value=part.share, unit="share", low=part.low, high=part.high,
        confidence=None if part.low is None else SHOWN_CONFIDENCE, n=steps, source=part.source,
    )  # fmt: skip


def on_host(hosts: Sequence[str], rank: int | None) -> str:
    """Where a rank runs, for people who go and look; nothing where that was not recorded."""
    return f" on {hosts[rank][:64]}" if rank is not None and rank < len(hosts) else ""


def middle(values: Sequence[float | None]) -> float | None:
    """The median of those that are there."""
    there = [value for value in values if value is not None]
    return statistics.median(there) if there else None


def _rows_of(measured: dict[str, Any]) -> int | None:
    config = measured.get("config", measured)
    rows = config.get("micro_batch_rows") if isinstance(config, dict) else None
    return rows if isinstance(rows, int) else measured.get("rows")

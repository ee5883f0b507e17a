"""Probe of one model: its request, its settings at a known site, and its trials."""

from dataclasses import dataclass
from pathlib import Path

from autotune.base.defaults import HEADROOM_SHARE, MAX_MICRO_BATCH_SIZE, TRIAL_TIMEOUT_S
from autotune.machine.gpu_models import GpuModel
from autotune.memory.decide.overheads import OverheadsRange
from autotune.memory.estimate import MemoryEstimate, estimate_model
from autotune.memory.values import KernelsRequest, StepRequest, TraceRequest
from autotune.profiles.decide.batch_split import DEFAULT_GLOBAL_BATCH_TOKENS
from autotune.trials.trial_machine import Machine
from autotune.trials.values import Trial
from trainer.config.train_config import TrainConfig
from trainer.data.sequence_statistics import SequenceStatistics
from trainer.formats.manifest import Manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCounts:
    """Numbers of optimizer steps of a trial: first untimed ones, then timed ones."""

    warmup: int
    timed: int


FIT_STEPS = StepCounts(warmup=1, timed=1)
"""Steps of a trial that tests whether a size fits; an evaluation follows each step."""

KERNEL_STEPS = {
    "cpu": StepCounts(warmup=1, timed=1),
    "cuda": StepCounts(warmup=3, timed=3),
}
"""Steps of a trial that profiles kernels, by device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeRequest:
    """Request to probe one model; a field that is None takes the machine's default."""

    config: TrainConfig
    """Settings of the step; unless set, ``layout`` and ``precision`` are the defaults
    of model and device."""
    data: Path
    """Directory of the dataset."""
    reports: Path
    """Directory of reports and trial logs."""
    memory_bytes: int | None = None
    """Memory budget of each rank."""
    as_gpu: GpuModel | None = None
    """Smaller GPU whose memory is imitated; None imitates no other GPU."""
    ranks: int | None = None
    """Ranks of this node that take the steps together."""
    accumulate: bool = True
    """True if a step has several micro-batches on each rank. Trials then take two, as
    more need no more memory: gradients exist while the second one is computed."""
    headroom_share: float = HEADROOM_SHARE
    """Share of the largest micro-batch to leave free."""
    max_micro_batch_size: int = MAX_MICRO_BATCH_SIZE
    """Largest size to try."""
    trial_timeout_s: float = TRIAL_TIMEOUT_S
    """Time limit of one trial, in seconds."""
    traced: bool = True
    """True if a trace predicts memory before any trial; otherwise trials alone guide
    the search."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """A request to probe one model, completed with the defaults of the site."""

    request: ProbeRequest
    config: TrainConfig
    """Complete settings; the chosen micro-batch splits their ``global_batch_size``."""
    manifest: Manifest
    """Manifest of the dataset."""
    memory_budget_bytes: int
    """Memory that each rank may use."""
    device_used_before_bytes: list[int] | None = None
    """Memory in use on the GPU of each local rank before this program, by NVML; None if
    it is unknown, and on a CPU."""
    local_ranks: int = 1
    """Ranks of this node, which take the steps together."""
    global_batch_tokens: int = DEFAULT_GLOBAL_BATCH_TOKENS
    """Non-padding tokens of an optimizer step on all ranks."""
    sequence_stats: SequenceStatistics | None = None
    """Statistics of the dataset's sequences; None for full sequences of one
    document."""
    overheads: OverheadsRange | None = None
    """Overheads of a traced step on this device; None if nothing is traced."""

    @property
    def micro_batches(self) -> int:
        """Micro-batches of an optimizer step on each rank in the trial of a size."""
        return 2 if self.request.accumulate else 1

    @property
    def documents_per_sequence(self) -> float:
        """Documents per sequence in the fullest micro-batches."""
        if self.sequence_stats is None or self.config.layout != "packed":
            return 1.0
        return self.sequence_stats.max_mean_samples

    @property
    def mean_tokens_per_sequence(self) -> float:
        """Mean non-padding tokens per sequence; full sequences without statistics."""
        if self.sequence_stats is None:
            return self.config.seq_length_tokens
        return self.sequence_stats.mean_non_padding_tokens

    def trace(self, machine: Machine) -> MemoryEstimate:
        """Trace the model's step, and predict its memory near the largest micro-batch.

        The probe must have ``overheads``.

        Raises:
            CannotTrace: If the memory can only be measured.
            BadInput: If the settings are invalid.
        """
        assert self.overheads is not None, "a probe without overheads is not traced"
        request = TraceRequest(
            config=step_config(self, 1),
            vocab_size=self.manifest.vocab_size,
            special_ids=self.manifest.special_ids,
            documents_per_sequence=self.documents_per_sequence,
            micro_batches=self.micro_batches,
            ranks=self.local_ranks,
        )
        return estimate_model(
            request,
            machine,
            self.memory_budget_bytes,
            self.overheads.usual,
            max_micro_batch_size=self.request.max_micro_batch_size,
        )


def step_config(
    probe: Probe, micro_batch_size: int, *, micro_batches: int | None = None
) -> TrainConfig:
    """Return the trainer's settings of a trial of a micro-batch size.

    Args:
        probe: The model and its limits.
        micro_batch_size: Sequences of each rank's micro-batch.
        micro_batches: Micro-batches of a step on each rank; None for the probe's.
    """
    if micro_batches is None:
        micro_batches = probe.micro_batches
    global_batch_size = micro_batch_size * probe.local_ranks * micro_batches
    return probe.config.model_copy(
        update={
            "micro_batch_size": micro_batch_size,
            "global_batch_size": global_batch_size,
        }
    )


def step_trial(
    probe: Probe,
    micro_batch_size: int,
    steps: StepCounts,
    budget_bytes: int | None,
    *,
    attempt: int = 0,
    micro_batches: int | None = None,
) -> Trial:
    """Return a trial of the trainer's step with a micro-batch size.

    Args:
        probe: The model and its limits.
        micro_batch_size: Sequences of each rank's micro-batch.
        steps: Optimizer steps to take.
        budget_bytes: Memory that each rank may use; None without a limit.
        attempt: Number that makes a repeated trial another trial; 0 for the first.
        micro_batches: Micro-batches of a step on each rank; None for the probe's.
    """
    request = StepRequest(
        config=step_config(probe, micro_batch_size, micro_batches=micro_batches),
        vocab_size=probe.manifest.vocab_size,
        special_ids=probe.manifest.special_ids,
        memory_budget_bytes=budget_bytes,
        warmup_steps=steps.warmup,
        timed_steps=steps.timed,
        local_ranks=probe.local_ranks,
        documents_per_sequence=probe.documents_per_sequence,
        attempt=attempt,
    )
    return request.trial(
        timeout_s=probe.request.trial_timeout_s,
        device_used_before_bytes=probe.device_used_before_bytes,
        first_attempt=attempt == 0,
    )


def kernels_trial(probe: Probe, micro_batch_size: int) -> Trial:
    """Return a trial that profiles the kernels of a step of one micro-batch."""
    steps = KERNEL_STEPS[probe.config.device]
    request = KernelsRequest(
        config=step_config(probe, micro_batch_size, micro_batches=1),
        vocab_size=probe.manifest.vocab_size,
        special_ids=probe.manifest.special_ids,
        memory_budget_bytes=None,
        warmup_steps=steps.warmup,
        timed_steps=steps.timed,
        local_ranks=probe.local_ranks,
        documents_per_sequence=probe.documents_per_sequence,
    )
    return request.trial(timeout_s=probe.request.trial_timeout_s)

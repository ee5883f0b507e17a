"""Probe of one model: its request, its settings at a known site, and its trials."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.base.defaults import MAX_MICRO_BATCH_SIZE
from autotune.memory.decide.overheads import OverheadsRange
from autotune.memory.estimate import MemoryEstimate
from autotune.memory.probe_limits import ProbeLimits
from autotune.memory.size_probe import SizeProbe, StepCounts
from autotune.profiles.decide.batch_split import DEFAULT_GLOBAL_BATCH_TOKENS
from autotune.profiles.profile_paths import relative_data_path
from autotune.subjects.mlm.memory.trace_request import TraceRequest
from autotune.subjects.mlm.subject import MlmSubject
from autotune.subjects.subject import Argument
from autotune.trials.trial_machine import Machine
from trainer.data.sequence_statistics import SequenceStatistics
from trainer.formats.manifest import Manifest
from trainer.formats.train_config import DataSettings, TrainConfig

FIT_STEPS = StepCounts(warmup=1, timed=1)
"""Steps of a trial that tests whether a size fits; an evaluation follows each step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeRequest(ProbeLimits):
    """Request to probe one model."""

    config: TrainConfig
    """Settings of the step; unless set, ``layout`` and ``precision`` are the defaults
    of model and device."""
    data: Path
    """Directory of the dataset."""
    accumulate: bool = True
    """True if a step has several micro-batches on each rank. Trials then take two, as
    more need no more memory: gradients exist while the second one is computed."""
    max_size: int = MAX_MICRO_BATCH_SIZE


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """A request to probe one model, completed with the defaults of the site."""

    limits: ProbeRequest
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
        return 2 if self.limits.accumulate else 1

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

    @property
    def subject(self) -> MlmSubject:
        """The model as a subject, with what the dataset adds."""
        return MlmSubject.of_dataset(
            self.config,
            self.manifest,
            documents_per_sequence=self.documents_per_sequence,
            local_ranks=self.local_ranks,
        )

    def trace_request(self) -> TraceRequest:
        """Return the request for traces of the model's step."""
        return TraceRequest(
            config=self.subject.chosen({"micro_batch_size": 1, **self.fit_choice}),
            vocab_size=self.manifest.vocab_size,
            special_ids=self.manifest.special_ids,
            documents_per_sequence=self.documents_per_sequence,
            micro_batches=self.micro_batches,
            ranks=self.local_ranks,
        )

    @property
    def fit_choice(self) -> dict[str, Argument]:
        """Settings of a trial that tests whether a size fits."""
        return {"micro_batches": self.micro_batches}

    def size_probe(self) -> SizeProbe:
        """Return the search for the largest micro-batch, with its limits."""
        request, config = self.limits, self.config
        return SizeProbe(
            subject=self.subject,
            device=config.device,
            memory_budget_bytes=self.memory_budget_bytes,
            max_size=request.max_size,
            fit_steps=FIT_STEPS,
            fit_choice=self.fit_choice,
            # A step of one micro-batch, which accumulation repeats.
            timed_choice={"micro_batches": 1},
            headroom_share=request.headroom_share,
            trial_timeout_s=request.trial_timeout_s,
            local_ranks=self.local_ranks,
            micro_batches=self.micro_batches,
            device_used_before_bytes=self.device_used_before_bytes,
            global_batch_size=config.global_batch_size,
            tokens_per_size=self.mean_tokens_per_sequence,
            trace=None if self.overheads is None else self.trace_request(),
            overheads=self.overheads,
            number_format=config.precision,
            study_file=request.study_file,
            document_tokens=config.seq_length_tokens / self.documents_per_sequence,
        )

    def trace(self, machine: Machine) -> MemoryEstimate:
        """Trace the model's step, and predict its memory near the largest micro-batch.

        The probe must have ``overheads``.

        Raises:
            CannotTrace: If the memory can only be measured.
            BadInput: If the settings are invalid.
        """
        return self.size_probe().estimate(machine)

    def settings_at(self, size: int, path: Path) -> Mapping[str, Any]:
        """Return the settings of the trainer with a micro-batch size."""
        data = DataSettings(
            path=relative_data_path(self.limits.data, path),
            dataset_hash=self.manifest.dataset_hash,
        )
        chosen = {"micro_batch_size": size, "data": data}
        return {"train": self.config.model_copy(update=chosen)}

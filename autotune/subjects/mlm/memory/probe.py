"""Probe of one model: its request, its settings at a known site, and its trials."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from autotune.base.defaults import MAX_MICRO_BATCH_SIZE
from autotune.evidence.profile import Profile
from autotune.machine.measured_device import MeasuredDevice
from autotune.memory.decide.overheads import OverheadsRange
from autotune.memory.estimate import MemoryEstimate
from autotune.memory.probe_budget import overheads_range, tell_budget
from autotune.memory.probe_request import ProbeRequest
from autotune.memory.size_probe import SizeProbe, StepCounts
from autotune.profiles.decide.batch_split import (
    DEFAULT_GLOBAL_BATCH_TOKENS,
    global_batch_size_of,
    split_global_batch,
)
from autotune.profiles.decide.default_settings import default_layout, default_precision
from autotune.profiles.profile_paths import relative_data_path
from autotune.subjects.bench import SubjectBench
from autotune.subjects.mlm.memory.trace_request import TraceRequest
from autotune.subjects.mlm.subject import MlmSubject
from autotune.subjects.subject import Argument
from autotune.trials.trial_machine import Machine
from trainer.config.compilers import missing_for_compile
from trainer.data.dataset import TokenDataset
from trainer.data.sequence_statistics import SequenceStatistics, sequence_statistics
from trainer.formats.manifest import Manifest, read_manifest
from trainer.formats.train_config import DataSettings, TrainConfig

FIT_STEPS = StepCounts(warmup=1, timed=1)
"""Steps of a trial that tests whether a size fits; an evaluation follows each step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MlmProbeRequest(ProbeRequest):
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

    @property
    def name(self) -> str:
        """Name of the model."""
        return self.config.model.name

    @property
    def data_dir(self) -> Path:
        """Directory of the dataset."""
        return self.data

    def requested_subject(self) -> MlmSubject:
        """Return the trainer with the requested settings, on its dataset.

        Raises:
            BadConfig: If there is no dataset.
        """
        return MlmSubject.of_dataset(self.config, read_manifest(self.data))

    def prepare(self, bench: SubjectBench) -> "MlmProbe":
        """Complete the settings of a probe, and report its memory budget on stderr.

        A sample of the dataset gives the tokens of a sequence, and these the number of
        sequences in the global batch.

        Raises:
            BadInput: If the global batch is too small for the ranks, or the device has
                too little memory or too few GPUs.
        """
        probe = self.settled(bench)
        sequence_stats = sequence_statistics(
            probe.config, TokenDataset(self.data, probe.manifest)
        )
        tokens = self.config.global_batch_tokens or DEFAULT_GLOBAL_BATCH_TOKENS
        global_batch_size = global_batch_size_of(
            tokens, sequence_stats.mean_non_padding_tokens
        )
        # Raises an error now if the global batch is too small for the ranks.
        split_global_batch(global_batch_size, 1, probe.local_ranks)
        tell_budget(bench.site, self, self.name, probe.memory_budget_bytes)
        config = probe.config.model_copy(
            update={"global_batch_size": global_batch_size}
        )
        return replace(
            probe,
            config=config,
            global_batch_tokens=tokens,
            sequence_stats=sequence_stats,
        )

    def settled(self, bench: SubjectBench) -> "MlmProbe":
        """Return a probe with the site's defaults, without the dataset's statistics.

        Raises:
            BadInput: If the device has too little memory or too few GPUs.
        """
        site = bench.site
        ranks, budget_bytes = self.on(site)
        return MlmProbe(
            request=self,
            config=_settled_config(self.config, site),
            manifest=read_manifest(self.data),
            memory_budget_bytes=budget_bytes,
            device_used_before_bytes=bench.used_before_bytes(ranks),
            local_ranks=ranks,
            overheads=overheads_range(site, ranks) if self.traced else None,
        )

    def with_settings(self, settings: Mapping[str, Argument], profile: Profile) -> Self:
        """Return the request for a step with other settings."""
        kept = {
            "parallel": profile.train.parallel,
            "global_batch_tokens": profile.constraints.global_batch_tokens,
        }
        config = self.config.model_copy(update={**settings, **kept})
        return replace(self, config=config)


@dataclass(frozen=True, slots=True, kw_only=True)
class MlmProbe:
    """A request to probe one model, completed with the defaults of the site."""

    request: MlmProbeRequest
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
        request, config = self.request, self.config
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
            path=relative_data_path(self.request.data, path),
            dataset_hash=self.manifest.dataset_hash,
        )
        chosen = {"micro_batch_size": size, "data": data}
        return {"train": self.config.model_copy(update=chosen)}


def _settled_config(config: TrainConfig, site: MeasuredDevice) -> TrainConfig:
    """Return the settings, with the site's default for each that is not set.

    The global batch in tokens is left out, as the probe has it in sequences.
    """
    settled: dict[str, Any] = {"device": site.device, "global_batch_tokens": None}
    if "layout" not in config.model_fields_set:
        settled["layout"] = default_layout(config.model)
    if "precision" not in config.model_fields_set:
        settled["precision"] = default_precision(site.device)
    if config.compile is None:
        can_compile = site.device == "cuda" and missing_for_compile("cuda") is None
        settled["compile"] = can_compile
    return config.model_copy(update=settled)

"""Prediction of training memory without the device: the trainer's step is traced and replayed through an allocator."""

import contextlib
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from autotune.corpus.values import SequenceContents, SequenceMeans
from autotune.errors import NotCheckable
from autotune.memory.decide.memory_model import (
    MemoryModel,
    MemoryOverheads,
    fit_memory_model,
    largest_micro_batch_size,
)
from autotune.memory.values import Trace, TraceRequest
from autotune.profiles.store import StoredProfile
from autotune.speed.values import StepWork
from autotune.trials.fork_server import Machine
from autotune.trials.values import Measured, TimedOut, TrialRequest
from trainer.config.train_config import Layout, ModelSettings, TrainConfig
from trainer.data.dataset import Manifest, SpecialIds, TokenDataset
from trainer.data.global_batch import SequenceStatistics, sequence_statistics

FIRST_SIZES = 8, 64
BELOW_SHARE = 0.8
"""Share of the predicted largest micro-batch that is also traced, so that sizes near it
lie between two traces."""
CLOSE_SHARE = 0.005
"""Relative distance to a traced size within which a prediction is final."""
MOST_ROUNDS = 3
SHIFTS = 3
"""Attempts to trace one sequence more, if no trace matches the largest: compiled layers
reuse blocks of equal size."""
TRACE_TIMEOUT_S = 120.0
DOCUMENTS_PER_PACKED_SEQUENCE = 4.0
"""Documents per packed sequence, assumed without a dataset; program functions average
2.1 per 512 tokens."""
DEFAULT_SPECIAL_IDS = SpecialIds(pad=0, unk=1, cls=2, sep=3, mask=4)
PACKED_FULL_SHARE = 0.997
"""Share of non-padding tokens in packed sequences of 512 tokens of program functions;
``docs/benchmarks.md``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Predicted memory of one model, with facts from its trace."""

    fit: MemoryModel
    max_micro_batch_size: int
    """Largest micro-batch that is predicted to fit."""
    parameters: int
    attention: str
    attention_reason: str
    works: tuple[StepWork, ...]
    """Kernels of a step, by traced micro-batch size."""

    def work_near(self, rows: int) -> StepWork:
        """Return the kernels of a step at the traced micro-batch size that is nearest."""
        return min(self.works, key=lambda one: abs(one.micro_batch_size - rows))


class CannotTrace(NotCheckable):
    """The memory of this model cannot be predicted from a trace, only measured."""


class AnyTraceRequest(Protocol):
    """Request for traces: of the trainer's step, or of a model of your own."""

    @property
    def name(self) -> str:
        """Name of the model."""

    def model_copy(self, *, update: Mapping[str, Any]) -> TrialRequest:
        """Return the request with other sizes."""


def estimate_model(
    request: AnyTraceRequest,
    machine: Machine,
    budget_bytes: float,
    overheads: MemoryOverheads,
    *,
    max_micro_batch_size: int,
) -> MemoryEstimate:
    """Trace a model's step at two sizes, then near the largest micro-batch that fits, until the prediction is stable.

    Raise ``CannotTrace`` if it cannot be traced, or allocates in another order at other
    sizes; ``BadInput`` if invalid.
    """
    fit, traces, told = _extended(request, machine, (), FIRST_SIZES)
    for number in range(MOST_ROUNDS):
        # A single sequence is a view; several are copied.
        rows = max(
            2,
            largest_micro_batch_size(
                fit, budget_bytes, overheads, max_micro_batch_size=max_micro_batch_size
            ),
        )
        if any(
            abs(trace.micro_batch_size - rows) <= CLOSE_SHARE * rows for trace in traces
        ):
            break
        below = (max(1, round(BELOW_SHARE * rows)),) if number == 0 else ()
        fit, traces, told = _extended(request, machine, traces, (*below, rows))
    most = largest_micro_batch_size(
        fit, budget_bytes, overheads, max_micro_batch_size=max_micro_batch_size
    )
    return MemoryEstimate(
        fit=fit,
        max_micro_batch_size=most,
        works=tuple(trace.work for trace in traces),
        **told,
    )


def _extended(
    request: AnyTraceRequest,
    machine: Machine,
    traces: tuple[Trace, ...],
    rows: tuple[int, ...],
) -> tuple[MemoryModel, tuple[Trace, ...], dict[str, Any]]:
    """Trace further sizes.

    Return the memory model of all traces like the largest, these traces, and model
    facts.
    """
    for shift in range(SHIFTS):
        known = {trace.micro_batch_size for trace in traces}
        sizes = dict.fromkeys(one + shift for one in rows)
        found = _traced(
            request, machine, tuple(one for one in sizes if one not in known)
        )
        traces = (*traces, *(Trace.of(one) for one in found["traces"]))
        largest = max(traces, key=lambda trace: trace.micro_batch_size)
        alike = [
            trace
            for trace in traces
            if trace is largest or fit_memory_model((trace, largest)) is not None
        ]
        fit = fit_memory_model(alike)
        if fit is not None and len(alike) > 1:
            break
    else:
        raise _cannot(request, "its allocations change order with the micro-batch size")
    told = {
        name: found[name] for name in ("parameters", "attention", "attention_reason")
    }
    return fit, tuple(alike), told


def traced_work(request: TraceRequest, machine: Machine) -> StepWork:
    """Return the kernels of a step at its settings' micro-batch size.

    Raise ``CannotTrace`` or ``BadInput``.
    """
    return Trace.of(
        _traced(request, machine, (request.config.micro_batch_size,))["traces"][0]
    ).work


def _traced(
    request: AnyTraceRequest, machine: Machine, rows: tuple[int, ...]
) -> Mapping[str, Any]:
    outcome = machine.run(
        request.model_copy(update={"sizes": list(rows)}).trial(
            timeout_s=TRACE_TIMEOUT_S
        )
    )
    if isinstance(outcome, Measured):
        return outcome.figures
    if isinstance(outcome, TimedOut):
        raise _cannot(request, f"tracing took longer than {TRACE_TIMEOUT_S:g} s")
    raise _cannot(request, (outcome.detail.strip().splitlines() or [outcome.kind])[-1])


def _cannot(request: AnyTraceRequest, why: str) -> CannotTrace:
    what = f"the memory of {request.name!r} cannot be predicted: {why}"
    return CannotTrace(
        what, next_step="Measure it on the machine that will train: autotune probe"
    )


def assumed_contents(
    vocab_size: int, layout: Layout, seq_length_tokens: int
) -> SequenceContents:
    """Return the assumptions without a dataset: packed sequences are nearly full, others hold one unpadded sample."""
    packed = layout == "packed"
    return SequenceContents(
        vocab_size=vocab_size,
        special_ids=DEFAULT_SPECIAL_IDS,
        dataset_hash=None,
        mean_non_padding_tokens=(PACKED_FULL_SHARE if packed else 1.0)
        * seq_length_tokens,
        # So that a global batch of 256 samples is one of 256 sequences, as BERT's was.
        mean_samples=1.0,
        documents=DOCUMENTS_PER_PACKED_SEQUENCE if packed else 1.0,
    )


def sequence_contents(
    data: Path | None, vocab_size: int, config: TrainConfig
) -> SequenceContents:
    """Return the contents of sequences with these settings: those of the dataset, or assumed ones without it."""
    if data is None:
        return assumed_contents(vocab_size, config.layout, config.seq_length_tokens)
    return contents_of(data, config.layout, config.seq_length_tokens)


@functools.cache
def contents_of(data: Path, layout: Layout, seq_length_tokens: int) -> SequenceContents:
    """Return the contents of a dataset's sequences, from a sample of it.

    Raises:
        TrainerError: If it is no dataset.
    """
    # Sequences do not depend on it.
    any_model = ModelSettings(name="any", config={"model_type": "bert"})
    rows, manifest = _laid_out(
        data,
        TrainConfig(
            model=any_model, layout=layout, seq_length_tokens=seq_length_tokens
        ),
    )
    said = {
        name: getattr(manifest, name)
        for name in ("vocab_size", "special_ids", "dataset_hash")
    }
    said |= {
        name: getattr(rows, name)
        for name in ("mean_non_padding_tokens", "mean_samples")
    }
    return SequenceContents(
        documents=rows.max_documents if layout == "packed" else 1.0, **said
    )


def _laid_out(data: Path, config: TrainConfig) -> tuple[SequenceStatistics, Manifest]:
    with contextlib.closing(TokenDataset.open(data)) as dataset:
        return sequence_statistics(config, dataset), dataset.manifest


def sequence_means(stored: StoredProfile, data: Path | None) -> SequenceMeans:
    """Return non-padding tokens and samples per sequence: a dataset's, by a sample of it, or else the profile's."""
    profile, directory = stored.profile, data or stored.data_here()
    if directory is None:
        packed = profile.train.layout == "packed"
        source = "dataset not found" if packed else "one sample per sequence"
        tokens = profile.mean_tokens_per_sequence
        return SequenceMeans(
            non_padding_tokens=tokens, samples=None if packed else 1.0, source=source
        )
    found, manifest = _laid_out(directory, profile.train)
    other = manifest.dataset_hash != profile.fingerprint.dataset_hash
    source = (
        "a different dataset from the profile's"
        if other
        else "a sample of the dataset's sequences"
    )
    return SequenceMeans(
        non_padding_tokens=found.mean_non_padding_tokens,
        samples=found.mean_samples,
        source=source,
    )

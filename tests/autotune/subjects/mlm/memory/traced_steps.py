"""Traces of real steps of small models, and the memory in use at points of a trace."""

from collections import Counter
from collections.abc import Iterator
from itertools import accumulate, islice

from autotune.memory.values import Term, Trace
from autotune.subjects.mlm.jobs.trace import trace_steps
from testbed.simulators.allocator import SPECIAL_IDS, Case
from trainer.formats.train_config import TrainConfig

LAYERS = 2
HIDDEN = 64
INTERMEDIATE = 256
SHAPE = {
    "num_hidden_layers": LAYERS,
    "hidden_size": HIDDEN,
    "num_attention_heads": 2,
    "intermediate_size": INTERMEDIATE,
}
BASE = Case(family="bert", dropout=0.0, vocab_size=512, rows=8, width=64, shape=SHAPE)
GPU = {"device": "cuda", "precision": "bf16", "attention": "varlen"}
"""Changes by which a step is traced for a GPU."""
NUMBERS_LEFT_BYTES = 2 * 4
"""Bytes of two fp32 numbers that a step leaves to the next, such as the divisor by
which the optimizer clips gradients."""


def traced(case: Case, *, ranks: int = 1, **changes: object) -> Trace:
    """Return the trace of a case whose settings have some changes."""
    config = TrainConfig.model_validate(case.config.model_dump() | changes)
    steps = trace_steps(
        config,
        case.vocab_size,
        SPECIAL_IDS,
        documents_per_sequence=case.documents_per_sequence,
        ranks=ranks,
    )
    return steps.trace


def changes_of(trace: Trace) -> Iterator[tuple[str, int]]:
    """Yield the term and bytes of every event; bytes of a release are negative."""
    for event in trace.events:
        if event >= 0:
            allocation = trace.allocations[event]
            yield allocation.term, allocation.size_bytes
        else:
            allocation = trace.allocations[-1 - event]
            yield allocation.term, -allocation.size_bytes


def running_bytes(trace: Trace) -> list[int]:
    """Return the bytes in use after each event."""
    return list(accumulate(size_bytes for _, size_bytes in changes_of(trace)))


def peak_of(trace: Trace) -> int:
    return max(running_bytes(trace))


def terms_after(trace: Trace, events: int) -> Counter[str]:
    """Return the bytes in use after the first events, by term."""
    terms_bytes: Counter[str] = Counter()
    for term, size_bytes in islice(changes_of(trace), events):
        terms_bytes[term] += size_bytes
    return terms_bytes


def terms_at_peak(trace: Trace) -> Counter[str]:
    """Return the bytes in use at the peak, by term."""
    return terms_after(trace, running_bytes(trace).index(peak_of(trace)) + 1)


def between_steps(trace: Trace) -> Counter[str]:
    """Return the bytes in use before the last step, by term."""
    return terms_after(trace, trace.repeats_from)


def left_by_last_step(trace: Trace) -> Counter[str]:
    """Return the bytes in use after the last step that were not before it, by term."""
    return terms_after(trace, len(trace.events)) - between_steps(trace)


def weights_bytes(terms_bytes: Counter[str]) -> float:
    """Return the bytes of all trained weights in fp32, by those of the optimizer.

    It keeps two numbers for each weight. The counts of steps, a number for each tensor,
    make the figure too large by less than 0.1 %.
    """
    return terms_bytes[Term.OPTIMIZER] / 2

"""Prediction of a model's memory from traces of few micro-batch sizes."""

from dataclasses import replace

import pytest

import autotune.memory.estimate
from autotune.base.units import MIB
from autotune.memory.decide.memory_model import peak_bytes
from autotune.memory.decide.overheads import MemoryOverheads, overheads_on_cpu
from autotune.memory.estimate import CannotTrace, estimate_model
from autotune.memory.values import Allocation
from autotune.subjects.mlm.memory.trace_request import TraceRequest
from autotune.trials.outcomes import Crashed, Measured, TimedOut
from testbed.fakes import FakeHost, FakeMachine
from tests.autotune.memory.simulated_traces import figures_of, trace_of
from trainer.data.head_slots import SLOTS_MULTIPLE, head_slots
from trainer.formats.manifest import SpecialIds
from trainer.formats.presets import model_settings
from trainer.formats.train_config import TrainConfig

SEQ_LENGTH_TOKENS = 64
REQUEST = TraceRequest(
    config=TrainConfig(
        model=model_settings("bert-mini"), seq_length_tokens=SEQ_LENGTH_TOKENS
    ),
    vocab_size=500,
    special_ids=SpecialIds(pad=0, unk=1, cls=2, sep=3, mask=4),
    documents_per_sequence=1.0,
    micro_batches=2,
    ranks=1,
)
FIXED_BYTES = 100_000_000
SEQUENCE_BYTES = 3_000_000
SLOT_BYTES = 2_000
"""Memory of each slot of the sparse MLM head, which has a slot for a masked token."""
MASKED_SHARE = 0.15
JUMP_BYTES = 20_000_000
UNREACHED_SIZE = 10**9
"""Micro-batch size that no trace has."""
CPU_OVERHEADS = overheads_on_cpu().usual
LARGE_BYTES = 7 * 10**10
"""Budget in which more sequences fit than a micro-batch may have."""
MAX_MICRO_BATCH_SIZE = 16_384


def simulate_trace(
    trial, *, jump_from=UNREACHED_SIZE, other_order_below=0, unlike_sizes=()
):
    """Simulate a trial that traces a model.

    Its memory grows with the number of sequences and of slots of the head.

    Args:
        trial: The trial of the ``trace`` job.
        jump_from: Micro-batch size from which the activations take JUMP_BYTES more.
        other_order_below: Micro-batch size below which blocks are released in another
            order.
        unlike_sizes: Micro-batch sizes with a term that no other size has.
    """
    traces = []
    for size in trial.measured["sizes"]:
        slots = head_slots(SEQ_LENGTH_TOKENS * size, MASKED_SHARE)
        activations_bytes = SEQUENCE_BYTES * size
        if size >= jump_from:
            activations_bytes += JUMP_BYTES
        head = f"head of {size}" if size in unlike_sizes else "head and loss"
        # Of the activations, and of the head.
        releases = [-2, -3]
        if size < other_order_below:
            releases.reverse()
        traces.append(
            trace_of(
                size,
                allocations=[
                    Allocation(size_bytes=FIXED_BYTES, term="parameters"),
                    Allocation(
                        size_bytes=activations_bytes, term="activations: Linear"
                    ),
                    Allocation(size_bytes=SLOT_BYTES * slots, term=head),
                ],
                events=[0, 1, 2, *releases],
                predicted_tokens=slots,
                repeats_from=1,
            )
        )
    return Measured(figures=figures_of(traces))


def machine_that_traces(**options):
    """Return a machine whose trials are ``simulate_trace`` with these options."""
    return FakeMachine(lambda trial: simulate_trace(trial, **options))


def estimated(machine, budget_bytes=LARGE_BYTES):
    return estimate_model(
        REQUEST,
        machine,
        budget_bytes,
        CPU_OVERHEADS,
        max_micro_batch_size=MAX_MICRO_BATCH_SIZE,
    )


def true_bytes(size: int) -> int:
    """Return the memory of a micro-batch of the simulated model, computed directly."""
    head_bytes = SLOT_BYTES * head_slots(SEQ_LENGTH_TOKENS * size, MASKED_SHARE)
    return (
        FIXED_BYTES
        + SEQUENCE_BYTES * size
        + head_bytes
        + CPU_OVERHEADS.non_pytorch_bytes
    )


BUDGETS = [
    pytest.param(10**8, id="no sequence fits"),
    pytest.param((true_bytes(1) + true_bytes(2)) / 2, id="one sequence fits"),
    pytest.param(5 * 10**8, id="500 MB"),
    pytest.param(10**9, id="1 GB"),
    pytest.param(LARGE_BYTES, id="more than the largest size"),
]


@pytest.mark.parametrize("budget_bytes", BUDGETS)
def test_predicted_largest_size_is_the_true_one(budget_bytes):
    size = estimated(machine_that_traces(), budget_bytes).max_micro_batch_size
    assert size == 0 or true_bytes(size) <= budget_bytes
    # Slots are rounded up, so that interpolation between two sizes is not exact.
    rounding_bytes = SLOTS_MULTIPLE * SLOT_BYTES
    next_bytes = true_bytes(size + 1) + rounding_bytes
    assert size == MAX_MICRO_BATCH_SIZE or next_bytes > budget_bytes


def simulate_trace_with_gap(trial):
    """Simulate a model whose memory falls by 50 MiB at 1000 sequences.

    From there on, a block of the optimizer fits where an activation was.
    """
    traces = [
        trace_of(
            size,
            allocations=[
                Allocation(size_bytes=95 * size * MIB // 100, term="activations"),
                Allocation(size_bytes=5 * size * MIB // 100, term="activations"),
                Allocation(size_bytes=20 * MIB, term="optimizer"),
                Allocation(size_bytes=50 * MIB, term="optimizer"),
            ],
            events=[0, 1, 2, -2, 3],
        )
        for size in trial.measured["sizes"]
    ]
    return Measured(figures=figures_of(traces))


# Within the first and the third, the search alone ends at 1020.
@pytest.mark.parametrize("budget_mib", [1046, 1050, 1058])
def test_sizes_a_little_below_the_largest_fit_too(budget_mib):
    overheads = MemoryOverheads(kind="cuda", workspaces_bytes=(), non_pytorch_bytes=0)
    budget_bytes = budget_mib * MIB
    estimate = estimate_model(
        REQUEST,
        FakeMachine(simulate_trace_with_gap),
        budget_bytes,
        overheads,
        max_micro_batch_size=MAX_MICRO_BATCH_SIZE,
    )

    # Of 971 sequences the pages of 20 MiB take 1060 MiB, of 1020 only 1040.
    assert estimate.max_micro_batch_size == 970
    peaks = [peak_bytes(estimate.memory_model, n, overheads) for n in (971, 1020)]
    assert peaks == [1060 * MIB, 1040 * MIB]


@pytest.mark.parametrize("budget_bytes", BUDGETS)
def test_no_size_is_traced_twice(budget_bytes):
    machine = machine_that_traces()
    estimated(machine, budget_bytes)
    sizes = [size for trial in machine.trials for size in trial.measured["sizes"]]
    assert len(sizes) == len(set(sizes))


@pytest.mark.parametrize("budget_bytes", BUDGETS)
def test_few_sizes_are_traced(budget_bytes):
    model = estimated(machine_that_traces(), budget_bytes).memory_model
    # Two at first, two near the predicted largest one, and one after its correction.
    assert len(model.micro_batch_sizes) <= 5


@pytest.mark.parametrize("size", [1, 7, 100, 1000])
def test_sizes_between_traces_are_predicted_closely(size):
    model = estimated(machine_that_traces()).memory_model
    # The number of slots also grows with a square root. 8, 64 and 13,107 sequences are
    # traced; lines between them miss the slots of these sizes by up to 292.
    assert peak_bytes(model, size, CPU_OVERHEADS) == pytest.approx(
        true_bytes(size), abs=300 * SLOT_BYTES
    )


def test_jump_in_memory_is_predicted_from_larger_traces():
    budget_bytes = 5 * 10**8
    machine = machine_that_traces(jump_from=100)
    size = estimated(machine, budget_bytes).max_micro_batch_size
    # More than 100 sequences fit, so that the jump is counted.
    assert true_bytes(size) + JUMP_BYTES <= budget_bytes
    assert true_bytes(size + 1) + JUMP_BYTES > budget_bytes


def test_other_order_of_small_sizes_is_left_out():
    model = estimated(machine_that_traces(other_order_below=100)).memory_model
    assert model.micro_batch_sizes.min() > 100


def test_model_without_a_common_order_cannot_be_traced():
    with pytest.raises(CannotTrace, match="change order"):
        estimated(machine_that_traces(unlike_sizes=range(100)))


@pytest.mark.parametrize(
    "unlike_size",
    [
        pytest.param(8, id="smaller first size"),
        pytest.param(64, id="larger first size"),
        pytest.param(MAX_MICRO_BATCH_SIZE, id="largest size"),
    ],
)
def test_unlike_trace_is_left_out(unlike_size):
    machine = machine_that_traces(unlike_sizes=(unlike_size,))
    traced_sizes = estimated(machine).memory_model.micro_batch_sizes
    assert unlike_size not in traced_sizes
    assert len(traced_sizes) > 2


@pytest.mark.parametrize(
    ("message", "outcome"),
    [
        pytest.param(
            "Tensor.item",
            Crashed(detail="…\nError: Tensor.item() cannot be called"),
            id="crashed",
        ),
        pytest.param("longer", TimedOut(detail=""), id="timed out"),
    ],
)
def test_untraceable_model_advises_a_probe(monkeypatch, message, outcome):
    monkeypatch.setattr(autotune.memory.estimate, "SystemHost", FakeHost)
    with pytest.raises(CannotTrace, match=message) as rejected:
        estimated(FakeMachine(lambda trial: outcome))
    assert "autotune probe" in rejected.value.next_step


class BusyHost(FakeHost):
    """A host on which other programs run."""

    def facts(self, paths):
        return replace(super().facts(paths), load_average_1min=17.14)


def test_late_trace_names_a_busy_machine(monkeypatch):
    monkeypatch.setattr(autotune.memory.estimate, "SystemHost", BusyHost)
    with pytest.raises(CannotTrace) as rejected:
        estimated(FakeMachine(lambda trial: TimedOut(detail="")))
    assert "machine is busy: the load average is 17.14 with 8" in str(rejected.value)
    assert "again" in rejected.value.next_step

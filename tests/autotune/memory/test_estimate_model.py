"""Prediction of a model's memory from traces of few micro-batch sizes."""

from dataclasses import replace

import pytest

import autotune.memory.estimate
from autotune.memory.decide.memory_model import peak_bytes
from autotune.memory.decide.overheads import overheads_on_cpu
from autotune.memory.estimate import CannotTrace, estimate_model
from autotune.memory.values import Allocation, TraceRequest
from autotune.trials.outcomes import Crashed, Measured, TimedOut
from testbed.fakes import FakeHost, FakeMachine
from tests.autotune.memory.simulated_traces import figures_of, trace_of
from trainer.config.presets import model_settings
from trainer.config.train_config import TrainConfig
from trainer.data.head_slots import head_slots
from trainer.data.manifest import SpecialIds

REQUEST = TraceRequest(
    config=TrainConfig(model=model_settings("bert-mini"), seq_length_tokens=64),
    vocab_size=500,
    special_ids=SpecialIds(pad=0, unk=1, cls=2, sep=3, mask=4),
    documents_per_sequence=1.0,
    micro_batches=2,
    ranks=1,
)
FIXED_BYTES = 100_000_000
SEQUENCE_BYTES = 3_000_000
SLOT_BYTES = 2_000
JUMP_BYTES = 20_000_000
MASKED_SHARE = 0.15
NEVER = 10**9
"""A micro-batch size that is not reached."""


def simulate_trace(trial, *, jump_from=NEVER, other_order_below=0, unlike_sizes=()):
    """Trace a model with a block for each sequence and one for each slot of the head.

    Args:
        trial: The trial of the ``trace`` job.
        jump_from: Micro-batch size from which the activations take JUMP_BYTES more.
        other_order_below: Smaller micro-batch sizes release blocks in another order.
        unlike_sizes: Micro-batch sizes with a term of their own.
    """
    traces = []
    for size in trial.measured["sizes"]:
        slots = head_slots(64 * size, MASKED_SHARE)
        activations_bytes = SEQUENCE_BYTES * size
        if size >= jump_from:
            activations_bytes += JUMP_BYTES
        head = f"head of {size}" if size in unlike_sizes else "head and loss"
        releases = [-3, -2] if size < other_order_below else [-2, -3]
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


CPU = overheads_on_cpu().usual
LARGE_BYTES = 7 * 10**10
"""Budget in which more sequences fit than a micro-batch may have."""
MAX_MICRO_BATCH_SIZE = 16_384


def machine_that_traces(**model):
    return FakeMachine(lambda trial: simulate_trace(trial, **model))


def estimated(machine, budget_bytes=LARGE_BYTES):
    return estimate_model(
        REQUEST, machine, budget_bytes, CPU, max_micro_batch_size=MAX_MICRO_BATCH_SIZE
    )


def true_bytes(size: int) -> int:
    """Return the memory of a micro-batch of the simulated model, computed directly."""
    head_bytes = SLOT_BYTES * head_slots(64 * size, MASKED_SHARE)
    return FIXED_BYTES + SEQUENCE_BYTES * size + head_bytes + CPU.non_pytorch_bytes


BUDGETS = [
    pytest.param(10**8, id="no sequence fits"),
    pytest.param((true_bytes(1) + true_bytes(2)) / 2, id="one sequence fits"),
    pytest.param(5 * 10**8, id="500 MB"),
    pytest.param(10**9, id="1 GB"),
    pytest.param(LARGE_BYTES, id="more than the largest size"),
]


@pytest.mark.parametrize("budget", BUDGETS)
def test_predicted_largest_size_is_the_true_one(budget):
    size = estimated(machine_that_traces(), budget).max_micro_batch_size
    assert size == 0 or true_bytes(size) <= budget
    # The number of slots is rounded, so that interpolation is not exact.
    assert size == MAX_MICRO_BATCH_SIZE or true_bytes(size + 1) > budget * (1 - 1e-4)


@pytest.mark.parametrize("budget", BUDGETS)
def test_no_size_is_traced_twice(budget):
    machine = machine_that_traces()
    estimate = estimated(machine, budget)
    assert len(estimate.memory_model.micro_batch_sizes) <= 5
    sizes = [size for trial in machine.trials for size in trial.measured["sizes"]]
    assert len(sizes) == len(set(sizes))


def test_sizes_between_traces_are_predicted_closely():
    sizes = (1, 7, 100, 1000)
    model = estimated(machine_that_traces()).memory_model
    predicted = [peak_bytes(model, size, CPU) for size in sizes]
    assert predicted == pytest.approx([true_bytes(size) for size in sizes], rel=0.01)


def test_jump_in_memory_is_predicted_from_larger_traces():
    budget = 5 * 10**8
    machine = machine_that_traces(jump_from=100)
    size = estimated(machine, budget).max_micro_batch_size
    assert true_bytes(size) + JUMP_BYTES <= budget
    assert true_bytes(size + 1) + JUMP_BYTES > budget


def test_other_order_of_small_sizes_is_left_out():
    model = estimated(machine_that_traces(other_order_below=100)).memory_model
    assert model.micro_batch_sizes.min() > 100


def test_model_without_a_common_order_cannot_be_traced():
    with pytest.raises(CannotTrace, match="change order"):
        estimated(machine_that_traces(unlike_sizes=range(100)))


@pytest.mark.parametrize("unlike_size", [8, 64, MAX_MICRO_BATCH_SIZE])
def test_unlike_trace_is_left_out(unlike_size):
    machine = machine_that_traces(unlike_sizes=(unlike_size,))
    traced_sizes = estimated(machine).memory_model.micro_batch_sizes
    assert unlike_size not in traced_sizes
    assert len(traced_sizes) > 2


@pytest.mark.parametrize(
    ("message", "outcome"),
    [
        ("Tensor.item", Crashed(detail="…\nError: Tensor.item() cannot be called")),
        ("longer", TimedOut(detail="")),
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

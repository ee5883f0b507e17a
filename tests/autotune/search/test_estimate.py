import pytest

from autotune.core.allocations import Allocation, Trace
from autotune.core.outcome import Crashed, Measured, TimedOut
from autotune.decide.memory import expected_on_cpu, peak_bytes
from autotune.search.estimate import CannotTrace, EstimateRequest, estimate_model
from tests.fakes import FakeMachine
from trainer.config import TrainConfig
from trainer.dataset import SpecialIds
from trainer.masking import head_slots
from trainer.presets import model_settings

REQUEST = EstimateRequest(
    config=TrainConfig(model=model_settings("bert-mini"), seq_length_tokens=64),
    vocab_size=500,
    special_ids=SpecialIds(pad=0, unk=1, cls=2, sep=3, mask=4),
    documents_per_row=1.0,
    micro_batches=2,
    ranks=1,
)
FIXED, ROW, SLOT, BEND = 100_000_000, 3_000_000, 2_000, 20_000_000


def traced(trial, bent_from=10**9, other_order_from=10**9, unlike=()):
    """A model with a block for each row and one for each slot of the head; some sizes are unlike all others."""
    traces = []
    for rows in trial.measured["sizes"]:
        slots = head_slots(64 * rows, 0.15)
        allocations = (
            Allocation(size_bytes=FIXED, term="parameters"),
            Allocation(size_bytes=ROW * rows + (BEND if rows >= bent_from else 0), term="activations: Linear"),
            Allocation(size_bytes=SLOT * slots, term=f"head of {rows}" if rows in unlike else "head and loss"),
        )
        events = (0, 1, 2, -2, -3) if rows < other_order_from else (0, 1, 2, -3, -2)
        trace = Trace(rows=rows, predicted_tokens=slots, allocations=allocations, events=events, repeats_from=1)
        traces.append(trace.to_json())
    figures = {"parameters": 25_000_000, "attention": "sdpa", "attention_reason": "asked for"}
    return Measured(figures=figures | {"traces": traces})


CPU = expected_on_cpu().usual
LARGE_BYTES = 7 * 10**10


def estimated(budget_bytes=LARGE_BYTES, machine=None, **model):
    """The estimate, and the rows that are predicted to fit."""
    machine = machine or FakeMachine(lambda trial: traced(trial, **model))
    estimate = estimate_model(REQUEST, machine, budget_bytes, CPU, max_rows=16_384)
    return estimate, estimate.most_rows


def true_bytes(rows: int) -> int:
    return FIXED + ROW * rows + SLOT * head_slots(64 * rows, 0.15) + CPU.outside_bytes


ONE_ROW = (true_bytes(1) + true_bytes(2)) / 2


@pytest.mark.parametrize("budget", [10**8, ONE_ROW, 5 * 10**8, 10**9, LARGE_BYTES])
def test_the_predicted_largest_fits_and_one_more_does_not_and_other_sizes_are_predicted_closely(budget):
    machine = FakeMachine(traced)
    estimate, rows = estimated(budget, machine)
    assert rows == 0 or true_bytes(rows) <= budget
    assert rows == 16_384 or true_bytes(rows + 1) > budget * (1 - 1e-4)
    assert len(estimate.law.rows) <= 5
    sizes = [size for trial in machine.trials for size in trial.measured["sizes"]]
    assert len(sizes) == len(set(sizes))  # none is traced twice
    if budget == LARGE_BYTES:
        predicted = [peak_bytes(estimate.law, rows, CPU) for rows in (1, 7, 100, 1000)]
        assert predicted == pytest.approx([true_bytes(rows) for rows in (1, 7, 100, 1000)], rel=0.01)


def test_kernels_that_need_more_from_some_size_on_are_predicted_from_traces_above_it():
    _, rows = estimated(5 * 10**8, bent_from=100)
    assert true_bytes(rows) + BEND <= 5 * 10**8 < true_bytes(rows + 1) + BEND


def test_a_model_that_allocates_in_another_order_for_few_rows_is_predicted_from_many_and_at_every_size_not_at_all():
    assert estimated(other_order_from=100)[0].law.rows.min() > 100
    with pytest.raises(CannotTrace, match="another order"):
        estimated(unlike=range(100))


@pytest.mark.parametrize("unlike", [8, 64, 23_109])
def test_a_size_that_is_unlike_others_by_chance_is_left_out(unlike):
    law = estimated(unlike=(unlike,))[0].law
    assert unlike not in law.rows
    assert len(law.rows) > 2


def test_a_model_that_cannot_be_traced_is_to_be_measured():
    outcomes = {"Tensor.item": Crashed(detail="…\nRuntimeError: Tensor.item() cannot be called"),
                "longer": TimedOut(detail="")}  # fmt: skip
    for said, outcome in outcomes.items():
        with pytest.raises(CannotTrace, match=said) as refused:
            estimate_model(REQUEST, FakeMachine(lambda trial, outcome=outcome: outcome), LARGE_BYTES, CPU, max_rows=8)
        assert "autotune probe" in refused.value.next_step

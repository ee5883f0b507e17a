import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.core.allocations import Allocation, Trace
from autotune.core.outcome import Crashed, Measured, TimedOut
from autotune.decide.memory import affine_law, holds_for
from autotune.decide.surroundings import expected_on_cpu
from autotune.measure.machine import FakeMachine
from autotune.search.estimate import (
    CannotTrace,
    EstimateRequest,
    confirm,
    estimate_model,
    predicted_bytes,
    predicted_rows,
    traced_rows,
)
from trainer.config import TrainConfig
from trainer.dataset import SpecialIds
from trainer.masking import head_slots, most_predicted
from trainer.presets import model_settings

REQUEST = EstimateRequest(
    config=TrainConfig(model=model_settings("bert-mini"), seq_length_tokens=64),
    vocab_size=500,
    special_ids=SpecialIds(pad=0, unk=1, cls=2, sep=3, mask=4),
    documents_per_row=1.0,
    micro_batches=2,
    ranks=1,
)
FIXED, ROW, SLOT = 100_000_000, 3_000_000, 2_000


def traced(trial, bent_from=10**9, other_order_from=10**9):
    """A model with a block for each row and one for each slot of the head."""
    traces = []
    for rows in trial.measured["sizes"]:
        slots = head_slots(64 * rows, 0.15)
        allocations = (
            Allocation(size_bytes=FIXED, term="parameters"),
            Allocation(size_bytes=ROW * rows + (rows >= bent_from), term="activations: Linear"),
            Allocation(size_bytes=SLOT * slots, term="head and loss"),
        )
        events = (0, 1, 2, -2, -3) if rows < other_order_from else (0, 1, 2, -3, -2)
        traces.append(
            Trace(rows=rows, predicted_tokens=slots, allocations=allocations, events=events, repeats_from=1).to_json()
        )
    return Measured(
        figures={"traces": traces, "parameters": 25_000_000, "attention": "sdpa", "attention_reason": "asked for"}
    )


def test_three_sizes_give_the_law_of_any_other():
    machine = FakeMachine(traced)
    estimate = estimate_model(REQUEST, machine)
    by_rows = predicted_bytes(estimate, expected_on_cpu().usual)
    libraries = expected_on_cpu().usual.outside_bytes
    for rows in (1, 7, 100, 1000):
        assert by_rows(rows) == FIXED + ROW * rows + SLOT * head_slots(64 * rows, 0.15) + libraries
    assert len(machine.trials) == 1
    assert confirm(estimate, machine, 1000).traces == 4


def test_the_predicted_largest_fits_and_one_more_does_not():
    estimate = estimate_model(REQUEST, FakeMachine(traced))
    usual = expected_on_cpu().usual
    by_rows = predicted_bytes(estimate, usual)
    for budget in (10**8, 5 * 10**8, 10**9, 7 * 10**10):
        rows = predicted_rows(estimate, budget, usual, max_rows=16_384)
        assert rows == 0 or by_rows(rows) <= budget
        assert rows == 16_384 or by_rows(rows + 1) > budget


def test_a_model_that_changes_its_ways_with_its_size_is_not_predicted():
    with pytest.raises(CannotTrace, match="one law"):
        estimate_model(REQUEST, FakeMachine(lambda trial: traced(trial, other_order_from=20)))
    bent = estimate_model(REQUEST, FakeMachine(traced))
    with pytest.raises(CannotTrace, match="500 rows"):
        confirm(bent, FakeMachine(lambda trial: traced(trial, bent_from=400)), 500)


@pytest.mark.parametrize(
    ("outcome", "said"),
    [
        (Crashed(detail="…\nRuntimeError: Tensor.item() cannot be called"), "Tensor.item"),
        (TimedOut(detail=""), "longer"),
    ],
)
def test_a_model_that_cannot_be_traced_is_to_be_measured(outcome, said):
    with pytest.raises(CannotTrace, match=said) as refused:
        estimate_model(REQUEST, FakeMachine(lambda trial: outcome))
    assert "autotune probe" in refused.value.next_step


@given(width=st.integers(8, 8192), probability=st.floats(0.01, 0.6))
def test_rows_of_any_length_have_three_sizes_that_tell_rows_from_slots(width, probability):
    def slots(rows: int) -> int:
        return most_predicted(rows * width, probability)

    sizes = traced_rows(slots, width)
    assert np.linalg.matrix_rank([[1, rows, slots(rows)] for rows in sizes]) == 3
    assert all(slots(rows) < rows * width for rows in sizes)
    assert sizes[0] * width <= max(3 * width, 4000)


@pytest.mark.parametrize("width", [371, 375, 795, 1200, 2050])
def test_lengths_at_which_the_usual_sizes_lie_on_one_line_are_predicted_too(width):
    def slots(rows: int) -> int:
        return most_predicted(rows * width, 0.15)

    def trace(rows: int) -> Trace:
        sizes = (FIXED, ROW * rows, SLOT * slots(rows))
        return Trace(
            rows=rows, predicted_tokens=slots(rows), events=(0, 1, 2), repeats_from=0,
            allocations=tuple(Allocation(size_bytes=size, term="parameters") for size in sizes),
        )  # fmt: skip

    law = affine_law([trace(rows) for rows in traced_rows(slots, width)], slots)
    assert law is not None
    assert holds_for(law, trace(501))

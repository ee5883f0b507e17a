import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.core.exploration import Configuration
from autotune.decide.choose import deal
from autotune.decide.exploration import (
    ROW_DOUBLINGS,
    knob_space,
    micro_batches,
    useful_share,
    with_dealt_rows,
)

UNEXPLORED = Configuration(
    precision="fp32", attention="auto", checkpointing="none", compile_layers=False, layout="packed", micro_batch_rows=8
)
LEVELS = {
    "precision": ("fp32", "bf16"),
    "attention": ("auto", "sdpa"),
    "checkpointing": ("none", "full"),
    "compile_layers": (False, True),
    "layout": ("packed", "padded"),
}
GLOBAL = st.fixed_dictionaries({"packed": st.integers(8, 300), "padded": st.integers(8, 600)})
RANKS = st.integers(1, 8)
MOST = st.integers(1, 1000)


def space(global_rows, ranks, most, unexplored=UNEXPLORED):
    return knob_space(unexplored, LEVELS, global_rows, ranks, lambda knobs: most)


@settings(max_examples=25)
@given(GLOBAL, RANKS, MOST)
def test_every_cell_keeps_the_global_batch_and_is_dealt_already(global_rows, ranks, most):
    for cell in space(global_rows, ranks, most):
        whole = global_rows[cell.layout]
        dealt = deal(whole, cell.micro_batch_rows, ranks)
        assert dealt.rows_per_micro_batch == cell.micro_batch_rows
        assert dealt.micro_batches * dealt.rows_per_micro_batch * ranks - dealt.empty_rows == whole
        assert cell == with_dealt_rows(cell, global_rows, ranks)


@settings(max_examples=25)
@given(GLOBAL, RANKS, MOST)
def test_every_cell_is_another_one_and_the_unexplored_stands_first(global_rows, ranks, most):
    cells = space(global_rows, ranks, most)
    assert len(set(cells)) == len(cells)
    assert cells[0] == with_dealt_rows(UNEXPLORED, global_rows, ranks)


@settings(max_examples=25)
@given(GLOBAL, RANKS, MOST)
def test_every_combination_of_values_has_every_micro_batch_of_its_layout(global_rows, ranks, most):
    found = {}
    for cell in space(global_rows, ranks, most):
        found.setdefault(cell.kind, set()).add(cell.micro_batch_rows)
    assert len(found) == 2**5
    own = with_dealt_rows(UNEXPLORED, global_rows, ranks)
    for kind, rows in found.items():
        more = {own.micro_batch_rows} if kind == own.kind else set()
        assert rows == set(micro_batches(global_rows[kind.layout], ranks, most)) | more


@given(st.integers(1, 5000), RANKS, MOST)
def test_micro_batches_ascend_fit_and_are_not_far_below_the_largest_useful_one(global_rows, ranks, most):
    rows = micro_batches(global_rows, ranks, most)
    assert rows == sorted(set(rows))
    assert all(1 <= one <= most for one in rows)
    if global_rows >= ranks:
        largest = min(most, -(-global_rows // ranks))
        assert rows[-1] == deal(global_rows, largest, ranks).rows_per_micro_batch
        assert all(2 * 2**ROW_DOUBLINGS * one >= largest for one in rows)


def test_a_layout_whose_global_batch_leaves_ranks_without_a_row_has_no_cells():
    assert micro_batches(3, 4, 64) == []
    cells = space({"packed": 32, "padded": 3}, 4, 64)
    assert {cell.layout for cell in cells} == {"packed"}


def test_what_may_be_tried_bounds_the_micro_batches_of_its_kind_alone():
    def most(knobs):
        return 4 if knobs.checkpointing == "none" else 16

    cells = knob_space(UNEXPLORED, LEVELS, {"packed": 64, "padded": 64}, 1, most)[1:]
    largest = {kind: max(cell.micro_batch_rows for cell in cells if cell.checkpointing == kind)
               for kind in ("none", "full")}  # fmt: skip
    assert largest == {"none": 4, "full": 16}


@settings(max_examples=25)
@given(GLOBAL, RANKS, MOST)
def test_the_useful_share_is_what_the_global_batch_fills(global_rows, ranks, most):
    for cell in space(global_rows, ranks, most):
        dealt = deal(global_rows[cell.layout], cell.micro_batch_rows, ranks)
        computed = dealt.micro_batches * dealt.rows_per_micro_batch * ranks
        share = useful_share(cell, global_rows, ranks)
        assert 0 < share <= 1
        assert share == pytest.approx(1 - dealt.empty_rows / computed)


def test_a_cell_is_named_by_what_people_would_change():
    odd = UNEXPLORED.but(attention="sdpa", checkpointing="full", compile_layers=True, precision="bf16")
    assert UNEXPLORED.name == "8 packed rows, fp32"
    assert odd.name == "8 packed rows, bf16, sdpa, full checkpointing, compiled"
    names = [cell.name for cell in space({"packed": 32, "padded": 64}, 1, 64)]
    assert all(one != other for one, other in itertools.combinations(names, 2))

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.plan import pack_rows

problems = st.integers(1, 100).flatmap(
    lambda row: st.tuples(st.just(row), st.lists(st.integers(1, row), min_size=1, max_size=200))
)


def _slow_best_fit(lengths: list[int], row_tokens: int) -> list[int]:
    """The same by looking at every open row; of equally full ones the one filled last."""
    free: list[int] = []
    touched: list[int] = []
    rows = [0] * len(lengths)
    for turn, sample in enumerate(sorted(range(len(lengths)), key=lambda i: -lengths[i])):
        roomy = [row for row in range(len(free)) if free[row] >= lengths[sample]]
        if roomy:
            row = min(roomy, key=lambda r: (free[r], -touched[r]))
        else:
            row = len(free)
            free.append(row_tokens)
            touched.append(0)
        free[row] -= lengths[sample]
        touched[row] = turn
        rows[sample] = row
    return rows


@given(problem=problems)
def test_no_row_overflows_and_rows_are_numbered_without_gaps(problem):
    row_tokens, lengths = problem
    rows = pack_rows(np.array(lengths), row_tokens)
    filled = np.bincount(rows, weights=lengths)
    assert filled.max() <= row_tokens
    assert set(rows.tolist()) == set(range(len(filled)))


@given(problem=problems)
def test_the_rows_are_those_of_best_fit_by_trying_every_row(problem):
    row_tokens, lengths = problem
    assert pack_rows(np.array(lengths), row_tokens).tolist() == _slow_best_fit(lengths, row_tokens)


@given(problem=problems)
def test_no_two_rows_could_be_one(problem):
    row_tokens, lengths = problem
    filled = np.sort(np.bincount(pack_rows(np.array(lengths), row_tokens), weights=lengths))
    assert len(filled) < 2 or filled[0] + filled[1] > row_tokens


def test_nothing_packs_into_nothing():
    assert pack_rows(np.array([], dtype=np.int64), 8).tolist() == []


@pytest.mark.parametrize("lengths", [[9], [0], [3, -1]])
def test_a_sample_that_no_row_can_hold_is_refused(lengths):
    with pytest.raises(ValueError, match="1 to 8"):
        pack_rows(np.array(lengths), 8)

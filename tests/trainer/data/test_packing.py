"""Packing of samples into sequences by best fit decreasing."""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.data.packing import pack_sequences


@dataclass(frozen=True)
class Problem:
    """Lengths of samples, all of which fit into a sequence."""

    seq_length_tokens: int
    lengths_tokens: list[int]

    def solve(self) -> np.ndarray:
        """Return the sequence of each sample."""
        lengths = np.array(self.lengths_tokens, dtype=np.int64)
        return pack_sequences(lengths, self.seq_length_tokens)


@st.composite
def problems(draw) -> Problem:
    seq_length_tokens = draw(st.integers(1, 100))
    lengths_tokens = st.lists(st.integers(1, seq_length_tokens), max_size=200)
    return Problem(seq_length_tokens, draw(lengths_tokens))


def pack_by_trying_every_sequence(problem: Problem) -> list[int]:
    """Return the sequence of each sample: a slow reference for ``pack_sequences``.

    It is best fit decreasing, and of equally full sequences takes the one filled last.
    """
    # In the order in which sequences were filled last.
    free_tokens: dict[int, int] = {}
    sequence_of_sample = {}
    samples = range(len(problem.lengths_tokens))
    for sample in sorted(samples, key=lambda sample: -problem.lengths_tokens[sample]):
        length = problem.lengths_tokens[sample]
        best_sequence = None
        for sequence, free in reversed(free_tokens.items()):
            is_better = best_sequence is None or free < free_tokens[best_sequence]
            if free >= length and is_better:
                best_sequence = sequence
        if best_sequence is None:
            best_sequence = len(free_tokens)
            free_before = problem.seq_length_tokens
        else:
            # Removed, so that it is added at the end again.
            free_before = free_tokens.pop(best_sequence)
        free_tokens[best_sequence] = free_before - length
        sequence_of_sample[sample] = best_sequence
    return [sequence_of_sample[sample] for sample in samples]


@given(problem=problems())
def test_packing_is_best_fit_decreasing(problem):
    assert problem.solve().tolist() == pack_by_trying_every_sequence(problem)


@given(problem=problems())
def test_packed_sequences_do_not_overflow(problem):
    filled_tokens = np.bincount(problem.solve(), weights=problem.lengths_tokens)
    assert all(0 < tokens <= problem.seq_length_tokens for tokens in filled_tokens)


@given(problem=problems())
def test_no_two_packed_sequences_could_be_one(problem):
    filled_tokens = np.bincount(problem.solve(), weights=problem.lengths_tokens)
    emptiest_two = np.sort(filled_tokens)[:2]
    assert len(filled_tokens) < 2 or emptiest_two.sum() > problem.seq_length_tokens


@pytest.mark.parametrize(
    "lengths_tokens",
    [
        pytest.param([9], id="longer than a sequence"),
        pytest.param([0], id="empty"),
        pytest.param([3, -1], id="negative"),
    ],
)
def test_rejects_sample_that_no_sequence_holds(lengths_tokens):
    with pytest.raises(ValueError, match="1 to 8"):
        pack_sequences(np.array(lengths_tokens), 8)

"""Inputs of an encoder that describe the documents in packed sequences."""

import pytest
import torch

from trainer.model.encoder_inputs import edges_with_empty_segments


@pytest.mark.parametrize(
    ("segments", "expected"),
    [
        pytest.param(4, [0, 3, 8, 8, 8], id="more than there are"),
        pytest.param(2, [0, 3, 8], id="as many as there are"),
        pytest.param(1, [0, 3, 8], id="fewer than there are"),
    ],
)
def test_edges_get_empty_segments_at_their_end(segments, expected):
    edges = torch.tensor([0, 3, 8], dtype=torch.int32)
    filled = edges_with_empty_segments(edges, segments, end=8)
    assert filled.dtype == torch.int32
    assert filled.tolist() == expected

import dataclasses

import pytest
import torch

from tests.trainer import oracles
from trainer.data.micro_batch import MicroBatch
from trainer.model.encoder_inputs import document_edges, document_positions


def _empty_batch(sequences: int) -> MicroBatch:
    """Return a micro-batch of padding only."""
    none = torch.zeros(0, dtype=torch.int32)
    return MicroBatch(
        ids_BS=torch.zeros(sequences, 64, dtype=torch.uint16),
        starts_N=none,
        tokens_N=none,
        predicted_P=none,
        targets_P=none.to(torch.uint16),
        non_padding_tokens=0,
        predicted_tokens=0,
        most_predicted_in_sequence=0,
        padded_sequences=sequences,
    )


@pytest.fixture(
    params=[
        pytest.param(0, id="no documents"),
        pytest.param(1, id="documents in one sequence"),
        pytest.param(6, id="documents in six sequences"),
    ]
)
def batch(request, dataset) -> MicroBatch:
    """A micro-batch of eight sequences, of which only the first have documents."""
    if request.param == 0:
        return _empty_batch(8)
    config = oracles.config_of(micro_batch_size=8, global_batch_size=request.param)
    (filled,) = oracles.micro_batches(dataset, config)
    ids_BS = torch.zeros(8, 64, dtype=torch.uint16)
    ids_BS[: len(filled.ids_BS)] = filled.ids_BS
    return dataclasses.replace(filled, ids_BS=ids_BS)


@pytest.mark.parametrize(
    "segments",
    [
        pytest.param(0, id="as many as needed"),
        pytest.param(200, id="more than needed"),
    ],
)
class TestDocumentEdges:
    """Kernels leave positions outside of all segments undefined."""

    def test_cover_all_positions(self, segments, batch):
        edges = document_edges(batch, segments)
        assert int(edges[0]) == 0
        assert int(edges[-1]) == batch.ids_BS.numel()

    def test_hold_segments_no_longer_than_sequences(self, segments, batch):
        lengths = document_edges(batch, segments).diff()
        assert int(lengths.min()) >= 0
        assert int(lengths.max()) <= batch.ids_BS.shape[1]

    def test_are_at_least_the_fixed_number(self, segments, batch):
        edges = document_edges(batch, segments)
        documents = len(batch.starts_N)
        assert len(edges) == max(segments, documents + len(batch.ids_BS)) + 1

    def test_are_equal_only_at_the_end(self, segments, batch):
        edges = document_edges(batch, segments)
        first_end = int((edges < edges[-1]).sum())
        assert edges[: first_end + 1].diff().all()

    def test_include_those_of_all_documents(self, segments, batch):
        edges = document_edges(batch, segments)
        ends_N = batch.starts_N + batch.tokens_N
        assert {*batch.starts_N.tolist(), *ends_N.tolist()} <= set(edges.tolist())


def test_empty_batch_has_no_documents():
    document_BS, _ = document_positions(_empty_batch(sequences=2))
    assert not document_BS.any()

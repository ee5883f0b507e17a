"""Inputs of an encoder that describe the documents in packed sequences."""

import dataclasses

import pytest
import torch

from tests.trainer.tiny_models import config_of, micro_batches
from trainer.data.micro_batch import MicroBatch
from trainer.model.encoder_inputs import document_edges, document_positions

SEQUENCES = 8
SEQ_LENGTH_TOKENS = 64


def padding_ids(sequences: int) -> torch.Tensor:
    """Return the ids of sequences of padding only; its id is 0."""
    return torch.zeros(sequences, SEQ_LENGTH_TOKENS, dtype=torch.uint16)


def empty_batch(sequences: int) -> MicroBatch:
    """Return a micro-batch without documents."""
    no_positions = torch.zeros(0, dtype=torch.int32)
    return MicroBatch(
        ids_BS=padding_ids(sequences),
        starts_N=no_positions,
        tokens_N=no_positions,
        predicted_P=no_positions,
        targets_P=no_positions.to(torch.uint16),
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
    """A micro-batch of 8 sequences, of which only the first have documents."""
    filled_sequences = request.param
    if filled_sequences == 0:
        return empty_batch(SEQUENCES)
    config = config_of(
        micro_batch_size=SEQUENCES,
        global_batch_size=filled_sequences,
        seq_length_tokens=SEQ_LENGTH_TOKENS,
    )
    (filled,) = micro_batches(dataset, config)
    ids_BS = padding_ids(SEQUENCES)
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
    """Edges of segments, which are documents and the padding after them.

    Kernels leave positions outside of all segments undefined.
    """

    def test_cover_all_positions(self, segments, batch):
        edges = document_edges(batch, segments)
        assert int(edges[0]) == 0
        assert int(edges[-1]) == batch.ids_BS.numel()

    def test_hold_segments_no_longer_than_sequences(self, segments, batch):
        lengths = document_edges(batch, segments).diff()
        assert int(lengths.min()) >= 0
        assert int(lengths.max()) <= batch.ids_BS.shape[1]

    def test_reach_the_fixed_number(self, segments, batch):
        edges = document_edges(batch, segments)
        documents = len(batch.starts_N)
        assert len(edges) == max(segments, documents + len(batch.ids_BS)) + 1

    def test_are_equal_only_at_the_end(self, segments, batch):
        edges = document_edges(batch, segments)
        edges_before_end = int((edges < edges[-1]).sum())
        assert edges[: edges_before_end + 1].diff().all()

    def test_include_those_of_all_documents(self, segments, batch):
        edges = document_edges(batch, segments)
        ends_N = batch.starts_N + batch.tokens_N
        assert {*batch.starts_N.tolist(), *ends_N.tolist()} <= set(edges.tolist())


def test_empty_batch_has_no_documents():
    document_BS, _ = document_positions(empty_batch(sequences=2))
    assert not document_BS.any()

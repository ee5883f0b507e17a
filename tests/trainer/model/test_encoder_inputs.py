import dataclasses
from types import SimpleNamespace

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


@pytest.fixture(params=[2, 7, 8], ids=lambda count: f"{count} empty sequences")
def batch(request, dataset) -> MicroBatch:
    """A micro-batch of eight sequences, of which some or all have no documents."""
    empty_sequences = request.param
    if empty_sequences == 8:
        return _empty_batch(8)
    config = oracles.config_of(
        micro_batch_size=8, global_batch_size=8 - empty_sequences
    )
    (filled,) = oracles.micro_batches(dataset, config)
    ids_BS = torch.zeros(8, 64, dtype=torch.uint16)
    ids_BS[: len(filled.ids_BS)] = filled.ids_BS
    return dataclasses.replace(filled, ids_BS=ids_BS)


@pytest.mark.parametrize("segments", [0, 200])
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

    def test_have_fixed_number(self, segments, batch):
        edges = document_edges(batch, segments)
        documents = len(batch.starts_N)
        assert len(edges) == max(segments, documents + len(batch.ids_BS)) + 1

    def test_are_equal_only_at_the_end(self, segments, batch):
        edges = document_edges(batch, segments)
        before_end = int((edges < edges[-1]).sum())
        assert edges[: before_end + 1].diff().all()

    def test_include_those_of_all_documents(self, segments, batch):
        edges = document_edges(batch, segments)
        ends_N = batch.starts_N + batch.tokens_N
        assert {*batch.starts_N.tolist(), *ends_N.tolist()} <= set(edges.tolist())


def test_empty_batch_has_no_documents():
    document_BS, _ = document_positions(_empty_batch(2))
    assert not document_BS.any()


def test_reserves_segments_for_uneven_packing(dataset):
    module = oracles.training_of(oracles.config_of(layout="packed"), dataset).module
    # Sequences of 1 and 7 documents in turns: 4 on average, with a deviation of 3.
    starts_N = torch.cat(
        [
            512 * sequence + torch.arange(7 if sequence % 2 else 1)
            for sequence in range(128)
        ]
    )
    module.expect_documents(
        SimpleNamespace(ids_BS=torch.empty(128, 512), starts_N=starts_N)
    )
    # Six standard deviations of a sum over 128 sequences, and their padding.
    assert module._fixed_segments >= 128 + len(starts_N) + 6 * 3 * 128**0.5

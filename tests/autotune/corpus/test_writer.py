import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.corpus.tokenizer import learn_tokenizer
from autotune.corpus.writer import DatasetWriter, file_sha256, npy_header
from trainer.dataset import MANIFEST_NAME, SourceStatistics, TokenDataset, read_manifest

WORDS = learn_tokenizer(["a b c"], vocab_size=16, advance=lambda done: None)
SOURCE = SourceStatistics(
    kind="elf", files=1, rejected_files=0, duplicate_samples=0, raw_bytes=9, token_bytes=0, unknown_tokens=0
)


def ids(*values):
    return np.array(values, dtype=np.uint32)


@settings(max_examples=40, deadline=None)
@given(
    samples=st.lists(st.lists(st.integers(0, 7), max_size=12), min_size=1, max_size=30),
    shard_tokens=st.integers(1, 40),
    shard_samples=st.integers(1, 10),
)
def test_what_is_written_is_read_back_whatever_the_shards(samples, shard_tokens, shard_samples):
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        writer = DatasetWriter(directory, WORDS, shard_tokens=shard_tokens, shard_samples=shard_samples)
        for sample in samples:
            writer.add(ids(*sample))
        assert writer.token_bytes == 2 * sum(map(len, samples))
        manifest = writer.finish(SOURCE)
        assert read_manifest(directory) == manifest
        assert all(shard.samples <= shard_samples for shard in manifest.shards)
        dataset = TokenDataset.open(directory)
        assert [list(dataset.read(index, 99)) for index in range(len(dataset))] == samples
        dataset.close()


def test_the_manifest_holds_the_hash_of_every_file(tmp_path):
    writer = DatasetWriter(tmp_path, WORDS, shard_samples=2)
    for length in (3, 1, 2):
        writer.add(ids(*range(length)))
    manifest = writer.finish(SOURCE)
    hashes = {"tokenizer.json": manifest.tokenizer_sha256}
    for shard in manifest.shards:
        hashes |= {shard.tokens_file: shard.tokens_sha256, shard.offsets_file: shard.offsets_sha256}
    assert {path.name for path in tmp_path.iterdir()} == {*hashes, MANIFEST_NAME}
    assert all(file_sha256(tmp_path / name) == digest for name, digest in hashes.items())


def test_numpy_reads_the_shards(tmp_path):
    writer = DatasetWriter(tmp_path, WORDS)
    writer.add(ids(5, 6))
    writer.add(ids(7))
    writer.finish(SOURCE)
    tokens = np.load(tmp_path / "tokens-00000.npy")
    offsets = np.load(tmp_path / "offsets-00000.npy")
    assert tokens.tolist() == [5, 6, 7]
    assert tokens.dtype == np.uint16
    assert offsets.tolist() == [0, 2, 3]
    assert offsets.dtype == np.uint64


def test_lengths_are_counted_in_the_manifest(tmp_path):
    writer = DatasetWriter(tmp_path, WORDS)
    for length in (0, 7, 8, 1023, 1024, 5000):
        writer.add(np.zeros(length, dtype=np.uint32))
    histogram = writer.finish(SOURCE).length_histogram
    counted = {edge: count for edge, count in zip(histogram.edges, histogram.counts, strict=True) if count}
    assert counted == {0: 2, 8: 1, 1016: 1, 1024: 1, 4096: 1}


@pytest.mark.parametrize("length", [0, 1, 10**18])
def test_a_header_has_one_size_so_that_it_can_be_written_last(length):
    assert len(npy_header(np.dtype("uint16"), length)) == 128

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.corpus import distinct
from autotune.corpus.distinct import MAX_BUCKETS, Piece, buckets_for, find_duplicates, kept_samples, sort_digests
from autotune.corpus.pieces import PiecePaths, PieceWriter, digest, read_index
from autotune.corpus.split import ValidationSplit
from autotune.corpus.workplace import Workplace


def write(workplace, pieces):
    listed = []
    for number, samples in enumerate(pieces):
        directory = workplace.directory("extract", f"{number:08d}")
        directory.mkdir(parents=True)
        with PieceWriter(directory, 0) as writer:
            for sample in samples:
                writer.add(sample.encode(), digest(sample.encode()))
        sort_digests(PiecePaths.of(directory, 0))
        listed.append(Piece(task=f"{number:08d}", number=0, samples=len(samples), text_bytes=0))
    distinct.write_pieces(workplace, listed)
    return listed


def kept(workplace, listed, buckets):
    duplicates = 0
    for bucket in range(buckets):
        with workplace.unfinished(distinct.STAGE, distinct.bucket_name(bucket)) as task:
            duplicates += task.finish(find_duplicates(workplace, task, bucket=bucket, buckets=buckets))["duplicates"]
    found = [kept_samples(workplace, piece, number, buckets).tolist() for number, piece in enumerate(listed)]
    assert duplicates == sum(piece.samples for piece in listed) - sum(map(sum, found))
    return found


def first_of_each(pieces):
    seen = set()
    return [[not (one in seen or seen.add(one)) for one in samples] for samples in pieces]


@settings(max_examples=40, deadline=None)
@given(
    pieces=st.lists(st.lists(st.sampled_from("abcdefghij"), max_size=12), min_size=1, max_size=6),
    buckets=st.sampled_from([1, 2, 16]),
)
def test_the_first_of_equal_samples_is_kept_whatever_the_pieces_and_buckets(tmp_path_factory, pieces, buckets):
    workplace = Workplace(path=tmp_path_factory.mktemp("w"))
    listed = write(workplace, pieces)
    assert kept(workplace, listed, buckets) == first_of_each(pieces)


def test_samples_behind_a_limit_do_not_count(tmp_path):
    workplace = Workplace(path=tmp_path)
    listed = write(workplace, [["a", "b"], ["b", "c", "a", "d"]])
    listed[1] = Piece(task=listed[1].task, number=0, samples=2, text_bytes=0)
    distinct.write_pieces(workplace, listed)
    assert kept(workplace, listed, 2) == [[True, True], [False, True, False, False]]


def test_without_buckets_everything_is_kept(tmp_path):
    workplace = Workplace(path=tmp_path)
    listed = write(workplace, [["a", "a"]])
    assert kept_samples(workplace, listed[0], 0, 0).tolist() == [True, True]


@pytest.mark.parametrize(
    ("samples", "buckets"), [(0, 1), (2**21, 1), (2**21 + 1, 2), (500_000_000, 256), (2**40, MAX_BUCKETS)]
)
def test_no_bucket_holds_more_than_a_process_may(samples, buckets):
    assert buckets_for(samples) == buckets


@settings(max_examples=30, deadline=None)
@given(samples=st.lists(st.text(max_size=5), max_size=50), more=st.lists(st.text(max_size=5), max_size=50))
def test_the_split_of_a_sample_does_not_depend_on_the_others(tmp_path_factory, samples, more):
    directory = tmp_path_factory.mktemp("p")
    split = ValidationSplit(share=0.3, seed=1)

    def chosen(texts, number):
        with PieceWriter(directory, number) as writer:
            for text in texts:
                writer.add(text.encode(), digest(text.encode()))
        found = split.chosen(read_index(PiecePaths.of(directory, number)))
        (directory / f"{number:04d}.index").unlink()
        (directory / f"{number:04d}.text").unlink()
        return found.tolist()

    assert chosen(more + samples, 0)[len(more) :] == chosen(samples, 1)


def test_the_split_has_its_share_and_seeds_differ(tmp_path):
    with PieceWriter(tmp_path, 0) as writer:
        for number in range(20_000):
            writer.add(b"", digest(str(number).encode()))
    index = read_index(PiecePaths.of(tmp_path, 0))
    one, other = (ValidationSplit(share=0.1, seed=seed).chosen(index) for seed in (0, 1))
    # Five standard deviations of a binomial count: 212.
    assert abs(int(one.sum()) - 2000) < 212
    assert abs(int((one & other).sum()) - 200) < 70
    assert not ValidationSplit(share=0.0, seed=0).chosen(index).any()
    assert np.array_equal(one, ValidationSplit(share=0.1, seed=0).chosen(index))

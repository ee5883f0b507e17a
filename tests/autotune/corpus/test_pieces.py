import functools
from contextlib import closing

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.corpus import encode
from autotune.corpus import pieces as module
from autotune.corpus.pieces import INDEX, Piece, PiecePaths, PieceWriter, digest, drawn
from autotune.corpus.workplace import Workplace


@settings(max_examples=40, deadline=None)
@given(
    pieces=st.lists(
        st.lists(st.sampled_from("abcdefghij"), max_size=12), min_size=1, max_size=6
    ),
    buckets=st.sampled_from([1, 2, 16]),
)
def test_keeps_the_first_of_equal_samples(tmp_path_factory, pieces, buckets):
    workplace = Workplace(path=tmp_path_factory.mktemp("w"))
    listed = []
    seen = set()
    duplicates = 0
    for number, samples in enumerate(pieces):
        directory = workplace.directory(module.EXTRACT, number)
        directory.mkdir(parents=True)
        with closing(PieceWriter(directory, 0)) as writer:
            for sample in samples:
                writer.add(sample.encode(), digest(sample.encode()))
        PiecePaths(directory=directory, number=0).sort_digests()
        listed.append(
            Piece(partition=number, number=0, samples=len(samples), text_bytes=0)
        )
    module.write_pieces(workplace, listed)
    for bucket in range(buckets):
        work = functools.partial(
            module.find_duplicates, workplace, bucket=bucket, buckets=buckets
        )
        duplicates += workplace.perform(module.DISTINCT, bucket, work)["duplicates"]
    selection = module.Selection(buckets=buckets, validation_share=0.0, seed=0)
    kept = [
        selection.of(workplace, number)[1].tolist() for number in range(len(listed))
    ]
    assert kept == [
        [not (text in seen or seen.add(text)) for text in samples] for samples in pieces
    ]
    assert duplicates == sum(map(len, pieces)) - len(seen)


@pytest.mark.parametrize(
    ("samples", "buckets"),
    [
        (0, 1),
        (2**21, 1),
        (2**21 + 1, 2),
        (500_000_000, 256),
        (2**40, module.MAX_BUCKETS),
    ],
)
def test_buckets_fit_in_a_process(samples, buckets):
    assert module.buckets_for(samples) == buckets


@settings(max_examples=30, deadline=None)
@given(
    samples=st.lists(st.text(max_size=5), max_size=50),
    more=st.lists(st.text(max_size=5), max_size=50),
)
def test_split_does_not_depend_on_other_samples(samples, more):
    def chosen(texts):
        index = np.array(
            [(0, list(digest(text.encode()))) for text in texts], dtype=INDEX
        )
        return drawn(index, 0.3, "validation 1").tolist()

    assert chosen(more + samples)[len(more) :] == chosen(samples)


def test_split_has_its_share():
    index = np.array(
        [(0, list(digest(str(number).encode()))) for number in range(20_000)],
        dtype=INDEX,
    )
    chosen, chosen_by_other_seed = (
        drawn(index, 0.1, f"validation {seed}") for seed in (0, 1)
    )
    # Five standard deviations of a binomial count: 212.
    assert abs(int(chosen.sum()) - 2000) < 212
    assert abs(int((chosen & chosen_by_other_seed).sum()) - 200) < 70
    assert not drawn(index, 0.0, "validation 0").any()
    assert np.array_equal(chosen, drawn(index, 0.1, "validation 0"))


SIZES = st.lists(
    st.integers(0, 50).flatmap(lambda n: st.tuples(st.just(n), st.integers(n, 10 * n))),
    max_size=30,
)


@given(sizes=SIZES)
def test_shards_stay_within_their_bounds(sizes):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encode, "SHARD_TOKENS", 600)
        patch.setattr(encode, "SHARD_SAMPLES", 60)
        edges = encode.shard_edges(sizes)
    covered = [number for first, end in edges for number in range(first, end)]
    assert covered == sorted(set(covered))
    assert {number for number, (samples, _) in enumerate(sizes) if samples} <= set(
        covered
    )
    for first, end in edges:
        assert sum(samples for samples, _ in sizes[first:end]) > 0
        if end - first > 1:
            assert sum(samples for samples, _ in sizes[first:end]) <= 60
            assert sum(tokens for _, tokens in sizes[first:end]) <= 600

import importlib.util
import json
from collections import Counter
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.normalizers import Replace
from tokenizers.pre_tokenizers import WhitespaceSplit

from autotune.corpus import encode, pieces, tokenizer
from autotune.corpus.elf import functions
from autotune.corpus.encode import LengthLimit
from autotune.corpus.engine import Workers
from autotune.corpus.prepare import Request, prepare
from autotune.corpus.sources import text
from autotune.corpus.sources.base import Reject, SourceOptions
from autotune.corpus.tokenizer import SPECIAL_TOKENS
from autotune.corpus.workplace import publish
from autotune.errors import BadInput, MachineLacks
from tests.system.faults.corpora import content
from trainer.data.dataset import TokenDataset
from trainer.formats.manifest import read_manifest
from trainer.formats.progress import progress

DEFAULTS = {
    "options": SourceOptions(),
    "max_samples": None,
    "keep_duplicates": False,
    "validation_share": 0.0,
    "split_seed": 0,
    "tokenizer": None,
    "vocab_size": 8192,
    "limit": LengthLimit(max_tokens=None, long="truncate"),
}
slow = partial(pytest.param, marks=pytest.mark.slow)


def run(
    *sources,
    out,
    stages=progress,
    messages=None,
    workers=1,
    strict=False,
    overwrite=False,
    **options,
):
    request = Request(sources=sources, **DEFAULTS | options)
    tell = [].append if messages is None else messages.append
    return prepare(
        request,
        out,
        stages,
        tell,
        workers=Workers(count=workers),
        strict=strict,
        overwrite=overwrite,
    )


def stored(directory, split="train"):
    """Return the samples of a dataset as text, words joined by spaces."""
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    dataset = TokenDataset.open(directory, split)
    ids = [dataset.read(sample).tolist() for sample in range(len(dataset))]
    dataset.close()
    return [
        " ".join(tokenizer.id_to_token(number) for number in sample) for sample in ids
    ]


@pytest.fixture
def lines(tmp_path) -> Path:
    """A file of lines, some of them twice."""
    path = tmp_path / "lines.txt"
    path.write_text(
        "".join(f"word{n % 50} and word{n % 170} again\n" for n in range(2000))
    )
    return path


@pytest.fixture
def small_pieces(monkeypatch):
    """Make limits so small that a little data has many parts, as much data has."""
    monkeypatch.setattr(pieces, "PIECE_SAMPLES", 64)
    monkeypatch.setattr(pieces, "_BUCKET_SAMPLES", 100)
    monkeypatch.setattr(tokenizer, "_MERGE_BYTES", 4000)
    monkeypatch.setattr(tokenizer, "_WORDS_IN_MEMORY", 20)
    monkeypatch.setattr(encode, "SHARD_SAMPLES", 100)
    monkeypatch.setattr(encode, "_BATCH_CHARACTERS", 200)


def test_dataset_holds_every_function_once(programs, tmp_path):
    out = tmp_path / "data"
    last = {}

    @contextmanager
    def recording(title):
        yield lambda done_count, total, note: last.update({title: (done_count, total)})

    manifest = run(f"elf:{programs}", stages=recording, out=out).manifest
    assert list(last) == [
        "extract samples",
        "find duplicates",
        "count words",
        "merge words",
        "learn tokenizer",
        "encode",
        "assemble train",
    ]
    assert all(done_count == total for done_count, total in last.values())
    read = ("first", "second", "copy-of-first")
    everything = [line for name in read for line in functions(programs / name)]
    assert len(stored(out)) == len(set(stored(out)))
    assert set(stored(out)) == set(everything)
    assert manifest == read_manifest(out)
    source = manifest.source
    assert (source.kinds, source.files, source.unknown_tokens) == (["elf"], 3, 0)
    assert source.duplicate_samples == len(everything) - len(stored(out))
    assert source.raw_bytes == sum((programs / name).stat().st_size for name in read)
    assert source.token_bytes == 2 * manifest.train.tokens


def test_lists_unusable_files_with_reasons(programs, tmp_path):
    (tmp_path / "bad.jsonl").write_text('{"text": "good"}\nno json\n')
    prepared = run(f"elf:{programs}", f"jsonl:{tmp_path}", out=tmp_path / "data")
    rejects = [
        Reject(**json.loads(line))
        for line in (tmp_path / "data" / "rejects.jsonl").open()
    ]
    assert {Path(reject.path).name for reject in rejects} == {
        "garbage",
        "truncated",
        "bad.jsonl",
    }
    assert [reject.where for reject in rejects if reject.path.endswith("jsonl")] == [
        "line at byte 17"
    ]
    assert all(reject.reason for reject in rejects)
    assert prepared.manifest.source.rejected == 3
    assert prepared.first_rejects == rejects
    # A script and an empty file beside the programs; everything else is no jsonl.
    assert prepared.other_files >= 2


def test_strict_stops_at_a_reject(programs, tmp_path):
    with pytest.raises(BadInput, match=r"--strict is set.*(garbage|truncated)"):
        run(f"elf:{programs}", out=tmp_path / "strict", strict=True)
    assert not (tmp_path / "strict").exists()
    assert list(tmp_path.glob(".strict.*.partial"))


@pytest.mark.parametrize("kind", [slow("wordlevel"), "bpe"])
def test_dataset_does_not_depend_on_parallelism(
    lines, tmp_path, kind, monkeypatch, request
):
    monkeypatch.setattr(
        text,
        "cut_lines",
        lambda file: [
            text.Slice(
                path=str(file.path), begin=begin, end=min(begin + 9000, file.size_bytes)
            )
            for begin in range(0, file.size_bytes, 9000)
        ],
    )
    monkeypatch.setattr("autotune.corpus.sources.PARTITION_BYTES", 9000)
    options = {
        "tokenizer": kind,
        "vocab_size": 320,
        "validation_share": 0.2,
        "split_seed": 3,
    }
    run(f"text:{lines}", out=tmp_path / "1", **options)
    run(f"text:{lines}", out=tmp_path / "2", workers=2, **options)
    assert content(tmp_path / "1") == content(tmp_path / "2")
    request.getfixturevalue("small_pieces")
    run(f"text:{lines}", out=tmp_path / "parts", **options)
    train = stored(tmp_path / "1")
    validation = stored(tmp_path / "1", "validation")
    assert set(train).isdisjoint(validation)
    assert (len(train) + len(validation), len(validation) > 0) == (
        len(set(lines.read_text().splitlines())),
        True,
    )
    assert (stored(tmp_path / "parts"), stored(tmp_path / "parts", "validation")) == (
        train,
        validation,
    )
    assert len(read_manifest(tmp_path / "parts").train.shards) > 1


def test_counts_words_exactly(lines, tmp_path, small_pieces):
    run(f"text:{lines}", out=tmp_path / "data", tokenizer="wordlevel", vocab_size=64)
    counts = Counter(
        word
        for line in dict.fromkeys(lines.read_text().splitlines())
        for word in line.split()
    )
    expected = sorted(counts, key=lambda word: (-counts[word], word))[: 64 - 5]
    vocabulary = Tokenizer.from_file(
        str(tmp_path / "data" / "tokenizer.json")
    ).get_vocab()
    assert sorted(vocabulary, key=vocabulary.get)[5:] == expected


@pytest.mark.parametrize("workers", [1, 2])
def test_bound_takes_the_first_distinct_samples(lines, tmp_path, workers):
    distinct_lines = list(dict.fromkeys(lines.read_text().splitlines()))
    for bound in (1, 60, 170, 10**6):
        out = tmp_path / f"{workers}-{bound}"
        manifest = run(
            f"text:{lines}",
            out=out,
            tokenizer="wordlevel",
            max_samples=bound,
            workers=workers,
        ).manifest
        assert stored(out) == distinct_lines[:bound]
        assert manifest.train.samples == min(bound, len(distinct_lines))


LONG = "a b c d e f g\nh\nh\n"
CUT, SPLIT = (LengthLimit(max_tokens=3, long=long) for long in ("truncate", "split"))


@pytest.mark.parametrize(
    ("name", "raw", "options", "samples", "counts"),
    [
        (
            "a.jsonl",
            '{"doc": {"body": "one two"}}\n',
            {"options": SourceOptions(field="doc.body")},
            ["one two"],
            {},
        ),
        (
            "a.text",
            "one\ntwo\n\nthree\n",
            {"options": SourceOptions(unit="paragraph")},
            ["one two", "three"],
            {},
        ),
        ("a.text", "b\na\nb\n", {"keep_duplicates": True}, ["b", "a", "b"], {}),
        (
            "a.text",
            LONG,
            {"limit": CUT},
            ["a b c", "h"],
            {"truncated_samples": 1, "duplicate_samples": 1},
        ),
        (
            "a.text",
            LONG,
            {"limit": SPLIT},
            ["a b c", "d e f", "g", "h"],
            {"split_samples": 1, "duplicate_samples": 1},
        ),
    ],
    ids=["field", "unit", "duplicates", "truncate", "split"],
)
def test_follows_options_of_the_request(tmp_path, name, raw, options, samples, counts):
    path = tmp_path / name
    path.write_text(raw)
    manifest = run(
        f"{path.suffix[1:]}:{path}",
        out=tmp_path / "data",
        tokenizer="wordlevel",
        **options,
    ).manifest
    assert stored(tmp_path / "data") == samples
    source = manifest.source
    counted = ("truncated_samples", "split_samples", "duplicate_samples")
    assert {
        name: getattr(source, name) for name in counted if getattr(source, name)
    } == counts


def test_uses_a_given_tokenizer(programs, tmp_path):
    run(f"elf:{programs}", out=tmp_path / "small", vocab_size=64)
    given = tmp_path / "small" / "tokenizer.json"
    run(f"elf:{programs}", out=tmp_path / "data", tokenizer=given)
    assert (tmp_path / "data" / "tokenizer.json").read_bytes() == given.read_bytes()
    assert stored(tmp_path / "data") == stored(tmp_path / "small")


def test_counts_unknown_tokens(programs, tmp_path):
    run(f"elf:{programs}", out=tmp_path / "small", vocab_size=64)
    given = tmp_path / "small" / "tokenizer.json"
    foreign_text = tmp_path / "other.txt"
    foreign_text.write_text("words that no program holds\n")
    manifest = run(
        f"text:{foreign_text}", out=tmp_path / "other", tokenizer=given
    ).manifest
    assert manifest.source.unknown_tokens == 5


@pytest.mark.parametrize(
    "stage",
    [
        "extract samples",
        "encode",
        *map(slow, ("find duplicates", "count words", "assemble train")),
    ],
)
def test_resumes_after_any_interrupt(lines, tmp_path, stage, small_pieces):
    options = {"tokenizer": "wordlevel", "validation_share": 0.01}
    run(f"text:{lines}", out=tmp_path / "whole", **options)
    with pytest.raises(KeyboardInterrupt):
        run(
            f"text:{lines}",
            stages=interrupting(stage),
            out=tmp_path / "data",
            **options,
        )
    assert not (tmp_path / "data").exists()
    run(f"text:{lines}", out=tmp_path / "data", **options)
    assert content(tmp_path / "data") == content(tmp_path / "whole")
    assert not list(tmp_path.glob(".data.*"))


def interrupting(stage):
    """Return stages of which one is interrupted when it first reports progress."""

    @contextmanager
    def stages(title):
        def update(done, total, note):
            if title == stage:
                raise KeyboardInterrupt

        yield update

    return stages


@pytest.mark.parametrize("overwrite", [False, True])
def test_interrupt_after_publishing_only_cleans_up(lines, tmp_path, overwrite):
    def publish_and_end(dataset, final):
        publish(dataset, final)
        raise KeyboardInterrupt

    if overwrite:
        run(f"text:{lines}", out=tmp_path / "data", max_samples=5)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("autotune.corpus.workplace.publish", publish_and_end)
        run(f"text:{lines}", out=tmp_path / "data", overwrite=overwrite)
    before = content(tmp_path / "data")
    manifest = run(f"text:{lines}", out=tmp_path / "data", overwrite=overwrite).manifest
    assert manifest == read_manifest(tmp_path / "data")
    assert content(tmp_path / "data") == before
    assert not list(tmp_path.glob(".data.*"))


def test_existing_dataset_is_kept(lines, tmp_path):
    run(f"text:{lines}", out=tmp_path / "data")
    path = tmp_path / "data" / "train-tokens-00000.npy"
    before = path.stat().st_mtime_ns
    messages = []
    manifest = run(f"text:{lines}", out=tmp_path / "data", messages=messages).manifest
    assert path.stat().st_mtime_ns == before
    assert "already contains this dataset" in messages[0]
    assert manifest == read_manifest(tmp_path / "data")


def test_overwrite_replaces_a_corrupt_dataset(lines, tmp_path):
    run(f"text:{lines}", out=tmp_path / "data")
    path = tmp_path / "data" / "train-tokens-00000.npy"
    good = path.read_bytes()
    path.write_bytes(bytes(len(good)))
    corrupt = content(tmp_path / "data")
    with pytest.raises(BadInput, match="already contains a dataset"):
        run(f"text:{lines}", out=tmp_path / "data", max_samples=4)
    assert content(tmp_path / "data") == corrupt
    run(f"text:{lines}", out=tmp_path / "data", overwrite=True)
    assert path.read_bytes() == good
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "lines.txt"]


def test_changed_input_is_not_resumed(lines, tmp_path):
    options = {"out": tmp_path / "data", "tokenizer": "wordlevel"}
    with pytest.raises(KeyboardInterrupt):
        run(f"text:{lines}", stages=interrupting("extract samples"), **options)
    lines.write_text("quite another line\n")
    messages = []
    run(f"text:{lines}", messages=messages, **options)
    assert stored(tmp_path / "data") == ["quite another line"]
    assert len(messages) == 1
    assert (
        ".partial is left from a preparation with other settings or files"
        in messages[0]
    )


def test_missing_library_suggests_its_installation(programs, tmp_path, monkeypatch):
    find = importlib.util.find_spec
    missing = ("capstone", "pyarrow")
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name: None if name in missing else find(name),
    )
    with pytest.raises(MachineLacks, match="requires capstone") as error:
        run(f"elf:{programs}", out=tmp_path / "data")
    assert "pip install capstone" in error.value.next_step
    with pytest.raises(MachineLacks, match="requires pyarrow"):
        run(f"parquet:{programs}", out=tmp_path / "data")


@pytest.mark.parametrize(
    ("spec", "tokenizer", "message"),
    [
        ("text:{}/blank.txt", None, "no sample found in 1 files"),
        ("jsonl:{}/fields.jsonl", None, "field 'text' not found; fields of text: 'a'"),
        ("elf:{}", None, "no sample found in 1 files; the first, .*garbage"),
        ("text:{}/raw.txt", "nothing.json", "no token from this data"),
    ],
)
def test_request_without_samples_leaves_nothing(tmp_path, spec, tokenizer, message):
    nothing = Tokenizer(
        WordLevel(
            {word: number for number, word in enumerate(SPECIAL_TOKENS)},
            unk_token="[UNK]",
        )
    )
    nothing.normalizer = Replace(Regex(".+"), "")
    nothing.pre_tokenizer = WhitespaceSplit()
    nothing.save(str(tmp_path / "nothing.json"))
    (tmp_path / "blank.txt").write_text("\n")
    (tmp_path / "fields.jsonl").write_text('{"a": "x"}\n')
    (tmp_path / "raw.txt").write_text("xx\n")
    (tmp_path / "garbage").write_bytes(b"\x7fELF, but no more")
    options = {"tokenizer": tmp_path / tokenizer} if tokenizer else {}
    with pytest.raises(BadInput, match=message):
        run(spec.format(tmp_path), out=tmp_path / "data", **options)
    assert not list(tmp_path.glob(".data.*"))

import importlib.util
import json
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.normalizers import Replace
from tokenizers.pre_tokenizers import WhitespaceSplit

from autotune.corpus import encode, pieces, words
from autotune.corpus.elf import functions
from autotune.corpus.encode import LengthLimit
from autotune.corpus.engine import Workers
from autotune.corpus.pieces import ValidationSplit
from autotune.corpus.prepare import prepare
from autotune.corpus.request import Request
from autotune.corpus.sources import text
from autotune.corpus.sources.base import SourceOptions
from autotune.corpus.tokenizer import SPECIAL_TOKENS
from autotune.corpus.workplace import publish
from autotune.errors import BadInput, MachineLacks
from tests.system.faults.corpora import content
from trainer.dataset import TokenDataset, read_manifest

NO_VALIDATION = ValidationSplit(share=0.0, seed=0)


def run(silent, *sources, **options):
    ways = {name: options.pop(name) for name in ("strict", "overwrite") if name in options}
    out, told, workers = options.pop("out"), options.pop("told", []), Workers(count=options.pop("workers", 1))
    request = Request(sources=tuple(map(str, sources)), **options)
    return prepare(request, out, silent, told.append, workers=workers, **ways)


def stored(directory, split="train"):
    """The samples of a dataset as text, words joined by spaces."""
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    dataset = TokenDataset.open(directory, split)
    ids = [dataset.read(sample).tolist() for sample in range(len(dataset))]
    dataset.close()
    return [" ".join(tokenizer.id_to_token(number) for number in sample) for sample in ids]


def listed(directory):
    return [json.loads(line) for line in (directory / "rejects.jsonl").read_text().splitlines()]


@pytest.fixture
def lines(tmp_path) -> Path:
    """A file of lines, some of them twice."""
    path = tmp_path / "lines.txt"
    path.write_text("".join(f"word{n % 50} and word{n % 170} again\n" for n in range(2000)))
    return path


@pytest.fixture
def small_pieces(monkeypatch):
    """Everything in many parts, as with much data."""
    monkeypatch.setattr(pieces, "PIECE_SAMPLES", 64)
    monkeypatch.setattr(pieces, "_BUCKET_SAMPLES", 100)
    monkeypatch.setattr(words, "_MERGE_BYTES", 4000)
    monkeypatch.setattr(words, "_WORDS_IN_MEMORY", 20)
    monkeypatch.setattr(encode, "SHARD_SAMPLES", 100)
    monkeypatch.setattr(encode, "_BATCH_CHARACTERS", 200)


def test_the_dataset_holds_every_function_once_in_reading_order(programs, tmp_path, silent):
    out = tmp_path / "data"
    prepared = run(silent, f"elf:{programs}", out=out, validation=NO_VALIDATION)
    everything = [line for name in ("first", "second", "copy-of-first") for line in functions(programs / name)]
    assert len(stored(out)) == len(set(stored(out)))
    assert set(stored(out)) == set(everything)
    source = prepared.manifest.source
    assert source.duplicate_samples == len(everything) - len(stored(out))
    assert source.unknown_tokens == 0
    assert source.files == 3
    assert source.kinds == ["elf"]
    assert source.raw_bytes == sum((programs / name).stat().st_size for name in ("first", "second", "copy-of-first"))
    assert source.token_bytes == 2 * prepared.manifest.train.tokens
    assert prepared.manifest == read_manifest(out)


def test_what_cannot_be_used_is_listed_with_its_reason(programs, tmp_path, silent):
    (tmp_path / "bad.jsonl").write_text('{"text": "good"}\nno json\n')
    prepared = run(silent, f"elf:{programs}", f"jsonl:{tmp_path}", out=tmp_path / "data")
    rejects = listed(tmp_path / "data")
    assert {Path(one["path"]).name for one in rejects} == {"garbage", "truncated", "bad.jsonl"}
    assert [one["where"] for one in rejects if one["path"].endswith("jsonl")] == ["line at byte 17"]
    assert all(one["reason"] for one in rejects)
    assert prepared.manifest.source.rejected == len(rejects) == 3
    assert [reject.path for reject in prepared.first_rejects] == [one["path"] for one in rejects]
    # A script and an empty file beside the programs; everything else is no jsonl.
    assert prepared.other_files >= 2


def test_strict_stops_at_the_first_and_keeps_the_work(programs, tmp_path, silent):
    with pytest.raises(BadInput, match=r"--strict is set.*(garbage|truncated)"):
        run(silent, f"elf:{programs}", out=tmp_path / "data", strict=True)
    assert not (tmp_path / "data").exists()
    assert list(tmp_path.glob(".data.*.partial"))
    run(silent, f"elf:{programs}", out=tmp_path / "data")
    assert not list(tmp_path.glob(".data.*.partial"))


@pytest.mark.parametrize("kind", [pytest.param("wordlevel", marks=pytest.mark.slow), "bpe"])
def test_the_number_of_processes_and_of_parts_changes_no_byte(lines, tmp_path, silent, kind, monkeypatch, request):
    monkeypatch.setattr(text, "cut_lines", lambda file: [
        text.Slice(path=str(file.path), begin=begin, end=min(begin + 9000, file.size_bytes))
        for begin in range(0, file.size_bytes, 9000)
    ])  # fmt: skip
    monkeypatch.setattr("autotune.corpus.sources.PARTITION_BYTES", 9000)
    options = {"tokenizer": kind, "vocab_size": 320, "validation": ValidationSplit(share=0.2, seed=3)}
    run(silent, f"text:{lines}", out=tmp_path / "1", **options)
    run(silent, f"text:{lines}", out=tmp_path / "2", workers=2, **options)
    assert content(tmp_path / "1") == content(tmp_path / "2")
    request.getfixturevalue("small_pieces")
    run(silent, f"text:{lines}", out=tmp_path / "parts", **options)
    assert stored(tmp_path / "parts") == stored(tmp_path / "1")
    assert stored(tmp_path / "parts", "validation") == stored(tmp_path / "1", "validation")
    assert len(read_manifest(tmp_path / "parts").train.shards) > 1


def test_words_are_counted_exactly_whatever_the_parts(lines, tmp_path, silent, small_pieces):
    run(silent, f"text:{lines}", out=tmp_path / "data", tokenizer="wordlevel", vocab_size=64, validation=NO_VALIDATION)
    distinct_lines = list(dict.fromkeys(lines.read_text().splitlines()))
    counts = Counter(word for line in distinct_lines for word in line.split())
    expected = sorted(counts, key=lambda word: (-counts[word], word))[: 64 - 5]
    vocabulary = Tokenizer.from_file(str(tmp_path / "data" / "tokenizer.json")).get_vocab()
    assert [word for word, _ in sorted(vocabulary.items(), key=lambda entry: entry[1])][5:] == expected


@pytest.mark.parametrize("workers", [1, 2])
def test_a_bound_takes_the_first_distinct_samples_of_all(lines, tmp_path, silent, workers):
    distinct_lines = list(dict.fromkeys(lines.read_text().splitlines()))
    for bound in (1, 60, 170, 10**6):
        out = tmp_path / f"{workers}-{bound}"
        options = {"tokenizer": "wordlevel", "validation": NO_VALIDATION, "max_samples": bound, "workers": workers}
        prepared = run(silent, f"text:{lines}", out=out, **options)
        assert stored(out) == distinct_lines[:bound]
        assert prepared.manifest.train.samples == min(bound, len(distinct_lines))


def test_the_split_is_by_content_and_survives_more_data(lines, tmp_path, silent):
    split = ValidationSplit(share=0.2, seed=1)
    options = {"tokenizer": "wordlevel", "validation": split}
    run(silent, f"text:{lines}", out=tmp_path / "one", **options)
    more = tmp_path / "more.txt"
    more.write_text("".join(f"other{n} word{n % 50}\n" for n in range(3000)))
    run(silent, f"text:{lines}", f"text:{more}", out=tmp_path / "both", **options)
    train, apart = stored(tmp_path / "one"), stored(tmp_path / "one", "validation")
    assert not set(train) & set(apart)
    assert len(apart) > 0
    assert set(train) <= set(stored(tmp_path / "both"))
    assert set(apart) <= set(stored(tmp_path / "both", "validation"))


def test_duplicates_stay_on_request(lines, tmp_path, silent):
    options = {"tokenizer": "wordlevel", "validation": NO_VALIDATION, "keep_duplicates": True}
    prepared = run(silent, f"text:{lines}", out=tmp_path / "data", **options)
    assert stored(tmp_path / "data") == lines.read_text().splitlines()
    assert prepared.manifest.source.duplicate_samples == 0


@pytest.mark.parametrize(
    ("long", "samples", "counts"),
    [("truncate", ["a b c", "h i"], (1, 0)), ("split", ["a b c", "d e f", "g", "h i"], (0, 1))],
)
def test_long_samples_are_cut_or_split(tmp_path, silent, long, samples, counts):
    path = tmp_path / "long.txt"
    path.write_text("a b c d e f g\nh i\n")
    options = {"tokenizer": "wordlevel", "validation": NO_VALIDATION, "limit": LengthLimit(max_tokens=3, long=long)}
    source = run(silent, f"text:{path}", out=tmp_path / "data", **options).manifest.source
    assert stored(tmp_path / "data") == samples
    assert (source.truncated_samples, source.split_samples) == counts


def test_a_given_tokenizer_is_used_and_its_unknown_tokens_counted(programs, tmp_path, silent):
    run(silent, f"elf:{programs}", out=tmp_path / "small", vocab_size=64)
    given = tmp_path / "small" / "tokenizer.json"
    run(silent, f"elf:{programs}", out=tmp_path / "data", tokenizer=given)
    assert (tmp_path / "data" / "tokenizer.json").read_bytes() == given.read_bytes()
    assert stored(tmp_path / "data") == stored(tmp_path / "small")
    other = tmp_path / "other.txt"
    other.write_text("words that no program holds\n")
    prepared = run(silent, f"text:{other}", out=tmp_path / "other", tokenizer=given)
    assert prepared.manifest.source.unknown_tokens == 5


def test_fields_and_units_are_asked_for(tmp_path, silent):
    (tmp_path / "a.jsonl").write_text('{"doc": {"body": "one two"}}\n')
    options = {"tokenizer": "wordlevel", "validation": NO_VALIDATION}
    run(silent, f"jsonl:{tmp_path}", out=tmp_path / "j", options=SourceOptions(field="doc.body"), **options)
    assert stored(tmp_path / "j") == ["one two"]
    (tmp_path / "a.txt").write_text("one\ntwo\n\nthree\n")
    run(silent, f"text:{tmp_path / 'a.txt'}", out=tmp_path / "p", options=SourceOptions(unit="paragraph"), **options)
    assert stored(tmp_path / "p") == ["one two", "three"]


def test_an_existing_dataset_is_left_alone(programs, tmp_path, silent):
    out = tmp_path / "data"
    run(silent, f"elf:{programs}", out=out, max_samples=3)
    before = content(out)
    with pytest.raises(BadInput, match="holds a dataset already"):
        run(silent, f"elf:{programs}", out=out)
    assert content(out) == before
    assert not list(tmp_path.glob(".data.*"))
    run(silent, f"elf:{programs}", out=out, max_samples=4, overwrite=True)
    manifest = read_manifest(out)
    assert manifest.train.samples + manifest.validation.samples == 4
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "programs"]


@pytest.mark.parametrize(
    "stage",
    [
        "extract samples",
        "encode",
        *(
            pytest.param(stage, marks=pytest.mark.slow)
            for stage in ("find duplicates", "count words", "assemble train")
        ),
    ],
)
def test_after_an_interrupt_anywhere_it_goes_on_and_ends_the_same(lines, tmp_path, silent, stage, small_pieces):
    options = {"tokenizer": "wordlevel"}
    run(silent, f"text:{lines}", out=tmp_path / "whole", **options)

    @contextmanager
    def interrupting(title):
        def update(done, total, note):
            if title == stage:
                raise KeyboardInterrupt

        yield update

    with pytest.raises(KeyboardInterrupt):
        run(interrupting, f"text:{lines}", out=tmp_path / "data", **options)
    assert not (tmp_path / "data").exists()
    fresh = []

    @contextmanager
    def recording(title):
        yield lambda done, total, note: fresh.append(title)

    run(recording, f"text:{lines}", out=tmp_path / "data", **options)
    assert content(tmp_path / "data") == content(tmp_path / "whole")
    assert not list(tmp_path.glob(".data.*"))


@contextmanager
def interrupted_after_publishing():
    """Whatever prepares in the block is interrupted between its last two steps."""

    def publish_and_end(dataset, final):
        publish(dataset, final)
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("autotune.corpus.prepare.publish", publish_and_end)
        with pytest.raises(KeyboardInterrupt):
            yield


def test_ended_between_publishing_and_cleaning_up_it_only_cleans_up(lines, tmp_path, silent):
    with interrupted_after_publishing():
        run(silent, f"text:{lines}", out=tmp_path / "data")
    before = content(tmp_path / "data")
    prepared = run(silent, f"text:{lines}", out=tmp_path / "data")
    assert prepared.manifest == read_manifest(tmp_path / "data")
    assert content(tmp_path / "data") == before
    assert not list(tmp_path.glob(".data.*"))


def test_the_same_request_is_not_carried_out_twice_unless_asked_for(lines, tmp_path, silent):
    run(silent, f"text:{lines}", out=tmp_path / "data")
    path = tmp_path / "data" / "train-tokens-00000.npy"
    before, told = path.stat().st_mtime_ns, []
    prepared = run(silent, f"text:{lines}", out=tmp_path / "data", told=told)
    assert path.stat().st_mtime_ns == before
    assert "prepared by the same request already" in told[0]
    assert prepared.manifest == read_manifest(tmp_path / "data")
    good = path.read_bytes()
    path.write_bytes(bytes(len(good)))
    run(silent, f"text:{lines}", out=tmp_path / "data", overwrite=True)
    assert path.read_bytes() == good


def test_an_overwriting_run_that_ended_after_publishing_never_publishes_the_old_data(lines, tmp_path, silent):
    run(silent, f"text:{lines}", out=tmp_path / "data", max_samples=5)

    with interrupted_after_publishing():
        run(silent, f"text:{lines}", out=tmp_path / "data", overwrite=True)
    before = content(tmp_path / "data")
    run(silent, f"text:{lines}", out=tmp_path / "data", overwrite=True)
    assert content(tmp_path / "data") == before
    assert not list(tmp_path.glob(".data.*"))


def test_changed_input_is_not_gone_on_from_and_what_is_left_is_told(lines, tmp_path, silent):
    @contextmanager
    def interrupting(title):
        yield lambda done, total, note: (_ for _ in ()).throw(KeyboardInterrupt)

    with pytest.raises(KeyboardInterrupt):
        run(interrupting, f"text:{lines}", out=tmp_path / "data", tokenizer="wordlevel", validation=NO_VALIDATION)
    lines.write_text("quite another line\n")
    told = []
    options = {"tokenizer": "wordlevel", "validation": NO_VALIDATION, "told": told}
    run(silent, f"text:{lines}", out=tmp_path / "data", **options)
    assert stored(tmp_path / "data") == ["quite another line"]
    assert len(told) == 1
    assert ".partial is left of a preparation with other settings or files" in told[0]


def test_missing_libraries_are_named_with_the_way_to_get_them(programs, tmp_path, silent, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name in ("capstone", "pyarrow") else find(name)
    )
    with pytest.raises(MachineLacks, match="needs capstone") as error:
        run(silent, f"elf:{programs}", out=tmp_path / "data")
    assert "encoder-autotune[elf]" in error.value.next_step
    with pytest.raises(MachineLacks, match="needs pyarrow"):
        run(silent, f"parquet:{programs}", out=tmp_path / "data")


def test_progress_ends_complete(programs, tmp_path):
    last = {}

    @contextmanager
    def recording(title):
        yield lambda done, total, note: last.update({title: (done, total)})

    run(recording, f"elf:{programs}", out=tmp_path / "data", validation=NO_VALIDATION)
    assert list(last) == [
        "extract samples", "find duplicates", "count words", "merge words", "learn tokenizer", "encode",
        "assemble train",
    ]  # fmt: skip
    assert all(done == total for done, total in last.values())


def test_the_bound_on_samples_is_the_one_that_the_command_line_tells():
    assert pieces.MAX_SAMPLES == 5_000_000


@pytest.mark.parametrize(
    ("spec", "tokenizer", "message"),
    [
        ("text:{}/blank.txt", None, "no sample in 1 files"),
        ("elf:{}", None, "no sample in 1 files; the first, .*garbage"),
        ("text:{}/raw.txt", "nothing.json", "no token of this data"),
    ],
)
def test_a_request_that_comes_to_nothing_says_why_and_leaves_nothing(tmp_path, silent, spec, tokenizer, message):
    nothing = Tokenizer(WordLevel(dict(zip(SPECIAL_TOKENS, range(5), strict=True)), unk_token="[UNK]"))
    nothing.normalizer = Replace(Regex(".+"), "")
    nothing.pre_tokenizer = WhitespaceSplit()
    nothing.save(str(tmp_path / "nothing.json"))
    (tmp_path / "blank.txt").write_text("\n")
    (tmp_path / "raw.txt").write_text("xx\n")
    (tmp_path / "garbage").write_bytes(b"\x7fELF, but no more")
    options = {"tokenizer": tmp_path / tokenizer} if tokenizer else {}
    with pytest.raises(BadInput, match=message):
        run(silent, spec.format(tmp_path), out=tmp_path / "data", **options)
    assert not list(tmp_path.glob(".data.*"))

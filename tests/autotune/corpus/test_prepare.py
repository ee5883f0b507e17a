import importlib.util
import os
import signal
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import psutil
import pytest
from tokenizers import Regex, Tokenizer
from tokenizers.normalizers import Replace

from autotune.corpus.elf import functions
from autotune.corpus.prepare import Request, prepare
from autotune.errors import BadInput, MachineLacks
from trainer.dataset import TokenDataset, read_manifest


def content(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_the_dataset_holds_every_function_once_in_reading_order(programs, tmp_path, silent):
    out = tmp_path / "data"
    prepared = prepare(Request(source=f"elf:{programs}", out=out), silent)
    everything = [line for name in ("first", "second", "copy-of-first") for line in functions(programs / name)]
    tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
    dataset = TokenDataset.open(out)
    stored = [
        " ".join(tokenizer.id_to_token(int(index)) for index in dataset.read(sample, 10**6))
        for sample in range(len(dataset))
    ]
    dataset.close()
    assert len(stored) == len(set(stored))
    assert set(stored) == set(everything)
    source = prepared.manifest.source
    assert source.duplicate_samples == len(everything) - len(stored)
    assert source.unknown_tokens == 0
    assert source.files == 3
    assert source.raw_bytes == sum((programs / name).stat().st_size for name in ("first", "second", "copy-of-first"))
    assert source.token_bytes == 2 * prepared.manifest.tokens
    assert prepared.manifest == read_manifest(out)


def test_files_that_cannot_be_used_are_listed_with_their_reason(programs, tmp_path, silent):
    prepared = prepare(Request(source=f"elf:{programs}", out=tmp_path / "data"), silent)
    rejected = {item.path.name: item.reason for item in prepared.rejected}
    assert set(rejected) == {"garbage", "truncated"}
    assert all(rejected.values())
    assert prepared.manifest.source.rejected_files == 2
    assert prepared.other_files == 2


def test_the_number_of_processes_changes_no_byte(programs, tmp_path, silent):
    for workers in (1, 2, 3):
        prepare(Request(source=f"elf:{programs}", out=tmp_path / str(workers), workers=workers), silent)
    assert content(tmp_path / "1") == content(tmp_path / "2") == content(tmp_path / "3")


def test_a_bound_takes_the_first_functions_of_all(programs, tmp_path, silent):
    prepare(Request(source=f"elf:{programs}", out=tmp_path / "all"), silent)
    given = tmp_path / "all" / "tokenizer.json"
    all_functions = TokenDataset.open(tmp_path / "all")
    for workers in (1, 2):
        for bound in (1, 3, 5):
            out = tmp_path / f"{workers}-{bound}"
            request = Request(source=f"elf:{programs}", out=out, max_functions=bound, workers=workers, tokenizer=given)
            assert prepare(request, silent).manifest.samples == bound
            some = TokenDataset.open(out)
            for sample in range(bound):
                np.testing.assert_array_equal(some.read(sample, 10**6), all_functions.read(sample, 10**6))
    assert content(tmp_path / "1-3") == content(tmp_path / "2-3")


def test_a_given_tokenizer_is_used_and_its_unknown_tokens_counted(programs, tmp_path, silent):
    prepare(Request(source=f"elf:{programs}", out=tmp_path / "small", vocab_size=16), silent)
    given = tmp_path / "small" / "tokenizer.json"
    prepared = prepare(Request(source=f"elf:{programs}", out=tmp_path / "data", tokenizer=given), silent)
    assert (tmp_path / "data" / "tokenizer.json").read_bytes() == given.read_bytes()
    assert 0 < prepared.manifest.source.unknown_tokens < prepared.manifest.tokens
    assert content(tmp_path / "data") == content(tmp_path / "small")


def test_an_existing_dataset_is_left_alone(programs, tmp_path, silent):
    out = tmp_path / "data"
    prepare(Request(source=f"elf:{programs}", out=out, max_functions=3), silent)
    before = content(out)
    with pytest.raises(BadInput, match="holds a dataset already"):
        prepare(Request(source=f"elf:{programs}", out=out), silent)
    assert content(out) == before
    prepare(Request(source=f"elf:{programs}", out=out, max_functions=4, overwrite=True), silent)
    assert read_manifest(out).samples == 4


def test_no_function_at_all_is_an_error_that_shows_why(tmp_path, silent):
    (tmp_path / "programs").mkdir()
    (tmp_path / "programs" / "garbage").write_bytes(b"\x7fELF, but no more")
    with pytest.raises(BadInput, match="garbage"):
        prepare(Request(source=f"elf:{tmp_path / 'programs'}", out=tmp_path / "data"), silent)
    assert [path.name for path in tmp_path.iterdir()] == ["programs"]


@pytest.mark.parametrize("stage", ["extract functions", "learn tokenizer", "encode"])
def test_an_interrupt_leaves_no_file_and_no_process(programs, tmp_path, stage):
    @contextmanager
    def interrupting(title):
        def update(done, total, note):
            if title == stage:
                os.kill(os.getpid(), signal.SIGINT)

        yield update

    (tmp_path / "out").mkdir()
    with pytest.raises(KeyboardInterrupt):
        prepare(Request(source=f"elf:{programs}", out=tmp_path / "out" / "data"), interrupting)
    assert list((tmp_path / "out").iterdir()) == []
    assert psutil.Process().children() == []


def test_missing_libraries_are_named_with_the_way_to_get_them(programs, tmp_path, silent, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "capstone" else find(name))
    with pytest.raises(MachineLacks, match="needs capstone") as error:
        prepare(Request(source=f"elf:{programs}", out=tmp_path / "data"), silent)
    assert "encoder-autotune[elf]" in error.value.next_step


def test_progress_ends_complete(programs, tmp_path):
    last = {}

    @contextmanager
    def recording(title):
        yield lambda done, total, note: last.update({title: (done, total)})

    prepare(Request(source=f"elf:{programs}", out=tmp_path / "data"), recording)
    assert list(last) == ["extract functions", "learn tokenizer", "encode"]
    assert all(done == total for done, total in last.values())


def test_a_tokenizer_that_makes_no_token_is_refused(programs, tmp_path, silent):
    prepare(Request(source=f"elf:{programs}", out=tmp_path / "any"), silent)
    tokenizer = Tokenizer.from_file(str(tmp_path / "any" / "tokenizer.json"))
    tokenizer.normalizer = Replace(Regex(".+"), "")
    tokenizer.save(str(tmp_path / "mute.json"))
    request = Request(source=f"elf:{programs}", out=tmp_path / "data", tokenizer=tmp_path / "mute.json")
    with pytest.raises(BadInput, match="no token"):
        prepare(request, silent)

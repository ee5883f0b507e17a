import ctypes
import errno
import os
import shutil
import stat
import subprocess
import sys
from types import SimpleNamespace

import pytest

from autotune.corpus import workplace as module
from autotune.corpus.workplace import (
    Workplace,
    check_place,
    open_workplace,
    other_workplaces,
    publish,
    writing,
)
from autotune.errors import BadInput


def test_failed_work_keeps_its_workplace(tmp_path):
    with (
        pytest.raises(RuntimeError),
        open_workplace(tmp_path / "data", "k1") as workplace,
    ):
        (workplace.path / "stage" / ".unfinished-one-abc").mkdir(parents=True)
        (workplace.path / "stage" / "two").mkdir()
        raise RuntimeError
    assert workplace.path == module.workplace_path(tmp_path / "data", "k1")
    assert stat.S_IMODE(workplace.path.stat().st_mode) == 0o700
    with open_workplace(tmp_path / "data", "k1"):
        assert [path.name for path in (workplace.path / "stage").iterdir()] == ["two"]


def write(directory):
    (directory / "file").write_text("whole")
    return {"n": 1}


def fail(directory):
    (directory / "file").write_text("half")
    raise RuntimeError


def test_unfinished_task_does_not_count(tmp_path):
    workplace = Workplace(path=tmp_path)
    with pytest.raises(RuntimeError):
        workplace.perform("stage", 1, fail)
    assert workplace.receipt("stage", 1) is None
    assert list((tmp_path / "stage").iterdir()) == []


def test_finished_task_is_performed_once(tmp_path):
    workplace = Workplace(path=tmp_path)
    assert (
        workplace.perform("stage", 1, write)
        == workplace.receipt("stage", 1)
        == {"n": 1}
    )
    assert (workplace.directory("stage", 1) / "file").read_text() == "whole"
    assert workplace.perform("stage", 1, fail) == {"n": 1}

    def write_second(directory):
        workplace.perform("stage", 2, write)
        return write(directory)

    assert workplace.perform("stage", 2, write_second) == {"n": 1}
    assert sorted(path.name for path in (tmp_path / "stage").iterdir()) == [
        "00000001",
        "00000002",
    ]


def test_two_processes_cannot_share_it(tmp_path):
    code = (
        "import sys, os, signal; from pathlib import Path; from"
        " autotune.corpus.workplace import open_workplace\nwith"
        " open_workplace(Path(sys.argv[1]), 'k'):\n    print('taken', flush=True);"
        " signal.pause()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "data")],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "taken\n"
    with (
        pytest.raises(BadInput, match="another process"),
        open_workplace(tmp_path / "data", "k"),
    ):
        pytest.fail("it was taken twice")
    holder.kill()
    holder.wait()
    holder.stdout.close()
    with open_workplace(tmp_path / "data", "k"):
        pass


def test_finds_other_unfinished_work(tmp_path):
    for name in (".da*ta.k1.partial", ".da*ta.k2.partial", ".daXta.k3.partial"):
        (tmp_path / name).mkdir()
    (tmp_path / ".da*ta.k2.partial" / "file").write_bytes(bytes(10))
    assert other_workplaces(tmp_path / "da*ta", "k1") == [
        (tmp_path / ".da*ta.k2.partial", 10)
    ]


def build(out, text="new", *, overwrite=False):
    """Publish a directory; return what the replaced one held."""
    check_place(out, overwrite=overwrite)
    work = out.resolve().parent / "work"
    (work / "dataset").mkdir(parents=True)
    (work / "dataset" / "manifest.json").write_text(text)
    publish(work / "dataset", out.resolve())
    replaced = [path.read_text() for path in work.rglob("manifest.json")]
    shutil.rmtree(work)
    return replaced[0] if replaced else None


@pytest.mark.parametrize("present", ["nothing", "directory", "link"])
def test_publishes_into_every_free_place(tmp_path, present):
    target = tmp_path / ("disk" if present == "link" else "data")
    if present != "nothing":
        target.mkdir()
    if present == "link":
        (tmp_path / "data").symlink_to("disk")
    assert build(tmp_path / "data") is None
    assert (target / "manifest.json").read_text() == "new"
    assert (tmp_path / "data").is_symlink() == (present == "link")


@pytest.mark.parametrize(
    ("number", "message", "next_step"),
    [
        (errno.ENOSPC, "no space left", "same command again to resume"),
        (errno.EDQUOT, "no space left", "same command again to resume"),
        (errno.EROFS, r"cannot write .*Read-only", "permission"),
    ],
)
def test_failed_write_names_its_cause(tmp_path, number, message, next_step):
    with pytest.raises(BadInput, match=message) as error, writing(tmp_path / "d"):
        raise OSError(number, os.strerror(number))
    assert next_step in error.value.next_step


def refuse_to_swap(*_):
    ctypes.set_errno(errno.EINVAL)
    return -1


@pytest.mark.parametrize(
    "library",
    [
        ctypes.CDLL,
        lambda *_, **__: object(),
        lambda *_, **__: SimpleNamespace(renameat2=refuse_to_swap),
    ],
    ids=["swap", "no renameat2", "renameat2 refused"],
)
def test_replaces_dataset_only_on_request(tmp_path, monkeypatch, library):
    monkeypatch.setattr(module.ctypes, "CDLL", library)
    out = tmp_path / "data"
    build(out, "old")
    with pytest.raises(BadInput) as error:
        build(out)
    assert "--overwrite" in error.value.next_step
    assert (out / "manifest.json").read_text() == "old"
    assert build(out, overwrite=True) == "old"
    assert (out / "manifest.json").read_text() == "new"


def test_replaces_only_files_of_a_dataset(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    for overwrite in (False, True):
        with pytest.raises(BadInput, match=r"nor a dataset: it contains 'notes\.txt'"):
            check_place(tmp_path, overwrite=overwrite)
    for name in (
        "manifest.json",
        "tokenizer.json",
        "rejects.jsonl",
        "prepared.json",
        "validation-offsets-12345.npy",
    ):
        (tmp_path / name).write_text("")
    with pytest.raises(BadInput, match="already contains a dataset"):
        check_place(tmp_path, overwrite=False)
    with pytest.raises(
        BadInput, match=r"'notes\.txt', which does not belong to the dataset"
    ):
        check_place(tmp_path, overwrite=True)
    with pytest.raises(BadInput, match="not a directory"):
        check_place(tmp_path / "notes.txt", overwrite=True)
    (tmp_path / "notes.txt").unlink()
    check_place(tmp_path, overwrite=True)

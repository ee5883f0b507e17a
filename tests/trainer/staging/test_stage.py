import contextlib
import errno
import fcntl
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from testbed.datasets import write_dataset
from testbed.examples.checkpoints import resolved_of
from tests.system.faults.corpora import content
from tests.trainer.oracles import config_of
from trainer.config.train_config import DataSettings
from trainer.data.dataset import read_manifest
from trainer.errors import BadConfig
from trainer.staging import stage as staging
from trainer.staging.copying import (
    CopyFigures,
    copy_files,
    dataset_files,
    in_threads,
    seconds_per_sample,
)
from trainer.staging.stage import Staged, stage, stage_data

SAMPLES = [[5 + number % 90] * (1 + number % 40) for number in range(2000)]


@pytest.fixture
def source(tmp_path):
    return write_dataset(tmp_path / "source", SAMPLES, shards=3, validation=[[7, 8]])


@pytest.fixture
def local(tmp_path):
    (tmp_path / "local").mkdir()
    return tmp_path / "local"


@pytest.fixture
def root(local):
    """The user's own directory there, left open to others by somebody."""
    root = local / f"autotune-{os.getuid()}"
    root.mkdir()
    root.chmod(0o777)
    return root


@contextlib.contextmanager
def held(path):
    """Have a lock, which not even another file of this process gets then."""
    with path.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def test_the_copy_is_the_source_private_and_measured_and_is_not_copied_again(
    source, local, root
):
    first = stage(source, local)
    assert content(first.directory) == content(source)
    assert first.directory == root / first.dataset_hash[:16]
    assert {path.stat().st_mode & 0o777 for path in (root, first.directory)} == {0o700}
    assert None not in (
        first.copied,
        first.source_s_per_sample,
        first.local_s_per_sample,
    )
    before = {path: path.stat().st_mtime_ns for path in first.directory.iterdir()}
    again = stage(source, local)
    assert (again.copied, again.break_even_epochs) == (None, None)
    assert {
        path: path.stat().st_mtime_ns for path in again.directory.iterdir()
    } == before


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        (
            "train-tokens-00001.npy",
            lambda path: os.truncate(path, path.stat().st_size - 2),
        ),
        (
            "train-tokens-00001.npy",
            lambda path: path.write_bytes(b"x" * path.stat().st_size),
        ),
        ("validation-offsets-00000.npy", lambda path: path.unlink()),
        ("manifest.json", lambda path: path.write_text("{}")),
        (
            "manifest.json",
            lambda path: path.write_text(
                path.read_text().replace('"rejected": 0', '"rejected": 1')
            ),
        ),
        ("tokenizer.json", lambda path: path.write_text("{}")),
    ],
    ids=["shorter", "header", "missing", "manifest", "other", "tokenizer"],
)
def test_a_damaged_copy_is_replaced(source, local, name, damage):
    directory = stage(source, local).directory
    damage(directory / name)
    assert stage(source, local).copied is not None
    assert content(directory) == content(source)
    assert list(directory.parent.glob(".partial*")) == []


def _rank(source, local, pipe):
    staged = stage(source, local, timeout_s=30)
    pipe.send((str(staged.directory), staged.copied is not None))


def _copy_and_stall(source, local, pipe):
    def stall(done, total, note):
        pipe.send("copying")
        threading.Event().wait()

    stage(source, local, update=stall)


def test_when_the_one_that_copies_is_killed_one_that_waits_removes_the_half_and_copies(
    source, local
):
    context = multiprocessing.get_context("spawn")

    def start(work):
        ours, theirs = context.Pipe()
        process = context.Process(
            target=work, args=(source, local, theirs), daemon=True
        )
        process.start()
        return process, ours

    leader, pipe = start(_copy_and_stall)
    assert pipe.recv() == "copying"
    waiting = [start(_rank)[1] for _ in range(3)]
    assert not any(pipe.poll(1.5) for pipe in waiting)
    leader.kill()
    directories, copied = zip(*[pipe.recv() for pipe in waiting], strict=True)
    assert set(directories) == {str(stage(source, local).directory)}
    assert sum(copied) == 1
    assert content(stage(source, local).directory) == content(source)
    assert list(local.rglob(".partial*")) == []


@pytest.mark.parametrize("kind", ["link", "file", "another user's", "no disk"])
def test_a_place_that_cannot_be_used_is_said_at_once_and_not_touched(
    source, local, root, tmp_path, kind
):
    trap = tmp_path / "trap"
    trap.mkdir(mode=0o755)
    if kind == "another user's":
        if os.geteuid() != 0:
            pytest.skip("only root may give a directory away")
        os.chown(root, 12345, 12345)
    else:
        root.rmdir()
        {
            "link": lambda: root.symlink_to(trap),
            "file": root.touch,
            "no disk": local.rmdir,
        }[kind]()
    with pytest.raises(
        BadConfig,
        match="is not a directory that you own" if kind != "no disk" else "not found",
    ):
        stage(source, local)
    assert list(trap.iterdir()) == []
    assert trap.stat().st_mode & 0o777 == 0o755


def test_copying_clears_what_killed_copies_left_and_nothing_else(source, local, root):
    mine, free, busy = (
        stage(source, local).dataset_hash[:16],
        "0123456789abcdef",
        "fedcba9876543210",
    )
    kept = {
        f".partial-{busy}-00000003",
        ".partial-of-somebody",
        f".partial-{free}-short",
        "another",
    }
    for name in (f".partial-{mine}-00000001", f".partial-{free}-00000002", *kept):
        (root / name).mkdir()
        (root / name / "file").write_text("x")
    (root / mine / "manifest.json").unlink()
    with held(root / f"{busy}.lock"):
        stage(source, local)
    assert {path.name for path in root.iterdir()} == kept | {
        f"{name}.lock" for name in (mine, free, busy)
    } | {mine}


def test_a_lock_that_is_held_too_long_is_said_and_stays(source, local):
    staged = stage(source, local).directory
    lock, said = (
        staged.with_name(f"{staged.name}.lock"),
        r"another process is still copying .* after 0\.2 s",
    )
    with held(lock), pytest.raises(BadConfig, match=said):
        stage(source, local, timeout_s=0.2)
    assert lock.exists()


@pytest.mark.parametrize(
    ("spare_bytes", "files", "number", "said", "next_step"),
    [
        (2**60, 2**40, 0, r"MiB free; the dataset requires 1 MiB", "Free "),
        (
            staging.SPARE_BYTES,
            3,
            0,
            "has inodes for 3 more files; the dataset has 10",
            "Remove 15 files",
        ),
        # While it copies; who filled the disk is gone.
        (
            2**20,
            2**40,
            errno.ENOSPC,
            r"MiB free; the dataset requires 1 MiB",
            "There is space again",
        ),
        (
            2**20,
            2**40,
            errno.EDQUOT,
            r"the dataset \(1 MiB\) exceeds your quota",
            "Remove files there",
        ),
        (
            2**20,
            2**40,
            errno.EROFS,
            r"cannot write to .*local: Read-only file system",
            "Free disk space, check",
        ),
    ],
)
def test_what_the_disk_refuses_is_said_with_what_is_needed_and_missing(
    source, local, monkeypatch, spare_bytes, files, number, said, next_step
):
    disk = SimpleNamespace(f_bavail=2**40, f_frsize=1, f_favail=files, f_files=100)
    monkeypatch.setattr(os, "statvfs", lambda _: disk)
    monkeypatch.setattr(staging, "SPARE_BYTES", spare_bytes)
    if number:
        monkeypatch.setattr(
            staging,
            "copy_files",
            Mock(side_effect=OSError(number, os.strerror(number))),
        )
    with pytest.raises(BadConfig, match=said) as caught:
        stage(source, local)
    assert caught.value.next_step.startswith(next_step)
    assert list(local.rglob(".partial*")) == []


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: os.truncate(path, path.stat().st_size - 2),
        lambda path: path.write_bytes(
            path.read_bytes()[:300] + b"\x07" + path.read_bytes()[301:]
        ),
    ],
    ids=["cannot be read at random", "hash"],
)
def test_every_process_of_a_node_names_the_damaged_file_and_nothing_is_published(
    source, local, damage
):
    damage(source / "train-tokens-00001.npy")
    for _ in range(2):
        with pytest.raises(
            BadConfig, match=r"source/train-tokens-00001\.npy"
        ) as caught:
            stage(source, local)
        assert f"autotune data verify {source}" in caught.value.next_step
        assert list(local.rglob("*.npy")) == []


@pytest.mark.parametrize(
    ("source_s", "epochs"), [(0.011, pytest.approx(2.0)), (0.001, None)]
)
def test_break_even_is_the_time_of_copying_over_the_time_saved_in_an_epoch(
    source_s, epochs
):
    staged = Staged(
        directory=None,
        dataset_hash="",
        samples=1000,
        source_s_per_sample=source_s,
        local_s_per_sample=0.001,
        copied=CopyFigures(size_bytes=10, seconds=20.0, read_s=1.0, write_s=1.0),
    )
    assert staged.break_even_epochs == epochs


def test_the_trainer_stages_what_its_profile_asks_for(source, local):
    environment, config = (
        {"LOCAL_DISK": str(local)},
        config_of(data=DataSettings(stage_to="$LOCAL_DISK/below")),
    )
    plain, resolved = resolved_of(config_of(), source), resolved_of(config, source)
    assert stage_data(plain, environment) is plain
    (local / "below").mkdir()
    staged = stage_data(resolved, environment)
    assert staged.data_dir.parent.parent == local / "below"
    assert content(staged.data_dir) == content(source)
    assert staged.config == resolved.config
    with pytest.raises(BadConfig, match=r"\$LOCAL_DISK"):
        stage_data(resolved, {})


INTERRUPTED = """\
import os, signal, sys, threading, time
from trainer.staging.copying import in_threads
stopped = threading.Event()
kill = threading.Timer(float(sys.argv[1]), os.kill, (os.getpid(), signal.SIGINT))
kill.daemon = True
kill.start()
try:
    for _ in range(100_000):
        in_threads(lambda item: stopped.is_set() or item, range(50), 4, stop=stopped.set)
        stopped.clear()
except KeyboardInterrupt:
    sys.exit(7)
"""


def test_results_come_in_the_order_of_the_items_whoever_was_first():
    def slow_first(item: int) -> int:
        time.sleep(0.02 if item == 0 else 0)
        return item * item

    stopped: list[bool] = []
    squares = in_threads(slow_first, range(20), 4, stop=lambda: stopped.append(True))
    assert (squares, stopped) == ([item * item for item in range(20)], [])
    assert in_threads(slow_first, [], 4) == []


def test_several_work_at_once_and_no_more_than_asked_for():
    barrier = threading.Barrier(3, timeout=30)
    names = in_threads(
        lambda _: (barrier.wait(), threading.current_thread().name)[1], range(9), 3
    )
    assert len(set(names)) == 3


def test_the_first_error_is_raised_others_are_asked_to_stop_and_nothing_more_is_begun():
    stop = threading.Event()
    begun: list[int] = []

    def work(item: int) -> None:
        begun.append(item)
        if item == 1:
            raise ValueError("one")
        assert stop.wait(30)

    with pytest.raises(ValueError, match="one"):
        in_threads(work, range(100), 2, stop=stop.set)
    assert set(begun) <= {0, 1, 2}
    assert not [
        one
        for one in threading.enumerate()
        if one.name.startswith("ThreadPoolExecutor")
    ]


@pytest.mark.parametrize("moment_s", [0.1, 0.2, 0.3])
def test_ctrl_c_at_any_moment_ends_it(moment_s):
    assert (
        subprocess.run(
            [sys.executable, "-c", INTERRUPTED, str(moment_s)], timeout=60, check=False
        ).returncode
        == 7
    )


def copy(source, local, change=lambda: None, update=lambda done, total, note: None):
    """Copy, and change the source once all is listed and the first bytes are copied."""
    manifest = read_manifest(source)
    files = dataset_files(source, manifest)
    change()
    return copy_files(files, source, local, manifest, update)


def test_all_files_of_both_splits_and_the_notes_beside_them_are_copied_and_counted(
    source, local
):
    (source / "rejects.jsonl").write_text("{}\n")
    (source / "prepared.json").write_text("{}\n")
    (source / "of-somebody-else").write_text("no part of the dataset")
    told = []
    figures = copy(
        source, local, update=lambda done, total, note: told.append((done, total, note))
    )
    assert [done for done, _, _ in told] == sorted(done for done, _, _ in told)
    assert told[-1][:2] == (figures.size_bytes, figures.size_bytes)
    assert told[-1][2].endswith(" MiB/s")
    (source / "of-somebody-else").unlink()
    assert content(local) == content(source)
    assert figures.size_bytes == sum(len(file) for file in content(source).values())
    assert min(figures.read_s, figures.write_s, figures.seconds) > 0


@pytest.mark.parametrize(
    "name", ["train-tokens-00002.npy", "validation-offsets-00000.npy", "tokenizer.json"]
)
def test_a_file_that_is_not_what_the_manifest_says_is_named(source, local, name):
    raw = bytearray((source / name).read_bytes())
    raw[-1] ^= 1
    (source / name).write_bytes(raw)
    with pytest.raises(BadConfig, match=rf"source/{name}: its SHA-256 is") as caught:
        copy(source, local)
    assert caught.value.next_step.endswith(f"autotune data verify {source}")


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        (
            "rejects.jsonl",
            lambda path: path.write_text(path.read_text() + "{}\n"),
            "became longer",
        ),
        ("rejects.jsonl", lambda path: path.write_text(""), "became shorter"),
        ("rejects.jsonl", lambda path: path.unlink(), "No such file"),
        (
            "manifest.json",
            lambda path: path.write_text(
                path.read_text().replace('"rejected": 0', '"rejected": 1')
            ),
            "changed while it was copied",
        ),
        (
            "tokenizer.json",
            lambda path: path.symlink_to(path.rename(path.parent.parent / "outside")),
            "Too many levels of symbolic links",
        ),
    ],
)
def test_a_source_that_changes_while_it_is_copied_is_noticed(
    source, local, name, change, said
):
    (source / "rejects.jsonl").write_text("{}\n" * 20)
    with pytest.raises(BadConfig, match=rf"source/{name}: {said}"):
        copy(source, local, lambda: change(source / name))


@pytest.mark.parametrize(
    ("put", "said"),
    [
        (lambda path: None, "No such file"),
        (
            lambda path: path.symlink_to(path.parent.parent / "outside"),
            "is not a regular file",
        ),
        (os.mkfifo, "is not a regular file"),
    ],
)
def test_what_is_not_a_file_is_not_read(source, local, put, said):
    offsets = source / "train-offsets-00000.npy"
    offsets.rename(source.parent / "outside")
    put(offsets)
    with pytest.raises(BadConfig, match=rf"train-offsets-00000\.npy: {said}"):
        copy(source, local)
    assert list(local.iterdir()) == []


def test_the_time_of_a_sample_is_measured_where_there_is_one_without_changing_anything(
    source, tmp_path
):
    before = content(source)
    assert seconds_per_sample(source) > 0
    assert content(source) == before
    assert (
        seconds_per_sample(
            write_dataset(tmp_path / "empty", [], shards=0, validation=[[7]])
        )
        is None
    )

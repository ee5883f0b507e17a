import contextlib
import errno
import fcntl
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from testbed.datasets import write_dataset
from testbed.examples.checkpoints import resolved_of
from tests.system.faults.corpora import content
from tests.trainer.oracles import config_of
from trainer.config.train_config import DataSettings
from trainer.data.manifest import read_manifest
from trainer.errors import BadConfig, UnreadableFile
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
    """The user's own directory there, which others may write to."""
    root = local / f"autotune-{os.getuid()}"
    root.mkdir()
    root.chmod(0o777)
    return root


@contextlib.contextmanager
def held(path):
    """Hold a lock."""
    with path.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def modified_ns(directory):
    return {path: path.stat().st_mtime_ns for path in directory.iterdir()}


def test_copies_the_dataset(source, local, root):
    staged = stage(source, local)
    assert content(staged.directory) == content(source)
    assert staged.directory == root / staged.dataset_hash[:16]
    assert staged.copied is not None
    assert staged.source_s_per_sample is not None
    assert staged.local_s_per_sample is not None


def test_copy_is_private(source, local, root):
    staged = stage(source, local)
    assert root.stat().st_mode & 0o777 == 0o700
    assert staged.directory.stat().st_mode & 0o777 == 0o700


def test_reuses_an_intact_copy(source, local):
    before = modified_ns(stage(source, local).directory)
    again = stage(source, local)
    assert again.copied is None
    assert again.break_even_epochs is None
    assert modified_ns(again.directory) == before


def cut_end(path):
    os.truncate(path, path.stat().st_size - 2)


def overwrite(path):
    path.write_bytes(b"x" * path.stat().st_size)


def empty_table(path):
    path.write_text("{}")


def change_manifest(path):
    path.write_text(path.read_text().replace('"rejected": 0', '"rejected": 1'))


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        pytest.param("train-tokens-00001.npy", cut_end, id="shorter"),
        pytest.param("train-tokens-00001.npy", overwrite, id="header"),
        pytest.param("validation-offsets-00000.npy", Path.unlink, id="missing"),
        pytest.param("manifest.json", empty_table, id="manifest"),
        pytest.param("manifest.json", change_manifest, id="other"),
        pytest.param("tokenizer.json", empty_table, id="tokenizer"),
    ],
)
def test_replaces_a_damaged_copy(source, local, name, damage):
    directory = stage(source, local).directory
    damage(directory / name)
    assert stage(source, local).copied is not None
    assert content(directory) == content(source)
    assert list(directory.parent.glob(".partial*")) == []


@pytest.mark.parametrize("name", ["train-tokens-00001.npy", "train-offsets-00000.npy"])
def test_source_without_permission_is_not_corrupt(source, local, deny_reading, name):
    deny_reading(name)
    with pytest.raises(UnreadableFile, match=name) as raised:
        stage(source, local)
    assert "corrupt" not in raised.value.next_step


def _stage_and_report(source, local, pipe):
    staged = stage(source, local, timeout_s=30)
    pipe.send((str(staged.directory), staged.copied is not None))


def _copy_and_stall(source, local, pipe):
    def stall(done, total, note):
        pipe.send("copying")
        threading.Event().wait()

    stage(source, local, update=stall)


def test_waiting_rank_copies_if_the_first_is_killed(source, local):
    context = multiprocessing.get_context("spawn")

    def start(work):
        pipe, child_pipe = context.Pipe()
        process = context.Process(
            target=work, args=(source, local, child_pipe), daemon=True
        )
        process.start()
        return process, pipe

    copying, pipe = start(_copy_and_stall)
    assert pipe.recv() == "copying"
    waiting = []
    for _ in range(3):
        _, waiting_pipe = start(_stage_and_report)
        waiting.append(waiting_pipe)
    assert not any(pipe.poll(1.5) for pipe in waiting)
    copying.kill()
    reports = [pipe.recv() for pipe in waiting]
    staged = stage(source, local).directory
    assert {directory for directory, _ in reports} == {str(staged)}
    assert sum(has_copied for _, has_copied in reports) == 1
    assert content(staged) == content(source)
    assert list(local.rglob(".partial*")) == []


@pytest.fixture
def other_directory(tmp_path):
    """Directory that staging must not touch."""
    directory = tmp_path / "other"
    directory.mkdir(mode=0o755)
    yield directory
    assert list(directory.iterdir()) == []
    assert directory.stat().st_mode & 0o777 == 0o755


def test_rejects_link_as_user_directory(source, local, root, other_directory):
    root.rmdir()
    root.symlink_to(other_directory)
    with pytest.raises(BadConfig, match="is not a directory that you own"):
        stage(source, local)


def test_rejects_file_as_user_directory(source, local, root):
    root.rmdir()
    root.touch()
    with pytest.raises(BadConfig, match="is not a directory that you own"):
        stage(source, local)


def test_rejects_directory_of_another_user(source, local, root):
    if os.geteuid() != 0:
        pytest.skip("only root may give a directory away")
    os.chown(root, 12345, 12345)
    with pytest.raises(BadConfig, match="is not a directory that you own"):
        stage(source, local)


def test_rejects_missing_local_disk(source, local):
    local.rmdir()
    with pytest.raises(BadConfig, match="not found"):
        stage(source, local)


def test_clears_only_what_killed_copies_left(source, local, root):
    own = stage(source, local).dataset_hash[:16]
    unlocked = "0123456789abcdef"
    locked = "fedcba9876543210"
    kept = {
        f".partial-{locked}-00000003",
        ".partial-of-somebody",
        f".partial-{unlocked}-short",
        "another",
    }
    for name in (f".partial-{own}-00000001", f".partial-{unlocked}-00000002", *kept):
        (root / name).mkdir()
        (root / name / "file").write_text("x")
    (root / own / "manifest.json").unlink()
    with held(root / f"{locked}.lock"):
        stage(source, local)
    locks = {f"{name}.lock" for name in (own, unlocked, locked)}
    assert {path.name for path in root.iterdir()} == kept | locks | {own}


def test_reports_a_lock_held_too_long(source, local):
    staged = stage(source, local).directory
    lock = staged.with_name(f"{staged.name}.lock")
    message = r"another process is still copying .* after 0\.2 s"
    with held(lock), pytest.raises(BadConfig, match=message):
        stage(source, local, timeout_s=0.2)
    assert lock.exists()


def report_disk(monkeypatch, *, free_inodes=2**40):
    """Let the disk report 1 TiB of free space and so many inodes."""
    disk = SimpleNamespace(
        f_bavail=2**40, f_frsize=1, f_favail=free_inodes, f_files=100
    )
    monkeypatch.setattr(os, "statvfs", lambda _: disk)


def test_rejects_disk_with_too_little_room(source, local, monkeypatch):
    report_disk(monkeypatch)
    monkeypatch.setattr(staging, "SPARE_BYTES", 2**60)
    with pytest.raises(
        BadConfig, match="MiB free; the dataset requires 1 MiB"
    ) as raised:
        stage(source, local)
    assert raised.value.next_step.startswith("Free ")
    assert list(local.rglob(".partial*")) == []


def test_rejects_disk_with_too_few_inodes(source, local, monkeypatch):
    report_disk(monkeypatch, free_inodes=3)
    with pytest.raises(
        BadConfig, match="has inodes for 3 more files; the dataset has 10"
    ) as raised:
        stage(source, local)
    assert raised.value.next_step.startswith("Remove 15 files")
    assert list(local.rglob(".partial*")) == []


@pytest.mark.parametrize(
    ("number", "message", "next_step"),
    [
        # There is room again after the copy failed.
        (
            errno.ENOSPC,
            r"MiB free; the dataset requires 1 MiB",
            "There is space again",
        ),
        (errno.EDQUOT, r"the dataset \(1 MiB\) exceeds your quota", "Remove files"),
        (
            errno.EROFS,
            r"cannot write to .*local: Read-only file system",
            "Free disk space, check",
        ),
    ],
    ids=["disk full", "quota", "read-only"],
)
def test_explains_write_error(source, local, monkeypatch, number, message, next_step):
    report_disk(monkeypatch)
    monkeypatch.setattr(staging, "SPARE_BYTES", 2**20)
    monkeypatch.setattr(
        staging, "copy_files", Mock(side_effect=OSError(number, os.strerror(number)))
    )
    with pytest.raises(BadConfig, match=message) as raised:
        stage(source, local)
    assert raised.value.next_step.startswith(next_step)
    assert list(local.rglob(".partial*")) == []


def change_one_token(path):
    raw = bytearray(path.read_bytes())
    raw[300] = 7
    path.write_bytes(raw)


@pytest.mark.parametrize(
    "damage",
    [cut_end, change_one_token],
    ids=["cannot be read at random", "hash"],
)
def test_every_rank_reports_a_damaged_source(source, local, damage):
    damage(source / "train-tokens-00001.npy")
    for _ in range(2):
        with pytest.raises(
            BadConfig, match=r"source/train-tokens-00001\.npy"
        ) as raised:
            stage(source, local)
        assert f"autotune data verify {source}" in raised.value.next_step
        assert list(local.rglob("*.npy")) == []


@pytest.mark.parametrize(
    ("source_s", "epochs"), [(0.011, pytest.approx(2.0)), (0.001, None)]
)
def test_break_even_is_copy_time_over_saved_time(source_s, epochs):
    staged = Staged(
        directory=None,
        dataset_hash="",
        samples=1000,
        source_s_per_sample=source_s,
        local_s_per_sample=0.001,
        copied=CopyFigures(size_bytes=10, seconds=20.0, read_s=1.0, write_s=1.0),
    )
    assert staged.break_even_epochs == epochs


def test_trainer_stages_to_the_configured_directory(source, local):
    config = config_of(data=DataSettings(stage_to="$LOCAL_DISK/below"))
    resolved = resolved_of(config, source)
    (local / "below").mkdir()
    staged = stage_data(resolved, {"LOCAL_DISK": str(local)})
    assert staged.data_dir.parent.parent == local / "below"
    assert content(staged.data_dir) == content(source)
    assert staged.config == resolved.config


def test_trainer_stages_nothing_by_default(source):
    resolved = resolved_of(config_of(), source)
    assert stage_data(resolved, {}) is resolved


def test_rejects_unset_variable_in_stage_to(source):
    config = config_of(data=DataSettings(stage_to="$LOCAL_DISK/below"))
    with pytest.raises(BadConfig, match=r"\$LOCAL_DISK"):
        stage_data(resolved_of(config, source), {})


INTERRUPTED = """\
import os, signal, sys, threading, time
from trainer.staging.copying import in_threads
stopped = threading.Event()
kill = threading.Timer(float(sys.argv[1]), os.kill, (os.getpid(), signal.SIGINT))
kill.daemon = True
kill.start()
work = lambda item: stopped.is_set() or item
try:
    for _ in range(100_000):
        in_threads(work, range(50), 4, stop=stopped.set)
        stopped.clear()
except KeyboardInterrupt:
    sys.exit(7)
"""


def test_results_have_the_order_of_items():
    def slow_first(item: int) -> int:
        time.sleep(0.02 if item == 0 else 0)
        return item * item

    stopped: list[bool] = []
    squares = in_threads(slow_first, range(20), 4, stop=lambda: stopped.append(True))
    assert squares == [item * item for item in range(20)]
    assert stopped == []
    assert in_threads(slow_first, [], 4) == []


def test_uses_the_requested_number_of_threads():
    barrier = threading.Barrier(3, timeout=30)

    def wait_for_others(_) -> str:
        barrier.wait()
        return threading.current_thread().name

    names = in_threads(wait_for_others, range(9), 3)
    assert len(set(names)) == 3


def test_first_error_stops_all_threads():
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
    assert not any(
        thread.name.startswith("ThreadPoolExecutor") for thread in threading.enumerate()
    )


@pytest.mark.parametrize("moment_s", [0.1, 0.2, 0.3])
def test_ctrl_c_ends_threads_at_any_moment(moment_s):
    command = [sys.executable, "-c", INTERRUPTED, str(moment_s)]
    process = subprocess.run(command, timeout=60, check=False)
    assert process.returncode == 7


def copy(source, local, *, change=lambda: None, update=lambda done, total, note: None):
    """Copy the dataset; ``change`` is called once its files are listed."""
    manifest = read_manifest(source)
    files = dataset_files(source, manifest)
    change()
    return copy_files(files, source, local, manifest, update)


def test_copies_all_files_of_a_dataset_only(source, local):
    (source / "rejects.jsonl").write_text("{}\n")
    (source / "prepared.json").write_text("{}\n")
    other = source / "other"
    other.write_text("no part of the dataset")
    figures = copy(source, local)
    other.unlink()
    assert content(local) == content(source)
    assert figures.size_bytes == sum(len(file) for file in content(source).values())
    assert min(figures.read_s, figures.write_s, figures.seconds) > 0


def test_copy_reports_progress_in_bytes(source, local):
    updates = []
    figures = copy(
        source,
        local,
        update=lambda done, total, note: updates.append((done, total, note)),
    )
    copied_bytes = [done for done, _, _ in updates]
    assert copied_bytes == sorted(copied_bytes)
    done, total, note = updates[-1]
    assert done == total == figures.size_bytes
    assert note.endswith(" MiB/s")


@pytest.mark.parametrize(
    "name", ["train-tokens-00002.npy", "validation-offsets-00000.npy", "tokenizer.json"]
)
def test_names_file_with_another_hash(source, local, name):
    raw = bytearray((source / name).read_bytes())
    raw[-1] ^= 1
    (source / name).write_bytes(raw)
    with pytest.raises(BadConfig, match=rf"source/{name}: its SHA-256 is") as raised:
        copy(source, local)
    assert raised.value.next_step.endswith(f"autotune data verify {source}")


def append_line(path):
    path.write_text(path.read_text() + "{}\n")


def empty(path):
    path.write_text("")


def move_and_link(path):
    path.symlink_to(path.rename(path.parent.parent / "outside"))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("rejects.jsonl", append_line, "became longer"),
        ("rejects.jsonl", empty, "became shorter"),
        ("rejects.jsonl", Path.unlink, "No such file"),
        ("manifest.json", change_manifest, "changed while it was copied"),
        ("tokenizer.json", move_and_link, "Too many levels of symbolic links"),
    ],
    ids=["longer", "shorter", "missing", "other manifest", "link"],
)
def test_notices_source_that_changes_meanwhile(source, local, name, change, message):
    (source / "rejects.jsonl").write_text("{}\n" * 20)
    with pytest.raises(BadConfig, match=rf"source/{name}: {message}"):
        copy(source, local, change=lambda: change(source / name))


@pytest.mark.parametrize(
    ("replace", "message"),
    [
        (lambda path: None, "No such file"),
        (
            lambda path: path.symlink_to(path.parent.parent / "outside"),
            "is not a regular file",
        ),
        (os.mkfifo, "is not a regular file"),
    ],
    ids=["missing", "link", "pipe"],
)
def test_rejects_what_is_not_a_file(source, local, replace, message):
    offsets = source / "train-offsets-00000.npy"
    offsets.rename(source.parent / "outside")
    replace(offsets)
    with pytest.raises(BadConfig, match=rf"train-offsets-00000\.npy: {message}"):
        copy(source, local)
    assert list(local.iterdir()) == []


def test_measuring_a_dataset_changes_nothing(source):
    before = content(source)
    assert seconds_per_sample(source) > 0
    assert content(source) == before


def test_time_per_sample_is_unknown_without_samples(tmp_path):
    dataset = write_dataset(tmp_path / "empty", [], shards=0, validation=[[7]])
    assert seconds_per_sample(dataset) is None

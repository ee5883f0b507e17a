import contextlib
import errno
import fcntl
import multiprocessing
import os
import threading
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from testbed.examples.checkpoints import resolved_of
from tests.system.faults.corpora import content
from tests.trainer.oracles import config_of
from tests.trainer.staging.damage import (
    change_manifest,
    change_one_token,
    cut_end,
    empty_table,
    overwrite,
)
from trainer.config.train_config import DataSettings
from trainer.errors import BadConfig, UnreadableFile
from trainer.staging import stage as staging
from trainer.staging.copying import CopyFigures
from trainer.staging.stage import Staged, stage, stage_data


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

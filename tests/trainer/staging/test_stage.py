"""Staging of a dataset in one process: copies, faults of the disk and of the source."""

import errno
import os
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from testbed.examples.checkpoints import resolved_of
from tests.system.faults.corpora import content
from tests.trainer.staging.damage import (
    change_manifest,
    change_one_token,
    cut_last_token,
    overwrite_with_text,
    write_empty_table,
)
from tests.trainer.staging.locks import hold_lock
from tests.trainer.tiny_models import config_of
from trainer.formats.errors import BadConfig, UnreadableFile
from trainer.formats.manifest import read_manifest
from trainer.formats.train_config import DataSettings
from trainer.staging import stage as staging
from trainer.staging.copying import CopyFigures
from trainer.staging.stage import Staged, stage, stage_data
from trainer.staging.staging_directory import SPARE_BYTES, SPARE_INODES

OTHER_DATASET = "0123456789abcdef"
"""Name under which the copy of another dataset is published."""
SOURCE_FILES = 10
"""Files of ``source``, whose size is less than 1 MiB."""
PLENTY_BYTES = 2**40
PLENTY_INODES = 2**30


@pytest.fixture
def root(local):
    """The user's directory on the local disk; others may write to it until staging."""
    root = local / f"autotune-{os.getuid()}"
    root.mkdir()
    root.chmod(0o777)
    return root


def permissions_of(path):
    return path.stat().st_mode & 0o777


def modified_ns(directory):
    """Return when each file of a directory was last modified."""
    return {path: path.stat().st_mtime_ns for path in directory.iterdir()}


def cache_name(source):
    """Return the name under which the copy of a dataset is published."""
    return read_manifest(source).dataset_hash[:16]


def leave_partial(root, name):
    """Leave a directory with a file, as a killed copy does, and return it."""
    partial = root / name
    partial.mkdir()
    (partial / "file").write_text("part of a dataset")
    return partial


def names_in(directory):
    return {path.name for path in directory.iterdir()}


def report_disk(monkeypatch, *, free_bytes=PLENTY_BYTES, free_inodes=PLENTY_INODES):
    """Let every disk report so much room, in blocks of one byte."""
    disk = SimpleNamespace(
        f_bavail=free_bytes,
        f_frsize=1,
        f_favail=free_inodes,
        f_files=PLENTY_INODES,
    )
    monkeypatch.setattr(os, "statvfs", lambda _: disk)


def test_copies_the_dataset(source, local, root):
    staged = stage(source, local)
    assert content(staged.directory) == content(source)
    assert staged.directory == root / cache_name(source)


def test_measures_copy_and_reads(source, local):
    staged = stage(source, local)
    assert staged.copied is not None
    assert staged.source_s_per_sample is not None
    assert staged.local_s_per_sample is not None


def test_copy_is_private(source, local, root):
    staged = stage(source, local)
    assert permissions_of(root) == 0o700
    assert permissions_of(staged.directory) == 0o700


def test_reuses_an_intact_copy(source, local):
    before = modified_ns(stage(source, local).directory)
    again = stage(source, local)
    assert again.copied is None
    assert again.break_even_epochs is None
    assert modified_ns(again.directory) == before


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        pytest.param("train-tokens-00001.npy", cut_last_token, id="tokens too short"),
        pytest.param(
            "train-tokens-00001.npy", overwrite_with_text, id="tokens without header"
        ),
        pytest.param("validation-offsets-00000.npy", Path.unlink, id="no offsets"),
        pytest.param("manifest.json", write_empty_table, id="manifest without keys"),
        pytest.param("manifest.json", change_manifest, id="manifest with another hash"),
        pytest.param("tokenizer.json", write_empty_table, id="another tokenizer"),
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


def test_rejects_link_as_user_directory(source, local, root, tmp_path):
    target = tmp_path / "target"
    target.mkdir()
    target.chmod(0o755)
    root.rmdir()
    root.symlink_to(target)
    with pytest.raises(BadConfig, match="is not a directory that you own"):
        stage(source, local)
    assert list(target.iterdir()) == []
    assert permissions_of(target) == 0o755


def test_rejects_file_as_user_directory(source, local, root):
    root.rmdir()
    root.touch()
    with pytest.raises(BadConfig, match="is not a directory that you own"):
        stage(source, local)


def test_rejects_directory_of_another_user(source, local, root):
    if os.geteuid() != 0:
        pytest.skip("only root may give a directory away")
    another_user = 12345
    os.chown(root, another_user, another_user)
    with pytest.raises(BadConfig, match="is not a directory that you own"):
        stage(source, local)


def test_rejects_missing_local_disk(source, local):
    local.rmdir()
    with pytest.raises(BadConfig, match="not found"):
        stage(source, local)


@pytest.fixture
def damaged_copy(source, local):
    """Published copy that staging has to replace."""
    directory = stage(source, local).directory
    (directory / "manifest.json").unlink()
    return directory


def test_clears_partial_copies_of_killed_processes(source, local, root, damaged_copy):
    own = damaged_copy.name
    leave_partial(root, f".partial-{own}-00000001")
    leave_partial(root, f".partial-{OTHER_DATASET}-00000002")
    stage(source, local)
    assert names_in(root) == {own, f"{own}.lock", f"{OTHER_DATASET}.lock"}


def test_keeps_partial_copy_whose_lock_is_held(source, local, root, damaged_copy):
    own = damaged_copy.name
    partial = leave_partial(root, f".partial-{OTHER_DATASET}-00000003")
    lock = root / f"{OTHER_DATASET}.lock"
    with hold_lock(lock):
        stage(source, local)
    assert names_in(root) == {own, f"{own}.lock", lock.name, partial.name}
    assert names_in(partial) == {"file"}


def test_keeps_directories_that_are_no_partial_copies(
    source, local, root, damaged_copy
):
    own = damaged_copy.name
    kept_names = {".partial-of-somebody", f".partial-{OTHER_DATASET}-short", "another"}
    for name in kept_names:
        leave_partial(root, name)
    stage(source, local)
    assert names_in(root) == {own, f"{own}.lock", *kept_names}
    for name in kept_names:
        assert names_in(root / name) == {"file"}


def test_rejects_disk_with_too_little_room(source, local, monkeypatch):
    report_disk(monkeypatch, free_bytes=SPARE_BYTES)
    message = "64 MiB free; the dataset requires 1 MiB and 64 MiB to spare"
    with pytest.raises(BadConfig, match=message) as raised:
        stage(source, local)
    assert raised.value.next_step.startswith("Free 1 MiB there")
    assert list(local.rglob(".partial*")) == []


def test_rejects_disk_with_too_few_inodes(source, local, monkeypatch):
    free_inodes = 3
    report_disk(monkeypatch, free_inodes=free_inodes)
    message = f"has inodes for 3 more files; the dataset has {SOURCE_FILES}"
    with pytest.raises(BadConfig, match=message) as raised:
        stage(source, local)
    missing_inodes = SOURCE_FILES + SPARE_INODES - free_inodes
    assert raised.value.next_step.startswith(f"Remove {missing_inodes} files")
    assert list(local.rglob(".partial*")) == []


@pytest.mark.parametrize(
    ("error_number", "message", "next_step"),
    [
        pytest.param(
            errno.ENOSPC,
            "MiB free; the dataset requires 1 MiB",
            # The disk reports room after the copy failed.
            "There is space again",
            id="disk full",
        ),
        pytest.param(
            errno.EDQUOT,
            r"the dataset \(1 MiB\) exceeds your quota",
            "Remove files",
            id="quota",
        ),
        pytest.param(
            errno.EROFS,
            "cannot write to .*local: Read-only file system",
            "Free disk space, check",
            id="read-only",
        ),
    ],
)
def test_explains_write_error(
    source, local, monkeypatch, error_number, message, next_step
):
    report_disk(monkeypatch)
    error = OSError(error_number, os.strerror(error_number))
    monkeypatch.setattr(staging, "copy_files", Mock(side_effect=error))
    with pytest.raises(BadConfig, match=message) as raised:
        stage(source, local)
    assert raised.value.next_step.startswith(next_step)
    assert list(local.rglob(".partial*")) == []


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(cut_last_token, id="too short, noticed before the copy"),
        pytest.param(change_one_token, id="another hash, noticed while copying"),
    ],
)
def test_every_rank_reports_a_damaged_source(source, local, damage):
    name = "train-tokens-00001.npy"
    damage(source / name)
    for _ in range(2):  # two ranks, one after the other
        with pytest.raises(BadConfig, match=rf"source/{name}") as raised:
            stage(source, local)
        assert f"autotune data verify {source}" in raised.value.next_step
        assert list(local.rglob("*.npy")) == []


@pytest.mark.parametrize(
    ("source_s_per_sample", "epochs"),
    [
        # 10 ms per sample are saved: 10 s per epoch, half of the time of the copy.
        pytest.param(0.011, pytest.approx(2.0), id="source is slower"),
        pytest.param(0.001, None, id="source is as fast"),
    ],
)
def test_break_even_is_copy_time_over_saved_time(source_s_per_sample, epochs):
    staged = Staged(
        directory=Path("unused"),
        dataset_hash="unused",
        samples=1000,
        source_s_per_sample=source_s_per_sample,
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

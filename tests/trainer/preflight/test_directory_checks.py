"""Room on the disk of the run directory, and the locks of its file system."""

import errno
import shutil
from types import SimpleNamespace

import pytest

from tests.trainer.tiny_models import config_of
from trainer.formats.errors import BadConfig
from trainer.formats.events import EventRow
from trainer.preflight.directory_checks import check_directory, check_room
from trainer.record.writer import RunWriter
from trainer.runtime.ranks import join_ranks

CONFIG = config_of()
SINGLE_RANK = join_ranks(CONFIG, environment={})
MIB = 2**20


@pytest.fixture
def free_150_mib(monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=150 * MIB))


@pytest.mark.usefixtures("free_150_mib")
@pytest.mark.parametrize(
    ("checkpoint_mib", "existing_checkpoints", "keep_last"),
    [
        pytest.param(75, 0, 1, id="the kept one and the next one"),
        pytest.param(150, 1, 1, id="the next one of a resumed run"),
        pytest.param(50, 0, 2, id="two kept ones and the next one"),
    ],
)
def test_accepts_enough_room(tmp_path, checkpoint_mib, existing_checkpoints, keep_last):
    warnings = check_room(
        tmp_path,
        checkpoint_mib * MIB,
        SINGLE_RANK,
        existing_checkpoints=existing_checkpoints,
        keep_last=keep_last,
    )
    assert warnings == []


@pytest.mark.usefixtures("free_150_mib")
def test_new_run_requires_room_for_two_checkpoints(tmp_path):
    with pytest.raises(
        BadConfig, match="has 150 MiB free; 2 checkpoints require 152 MiB"
    ) as raised:
        check_room(tmp_path, 76 * MIB, SINGLE_RANK, existing_checkpoints=0)
    assert "train.checkpoint.enabled=false" in raised.value.next_step


@pytest.mark.usefixtures("free_150_mib")
@pytest.mark.parametrize("existing_checkpoints", [1, 2, 5])
def test_resumed_run_without_room_is_warned(tmp_path, existing_checkpoints):
    (warning,) = check_room(
        tmp_path,
        151 * MIB,
        SINGLE_RANK,
        existing_checkpoints=existing_checkpoints,
    )
    assert "the next save will fail" in warning.next_step


@pytest.mark.usefixtures("free_150_mib")
def test_warns_if_not_all_checkpoints_fit(tmp_path):
    (warning,) = check_room(
        tmp_path, 51 * MIB, SINGLE_RANK, existing_checkpoints=0, keep_last=2
    )
    assert (
        "has 150 MiB free; keeping 2 checkpoints while writing the next requires"
        " 153 MiB" in warning.message
    )
    assert "keep_last" in warning.next_step


def _check_run_directory(writer: RunWriter) -> list[EventRow]:
    """Check the directory of a new run, whose checkpoints fit on any disk."""
    return check_directory(
        writer,
        CONFIG,
        checkpoint_bytes=1,
        existing_checkpoints=0,
        ranks=SINGLE_RANK,
    )


def test_warns_of_file_system_without_locks(tmp_path, monkeypatch):
    def no_locks(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    with monkeypatch.context() as patch:
        patch.setattr("trainer.formats.file_locks.fcntl.flock", no_locks)
        writer = RunWriter(tmp_path / "r")
    (warning,) = _check_run_directory(writer)
    assert "has no locks" in warning.message


def test_file_system_with_locks_has_no_warning(tmp_path):
    writer = RunWriter(tmp_path / "r")
    assert _check_run_directory(writer) == []

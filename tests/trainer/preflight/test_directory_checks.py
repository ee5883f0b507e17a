"""Room on the disk of the run directory, its visibility to all ranks, and its locks."""

import errno
import shutil
from types import SimpleNamespace

import pytest

from tests.trainer.oracles import config_of
from trainer.distributed.ranks import join_ranks
from trainer.errors import BadConfig
from trainer.health.events import EventRow
from trainer.preflight.directory_checks import (
    check_directory,
    check_room,
    check_shared,
)
from trainer.record.writer import RunWriter

CONFIG = config_of()
SINGLE_RANK = join_ranks(CONFIG, environment={})
MIB = 2**20
TOKEN_OF_RANK_0 = "0a0b"
"""Part of the name of the file by which rank 0 tests its directory."""


@pytest.fixture
def free_150_mib(monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=150 * MIB))


@pytest.mark.usefixtures("free_150_mib")
@pytest.mark.parametrize(
    ("checkpoint_mib", "existing_checkpoints", "keep_last"),
    [
        pytest.param(75, 0, 1, id="the kept and the next one"),
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


class SeveralRanks:
    """Several ranks, of which this process is rank 0 or the last one.

    Args:
        others_see: For each other rank by rank, whether it sees the file of rank 0.
        leads: True if this process is rank 0.
    """

    def __init__(self, others_see: list[bool], *, leads: bool = True) -> None:
        self.leads = leads
        self._others_miss = [float(not sees) for sees in others_see]

    def broadcast_object(self, token):
        return token if self.leads else TOKEN_OF_RANK_0

    def all_reduce_sum(self, *values):
        return list(values)

    def all_gather_float(self, value):
        if self.leads:
            return [value, *self._others_miss]
        return [*self._others_miss, value]


RANKS_THAT_MISS_THE_DIRECTORY = pytest.mark.parametrize(
    ("ranks", "named"),
    [
        pytest.param(SeveralRanks([False]), "rank 1", id="the other rank"),
        pytest.param(
            SeveralRanks([True, False, False]), "ranks 2, 3", id="two of four"
        ),
        # The temporary directory of the test has no file of another rank 0.
        pytest.param(SeveralRanks([True], leads=False), "rank 1", id="this rank"),
        pytest.param(
            SeveralRanks([False] * 6), "ranks 1, 2, 3, 4 and 2 more", id="many ranks"
        ),
    ],
)


@RANKS_THAT_MISS_THE_DIRECTORY
def test_rejects_directory_that_ranks_must_see(tmp_path, ranks, named):
    with pytest.raises(
        BadConfig, match=f"not found on {named}, but all ranks write"
    ) as raised:
        check_shared(tmp_path, ranks, needed=True)
    assert "--out" in raised.value.next_step
    assert list(tmp_path.iterdir()) == []


@RANKS_THAT_MISS_THE_DIRECTORY
def test_warns_of_directory_that_ranks_miss(tmp_path, ranks, named):
    (warning,) = check_shared(tmp_path, ranks, needed=False)
    assert (
        f"not found on {named}: they cannot record their exit in exit.json"
        in warning.message
    )
    assert "--out" in warning.next_step
    assert list(tmp_path.iterdir()) == []


def test_error_has_the_next_step_of_the_warning(tmp_path):
    ranks = SeveralRanks([False])
    (warning,) = check_shared(tmp_path, ranks, needed=False)
    with pytest.raises(BadConfig) as raised:
        check_shared(tmp_path, ranks, needed=True)
    assert raised.value.next_step == warning.next_step


@pytest.mark.parametrize("needed", [True, False])
@pytest.mark.parametrize(
    "ranks",
    [SINGLE_RANK, SeveralRanks([True, True])],
    ids=["one rank", "several ranks"],
)
def test_accepts_shared_directory(tmp_path, ranks, needed):
    assert check_shared(tmp_path, ranks, needed=needed) == []
    assert list(tmp_path.iterdir()) == []


def test_accepts_directory_with_the_file_of_rank_0(tmp_path):
    (tmp_path / f".seen-by-all-ranks.{TOKEN_OF_RANK_0}").touch()
    ranks = SeveralRanks([True], leads=False)
    assert check_shared(tmp_path, ranks, needed=True) == []


def _check_any_room(writer: RunWriter) -> list[EventRow]:
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
        patch.setattr("trainer.files.fcntl.flock", no_locks)
        writer = RunWriter(tmp_path / "r")
    (warning,) = _check_any_room(writer)
    assert "has no locks" in warning.message


def test_file_system_with_locks_has_no_warning(tmp_path):
    writer = RunWriter(tmp_path / "r")
    assert _check_any_room(writer) == []

import ctypes
import errno
import faulthandler
import os
import shutil
import signal
import time

import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autotune.corpus.bounded import ChildLimits, Extracted, Unread, run_bounded
from autotune.corpus.extract import extract_slices
from autotune.corpus.pieces import INDEX

WORK_RESULT = [Extracted(samples=3, piece=0, rejected=1), Unread(reason="bad magic")]


def raising(error):
    def work():
        raise error

    return work


def spinning():
    while True:
        pass


def crashing():
    faulthandler.disable()
    ctypes.string_at(0)


@pytest.mark.parametrize(
    ("work", "limits", "reason"),
    [
        (raising(ValueError("bad magic")), ChildLimits(), "bad magic"),
        (raising(KeyError()), ChildLimits(), "KeyError"),
        (raising(SystemExit(0)), ChildLimits(), "exited with status 1"),
        (raising(KeyboardInterrupt()), ChildLimits(), "exited with status 1"),
        (raising(ValueError("a\x1b[31m\nb" + "x" * 999)), ChildLimits(), "a?[31m?bxxx"),
        (
            lambda: bytearray(2**30),
            ChildLimits(added_bytes=2**28),
            "more than 256 MiB of memory",
        ),
        (lambda: time.sleep(60), ChildLimits(wall_s=0.3), "not finished after 0.3 s"),
        (spinning, ChildLimits(wall_s=0.3), "not finished after 0.3 s"),
        (crashing, ChildLimits(), f"signal {int(signal.SIGSEGV)}"),
        (lambda: os._exit(0), ChildLimits(), "did not reply"),
        (
            lambda: os.kill(os.getpid(), signal.SIGKILL),
            ChildLimits(),
            f"signal {int(signal.SIGKILL)}",
        ),
        (raising(OSError(errno.EIO, "broken disk")), ChildLimits(), "broken disk"),
    ],
    ids=[
        "error",
        "error without words",
        "exit",
        "interrupt",
        "control characters",
        "too much memory",
        "sleeping",
        "spinning",
        "segfault",
        "exit without reply",
        "killed",
        "broken disk",
    ],
)
def test_hostile_work_is_one_refusal(work, limits, reason):
    started_s = time.monotonic()
    outcome = run_bounded(work, limits)
    assert isinstance(outcome, Unread)
    assert reason in outcome.reason
    assert outcome.reason.isprintable()
    assert len(outcome.reason) <= 200
    assert outcome.killed == (f"signal {int(signal.SIGKILL)}" in outcome.reason)
    assert time.monotonic() - started_s < 20


def test_limits_the_output_of_a_child(tmp_path):
    path = tmp_path / "output"

    def flooding():
        with path.open("wb") as file:
            for _ in range(64):
                file.write(bytes(2**20))

    assert isinstance(run_bounded(flooding, ChildLimits(output_bytes=2**22)), Unread)
    assert path.stat().st_size <= 2**22


def test_full_disk_is_not_the_files_fault():
    # A full disk is not the fault of the file.
    for number in (errno.ENOSPC, errno.EDQUOT):
        with pytest.raises(OSError, match=os.strerror(number)) as caught:
            run_bounded(raising(OSError(number, os.strerror(number))), ChildLimits())
        assert caught.value.errno == number


def test_kills_what_the_child_started(tmp_path):
    pid_file = tmp_path / "pid"

    def forking():
        pid = os.fork()
        if pid == 0:
            time.sleep(60)
        pid_file.write_text(str(pid))
        return WORK_RESULT

    assert run_bounded(forking, ChildLimits()) == WORK_RESULT
    assert ended(int(pid_file.read_text()))


def ended(pid: int) -> bool:
    """Return whether a process is gone, or a zombie that waits to be reaped."""
    for _ in range(50):
        if (
            not psutil.pid_exists(pid)
            or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
        ):
            return True
        time.sleep(0.1)
    return False


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_mutated_program_is_at_worst_refused(first_program, tmp_path, data):
    original = first_program.read_bytes()
    mutated = bytearray(original)
    anywhere = st.integers(0, len(original) - 1)
    # Half of the changes hit the headers, where they do most.
    place = st.one_of(
        st.integers(0, 63),
        st.integers(len(original) - 2048, len(original) - 1),
        anywhere,
    )
    for position, value in data.draw(
        st.lists(st.tuples(place, st.integers(0, 255)), min_size=1, max_size=12)
    ):
        mutated[position] = value
    path = tmp_path / "mutated"
    pieces = tmp_path / "pieces"
    path.write_bytes(mutated[: data.draw(st.one_of(st.none(), anywhere))])
    shutil.rmtree(pieces, ignore_errors=True)
    pieces.mkdir()
    part = {"path": str(path), "begin": 0, "end": len(mutated)}
    request = {
        "kind": "elf",
        "slices": [part],
        "options": {},
        "directory": str(pieces),
        "piece": 0,
        "most": None,
    }
    outcome = run_bounded(
        lambda: extract_slices(request), ChildLimits(wall_s=20, added_bytes=2**29)
    )
    if not isinstance(outcome, Unread):
        (outcome,) = outcome
    if isinstance(outcome, Unread):
        assert outcome.reason.isprintable()
    else:
        assert (
            (pieces / "0000.index").stat().st_size
            == outcome.samples * INDEX.itemsize
            > 0
        )

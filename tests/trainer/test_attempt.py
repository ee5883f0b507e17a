import os
import signal
import subprocess
import sys
import time

import pytest

from trainer.attempt import Attempt, Standing, job_key
from trainer.errors import BadConfig

LEAD = """
import signal, sys
from pathlib import Path
from trainer.attempt import Attempt
with Attempt(Path(sys.argv[1])).leading(5):
    print("leading", flush=True)
    signal.pause()
"""


@pytest.fixture
def path(tmp_path):
    return tmp_path / "report.json"


@pytest.fixture
def leader(path):
    """A real process that leads until it is killed."""
    process = subprocess.Popen([sys.executable, "-c", LEAD, path], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"leading\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_nobody_has_begun_until_somebody_leads(path):
    assert Attempt(path).read().standing is Standing.NOT_BEGUN
    # Having looked is not having begun.
    assert Attempt(path).read().standing is Standing.NOT_BEGUN


def test_a_leader_is_at_work_and_then_done(path):
    with Attempt(path).leading(1):
        assert Attempt(path).read().standing is Standing.AT_WORK
    assert Attempt(path).read().standing is Standing.DONE


def test_an_error_is_told_with_its_next_step_however_long(path):
    message = "the disk “ä” is full " * 500
    with pytest.raises(BadConfig), Attempt(path).leading(1):
        raise BadConfig(message, next_step="Free some.")
    word = Attempt(path).read()
    assert (word.standing, word.message, word.next_step) == (Standing.FAILED, message, "Free some.")
    with Attempt(path).leading(1):
        pass
    assert Attempt(path).read().standing is Standing.DONE


def test_a_killed_leader_is_seen_as_dead_at_once(path, leader):
    assert Attempt(path).read().standing is Standing.AT_WORK
    leader.send_signal(signal.SIGKILL)
    leader.wait()
    assert Attempt(path).read().standing is Standing.DIED


def test_a_leader_that_could_write_nothing_is_seen_as_dead(path):
    path.write_bytes(b"\0" * 4096)
    assert Attempt(path).read().standing is Standing.DIED


def test_a_damaged_report_is_no_word(path):
    path.write_bytes(b'{"message": "hal')
    assert Attempt(path).read().standing is Standing.DIED
    path.write_bytes(b"[1]")
    assert Attempt(path).read().standing is Standing.DIED


def test_what_was_written_before_this_process_began_is_another_starts(path):
    with pytest.raises(BadConfig), Attempt(path).leading(1):
        raise BadConfig("of yesterday", next_step="")
    os.utime(path, (time.time() - 86400,) * 2)
    assert Attempt(path).read().standing is Standing.NOT_BEGUN


def test_a_second_leader_of_the_same_name_waits_and_gives_up(path, leader):
    with pytest.raises(BadConfig, match=r"at the same work for 0\.2 s"), Attempt(path).leading(0.2):
        pass


def test_a_link_is_not_followed(path, tmp_path):
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic links"):
        Attempt(path).read()
    assert not (tmp_path / "elsewhere").exists()


def test_jobs_and_their_restarts_have_different_keys():
    environments = [
        {},
        {"SLURM_JOB_ID": "1"},
        {"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "1"},
        {"SLURM_JOB_ID": "1", "SLURM_RESTART_COUNT": "1"},
        {"TORCHELASTIC_RUN_ID": "1"},
        {"TORCHELASTIC_RUN_ID": "1", "TORCHELASTIC_RESTART_COUNT": "1"},
        {"MASTER_PORT": "1"},
    ]
    assert len({job_key(environment) for environment in environments}) == len(environments)
    assert job_key({"MASTER_PORT": "1", "LOCAL_RANK": "0"}) == job_key({"MASTER_PORT": "1", "LOCAL_RANK": "3"})

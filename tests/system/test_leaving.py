"""Ranks that are lost after the last step, when the others only wait to leave: real torchrun, real gloo."""

import pytest

from tests.system.faults.jobs import Workplace
from trainer.record import read_exit

pytestmark = pytest.mark.system
SHORT = {"train.max_steps": 3, "train.warmup_steps": 1}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return Workplace(tmp_path_factory.mktemp("leaving"))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_dies_at_the_end_holds_up_nobody_and_the_run_is_finished(place, rank):
    job = place.job(2, SHORT)
    process = job.start([{"kind": "kill", "step": -1, "rank": rank}])
    job.end(process, within_s=60)
    assert process.returncode != 0
    assert f"error: rank {1 - rank}: after the last step, another rank is gone" in job.told()
    assert "next: none: the run is finished" in job.told()
    end = read_exit(job.directory)
    assert (end.exit_code, end.reason, end.steps) == (0, "finished", 3)


def test_a_rank_that_hangs_at_the_end_is_waited_for_no_longer_than_the_watch_allows(place):
    job = place.job(2, SHORT | {"train.parallel.timeout_s": 12})
    process = job.start([{"kind": "hang", "step": -1, "rank": 1}])
    job.end(process, within_s=60)  # the process group alone would wait for 72 s, and say nothing
    assert process.returncode != 0
    assert "train: nothing moved for 12 s after step 3" in job.told()
    assert (read_exit(job.directory).exit_code, read_exit(job.directory).reason) == (0, "finished")

"""Interruptions of a training, and effects of corrupt checkpoints and full disks.

An interruption starts a job, strikes, and checks that the job exits as it should. A job
that is started again afterwards resumes; ``tests.system.faults.train`` compares its end
with that of an undisturbed one.
"""

import os
import random
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from tests.system.faults.jobs import (
    END_S,
    LOCAL_DISK,
    PACE_S,
    STEPS,
    Job,
    Workplace,
    check_the_same,
)
from tests.system.faults.kills import fill_up, kill_tree, small_disk
from trainer.checkpoint.format import step_of
from trainer.checkpoint.stored_checkpoints import (
    list_checkpoints,
    newest_checkpoint,
    read_checkpoint,
)
from trainer.formats.errors import BadConfig
from trainer.formats.run_record import RunExit
from trainer.health.signals import SIGNALS
from trainer.health.watchdog import REQUEUE

Interruption = Callable[[Job, random.Random], bool]
"""Function that returns whether it struck: a kill at any moment may come too late."""

FEWEST_STEPS = 2
MOST_STEPS = 3
"""Steps of a start before it is struck: with a checkpoint every 2, so that there is one
to resume from."""
TIMEOUT_S = 8.0
EXITS_WITHIN_S = 45.0
NEEDED_S = 10.0
"""Time for a few slow steps, a save, and the exit."""
CHECKPOINTS_THAT_FIT = 3.5
"""Size of a small disk: two checkpoints are kept, and the next is written before one is
removed."""


def kill_all(job: Job, rng: random.Random) -> bool:
    """SIGKILL everything at a random moment.

    Half of the times it lies in the training, else anywhere from the start on.
    """
    startup_s = job.workplace.undisturbed(job.ranks).record().startup.total_s
    if rng.random() < 0.5:
        process = job.start_and_take(1)
        longest_s = STEPS * PACE_S
    else:
        process = job.start()
        longest_s = startup_s + 3
    deadline_s = time.monotonic() + rng.uniform(0, longest_s)
    while time.monotonic() < deadline_s and process.poll() is None:
        time.sleep(0.002)
    struck = process.poll() is None
    kill_tree(process)
    job.end(process)
    job.check_checkpoints()
    return struck


def signal_rank(job: Job, rng: random.Random) -> bool:
    rank_signal = rng.choice(SIGNALS)
    rank = rng.randrange(job.ranks)
    process = _start_and_take_few(job, rng)
    job.rank_processes(process)[rank].send_signal(rank_signal)
    _check_saved(job, process, f"{signal.Signals(rank_signal).name} on rank {rank};")
    return True


def end_torchrun(job: Job, rng: random.Random, end_signal: signal.Signals) -> bool:
    """SIGTERM to torchrun, which passes it on to every rank.

    Or SIGKILL to torchrun alone: ranks without it must not train on, and save before
    they exit.
    """
    process = _start_and_take_few(job, rng)
    process.send_signal(end_signal)
    _check_saved(job, process, r"SIGTERM on (rank \d+|\d+ ranks);")
    return True


signal_torchrun = partial(end_torchrun, end_signal=signal.SIGTERM)
kill_torchrun = partial(end_torchrun, end_signal=signal.SIGKILL)


def signal_twice(job: Job, rng: random.Random) -> bool:
    """Signal twice while a rank hangs, as the first has no effect.

    The signals go to that rank, or to all.
    """
    hung_rank = rng.randrange(job.ranks)
    steps = rng.randint(FEWEST_STEPS, MOST_STEPS)
    process = job.start_and_take(
        steps, [{"kind": "hang", "step": steps + 1, "rank": hung_rank}]
    )
    time.sleep(0.5)
    checkpoints_before = set(list_checkpoints(job.checkpoints))
    ranks = job.rank_processes(process)
    signalled = [ranks[hung_rank]] if rng.random() < 0.5 else list(ranks.values())
    for rank_process in signalled:
        rank_process.terminate()
    time.sleep(1.3)
    for rank_process in signalled:
        rank_process.terminate()
    _, alive = psutil.wait_procs(signalled, timeout=3)
    assert not alive, alive
    run_exit = job.leave(process, EXITS_WITHIN_S)
    assert (run_exit.exit_code, run_exit.requeue) == (REQUEUE, True)
    assert "second signal, SIGTERM: exited without saving" in run_exit.reason
    assert checkpoints_before <= set(list_checkpoints(job.checkpoints))
    job.check_checkpoints()
    return True


def hang(job: Job, rng: random.Random) -> bool:
    rank = rng.randrange(job.ranks)
    steps = rng.randint(FEWEST_STEPS, MOST_STEPS)
    settings = {"train.parallel.timeout_s": TIMEOUT_S}
    process = job.start_and_take(
        steps, [{"kind": "hang", "step": steps + 1, "rank": rank}], settings=settings
    )
    run_exit = job.leave(process, TIMEOUT_S + EXITS_WITHIN_S)
    assert (run_exit.exit_code, run_exit.requeue) == (REQUEUE, True)
    assert "hang_here" in (job.directory / f"rank-{rank:05d}.traceback.txt").read_text()
    return True


def fail_on_rank(
    job: Job, rng: random.Random, kind: str, code: int, reason: str
) -> bool:
    """Let one rank die, meet a bug, or lack something before all have joined.

    The exit of the run has the code and the reason.
    """
    early = kind == "no_local_disk"
    rank = rng.randrange(int(early), job.ranks)
    step = 0 if early else 1 + rng.randint(FEWEST_STEPS, MOST_STEPS)
    settings = {"train.data.stage_to": f"${LOCAL_DISK}"} if early else {}
    process = job.start([{"kind": kind, "step": step, "rank": rank}], settings=settings)
    run_exit = job.leave(process, EXITS_WITHIN_S if early else END_S)
    assert (run_exit.exit_code, run_exit.requeue) == (code, code == REQUEUE), run_exit
    # A rank that waits for a GPU may get torchrun's SIGTERM before NCCL reports the
    # lost connection.
    killed_by_torchrun = (
        kind == "kill"
        and job.settings.get("train.device") == "cuda"
        and "killed before the step" in run_exit.reason
    )
    assert killed_by_torchrun or reason.format(rank=rank) in run_exit.reason, run_exit
    if kind == "raise":
        traceback_file = job.directory / f"rank-{rank:05d}.traceback.txt"
        assert "raise_here" in traceback_file.read_text()
    return True


kill_rank = partial(
    fail_on_rank, kind="kill", code=REQUEUE, reason="lost connection to another rank"
)
raise_on_rank = partial(
    fail_on_rank, kind="raise", code=70, reason="ValueError: broken on purpose"
)
fail_before_it_begins = partial(
    fail_on_rank,
    kind="no_local_disk",
    code=BadConfig.exit_code,
    reason="rank {rank}: train.data.stage_to = ",
)


def damage(job: Job, rng: random.Random) -> bool:
    """SIGKILL everything, and cut one file of the newest checkpoint short.

    The next start resumes from the checkpoint before.
    """
    process = job.start_and_take(rng.randint(FEWEST_STEPS, MOST_STEPS))
    job.wait_until(process, lambda: len(list_checkpoints(job.checkpoints)) > 1)
    kill_tree(process)
    job.end(process)
    newest, older = list_checkpoints(job.checkpoints)[:2]
    file = rng.choice(sorted(newest.iterdir()))
    os.truncate(file, rng.randrange(file.stat().st_size))
    job.corrupt.append((newest.name, older.name))
    return True


def run_out_of_time(job: Job, rng: random.Random) -> bool:
    """``train.stop_after_s`` ends before the training does."""
    startup_s = job.workplace.undisturbed(job.ranks).record().startup.total_s
    stop_after_s = round(2 * startup_s + NEEDED_S + rng.uniform(1, 4), 1)
    # Steps alone take as long, however fast it starts.
    process = job.start(
        pace_s=stop_after_s / STEPS, settings={"train.stop_after_s": stop_after_s}
    )
    run_exit = _check_saved(job, process, ".*train.stop_after_s")
    if job.record().startup.total_s > stop_after_s - NEEDED_S:
        return False  # the machine was so busy that starting took all the time
    assert run_exit.seconds < stop_after_s, run_exit
    return True


def _start_and_take_few(job: Job, rng: random.Random) -> "subprocess.Popen[bytes]":
    """Start, and wait for a few steps and a part of the next."""
    process = job.start_and_take(rng.randint(FEWEST_STEPS, MOST_STEPS))
    time.sleep(rng.uniform(0, 2 * PACE_S))
    return process


def _check_saved(job: Job, process: "subprocess.Popen[bytes]", reason: str) -> RunExit:
    """Check that a job exits for this reason, and that its last step was saved."""
    run_exit = job.leave(process)
    assert re.match(reason, run_exit.reason), run_exit
    assert (run_exit.exit_code, run_exit.requeue) == (REQUEUE, True)
    newest = list_checkpoints(job.checkpoints)[0]
    assert run_exit.checkpoint == newest.name
    assert run_exit.steps == step_of(newest.name) == job.record().steps[-1].step
    assert job.events()[-1].kind == "stopped"
    job.check_checkpoints()
    return run_exit


def truncate(workplace: Workplace, points: int, seed: int) -> dict[str, Any]:
    """Cut the newest checkpoint short at many positions, in all of its files.

    Each time the checkpoint before is used.
    """
    checkpoints = Path(
        shutil.copytree(
            workplace.undisturbed().checkpoints, workplace.directory / "truncated"
        )
    )
    newest, before = list_checkpoints(checkpoints)[:2]
    rng = random.Random(seed)
    sizes = {file: file.stat().st_size for file in sorted(newest.iterdir())}
    cuts = []
    for file, size_bytes in sizes.items():
        cuts += [(file, 0), (file, 1), (file, size_bytes - 1)]
    other_files = [rng.choice(list(sizes)) for _ in range(points - len(cuts))]
    cuts += [(file, rng.randrange(sizes[file])) for file in other_files]
    for file, cut_bytes in cuts:
        content = file.read_bytes()
        os.truncate(file, cut_bytes)
        _check_passed_over(checkpoints, newest, before)
        file.write_bytes(content)
    for file in sizes:
        hidden = file.rename(file.with_name(f".{file.name}"))
        _check_passed_over(checkpoints, newest, before)
        hidden.rename(file)
    read_checkpoint(newest)
    shutil.rmtree(checkpoints)
    return {"faults": len(cuts), "runs": 0}


def _check_passed_over(checkpoints: Path, newest: Path, before: Path) -> None:
    used, corrupt = newest_checkpoint(checkpoints)
    assert [checkpoint.path for checkpoint in corrupt] == [newest]
    assert used.path == before


def fill(workplace: Workplace, *, points: int, seed: int) -> dict[str, Any]:
    """Fill the disk of the checkpoints while training, and free it again; needs root.

    In turn, rank 0 writes alone, all ranks write a share, and the record lies on that
    disk too and must wait. A disk that does not hold two checkpoints is rejected before
    the first step.
    """
    for point in range(points):
        settings: dict[str, object] = {}
        if point % 3 == 1:
            settings["train.parallel.strategy"] = "zero1"
        expected = workplace.undisturbed(2, settings)
        job = workplace.job(2, settings | {"train.checkpoint.interval_steps": 4})
        directory = job.directory if point % 3 == 2 else job.checkpoints
        with small_disk(
            directory, round(CHECKPOINTS_THAT_FIT * _checkpoint_bytes(expected))
        ) as disk:
            _fill_and_free(job, disk)
            check_the_same(job, expected)
    job = workplace.job(ranks=1)
    with small_disk(
        job.directory, round(1.5 * _checkpoint_bytes(workplace.undisturbed()))
    ):
        run_exit = job.leave(job.start())
        assert run_exit.exit_code == BadConfig.exit_code
        assert "2 checkpoints require" in run_exit.reason
        assert job.steps_written() == 0
    return {"faults": points + 1, "runs": points + 1}


def _fill_and_free(job: Job, disk: Path) -> None:
    process = job.start(pace_s=0.08)
    job.wait_until(process, lambda: _count_events(job, "saved") >= 2)
    filler = disk / "filler"
    fill_up(filler)
    job.wait_until(
        process,
        lambda: "error: cannot save step" in job.log.read_text(errors="replace"),
    )
    newest = list_checkpoints(job.checkpoints)[0]
    read_checkpoint(newest)
    filler.unlink()
    saved = _count_events(job, "saved")
    job.wait_until(process, lambda: _count_events(job, "saved") > saved)
    job.end(process)
    assert process.returncode == 0, job.told()
    failure = next(event for event in job.events() if event.kind == "save_failed")
    assert failure.level == "error"
    assert re.search(
        "No space left on device|could not write its file", failure.message
    )
    assert f"the newest checkpoint is still {newest.name}" in failure.message
    job.check_checkpoints()


def _count_events(job: Job, kind: str) -> int:
    return sum(event.kind == kind for event in job.events())


def _checkpoint_bytes(job: Job) -> int:
    return sum(
        file.stat().st_size for file in list_checkpoints(job.checkpoints)[0].iterdir()
    )

"""Ways to end a training before its end, and what corrupt checkpoints and full disks do
to it.

An interruption starts a job, strikes, and sees that it left as it should.

A job that is started again afterwards goes on; what it comes to in the end,
``tests.system.faults.train`` compares.
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
from trainer.checkpoint.format import (
    list_checkpoints,
    newest_checkpoint,
    read_checkpoint,
    step_of,
)
from trainer.errors import BadConfig
from trainer.health.watchdog import REQUEUE, SIGNALS
from trainer.record.run_record import RunExit

Interruption = Callable[[Job, random.Random], bool]
"""Returns whether it struck: a kill at any moment may come too late."""

FEWEST_STEPS, MOST_STEPS = 2, 3
"""A start is struck after so many: with a checkpoint every 2, so that there is
something to go on from."""
TIMEOUT_S = 8.0
LEAVES_WITHIN_S = 45.0
NEEDED_S = 10.0
"""For a few slow steps, a save, and leaving."""
CHECKPOINTS_THAT_FIT = 3.5
"""Two are kept, and the next is written before one is removed."""


def kill_all(job: Job, rng: random.Random) -> bool:
    """SIGKILL everything, half of the times during training, else at any moment from
    the start on."""
    startup_s = job.place.undisturbed(job.ranks).record().startup.total_s
    if rng.random() < 0.5:
        process, longest_s = job.start_and_take(1), STEPS * PACE_S
    else:
        process, longest_s = job.start(), startup_s + 3
    deadline_s = time.monotonic() + rng.uniform(0, longest_s)
    while time.monotonic() < deadline_s and process.poll() is None:
        time.sleep(0.002)
    struck = process.poll() is None
    kill_tree(process)
    job.end(process)
    job.check_checkpoints()
    return struck


def signal_rank(job: Job, rng: random.Random) -> bool:
    number, rank = rng.choice(SIGNALS), rng.randrange(job.ranks)
    process = _started(job, rng)
    job.rank_processes(process)[rank].send_signal(number)
    _check_saved(job, process, f"{signal.Signals(number).name} on rank {rank};")
    return True


def end_torchrun(job: Job, rng: random.Random, number: signal.Signals) -> bool:
    """SIGTERM to torchrun, which passes it on to every rank.

    Or SIGKILL to torchrun alone: ranks that nobody waits for any more must not train
    on, and save before they leave.
    """
    process = _started(job, rng)
    process.send_signal(number)
    _check_saved(job, process, r"SIGTERM on (rank \d+|\d+ ranks);")
    return True


signal_torchrun, kill_torchrun = (
    partial(end_torchrun, number=number) for number in (signal.SIGTERM, signal.SIGKILL)
)


def signal_twice(job: Job, rng: random.Random) -> bool:
    """A signal while a rank hangs, and another one, as nothing comes of it; to that
    rank, or to all."""
    hung, steps = rng.randrange(job.ranks), rng.randint(FEWEST_STEPS, MOST_STEPS)
    process = job.start_and_take(
        steps, [{"kind": "hang", "step": steps + 1, "rank": hung}]
    )
    time.sleep(0.5)
    there = set(list_checkpoints(job.checkpoints))
    ranks = job.rank_processes(process)
    signalled = [ranks[hung]] if rng.random() < 0.5 else list(ranks.values())
    for one in signalled:
        one.terminate()
    time.sleep(1.3)
    for one in signalled:
        one.terminate()
    _, alive = psutil.wait_procs(signalled, timeout=3)
    assert not alive, alive
    left = job.leave(process, LEAVES_WITHIN_S)
    assert (left.exit_code, left.requeue) == (REQUEUE, True)
    assert "second signal, SIGTERM: exited without saving" in left.reason
    assert there <= set(list_checkpoints(job.checkpoints))
    job.check_checkpoints()
    return True


def hang(job: Job, rng: random.Random) -> bool:
    rank, steps = rng.randrange(job.ranks), rng.randint(FEWEST_STEPS, MOST_STEPS)
    settings = {"train.parallel.timeout_s": TIMEOUT_S}
    process = job.start_and_take(
        steps, [{"kind": "hang", "step": steps + 1, "rank": rank}], settings=settings
    )
    left = job.leave(process, TIMEOUT_S + LEAVES_WITHIN_S)
    assert (left.exit_code, left.requeue) == (REQUEUE, True)
    assert "hang_here" in (job.directory / f"rank-{rank:05d}.traceback.txt").read_text()
    return True


def fail_on_rank(
    job: Job, rng: random.Random, kind: str, code: int, reason: str
) -> bool:
    """One rank dies, comes upon a bug, or lacks something before all have met: the run
    says with what and why."""
    early = kind == "no_local_disk"
    rank = rng.randrange(int(early), job.ranks)
    step = 0 if early else 1 + rng.randint(FEWEST_STEPS, MOST_STEPS)
    settings = {"train.data.stage_to": f"${LOCAL_DISK}"} if early else {}
    process = job.start([{"kind": kind, "step": step, "rank": rank}], settings=settings)
    left = job.leave(process, LEAVES_WITHIN_S if early else END_S)
    assert (left.exit_code, left.requeue) == (code, code == REQUEUE), left
    # A rank that waits for a GPU may get torchrun's SIGTERM before NCCL reports the
    # lost connection.
    ended = (
        kind == "kill"
        and job.settings.get("train.device") == "cuda"
        and "killed before the step" in left.reason
    )
    assert ended or reason.format(rank=rank) in left.reason, left
    if kind == "raise":
        assert (
            "raise_here"
            in (job.directory / f"rank-{rank:05d}.traceback.txt").read_text()
        )
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
    """SIGKILL everything, and cut one file of the newest checkpoint short: a start goes
    on from the one before."""
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
    startup_s = job.place.undisturbed(job.ranks).record().startup.total_s
    stop_after_s = round(2 * startup_s + NEEDED_S + rng.uniform(1, 4), 1)
    # Steps alone take as long, however fast it starts.
    process = job.start(
        pace_s=stop_after_s / STEPS, settings={"train.stop_after_s": stop_after_s}
    )
    left = _check_saved(job, process, ".*train.stop_after_s")
    if job.record().startup.total_s > stop_after_s - NEEDED_S:
        return False  # the machine was so busy that starting took all the time
    assert left.seconds < stop_after_s, left
    return True


def _started(job: Job, rng: random.Random) -> "subprocess.Popen[bytes]":
    """A start that has taken a few steps, and is somewhere in the next."""
    process = job.start_and_take(rng.randint(FEWEST_STEPS, MOST_STEPS))
    time.sleep(rng.uniform(0, 2 * PACE_S))
    return process


def _check_saved(job: Job, process: "subprocess.Popen[bytes]", reason: str) -> RunExit:
    """That it leaves for this reason and nothing is lost: what was saved is the last
    step of the record."""
    left = job.leave(process)
    assert re.match(reason, left.reason), left
    assert (left.exit_code, left.requeue) == (REQUEUE, True)
    newest = list_checkpoints(job.checkpoints)[0]
    assert left.checkpoint == newest.name
    assert left.steps == step_of(newest.name) == job.record().steps[-1].step
    assert job.events()[-1].kind == "stopped"
    job.check_checkpoints()
    return left


def truncate(place: Workplace, points: int, seed: int) -> dict[str, Any]:
    """Cut the newest checkpoint short at so many places, over all of its files; each
    time the one before is used."""
    checkpoints = Path(
        shutil.copytree(place.undisturbed().checkpoints, place.place / "truncated")
    )
    newest, before = list_checkpoints(checkpoints)[:2]
    rng = random.Random(seed)
    sizes = {file: file.stat().st_size for file in sorted(newest.iterdir())}
    cuts = [(file, size) for file, whole in sizes.items() for size in (0, 1, whole - 1)]
    others = [rng.choice(list(sizes)) for _ in range(points - len(cuts))]
    cuts += [(file, rng.randrange(sizes[file])) for file in others]
    for file, size in cuts:
        content = file.read_bytes()
        os.truncate(file, size)
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
    found, corrupt = newest_checkpoint(checkpoints)
    assert [path for path, _ in corrupt] == [newest]
    assert found[0] == before


def fill(place: Workplace, *, points: int, seed: int) -> dict[str, Any]:
    """Fill the disk that checkpoints go to while training, and free it again; needs
    root.

    In turn as rank 0 writes alone, as all ranks write a share, and as the record lies
    on that disk, too, and must wait. A disk that does not hold two checkpoints is
    refused before the first step.
    """
    for point in range(points):
        settings: dict[str, object] = (
            {"train.parallel.strategy": "zero1"} if point % 3 == 1 else {}
        )
        expected = place.undisturbed(2, settings)
        job = place.job(2, settings | {"train.checkpoint.interval_steps": 4})
        directory = job.directory if point % 3 == 2 else job.checkpoints
        with small_disk(
            directory, round(CHECKPOINTS_THAT_FIT * _checkpoint_bytes(expected))
        ) as disk:
            _fill_and_free(job, disk)
            check_the_same(job, expected)
    job = place.job(ranks=1)
    with small_disk(job.directory, round(1.5 * _checkpoint_bytes(place.undisturbed()))):
        left = job.leave(job.start())
        assert left.exit_code == BadConfig.exit_code
        assert "2 checkpoints require" in left.reason
        assert job.steps_written() == 0
    return {"faults": points + 1, "runs": points + 1}


def _fill_and_free(job: Job, disk: Path) -> None:
    process = job.start(pace_s=0.08)
    job.wait_until(process, lambda: _count(job, "saved") >= 2)
    filler = disk / "filler"
    fill_up(filler)
    job.wait_until(
        process,
        lambda: "error: cannot save step" in job.log.read_text(errors="replace"),
    )
    newest = list_checkpoints(job.checkpoints)[0]
    read_checkpoint(newest)
    filler.unlink()
    saved = _count(job, "saved")
    job.wait_until(process, lambda: _count(job, "saved") > saved)
    job.end(process)
    assert process.returncode == 0, job.told()
    failed = next(event for event in job.events() if event.kind == "save_failed")
    assert failed.level == "error"
    assert (
        "No space left on device" in failed.message
        or "could not write its file" in failed.message
    )
    assert f"the newest checkpoint is still {newest.name}" in failed.message
    job.check_checkpoints()


def _count(job: Job, kind: str) -> int:
    return sum(event.kind == kind for event in job.events())


def _checkpoint_bytes(job: Job) -> int:
    return sum(
        file.stat().st_size for file in list_checkpoints(job.checkpoints)[0].iterdir()
    )

"""Checkpoints that were damaged on their disk, and disks that are full."""

import os
import random
import shutil
from pathlib import Path
from typing import Any

from tests.system.faults.jobs import Job, Workplace, check_the_same
from tests.system.faults.kills import fill_up, small_disk
from trainer.checkpoint import list_checkpoints, newest_checkpoint, read_checkpoint
from trainer.errors import BadConfig

CHECKPOINTS_THAT_FIT = 3.5
"""Two are kept, and the next is written before one is removed."""


def truncate(place: Workplace, points: int, seed: int) -> dict[str, Any]:
    """Cut the newest checkpoint short at so many places, over all of its files; each time the one before is used."""
    checkpoints = place.place / "truncated"
    shutil.copytree(place.undisturbed().checkpoints, checkpoints)
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
    found, damaged = newest_checkpoint(checkpoints)
    assert [path for path, _ in damaged] == [newest]
    assert found[0] == before


def fill(place: Workplace, points: int) -> None:
    """Fill the disk that checkpoints go to while training, and free it again; needs root.

    In turn as rank 0 writes alone, as all ranks write a share, and as the record lies on that disk, too, and must wait.
    """
    for point in range(points):
        settings: dict[str, object] = {"train.parallel.strategy": "zero1"} if point % 3 == 1 else {}
        expected = place.undisturbed(2, settings)
        job = place.job(2, settings | {"train.checkpoint.interval_steps": 4})
        directory = job.directory if point % 3 == 2 else job.checkpoints
        with small_disk(directory, round(CHECKPOINTS_THAT_FIT * _checkpoint_bytes(expected))) as disk:
            _fill_and_free(job, disk)
            check_the_same(job, expected)


def _fill_and_free(job: Job, disk: Path) -> None:
    process = job.start(pace_s=0.08)
    job.wait_until(process, lambda: _count(job, "saved") >= 2)
    filler = disk / "filler"
    fill_up(filler)
    job.wait_until(process, lambda: "error: could not save step" in job.log.read_text(errors="replace"))
    newest = list_checkpoints(job.checkpoints)[0]
    read_checkpoint(newest)
    filler.unlink()
    saved = _count(job, "saved")
    job.wait_until(process, lambda: _count(job, "saved") > saved)
    job.end(process)
    assert process.returncode == 0, job.told()
    failed = next(event for event in job.events() if event.kind == "save_failed")
    assert failed.level == "error"
    assert "No space left on device" in failed.message or "could not write its share" in failed.message
    assert f"the newest checkpoint is still {newest.name}" in failed.message
    job.check_checkpoints()


def refuse_a_small_disk(place: Workplace) -> None:
    """A disk that does not hold two checkpoints is refused before the first step; needs root."""
    job = place.job(ranks=1)
    with small_disk(job.directory, round(1.5 * _checkpoint_bytes(place.undisturbed()))):
        left = job.leave(job.start())
        assert left.exit_code == BadConfig.exit_code
        assert "2 checkpoints take" in left.reason
        assert job.steps_written() == 0


def _count(job: Job, kind: str) -> int:
    return sum(event.kind == kind for event in job.events())


def _checkpoint_bytes(job: Job) -> int:
    return sum(file.stat().st_size for file in list_checkpoints(job.checkpoints)[0].iterdir())

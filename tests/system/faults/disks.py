"""Checkpoints that were damaged on their disk, and disks that are full."""

import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.system.faults.jobs import Job, Workplace, check_the_same
from tests.system.faults.kills import mount_tmpfs, unmount
from trainer.checkpoint import list_checkpoints, newest_checkpoint, read_checkpoint
from trainer.errors import BadConfig
from trainer.record import read_exit

CHECKPOINTS_THAT_FIT = 3.5
"""Two are kept, and the next is written before one is removed."""


def truncate(place: Workplace, points: int, seed: int) -> dict[str, Any]:
    """Cut the newest checkpoint short at so many places, over all of its files; each time the one before is used."""
    whole = place.undisturbed()
    checkpoints = place.place / "truncated"
    shutil.copytree(whole.checkpoints, checkpoints)
    newest, before = list_checkpoints(checkpoints)[:2]
    rng = random.Random(seed)
    cuts = 0
    for file, size in _places(newest, points, rng):
        content = file.read_bytes()
        os.truncate(file, size)
        _check_passed_over(checkpoints, newest, before)
        file.write_bytes(content)
        cuts += 1
    for file in newest.iterdir():
        hidden = file.rename(file.with_name(f".{file.name}"))
        _check_passed_over(checkpoints, newest, before)
        hidden.rename(file)
    read_checkpoint(newest)
    shutil.rmtree(checkpoints)
    return {"faults": cuts, "runs": 0, "used_the_one_before": cuts}


def _places(checkpoint: Path, points: int, rng: random.Random) -> Iterator[tuple[Path, int]]:
    """Files, and how much is left of them: the edges of each first, then anything."""
    sizes = {file: file.stat().st_size for file in sorted(checkpoint.iterdir())}
    edges = [(file, size) for file, whole in sizes.items() for size in (0, 1, whole - 1)]
    yield from edges
    for _ in range(points - len(edges)):
        file = rng.choice(list(sizes))
        yield file, rng.randrange(sizes[file])


def _check_passed_over(checkpoints: Path, newest: Path, before: Path) -> None:
    found, damaged = newest_checkpoint(checkpoints)
    assert [path for path, _ in damaged] == [newest]
    assert found is not None
    assert found[0] == before


def fill(place: Workplace, strategy: str = "ddp", *, with_record: bool = False) -> dict[str, Any]:
    """Fill the disk that checkpoints go to while training, and free it again; needs root.

    Under ``zero1`` every rank writes a share; ``with_record`` the rows lie on the same disk, and must wait.
    """
    settings = {} if strategy == "ddp" else {"train.parallel.strategy": strategy}
    expected = place.undisturbed(2, settings)
    job = place.job(2, settings | {"train.checkpoint.interval_steps": 4})
    disk = job.directory if with_record else job.checkpoints
    job.directory.mkdir()
    mount_tmpfs(disk, round(CHECKPOINTS_THAT_FIT * _checkpoint_bytes(expected)))
    try:
        _fill_and_free(job, disk)
        check_the_same(job, expected)
    finally:
        unmount(disk)
    return {"faults": 1, "runs": 1, "bit_identical": 1}


def _fill_and_free(job: Job, disk: Path) -> None:
    process = job.start(pace_s=0.08)
    job.wait_until(process, lambda: _count(job, "saved") >= 2)
    filler = disk / "filler"
    _write_until_full(filler)
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


def refuse_a_small_disk(place: Workplace) -> dict[str, Any]:
    """A disk that does not hold two checkpoints is refused before the first step; needs root."""
    job = place.job(ranks=1)
    mount_tmpfs(job.directory, round(1.5 * _checkpoint_bytes(place.undisturbed())))
    try:
        job.end(job.start())
        left = read_exit(job.directory)
        assert left is not None
        assert left.exit_code == BadConfig.exit_code
        assert "2 checkpoints take" in left.reason
        assert job.steps_written() == 0
    finally:
        unmount(job.directory)
    return {"faults": 1, "runs": 1}


def _count(job: Job, kind: str) -> int:
    return sum(event.kind == kind for event in job.events())


def _checkpoint_bytes(job: Job) -> int:
    return sum(file.stat().st_size for file in list_checkpoints(job.checkpoints)[0].iterdir())


def _write_until_full(filler: Path) -> None:
    with filler.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        while True:
            file.write(bytes(2**16))

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.system.faults.corpora import content
from tests.system.faults.kills import may_mount, mount_tmpfs, start, unmount
from tests.system.faults.stage import kill_stage, make_dataset, partials, stage_command, wait_for_copy
from trainer.errors import BadConfig
from trainer.stage import stage

pytestmark = pytest.mark.system

needs_mount = pytest.mark.skipif(not may_mount(), reason="needs root to mount")


@pytest.fixture
def disk(tmp_path):
    place = tmp_path / "disk"

    def make(size_bytes):
        mount_tmpfs(place, size_bytes)
        return place

    yield make
    if place.is_mount():
        unmount(place)


def test_killed_at_any_moment_the_next_call_repairs_it(tmp_path):
    assert kill_stage(tmp_path, points=3, seed=1)["kills"] == 3


def test_interrupted_while_it_copies_it_removes_the_half_and_ends_with_130(tmp_path):
    source = make_dataset(tmp_path / "source", 48)
    # On a busy machine a copy may be done before it is seen.
    for attempt in range(5):
        local = tmp_path / f"local-{attempt}"
        local.mkdir()
        process = start(stage_command(source, local))
        wait_for_copy(local, process)
        process.send_signal(signal.SIGINT)
        if process.wait(60):
            break
    assert process.returncode == 130
    assert partials(local) == []
    assert list(local.rglob("*.npy")) == []


@needs_mount
def test_too_small_a_disk_is_told_before_the_copy_and_a_larger_one_is_used(tmp_path, disk):
    source = make_dataset(tmp_path / "source", 8)
    place = disk(4 * 2**20)
    small = subprocess.run(stage_command(source, place), capture_output=True, text=True, check=False)
    assert small.returncode == 3
    assert "has 4 MiB free, and the dataset takes 9 MiB" in small.stderr
    assert "next: Free 69 MiB there" in small.stderr
    assert list(place.rglob("*.npy")) == []
    mount_tmpfs(place, 200 * 2**20, remount=True)
    done = subprocess.run(stage_command(source, place), capture_output=True, text=True, check=True)
    told = json.loads(done.stdout)
    assert told["copied"]
    assert content(Path(told["directory"])) == content(source)


@needs_mount
def test_a_disk_that_somebody_fills_during_the_copy_is_told_alike_and_nothing_is_left(tmp_path, disk):
    source = make_dataset(tmp_path / "source", 16)
    place = disk(100 * 2**20)
    filler = place / "filler"

    def fill(done, total, note):
        if not filler.exists():
            with filler.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
                while True:
                    file.write(bytes(2**20))

    with pytest.raises(BadConfig, match=r"MiB free, and the dataset takes 17 MiB") as caught:
        stage(source, place, update=fill)
    assert caught.value.next_step.startswith("Free ")
    assert partials(place) == []
    assert list(place.rglob("*.npy")) == []
    filler.unlink()
    assert content(stage(source, place).directory) == content(source)


@needs_mount
def test_a_disk_that_killed_copies_filled_to_the_last_byte_is_cleared(tmp_path, disk):
    source = make_dataset(tmp_path / "source", 8)
    place = disk(100 * 2**20)
    root = place / f"autotune-{os.getuid()}"
    half = root / ".partial-0123456789abcdef-01234567"
    half.mkdir(parents=True)
    with pytest.raises(OSError, match="No space left"):
        (half / "train-tokens-00000.npy").write_bytes(bytes(101 * 2**20))
    assert content(stage(source, place).directory) == content(source)

import errno
import os
import subprocess
import sys

import pytest

from tests.conftest import write_dataset
from trainer import stage as place_module
from trainer.copying import DatasetFile
from trainer.dataset import read_manifest
from trainer.errors import BadConfig
from trainer.stage import Place, writing

HOLD = """
import fcntl, sys, time
lock = open(sys.argv[1], "ab")
fcntl.flock(lock, fcntl.LOCK_EX)
print("held", flush=True)
time.sleep(60)
"""
FILES = [DatasetFile(name="a", size_bytes=3 * 2**20, sha256=None)]


@pytest.fixture
def local(tmp_path):
    (tmp_path / "local").mkdir()
    return tmp_path / "local"


@pytest.fixture
def place(local, tmp_path):
    place = Place(local, read_manifest(write_dataset(tmp_path / "source", [[5] * 9] * 9)))
    place.prepare()
    return place


@pytest.fixture
def hold():
    """A function that has another process hold a lock."""
    processes = []

    def start(path):
        process = subprocess.Popen([sys.executable, "-c", HOLD, path], stdout=subprocess.PIPE)
        processes.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"

    yield start
    for process in processes:
        process.kill()
        process.wait()
        process.stdout.close()


def test_the_directory_is_named_by_user_and_content_and_private(place, local):
    assert place.root == local / f"autotune-{os.getuid()}"
    assert place.directory == place.root / place.manifest.dataset_hash[:16]
    assert place.root.stat().st_mode & 0o777 == 0o700


def test_a_directory_of_ones_own_that_others_may_read_is_closed(place):
    place.root.chmod(0o777)
    place.prepare()
    assert place.root.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("kind", ["link", "file"])
def test_what_is_not_a_directory_is_refused_and_not_touched(place, tmp_path, kind):
    place.root.rmdir()
    (tmp_path / "trap").mkdir(mode=0o755)
    if kind == "link":
        place.root.symlink_to(tmp_path / "trap")
    else:
        place.root.write_text("mine")
    with pytest.raises(BadConfig, match="is not a directory of yours"):
        place.prepare()
    assert list((tmp_path / "trap").iterdir()) == []
    assert (tmp_path / "trap").stat().st_mode & 0o777 == 0o755


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give a directory away")
def test_a_directory_of_another_user_is_refused(place):
    os.chown(place.root, 12345, 12345)
    with pytest.raises(BadConfig, match="is not a directory of yours"):
        place.prepare()


def test_a_disk_that_is_not_there_is_said(place, local):
    place.root.rmdir()
    local.rmdir()
    with pytest.raises(BadConfig, match="local is not a directory"):
        place.prepare()


def test_clearing_takes_what_killed_copies_left_and_nothing_else(place, hold):
    mine, free, busy = place.directory.name, "0123456789abcdef", "fedcba9876543210"
    kept = {
        f".partial-{busy}-00000003", ".partial-of-somebody", f".partial-{free}-short", "another", f"{busy}.lock",
    }  # fmt: skip
    for name in (f".partial-{mine}-00000001", f".partial-{free}-00000002", *kept - {f"{busy}.lock"}):
        (place.root / name).mkdir()
        (place.root / name / "file").write_text("x")
    hold(place.root / f"{busy}.lock")
    place.clear()
    assert {path.name for path in place.root.iterdir()} == kept | {f"{free}.lock"}


def test_a_damaged_copy_gives_its_room_back(place):
    place.directory.mkdir()
    (place.directory / "half").write_text("x")
    place.clear()
    assert list(place.root.iterdir()) == []


def test_a_lock_that_is_held_too_long_is_said_and_stays(place, hold):
    lock = place.root / f"{place.directory.name}.lock"
    hold(lock)
    with pytest.raises(BadConfig, match=r"another process has been copying .* for 0\.2 s"), place.locked(0.2):
        pass
    assert lock.exists()


def test_a_partial_copy_is_gone_after_an_error_and_stays_once_published(place):
    with pytest.raises(KeyboardInterrupt), place.partial() as partial:
        (partial / "half").write_text("x")
        raise KeyboardInterrupt
    assert list(place.root.iterdir()) == []
    with place.partial() as partial:
        (partial / "whole").write_text("x")
        assert partial.stat().st_mode & 0o777 == 0o700
        partial.rename(place.directory)
    assert [path.name for path in place.directory.iterdir()] == ["whole"]


def test_too_little_room_is_said_with_what_is_needed_there_and_missing(place, monkeypatch):
    place.check_room(FILES)
    monkeypatch.setattr(place_module, "SPARE_BYTES", 2**60)
    with pytest.raises(BadConfig, match=r"MiB free, and the dataset takes 3 MiB") as caught:
        place.check_room(FILES)
    assert caught.value.next_step.startswith("Free ")


def test_a_disk_that_fills_up_is_told_as_too_small(place):
    with pytest.raises(BadConfig, match=r"MiB free, and the dataset takes 3 MiB") as caught, place.filling(FILES):
        raise OSError(errno.ENOSPC, "No space left on device")
    # Whoever filled it is gone.
    assert caught.value.next_step.startswith("It was full for a while")


def test_a_quota_that_is_used_up_is_said_as_that(place):
    said = r"your quota in .* was used up, and the dataset takes 3 MiB"
    with pytest.raises(BadConfig, match=said), place.filling(FILES):
        raise OSError(errno.EDQUOT, "Disk quota exceeded")


def test_other_refusals_of_the_system_say_where(tmp_path):
    with pytest.raises(BadConfig, match=f"cannot write in {tmp_path}: Read-only file system"), writing(tmp_path):
        raise OSError(errno.EROFS, "Read-only file system")

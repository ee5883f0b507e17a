import json
import signal
import subprocess
import time

import psutil
import pytest

from autotune.process import start as start_child
from tests.system.faults.corpora import content, write_raw
from tests.system.faults.kills import may_mount, mount_tmpfs, unmount, until
from tests.system.faults.prepare import kill_prepare, kill_workers, prepare_command

pytestmark = pytest.mark.system


def test_killed_at_any_moment_it_goes_on_and_ends_byte_identical(tmp_path):
    assert kill_prepare(tmp_path, points=1, seed=1)["kills"] == 1


def test_whichever_of_its_processes_is_killed_the_bytes_are_the_same(tmp_path):
    assert kill_workers(tmp_path, points=1, seed=2, lines=6_000)["kills"] == 1


@pytest.mark.parametrize(("number", "code", "workers"), [(signal.SIGINT, 130, 2), (signal.SIGTERM, 143, 1)])
def test_asked_to_stop_it_stops_at_once_says_so_and_goes_on(tmp_path, number, code, workers):
    raw = write_raw(tmp_path / "raw", files=4, lines=8_000)
    command = prepare_command(raw, tmp_path / "data", workers)
    process = start_child(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    until(lambda: list(tmp_path.glob(".data.*/extract-samples/0*")), "extracting")
    children = psutil.Process(process.pid).children(recursive=True)
    asked_s = time.monotonic()
    process.send_signal(number)
    _, told = process.communicate(timeout=60)
    stopped_s = time.monotonic() - asked_s
    assert process.returncode == code
    assert "the same command goes on" in told
    assert "Traceback" not in told
    assert psutil.wait_procs(children, timeout=10)[1] == []
    assert stopped_s < 15
    assert not (tmp_path / "data").exists()
    # That the bytes are the same too is tested where it is killed.
    again = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(again.stdout)["samples"] > 0


@pytest.mark.skipif(not may_mount(), reason="needs root to mount")
@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.soak)])
def test_a_full_disk_is_said_plainly_and_loses_nothing(tmp_path, workers):
    raw = write_raw(tmp_path / "raw")
    expected = tmp_path / "whole"
    subprocess.run(prepare_command(raw, expected, 1), capture_output=True, check=True)
    disk = tmp_path / "disk"
    # Full at one stage after the other: the first is too small for anything, the last almost large enough.
    sizes_mib = (1, 5, 7, 9)
    mount_tmpfs(disk, sizes_mib[0] * 2**20)
    command = prepare_command(raw, disk / "data", workers)
    try:
        for number, size_mib in enumerate(sizes_mib):
            mount_tmpfs(disk, size_mib * 2**20, remount=True)
            full = subprocess.run(command, capture_output=True, text=True, check=False)
            if full.returncode == 0:
                assert number > 1, "nothing was ever full"
                break
            assert full.returncode == 3, full.stderr
            assert "no space left" in full.stderr
            assert "same command then goes on" in full.stderr
            assert "Traceback" not in full.stderr
            assert not (disk / "data").exists()
        mount_tmpfs(disk, 200 * 2**20, remount=True)
        subprocess.run(command, capture_output=True, check=True)
        assert content(disk / "data") == content(expected)
    finally:
        unmount(disk)

import json
import subprocess
from pathlib import Path

import pytest

from tests.system.faults.corpora import content
from tests.system.faults.kills import may_mount, mount_tmpfs, unmount
from tests.system.faults.stage import kill_stage, make_dataset, stage_command

pytestmark = pytest.mark.system


def test_killed_at_any_moment_the_next_call_repairs_it(tmp_path):
    assert kill_stage(tmp_path, points=3, seed=1)["kills"] == 3


@pytest.mark.skipif(not may_mount(), reason="needs root to mount")
def test_too_small_a_disk_is_told_before_the_copy_and_a_larger_one_is_used(tmp_path):
    source = make_dataset(tmp_path / "source", 8)
    disk = tmp_path / "disk"
    mount_tmpfs(disk, 4 * 2**20)
    try:
        small = subprocess.run(stage_command(source, disk), capture_output=True, text=True, check=False)
        assert small.returncode == 3
        assert (
            "MiB free, and the dataset takes 8 MiB" in small.stderr
            or "MiB free, and the dataset takes 9 MiB" in small.stderr
        )
        assert "Free " in small.stderr
        assert list(disk.rglob("*.npy")) == []
        mount_tmpfs(disk, 200 * 2**20, remount=True)
        done = subprocess.run(stage_command(source, disk), capture_output=True, text=True, check=True)
        told = json.loads(done.stdout)
        assert told["copied"]
        assert content(Path(told["path"])) == content(source)
    finally:
        unmount(disk)

import json
import os
import random
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from autotune.base.process import start_child
from tests.system.faults import corpora
from tests.system.faults.corpora import (
    content,
    partials,
    prepare_command,
    stage_command,
    write_raw,
)
from tests.system.faults.kills import (
    fill_up,
    may_mount,
    resize,
    small_disk,
    start,
    until,
)
from tests.system.faults.mutations import mutate, mutate_files
from tests.system.faults.tune import kill_tune
from trainer.errors import BadConfig
from trainer.staging.stage import stage

pytestmark = pytest.mark.system

needs_mount = pytest.mark.skipif(not may_mount(), reason="needs root to mount")


@pytest.mark.parametrize(
    ("kill", "lines"), [(corpora.kill_command, 4_000), (corpora.kill_processes, 6_000)]
)
def test_killed_preparation_ends_byte_identical(tmp_path, kill, lines):
    assert (
        corpora.kill_prepare(tmp_path, points=1, seed=1, kill=kill, lines=lines)[
            "kills"
        ]
        == 1
    )


@pytest.mark.parametrize(
    ("number", "code", "workers"), [(signal.SIGINT, 130, 2), (signal.SIGTERM, 143, 1)]
)
def test_interrupted_preparation_resumes(tmp_path, number, code, workers):
    raw = write_raw(tmp_path / "raw", files=4, lines=8_000)
    command = prepare_command(raw, tmp_path / "data", workers)
    process = start_child(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    until(lambda: list(tmp_path.glob(".data.*/extract-samples/0*")), "extracting")
    children = psutil.Process(process.pid).children(recursive=True)
    asked_s = time.monotonic()
    process.send_signal(number)
    _, told = process.communicate(timeout=60)
    stopped_s = time.monotonic() - asked_s
    assert process.returncode == code
    assert "run the same command again" in told
    assert "Traceback" not in told
    assert psutil.wait_procs(children, timeout=10)[1] == []
    assert stopped_s < 15
    assert not (tmp_path / "data").exists()
    # That the bytes are the same too is tested where it is killed.
    again = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(again.stdout)["samples"] > 0


@needs_mount
@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.soak)])
def test_preparation_resumes_after_a_full_disk(tmp_path, workers):
    raw, expected = write_raw(tmp_path / "raw"), tmp_path / "whole"
    subprocess.run(prepare_command(raw, expected, 1), capture_output=True, check=True)
    # Full at one stage after the other: the first is too small for anything, the last
    # almost large enough.
    sizes_mib = (1, 5, 7, 9)
    with small_disk(tmp_path / "disk", sizes_mib[0] * 2**20) as disk:
        command = prepare_command(raw, disk / "data", workers)
        for number, size_mib in enumerate(sizes_mib):
            resize(disk, size_mib * 2**20)
            full = subprocess.run(command, capture_output=True, text=True, check=False)
            if full.returncode == 0:
                assert number > 1, "nothing was ever full"
                break
            assert full.returncode == 3, full.stderr
            assert "no space left" in full.stderr
            assert "same command again to resume" in full.stderr
            assert "Traceback" not in full.stderr
            assert not (disk / "data").exists()
        resize(disk, 200 * 2**20)
        subprocess.run(command, capture_output=True, check=True)
        assert content(disk / "data") == content(expected)


def test_next_call_repairs_killed_staging(tmp_path):
    assert corpora.kill_stage(tmp_path, points=3, seed=1)["kills"] == 3


def test_interrupted_staging_removes_its_partial_copy(tmp_path):
    source = corpora.make_dataset(tmp_path / "source", 48)
    # On a busy machine a copy may be done before it is seen.
    for attempt in range(5):
        local = tmp_path / f"local-{attempt}"
        local.mkdir()
        process = start(stage_command(source, local))
        corpora.wait_for_copy(local, process)
        process.send_signal(signal.SIGINT)
        if process.wait(60):
            break
    assert process.returncode == 130
    assert partials(local) == []
    assert list(local.rglob("*.npy")) == []


@needs_mount
def test_a_disk_that_is_too_small_or_filled_during_the_copy_is_told_and_one_full_of_killed_copies_is_cleared(
    tmp_path,
):
    source = corpora.make_dataset(tmp_path / "source", 16)
    with small_disk(tmp_path / "disk", 4 * 2**20) as disk:
        small = subprocess.run(
            stage_command(source, disk), capture_output=True, text=True, check=False
        )
        assert small.returncode == 3
        assert "has 4 MiB free; the dataset requires 17 MiB" in small.stderr
        assert "next: Free 77 MiB there" in small.stderr
        assert list(disk.rglob("*.npy")) == []
        resize(disk, 100 * 2**20)
        filler = disk / "filler"
        with pytest.raises(
            BadConfig, match=r"MiB free; the dataset requires 17 MiB"
        ) as caught:
            stage(source, disk, update=lambda *_: filler.exists() or fill_up(filler))
        assert caught.value.next_step.startswith("Free ")
        assert partials(disk) == []
        assert list(disk.rglob("*.npy")) == []
        filler.unlink()
        half = disk / f"autotune-{os.getuid()}" / ".partial-0123456789abcdef-01234567"
        half.mkdir(parents=True)
        fill_up(half / "train-tokens-00000.npy")
        done = subprocess.run(
            stage_command(source, disk), capture_output=True, text=True, check=True
        )
        told = json.loads(done.stdout)
        assert told["copied"]
        assert content(Path(told["directory"])) == content(source)


def test_killed_tuning_decides_by_its_trial_log(tmp_path):
    found = kill_tune(tmp_path, points=1, seed=1)
    assert (found["faults"], found["runs"]) == (1, 1)
    assert found["trials_replayed"] == found["trials"] > 0
    assert found["files_read_while_it_ran"] > 0


@pytest.mark.parametrize("suffix", [".json", ".toml", ".jsonl", ".npy", ".txt"])
def test_mutation_depends_only_on_its_draws(suffix):
    content = b'{"a": [1, 2], "b": {"c": "d"}}\n'
    first, again = (
        [mutate(content, suffix, random.Random(seed)) for seed in range(40)]
        for _ in range(2)
    )
    assert first == again
    assert len(set(first)) > 20


def test_corrupt_files_never_end_in_a_traceback(tmp_path):
    found = mutate_files(tmp_path, points=300, seed=1)
    assert found["tracebacks"] == 0, found["first_tracebacks"]
    assert min(found["by_kind"].values()) > 0
    # Refused with a message; the rest is still of its format.
    assert found["by_exit_code"]["3"] > 50

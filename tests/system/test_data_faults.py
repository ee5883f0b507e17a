"""Preparing, staging and tuning survive kills, full disks and corrupt files."""

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
from trainer.formats.errors import BadConfig
from trainer.staging.stage import stage

pytestmark = pytest.mark.system

MIB = 2**20
needs_mount = pytest.mark.skipif(not may_mount(), reason="needs root to mount")


@pytest.mark.parametrize(
    ("kill", "lines"), [(corpora.kill_command, 4_000), (corpora.kill_processes, 6_000)]
)
def test_killed_preparation_ends_byte_identical(tmp_path, kill, lines):
    figures = corpora.kill_prepare(tmp_path, points=1, seed=1, kill=kill, lines=lines)
    assert figures["kills"] == 1


@pytest.mark.parametrize(
    ("stop_signal", "code", "workers"),
    [(signal.SIGINT, 130, 2), (signal.SIGTERM, 143, 1)],
)
def test_interrupted_preparation_resumes(tmp_path, stop_signal, code, workers):
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
    signalled_s = time.monotonic()
    process.send_signal(stop_signal)
    _, stderr = process.communicate(timeout=60)
    stopping_s = time.monotonic() - signalled_s
    assert process.returncode == code
    assert "run the same command again" in stderr
    assert "Traceback" not in stderr
    _, alive = psutil.wait_procs(children, timeout=10)
    assert alive == []
    assert stopping_s < 15
    assert not (tmp_path / "data").exists()
    # Tests of kills check that the bytes are the same too.
    resumed = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(resumed.stdout)["samples"] > 0


@needs_mount
@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.soak)])
def test_preparation_resumes_after_a_full_disk(tmp_path, workers):
    raw = write_raw(tmp_path / "raw")
    expected = tmp_path / "whole"
    subprocess.run(prepare_command(raw, expected, 1), capture_output=True, check=True)
    # Each size is full at a later stage: the first is too small for anything, the last
    # almost large enough.
    sizes_mib = (1, 5, 7, 9)
    with small_disk(tmp_path / "disk", sizes_mib[0] * MIB) as disk:
        command = prepare_command(raw, disk / "data", workers)
        for number, size_mib in enumerate(sizes_mib):
            resize(disk, size_mib * MIB)
            ended = subprocess.run(command, capture_output=True, text=True, check=False)
            if ended.returncode == 0:
                assert number > 1, "the disk was never full"
                break
            assert ended.returncode == 3, ended.stderr
            assert "no space left" in ended.stderr
            assert "same command again to resume" in ended.stderr
            assert "Traceback" not in ended.stderr
            assert not (disk / "data").exists()
        resize(disk, 200 * MIB)
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
def test_staging_rejects_a_disk_too_small(tmp_path):
    source = corpora.make_dataset(tmp_path / "source", 16)
    with small_disk(tmp_path / "disk", 4 * MIB) as disk:
        ended = subprocess.run(
            stage_command(source, disk), capture_output=True, text=True, check=False
        )
        assert ended.returncode == 3
        assert "has 4 MiB free; the dataset requires 17 MiB" in ended.stderr
        assert "next: Free 77 MiB there" in ended.stderr
        assert list(disk.rglob("*.npy")) == []


@needs_mount
def test_staging_removes_its_copy_from_full_disk(tmp_path):
    source = corpora.make_dataset(tmp_path / "source", 16)
    with small_disk(tmp_path / "disk", 100 * MIB) as disk:
        filler = disk / "filler"

        def fill_once(*_):
            if not filler.exists():
                fill_up(filler)

        with pytest.raises(
            BadConfig, match=r"MiB free; the dataset requires 17 MiB"
        ) as rejection:
            stage(source, disk, update=fill_once)
        assert rejection.value.next_step.startswith("Free ")
        assert partials(disk) == []
        assert list(disk.rglob("*.npy")) == []


@needs_mount
def test_staging_clears_killed_copies(tmp_path):
    source = corpora.make_dataset(tmp_path / "source", 16)
    with small_disk(tmp_path / "disk", 100 * MIB) as disk:
        killed_copy = (
            disk / f"autotune-{os.getuid()}" / ".partial-0123456789abcdef-01234567"
        )
        killed_copy.mkdir(parents=True)
        fill_up(killed_copy / "train-tokens-00000.npy")
        staged = subprocess.run(
            stage_command(source, disk), capture_output=True, text=True, check=True
        )
        answer = json.loads(staged.stdout)
        assert answer["copied"]
        assert content(Path(answer["directory"])) == content(source)


@pytest.mark.slow
def test_killed_tuning_decides_by_its_trial_log(tmp_path):
    figures = kill_tune(tmp_path, points=1, seed=1)
    assert figures["faults"] == 1
    assert figures["runs"] == 1
    assert figures["trials_replayed"] == figures["trials"] > 0
    assert figures["files_read_while_it_ran"] > 0


@pytest.mark.parametrize("suffix", [".json", ".toml", ".jsonl", ".npy", ".txt"])
def test_mutation_depends_only_on_its_draws(suffix):
    content = b'{"a": [1, 2], "b": {"c": "d"}}\n'

    def mutations():
        return [mutate(content, suffix, random.Random(seed)) for seed in range(40)]

    assert mutations() == mutations()
    assert len(set(mutations())) > 20


def test_corrupt_files_never_end_in_a_traceback(tmp_path):
    figures = mutate_files(tmp_path, points=90, seed=1)
    assert figures["tracebacks"] == 0, figures["first_tracebacks"]
    assert min(figures["by_kind"].values()) > 0
    # Rejected with a message; the rest is still of its format.
    assert figures["by_exit_code"]["3"] > 15

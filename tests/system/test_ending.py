"""Ends of measurements, trainings and ``autotune train``, with real torchrun."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from autotune.base.process import start_child
from autotune.errors import MachineLacks
from autotune.profiles.toml_file import profile_to_toml
from testbed.examples.profiles import but, example_profile
from testbed.simulators.hosts import check_namespaces, hosts
from tests.system.faults.jobs import Workplace
from tests.system.faults.kills import until
from tests.trainer.tiny_models import config_of
from trainer.formats.manifest import read_manifest
from trainer.formats.run_record import read_exit
from trainer.formats.train_config import DataSettings

pytestmark = pytest.mark.system
MEASURE = """
import importlib.metadata, pathlib, sys, time
from autotune.cluster.torchrun import on_this_node
from autotune.trials.multirank import MultirankMachine
from testbed.simulators.hosts import hosts, together
scratch = pathlib.Path(sys.argv[1])
if sys.argv[2] == "hosts":
    with hosts(2, 10**9, name="ending") as names, together(names, scratch) as machine:
        machine.start()
        print("started", flush=True)
        time.sleep(600)
start = on_this_node(2, importlib.metadata.version("torch"))
with MultirankMachine(start, "cpu", scratch) as machine:
    machine.start()
    print("started", flush=True)
    time.sleep(600)
"""
END_S = 60.0


def running(part: str) -> list[str]:
    """Return the command lines of processes that contain this part."""
    command_lines = [
        " ".join(process.info["cmdline"] or ())
        for process in psutil.process_iter(["cmdline"])
    ]
    return [line for line in command_lines if part in line]


@pytest.mark.parametrize("end_signal", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize(
    "where",
    ["here", "here, while ranks start", pytest.param("hosts", marks=pytest.mark.slow)],
)
def test_no_process_outlives_a_measurement(tmp_path, where, end_signal):
    if where == "hosts":
        try:
            check_namespaces()
        except MachineLacks as error:
            pytest.skip(f"no network namespaces here: {error.message}")
    scratch = str(tmp_path / "scratch")
    command = [sys.executable, "-c", MEASURE, scratch, where]
    process = start_child(
        command,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path.cwd())},
    )
    if where.endswith("start"):
        while len(running(scratch)) < 3:
            assert process.poll() is None
    else:
        assert process.stdout.readline() == "started\n"
        # The command, at least one torchrun, and two ranks.
        assert len(running(scratch)) >= 4
    process.send_signal(end_signal)
    process.wait(timeout=END_S)
    until(lambda: not running(scratch), "ended", END_S, lambda: str(running(scratch)))
    # Names of networks are all that SIGKILL leaves: the next hosts remove them.
    if where == "hosts":
        with hosts(2, 10**9, name="ending"):
            pass


SHORT_RUN = {"train.max_steps": 3, "train.warmup_steps": 1}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return Workplace(tmp_path_factory.mktemp("leaving"))


@pytest.mark.parametrize("rank", [0, 1])
def test_run_is_finished_although_a_rank_dies_last(place, rank):
    job = place.job(2, SHORT_RUN)
    process = job.start([{"kind": "kill", "step": -1, "rank": rank}])
    job.end(process, within_s=60)
    assert process.returncode != 0
    assert (
        f"error: rank {1 - rank}: after the last step, lost connection to another rank"
        in job.told()
    )
    assert "next: Nothing: the run is finished" in job.told()
    end = read_exit(job.directory)
    assert end.exit_code == 0
    assert end.reason == "finished"
    assert end.steps == 3


def test_hanging_rank_ends_by_the_watchdog(
    place,
):
    job = place.job(2, SHORT_RUN | {"train.parallel.timeout_s": 12})
    process = job.start([{"kind": "hang", "step": -1, "rank": 1}])
    # The process group alone would wait for 72 s, and say nothing.
    job.end(process, within_s=60)
    assert process.returncode != 0
    assert "train: no progress for 12 s after step 3" in job.told()
    end = read_exit(job.directory)
    assert end.exit_code == 0
    assert end.reason == "finished"


@pytest.fixture
def train_command(tmp_path, patterned_dataset) -> list[str]:
    dataset_hash = read_manifest(patterned_dataset).dataset_hash
    train = config_of(
        data=DataSettings(dataset_hash=dataset_hash),
        micro_batch_size=2,
        global_batch_size=4,
        warmup_steps=2,
        max_steps=100_000,
    )
    profile = but(example_profile(), fingerprint={"dataset_hash": dataset_hash})
    profile = profile.with_train(train)
    (tmp_path / "p.toml").write_text(profile_to_toml(profile))
    return [
        sys.executable,
        "-m",
        "autotune",
        "train",
        "p.toml",
        "--data",
        str(patterned_dataset),
        "--out",
        "run",
    ]


@pytest.mark.slow
def test_train_command_resumes_after_a_signal(train_command, tmp_path):
    command = [*train_command, "--ranks", "2"]
    process = start_child(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    record = tmp_path / "run" / "steps.jsonl"
    until(lambda: record.is_file() and record.read_text(), "a step", 90)
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 75, stderr
    assert "launch: the run exited with code 75" in stderr
    exit_file = tmp_path / "run" / "exit.json"
    steps = json.loads(exit_file.read_text())["steps"]
    resumed = subprocess.run(
        [*command, "--set", f"train.max_steps={steps + 2}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert resumed.returncode == 0, resumed.stderr
    assert json.loads(exit_file.read_text())["steps"] == steps + 2
    assert "run: " in resumed.stdout

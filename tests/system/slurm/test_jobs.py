"""Jobs in a real SLURM cluster of two nodes on this host.

They are submitted from outside any allocation.
"""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import trainer
from autotune.base.process import start_child
from autotune.cluster.torchrun import (
    derived_ports,
    own_address,
    read_addresses,
    resolve_own_name,
)
from autotune.trials.trial_log import read_trial_log
from testbed.datasets import write_dataset
from tests.system.faults.kills import until
from tests.system.slurm.lab import NODES, Lab, missing, running_lab

pytestmark = [pytest.mark.system, pytest.mark.slow]

TINY = {
    "model_type": "bert",
    "hidden_size": 32,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
}
PROBE_LINE = (
    "probe --model tiny/config.json --data data --device cpu --memory 64MiB"
    " --seq-length 64 --max-micro-batch-size 8 --global-batch-tokens 1024"
    " --trial-timeout 60s"
)
PROBE = PROBE_LINE.split()
CPUS = min(2, os.cpu_count() or 1)
STEPS = 60
SETTINGS = [
    "--set",
    f"train.max_steps={STEPS}",
    "--set",
    "train.warmup_steps=2",
    "--set",
    "train.global_batch_size=8",
]


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    reason = missing()
    if reason is not None:
        if os.environ.get("CI"):
            pytest.fail(f"CI must be able to start a SLURM cluster: {reason}")
        pytest.skip(reason)
    with running_lab() as lab:
        yield lab


@pytest.fixture(autouse=True)
def no_job_is_left_behind(lab) -> Iterator[None]:
    yield
    lab.clear()


@pytest.fixture(scope="module")
def work(tmp_path_factory, patterned_dataset) -> Path:
    """Return the directory of submissions, with a site file for jobs of two CPUs."""
    directory = tmp_path_factory.mktemp("slurm")
    shutil.copytree(patterned_dataset, directory / "data")
    (directory / "tiny").mkdir()
    (directory / "tiny" / "config.json").write_text(json.dumps(TINY))
    (directory / "site.toml").write_text(
        'prologue = ["export OMP_NUM_THREADS=1"]\n[slurm]\ntime ='
        f' "00:10:00"\ncpus_per_task = {CPUS}\n'
    )
    return directory


@pytest.fixture(scope="module")
def autotune(lab, work) -> Callable[..., subprocess.CompletedProcess[str]]:
    def run(*arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        ended = subprocess.run(
            [sys.executable, "-m", "autotune", *arguments],
            cwd=work,
            env=lab.environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        output = f"{ended.stdout}\n{ended.stderr}\n{lab.logs()}"
        assert ended.returncode == code, output
        assert "Traceback" not in ended.stderr
        return ended

    return run


@pytest.fixture(scope="module")
def probed(autotune) -> subprocess.CompletedProcess[str]:
    return autotune(*PROBE, "--slurm", "--wait", "--json")


@pytest.fixture(scope="module")
def profile(probed, work) -> Path:
    return work / "profiles" / "tiny-cpu.toml"


def submit_training(autotune, *arguments: str) -> dict:
    ended = autotune("train", "profiles/tiny-cpu.toml", *arguments, "--json")
    return json.loads(ended.stdout)


def wait_for_steps(lab: Lab, work: Path, name: str, steps: int = 1) -> None:
    record = work / "runs" / name / "steps.jsonl"
    until(
        lambda: record.is_file() and record.read_text().count("\n") >= steps,
        f"{steps} steps",
        90,
        lambda: logs_of(work, name) + lab.logs(),
    )


def log_of(work: Path, name: str, job: str) -> str:
    return (work / "runs" / name / "logs" / f"{job}.log").read_text()


def site_with(work: Path, name: str, *lines: str) -> str:
    """Write a site file whose commands go through lines of shell; return its name."""
    wrapper = work / f"{name}.sh"
    wrapper.write_text("\n".join(["#!/bin/sh", *lines, 'exec "$@"', ""]))
    wrapper.chmod(0o755)
    (work / f"{name}.toml").write_text(
        f'command_prefix = "{wrapper}"\n{(work / "site.toml").read_text()}'
    )
    return f"{name}.toml"


def logs_of(work: Path, name: str) -> str:
    return "\n".join(
        f"== {path.name}\n{path.read_text()}"
        for path in (work / "runs" / name / "logs").glob("*")
    )


def test_probe_job_writes_the_profile(probed, profile, work, autotune):
    answer = json.loads(probed.stdout)
    assert answer["exit_code"] == 0
    assert f"job {answer['job']}: running on lab" in probed.stderr
    text = profile.read_text()
    assert f'slurm_job_id = "{answer["job"]}"' in text
    assert "feasible_max = 8" in text
    assert "bert" in text
    [tuning] = json.loads(autotune("status", "--json").stdout)["tunings"]
    assert Path(tuning["directory"]).name == "tiny-cpu"
    assert tuning["trials"] >= 1


@pytest.fixture(scope="module")
def tuned(autotune, work, probed) -> subprocess.CompletedProcess[str]:
    """Tune on one node, and the network of two.

    As in a container, the jobs have none of SLURM's programs.
    """
    inside = work / "inside"
    inside.mkdir()
    for program in ("bash", "sh", "env"):
        (inside / program).symlink_to(shutil.which(program))
    contained = site_with(work, "contained", f"export PATH={inside}")
    options = [
        *PROBE[1:],
        "--time-limit",
        "2min",
        "--window",
        "0.5s",
        "--ranks",
        "1",
        "--out",
        "tuned",
    ]
    options += ["--reports", "tuned/reports"]
    options[options.index("--trial-timeout") + 1] = "120s"
    return autotune(
        "tune", *options, "--nodes", "2", "--slurm", contained, "--wait", "--json"
    )


def test_tuning_submits_the_network_as_second_job(tuned, work):
    answer = json.loads(tuned.stdout)
    assert answer["exit_code"] == 0
    (second,) = answer["then"]
    assert f"job {second['job']}: running on lab[1-2]" in tuned.stderr
    profile = tomllib.loads((work / "tuned" / "tiny-cpu.toml").read_text())
    assert profile["evidence"]["probe"]["feasible_max"] == 8
    assert "chosen" in profile["evidence"]["workers"]
    # The time may not suffice for a confirmation.
    commands = set(profile["provenance"]["commands"]) - {"confirm"}
    assert commands == {"probe", "workers", "network", "baseline"}
    report = (work / "tuned" / "reports" / "tiny-cpu" / "report.md").read_text()
    assert "# Tuning report" in report
    assert "2 nodes" in report
    network = profile["evidence"]["network"]
    assert network["nodes"] == 2
    assert network["ranks_per_node"] == 1
    (link,) = network["links"]
    assert link["scope"] == "between nodes"
    assert link["bytes_per_s"] > 1e6
    gradient_syncs = network["gradient_syncs"]
    assert {sync["outcome"] for sync in gradient_syncs} == {"completed"}
    assert {sync["strategy"] for sync in gradient_syncs} >= {"ddp", "zero1", "fsdp2"}
    assert network["scaling"][0]["nodes"] == 1
    assert not any(row["measured"] for row in network["scaling"])


def test_scaling_is_predicted_here_but_measured_by_jobs(tuned, work, autotune):
    options = ["--predict", "tuned/tiny-cpu.toml", "--json", "--trial-timeout", "120s"]
    predicted = json.loads(autotune("network", "--nodes", "1,2,4", *options).stdout)
    assert [row["nodes"] for row in predicted["rows"]] == [1, 2, 4]
    job = ["--ranks", "1", "--slurm", "--wait"]
    answer = json.loads(autotune("network", "--nodes", "1,2", *options, *job).stdout)
    assert answer["exit_code"] == 0
    log = (work / answer["log"]).read_text()
    rows = json.loads(log[log.index("{\n  ") :])["rows"]
    assert [(row["nodes"], row["measured"]) for row in rows] == [
        (1, False),
        (2, False),
        (1, True),
        (2, True),
    ]
    prediction_file = work / "reports" / "tiny-cpu" / "scaling-predicted.json"
    kept_rows = json.loads(prediction_file.read_text())["rows"]
    assert [row["measured"] for row in kept_rows] == [False, False]


def test_login_node_passes_on_slurms_errors(autotune, lab, work):
    assert "--slurm" in autotune(*PROBE, code=5).stderr
    (work / "wrong.toml").write_text('[slurm]\npartition = "nowhere"\n')
    error = autotune(*PROBE, "--slurm", "wrong.toml", code=5).stderr
    assert "invalid partition specified: nowhere" in error
    assert "sbatch reports/jobs/probe-tiny-" in error


@pytest.fixture(scope="module")
def preempted(lab, work, autotune, profile) -> dict:
    """Preempt a run on two nodes after some steps; return its finished job.

    The port that follows from its job is in use.
    """
    config = lab.ask("scontrol", "show", "config")
    number = int(re.search(r"NEXT_JOB_ID\s*=\s*(\d+)", config)[1])
    address = own_address(None, read_addresses(), resolve_own_name())
    with socket.socket() as other_program:
        other_program.bind((address, derived_ports(number)[0]))
        other_program.listen()
        submission = submit_training(
            autotune, "--nodes", "2", "--out", "runs/two", *SETTINGS, "--slurm"
        )
        assert submission["jobs"] == [str(number)]
        wait_for_steps(lab, work, "two")
        lab.ask("scancel", "--signal=TERM", str(number))
        job = lab.wait_for(
            str(number), "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", timeout_s=90
        )
    assert job["JobState"] == "COMPLETED", logs_of(work, "two") + lab.logs()
    return job


def test_preempted_job_requeues_itself_until_finished(preempted, work, autotune):
    assert preempted["Restarts"] == "1"
    run = work / "runs" / "two"
    first_exit = json.loads((run / "earlier" / "1" / "exit.json").read_text())
    assert first_exit["exit_code"] == 75
    assert first_exit["requeue"] is True
    assert 0 < first_exit["steps"] < STEPS
    last_exit = json.loads((run / "exit.json").read_text())
    assert last_exit["exit_code"] == 0
    assert last_exit["steps"] == STEPS
    steps = [
        json.loads(line)["step"]
        for line in (run / "steps.jsonl").read_text().splitlines()
    ]
    assert steps == list(range(1, STEPS + 1))
    assert json.loads((run / "run.json").read_text())["world_size"] == 2
    log = log_of(work, "two", preempted["JobId"])
    for node in NODES:
        assert log.count(f"preflight: {node}: {CPUS} CPU") == 2  # before each start
        assert (run / "logs" / f"{preempted['JobId']}-{node}.log").is_file()
    used_port, next_port, *_ = derived_ports(int(preempted["JobId"]))
    assert f"port {used_port} of lab1 is in use; using {next_port}" in log
    (status,) = json.loads(autotune("status", "runs/two", "--json").stdout)["runs"]
    assert status["state"] == "finished"
    assert status["step"] == STEPS
    assert status["checkpoint"] == f"step-{STEPS:09}"


def test_chained_job_ends_at_once_after_the_run(preempted, lab, work, autotune):
    (work / "chained.toml").write_text(
        (work / "site.toml").read_text() + "requeue = false\n"
    )
    submission = submit_training(
        autotune,
        "--out",
        "runs/two",
        *SETTINGS,
        "--slurm",
        "chained.toml",
        "--chain",
        "2",
    )
    first, second = submission["jobs"]
    assert lab.job(second)["Reason"] == "Dependency"
    lab.ask("scancel", first)
    assert lab.wait_for(second, "COMPLETED", "FAILED")["JobState"] == "COMPLETED"
    log = log_of(work, "two", second)
    assert "nothing to do: the run exited with code 0" in log
    assert "preflight" not in log


def test_cancelled_job_saves_without_requeue(lab, work, autotune, profile):
    settings = [*SETTINGS[2:], "--set", "train.max_steps=1000000"]
    submission = submit_training(
        autotune, "--out", "runs/cancelled", *settings, "--slurm"
    )
    (number,) = submission["jobs"]
    wait_for_steps(lab, work, "cancelled")
    lab.ask("scancel", number)
    lab.wait_for(number, "CANCELLED")
    until(lambda: not lab.ask("squeue", "--noheader"), "no job", 30)
    job = lab.job(number)
    assert job["JobState"] == "CANCELLED", logs_of(work, "cancelled")
    assert job["Restarts"] == "0", logs_of(work, "cancelled")
    run_exit = json.loads((work / "runs" / "cancelled" / "exit.json").read_text())
    assert run_exit["exit_code"] == 75


def log_of_rejected(lab: Lab, work: Path, script: str) -> str:
    """Submit a script that its preflight must reject; return the log."""
    (work / "runs" / "rejected" / "logs").mkdir(parents=True, exist_ok=True)
    (work / "rejected.sbatch").write_text(script)
    number = subprocess.run(
        ["sbatch", "--parsable", "rejected.sbatch"],
        cwd=work,
        env=lab.environment,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    job = lab.wait_for(number, "COMPLETED", "FAILED")
    log = log_of(work, "rejected", number)
    assert job["JobState"] == "FAILED", log
    assert job["ExitCode"] == "6:0", log
    assert not (work / "runs" / "rejected" / "run.json").exists()
    return log


def script_of(autotune, *arguments: str) -> str:
    command = [
        "train",
        "profiles/tiny-cpu.toml",
        "--out",
        "runs/rejected",
        "--nodes",
        "2",
    ]
    slurm = [] if "--slurm" in arguments else ["--slurm"]
    return autotune(*command, *arguments, *slurm, "--dry-run").stdout


def test_preflight_rejects_steps_without_their_cpus(lab, work, autotune, profile):
    if CPUS < 2:
        pytest.skip("needs two processors")
    script = script_of(autotune)
    option = f" --cpus-per-task={CPUS} --export"
    assert script.count(option) == 1
    log = log_of_rejected(lab, work, script.replace(option, " --export"))
    assert f"lab1: allotted_cpus is 1, expected {CPUS}" in log
    assert "Pass --cpus-per-task to srun in the script" in log


@pytest.mark.parametrize(
    ("line", "log_parts"),
    [
        (
            "export PYTHONPATH={}",
            (
                "lab2: code is ",
                "Install the same version of this package",
                "preflight: lab1: ",
            ),
        ),
        ("cd {}", ("lab2: dataset is ", "autotune data verify")),
    ],
    ids=["code", "data"],
)
def test_preflight_names_a_node_that_differs(
    lab, work, autotune, profile, tmp_path, line, log_parts
):
    shutil.copytree(Path(trainer.__file__).parent, tmp_path / "trainer")
    with (tmp_path / "trainer" / "words.py").open("w") as file:
        file.write("# another version\n")
    write_dataset(tmp_path / "elsewhere" / "data", [[5, 6, 7, 8]] * 20, vocab_size=128)
    (tmp_path / "elsewhere" / "profiles").symlink_to(work / "profiles")
    directory = tmp_path if line.startswith("export") else tmp_path / "elsewhere"
    only_on_lab2 = (
        f'if [ "$SLURMD_NODENAME" = lab2 ]; then {line.format(directory)}; fi'
    )
    site = site_with(work, "unlike", only_on_lab2)
    log = log_of_rejected(lab, work, script_of(autotune, "--slurm", site))
    assert [part for part in log_parts if part not in log] == []


def test_profile_edited_while_queued_does_not_train(lab, work, autotune, profile):
    autotune("profile", "approve", "profiles/tiny-cpu.toml", "--by", "reviewer")
    script = script_of(autotune, "--require-approved")
    approved = profile.read_text()
    try:
        profile.write_text(approved.replace("seed = 0", "seed = 1", 1))
        log = log_of_rejected(lab, work, script)
    finally:
        profile.write_text(approved)
    assert "was modified since 'reviewer' approved" in log


def start_waiting_probe(lab: Lab, work: Path) -> tuple[subprocess.Popen[str], str]:
    """Start a probe that waits for its job, which has begun and sleeps.

    Return the command's process and the number of the job.
    """
    site = site_with(work, "late", "echo begun", "sleep 10")
    process = start_child(
        [
            sys.executable,
            "-m",
            "autotune",
            *PROBE,
            "--max-micro-batch-size",
            "64",
            "--slurm",
            site,
            "--wait",
        ],
        cwd=work,
        env=lab.environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    running_line = next(
        (line for line in process.stderr if ": running on lab" in line), None
    )
    assert running_line is not None, lab.logs()
    number = running_line.split()[1].rstrip(":")
    log = work / "reports" / "jobs" / f"probe-tiny-{number}.log"
    until(lambda: log.is_file() and log.read_text(), "a log", tell=lab.logs)
    return process, number


def test_ctrl_c_leaves_the_job_running(lab, work, profile):
    process, number = start_waiting_probe(lab, work)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == 130
    assert f"stopped waiting; job {number} continues" in stderr
    assert f"scancel {number}" in stderr
    assert lab.job(number)["JobState"] == "RUNNING"
    lab.ask("scancel", number)
    lab.wait_for(number, "CANCELLED")


def test_same_command_resumes_after_a_node_failed(lab, work, autotune, profile):
    process, number = start_waiting_probe(lab, work)
    node = lab.job(number)["NodeList"]
    lab.kill_node(node)
    try:
        _, stderr = process.communicate(timeout=90)
    finally:
        lab.start_node(node)
    assert process.returncode == 75, stderr
    assert f"job {number} lost {node}: the node failed" in stderr
    assert "Run the same command again" in stderr
    resumed = autotune(
        *PROBE, "--max-micro-batch-size", "64", "--slurm", "--wait", "--json"
    )
    assert json.loads(resumed.stdout)["exit_code"] == 0
    trials, corrupt_lines = read_trial_log(work / "reports" / "tiny-cpu" / "trials")
    assert corrupt_lines == 0
    measured = [
        (trial["site"], trial["key"])
        for trial in trials
        if trial.get("outcome", {}).get("kind") == "measured"
    ]
    # No trial that was measured before was measured again.
    assert len(measured) == len(set(measured)) > 1

"""The option ``--study`` of the commands that measure."""

import contextlib
from pathlib import Path

import pytest

from autotune.errors import BadInput
from autotune.memory import stage as probe_stage
from autotune.subjects import bench as subject_bench
from autotune.workers import own_loader
from autotune.workers import stage as workers_stage

NOT_MEASURED = BadInput("not measured", next_step="Nothing.")
"""Error by which a phase ends as soon as it has its request."""
OWN_STEP = ["--step=json:loads", "--along=s"]
OWN_LOADER = [*OWN_STEP, "--loader=json:dumps", "--set=s=1"]
PROBED = ["--model=bert-mini", "--data=data", "--device=cpu", "--memory=1GiB"]
COMMANDS = [
    pytest.param("workers", ["p.toml", "--data=data"], workers_stage, "sweep_loader"),
    pytest.param("workers", OWN_LOADER, own_loader, "sweep_own"),
    pytest.param("probe", PROBED, probe_stage, "probe_subjects"),
    pytest.param("probe", OWN_STEP, probe_stage, "probe_subjects"),
]


def study_files(arguments):
    """Yield the study files of the requests among a phase's arguments."""
    for argument in arguments:
        requests = argument if isinstance(argument, tuple) else (argument,)
        for request in requests:
            if hasattr(request, "study_file"):
                yield request.study_file


@pytest.mark.parametrize(("command", "options", "stage", "phase"), COMMANDS)
def test_study_reaches_the_phase(
    monkeypatch, workdir_with_data, says, command, options, stage, phase
):
    files = []

    def record(*arguments, **_):
        files.extend(study_files(arguments))
        raise NOT_MEASURED

    monkeypatch.setattr(stage, phase, record)
    monkeypatch.setattr(
        subject_bench, "open_subject", lambda *_, **__: contextlib.nullcontext()
    )
    says(command, *options, "--study=s.log", "--here", code=NOT_MEASURED.exit_code)
    assert files == [Path("s.log")]


@pytest.mark.parametrize("command", ["workers", "probe", "tune"])
def test_study_of_unknown_format_is_rejected(workdir_with_data, says, command):
    options = ["p.toml"] if command == "workers" else PROBED[:2]
    text = says(
        command, *options, "--study=s.csv", "--here", code=NOT_MEASURED.exit_code
    )
    assert "s.csv cannot be used as a study" in text
    assert "--study s.journal" in text

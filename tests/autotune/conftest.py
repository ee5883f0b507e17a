"""Commands called in the tests' own process, with a trial server that is started once
for all of them."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from autotune.cli import run
from autotune.machine.host import SystemHost
from autotune.machine.measured_device import fingerprint, open_device
from autotune.machine.nvml import NvmlMonitor
from autotune.memory import prediction
from autotune.profiles.values import profile_to_toml
from autotune.trials import session
from autotune.trials.fork_server import ForkServerMachine
from testbed.examples.profiles import example_profile
from trainer.data.dataset import read_manifest


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """The working directory, with the example's profile as ``p.toml``, and no
    cluster."""
    monkeypatch.chdir(tmp_path)
    for name in ("AUTOTUNE_DATA", "AUTOTUNE_SITE", "SLURM_JOB_ID", "SLURM_JOBID"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "p.toml").write_text(profile_to_toml(example_profile()))
    return tmp_path


@pytest.fixture
def made_here(here, patterned_dataset) -> Path:
    """The same with a dataset, ``data``, from which ``p.toml`` was made on this
    machine's CPU."""
    (here / "data").symlink_to(patterned_dataset)
    found, monitor, manifest = (
        example_profile(),
        NvmlMonitor(),
        read_manifest(patterned_dataset),
    )
    site = open_device("cpu", here / "data", SystemHost(), monitor)
    monitor.close()
    data = found.train.data.model_copy(
        update={"path": "data", "dataset_hash": manifest.dataset_hash}
    )
    train = found.train.model_copy(update={"data": data, "global_batch_size": 122})
    changes = {
        "train": train,
        "fingerprint": fingerprint(site, train.model, manifest, None),
    }
    (here / "p.toml").write_text(profile_to_toml(found.model_copy(update=changes)))
    return here


@pytest.fixture
def sbatch(here, monkeypatch) -> Path:
    """A scripted sbatch on PATH, which makes this a login node: the file in which it
    notes what it is given, by line.

    The number of a job is that of its line.
    """
    (here / "bin").mkdir()
    (here / "bin" / "sbatch").write_text(
        f'#!/bin/sh\necho "$@" >> {here}/given\nwc -l < {here}/given\n'
    )
    (here / "bin" / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{here / 'bin'}:/usr/bin:/bin")
    return here / "given"


@pytest.fixture
def says(capsys):
    """Call a command; what it says, on standard error if it is to fail."""

    def call(*words: object, code: int = 0) -> str:
        capsys.readouterr()
        assert run([str(word) for word in words]) == code, capsys.readouterr().err
        told = capsys.readouterr()
        return told.err if code else told.out

    return call


class Borrowed:
    """A machine that is not closed by those who use it."""

    def __init__(self, machine: ForkServerMachine) -> None:
        self._machine = machine

    def __getattr__(self, name: str):
        return getattr(self._machine, name)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None

    def close(self) -> None:
        """The next test uses it."""


@pytest.fixture(scope="session")
def started_server() -> Iterator[ForkServerMachine]:
    """One with torch loaded, which takes some seconds."""
    with pytest.MonkeyPatch.context() as patch, ForkServerMachine() as machine:
        patch.setenv("OMP_WAIT_POLICY", "PASSIVE")
        machine.start()
        yield machine


@pytest.fixture
def warm_server(monkeypatch, started_server) -> None:
    """Commands that are called in this process find their trial server started."""
    for room in (session, prediction):
        monkeypatch.setattr(room, "ForkServerMachine", lambda: Borrowed(started_server))

"""Commands called in the tests' own process, with one trial server for all of them."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from autotune.base.log import show_messages
from autotune.cli import run
from autotune.evidence.profile import model_sha256
from autotune.machine.host import SystemHost
from autotune.machine.measured_device import open_device
from autotune.profiles.toml_file import profile_to_toml
from autotune.subjects import bench
from autotune.subjects.mlm.memory import gains, plan_memory, prediction
from autotune.trials.fingerprint import fingerprint
from autotune.trials.fork_server import ForkServerMachine
from testbed.datasets import write_dataset
from testbed.examples.profiles import example_profile
from trainer.formats.manifest import read_manifest
from trainer.formats.nvml import NvmlMonitor
from trainer.formats.train_config import DataSettings, ModelSettings, TrainConfig


@pytest.fixture(autouse=True)
def _messages_are_shown() -> None:
    """Show messages as the command line does, whatever test came before."""
    show_messages()


@pytest.fixture(autouse=True)
def _no_optimizer_is_watched() -> Iterator[None]:
    """End the watch of optimizers that a test has begun, and left to its process."""
    yield
    optimizers = sys.modules.get("torch.optim.optimizer")
    if optimizers is not None:
        optimizers._global_optimizer_post_hooks.clear()


@pytest.fixture
def workdir(tmp_path, monkeypatch) -> Path:
    """Return the working directory, outside a cluster, with a profile ``p.toml``."""
    monkeypatch.chdir(tmp_path)
    for name in ("AUTOTUNE_DATA", "AUTOTUNE_SITE", "SLURM_JOB_ID", "SLURM_JOBID"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "p.toml").write_text(profile_to_toml(example_profile()))
    return tmp_path


@pytest.fixture
def workdir_with_data(workdir, patterned_dataset) -> Path:
    """Return the working directory with a dataset, ``data``, to which ``p.toml`` fits.

    The profile is of this machine's CPU.
    """
    (workdir / "data").symlink_to(patterned_dataset)
    profile = example_profile()
    monitor = NvmlMonitor()
    manifest = read_manifest(patterned_dataset)
    site = open_device("cpu", workdir / "data", SystemHost(), monitor)
    monitor.close()
    data = profile.train.data.model_copy(
        update={"path": "data", "dataset_hash": manifest.dataset_hash}
    )
    train = profile.train.model_copy(update={"data": data, "global_batch_size": 122})
    changes = {
        "fingerprint": fingerprint(
            site,
            None,
            model_sha256=model_sha256(train.model),
            dataset_hash=manifest.dataset_hash,
        )
    }
    profile = profile.with_train(train).model_copy(update=changes)
    (workdir / "p.toml").write_text(profile_to_toml(profile))
    return workdir


TINY_MODEL = ModelSettings(
    name="tiny",
    config={
        "model_type": "bert",
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "max_position_embeddings": 64,
    },
)


@pytest.fixture
def tiny_profile(workdir, monkeypatch) -> Path:
    """Return a profile of this machine's CPU and a model that trains in no time.

    Its dataset, ``data``, is beside it; packed sequences are half full.
    """
    # Neither nvidia-smi nor SLURM's commands are found.
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("SLURM_NNODES", raising=False)
    documents = [[5 + number % 100] * 30 for number in range(400)]
    data = write_dataset(workdir / "data", documents, vocab_size=128)
    manifest = read_manifest(data)
    monitor = NvmlMonitor()
    site = open_device("cpu", data, SystemHost(), monitor)
    monitor.close()
    train = TrainConfig(
        model=TINY_MODEL,
        data=DataSettings(path="data", dataset_hash=manifest.dataset_hash),
        seq_length_tokens=64,
        layout="packed",
        micro_batch_size=2,
        global_batch_size=4,
    )
    changes = {
        "fingerprint": fingerprint(
            site,
            None,
            model_sha256=model_sha256(TINY_MODEL),
            dataset_hash=manifest.dataset_hash,
        )
    }
    profile = example_profile().with_train(train).model_copy(update=changes)
    (workdir / "tiny.toml").write_text(profile_to_toml(profile))
    return workdir / "tiny.toml"


@pytest.fixture
def sbatch(workdir, monkeypatch) -> Path:
    """Put a scripted sbatch on PATH, which makes this a login node.

    Return the file in which it notes its arguments, a line a job. The number of a job
    is that of its line.
    """
    (workdir / "bin").mkdir()
    (workdir / "bin" / "sbatch").write_text(
        f'#!/bin/sh\necho "$@" >> {workdir}/given\nwc -l < {workdir}/given\n'
    )
    (workdir / "bin" / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{workdir / 'bin'}:/usr/bin:/bin")
    return workdir / "given"


@pytest.fixture
def says(capsys):
    """Return a function that calls a command and returns what it prints.

    That is its standard error if the command is expected to fail.
    """

    def call(*words: object, code: int = 0) -> str:
        capsys.readouterr()
        assert run([str(word) for word in words]) == code, capsys.readouterr().err
        printed = capsys.readouterr()
        return printed.err if code else printed.out

    return call


class Borrowed:
    """A machine that its users cannot close."""

    def __init__(self, machine: ForkServerMachine) -> None:
        self._machine = machine

    def __getattr__(self, name: str):
        return getattr(self._machine, name)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None

    def close(self) -> None:
        """Do nothing: the next test uses it."""


@pytest.fixture(scope="session")
def started_server() -> Iterator[ForkServerMachine]:
    """Start a trial server with torch loaded, which takes some seconds."""
    with ForkServerMachine() as machine:
        machine.start()
        yield machine


@pytest.fixture
def warm_server(monkeypatch, started_server) -> None:
    """Let commands that are called in this process use the started trial server."""

    class Server(ForkServerMachine):
        """The started server, unless code of yours is to be imported."""

        def __new__(cls, **options):
            if "preload" in options:
                return ForkServerMachine(**options)
            return Borrowed(started_server)

    for module in (bench, prediction, plan_memory, gains):
        monkeypatch.setattr(module, "ForkServerMachine", Server)

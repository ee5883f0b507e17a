import platform
import sys
from types import SimpleNamespace

import pytest
import torch

from testbed.datasets import write_dataset
from testbed.examples.checkpoints import resolved_of, write_checkpoint
from tests.trainer.oracles import config_of, training_of
from trainer.checkpoint.format import read_checkpoint
from trainer.checkpoint.resume import Start
from trainer.data.global_batch import make_plan
from trainer.distributed.ranks import join_ranks
from trainer.preflight.dataset_checks import open_dataset
from trainer.run_header import describe_run, gpu_driver_version


@pytest.fixture
def data(tmp_path):
    return write_dataset(
        tmp_path / "data", [[5 + step % 60 for step in range(20)]] * 40, vocab_size=128
    )


@pytest.fixture
def describe(data):
    """Function that returns the header of a run, and what it describes."""
    config = config_of(attention_dropout=0.25)
    resolved = resolved_of(config, data)
    dataset = open_dataset(resolved)
    training = training_of(config, dataset)
    plan = make_plan(config, len(dataset), 1)

    def run(start):
        header = describe_run(
            resolved,
            dataset,
            plan,
            training,
            start=start,
            hosts=["node1"],
            ranks=join_ranks(config, environment={}),
        )
        return header, SimpleNamespace(
            resolved=resolved, dataset=dataset, training=training, plan=plan
        )

    return run


def test_header_describes_the_run(describe):
    header, described = describe(Start())
    assert header.config_sha256 == described.resolved.config_sha256
    assert header.dataset_hash == described.dataset.manifest.dataset_hash
    assert header.global_batch_size == described.plan.global_batch_size
    assert (
        header.gradient_accumulation_steps == described.plan.gradient_accumulation_steps
    )
    parameters = described.training.module.parameters()
    assert header.parameters == sum(parameter.numel() for parameter in parameters)
    assert any("0.25" in change for change in header.recipe_changes)
    assert header.profile_modified is False
    assert header.versions["torch"] == torch.__version__
    assert header.versions["python"] == platform.python_version()
    assert header.hosts == ["node1"]
    assert header.peak_flops_per_s is None  # unknown for a CPU


def test_header_names_the_checkpoint_of_a_resume(describe, tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    path = write_checkpoint(tmp_path / "checkpoints", 7)
    header, _ = describe(Start(checkpoint=path, manifest=read_checkpoint(path)))
    assert header.resumed_step == 7
    assert header.resumed_from == "step-000000007"
    assert header.job == "slurm-17"


def test_header_of_a_start_from_scratch(describe):
    header, _ = describe(Start())
    assert (header.resumed_from, header.resumed_step) == (None, 0)


GPU_RANK = SimpleNamespace(device=torch.device("cuda", 0))


@pytest.mark.parametrize("version", ["580.95.05", "0.0 (nullgpu)", None])
def test_gpu_driver_version_comes_from_nvml(monkeypatch, version):
    def driver_version():
        if version is None:
            raise LookupError
        return version

    nvml = SimpleNamespace(
        NVMLError=LookupError,
        nvmlInit=lambda: None,
        nvmlSystemGetDriverVersion=driver_version,
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert gpu_driver_version(GPU_RANK) == version


def test_gpu_driver_version_is_unknown_without_nvml(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert gpu_driver_version(GPU_RANK) is None


def test_cpu_has_no_driver_version():
    assert gpu_driver_version(SimpleNamespace(device=torch.device("cpu"))) is None

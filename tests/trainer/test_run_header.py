import platform
from dataclasses import dataclass

import pytest
import torch

from testbed.datasets import write_dataset
from testbed.examples.checkpoints import resolved_of, write_checkpoint
from tests.trainer.tiny_models import config_of, training_of
from trainer.build import Training
from trainer.checkpoint.resume import Start
from trainer.checkpoint.stored_checkpoints import read_checkpoint
from trainer.config.resolve import ResolvedConfig
from trainer.data.batch_plan import BatchPlan, make_plan
from trainer.data.dataset import TokenDataset
from trainer.formats.run_record import RunHeader
from trainer.preflight.dataset_checks import open_dataset
from trainer.run_header import describe_run
from trainer.runtime.ranks import Ranks, join_ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltRun:
    """Parts of a run that its header describes."""

    resolved: ResolvedConfig
    dataset: TokenDataset
    plan: BatchPlan
    training: Training
    ranks: Ranks

    def header(self, start: Start) -> RunHeader:
        return describe_run(
            self.resolved,
            self.dataset,
            self.plan,
            self.training,
            hosts=["node1"],
            driver="580.95.05",
            gpu_activity_missing=["no permission"],
            ranks=self.ranks,
            start=start,
        )


@pytest.fixture(scope="module")
def built_run(tmp_path_factory) -> BuiltRun:
    data = write_dataset(
        tmp_path_factory.mktemp("built") / "data",
        samples=[list(range(5, 25))] * 40,
        vocab_size=128,
    )
    config = config_of(attention_dropout=0.25)
    resolved = resolved_of(config, data)
    dataset = open_dataset(resolved)
    return BuiltRun(
        resolved=resolved,
        dataset=dataset,
        plan=make_plan(config, len(dataset), world_size=1),
        training=training_of(config, dataset),
        ranks=join_ranks(config, environment={}),
    )


def test_header_describes_the_run(built_run):
    header = built_run.header(Start())
    assert header.config_sha256 == built_run.resolved.config_sha256
    assert header.dataset_hash == built_run.dataset.manifest.dataset_hash
    assert header.global_batch_size == built_run.plan.global_batch_size
    assert (
        header.gradient_accumulation_steps == built_run.plan.gradient_accumulation_steps
    )
    parameters = built_run.training.module.parameters()
    assert header.parameters == sum(parameter.numel() for parameter in parameters)
    # The model's own attention dropout is 0.
    assert any("0.25" in change for change in header.recipe_changes)
    assert header.profile_modified is False


def test_header_describes_the_machine(built_run):
    header = built_run.header(Start())
    assert header.versions["torch"] == torch.__version__
    assert header.versions["python"] == platform.python_version()
    assert header.hosts == ["node1"]
    assert header.driver == "580.95.05"
    assert header.gpu_activity_missing == ["no permission"]
    assert header.peak_flops_per_s is None  # unknown for a CPU


def test_header_names_the_checkpoint_of_a_resume(built_run, tmp_path):
    path = write_checkpoint(tmp_path / "checkpoints", 7)
    header = built_run.header(Start(checkpoint=path, manifest=read_checkpoint(path)))
    assert header.resumed_step == 7
    assert header.resumed_from == "step-000000007"


def test_header_names_the_job(built_run, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    assert built_run.header(Start()).job == "slurm-17"


def test_header_of_a_start_from_scratch(built_run):
    header = built_run.header(Start())
    assert (header.resumed_from, header.resumed_step) == (None, 0)

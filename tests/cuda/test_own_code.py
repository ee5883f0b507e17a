"""Your own training code on a pretended GPU, judged by torch's own allocator."""

import json
from pathlib import Path

import pytest

from autotune.evidence.peak_contents import ContentKind, PeakContents

pytestmark = pytest.mark.cuda
EXAMPLES = Path(__file__).parents[2] / "examples"
MEMORY_BYTES = 1_500_000_000
SAMPLED_EXAMPLE = "hf_trainer_causal_lm"
"""The example that is probed outside of ``make soak``."""
# cuDNN is not pretended.
SUBJECT = """
import torch
torch.backends.cudnn.enabled = False
from {example} import build_step
"""


def examples():
    """Yield the names of all examples as parameters of a test."""
    for path in sorted(EXAMPLES.glob("*.py")):
        is_sampled = path.stem == SAMPLED_EXAMPLE
        yield pytest.param(path.stem, marks=[] if is_sampled else pytest.mark.soak)


@pytest.mark.parametrize("example", list(examples()))
def test_example_fits_only_up_to_the_answer(null_gpu, tmp_path, example):
    (tmp_path / "subject.py").write_text(SUBJECT.format(example=example))
    machine = null_gpu(
        memory=MEMORY_BYTES,
        variables={"PYTHONPATH": f"{EXAMPLES.parent}:{EXAMPLES}:{tmp_path}"},
    )
    options = (
        "--memory",
        f"{MEMORY_BYTES}B",
        "--out",
        tmp_path,
        "--reports",
        tmp_path,
        "--json",
    )
    ended = machine.autotune("probe", "--step", "subject:build_step", *options)
    assert ended.code == 0, ended
    profile = json.loads(ended.out)["profiles"][0]
    assert profile["fingerprint"]["device"] == "cuda"
    step = profile["evidence"]["probe"]
    assert step["infeasible_min"] == step["feasible_max"] + 1
    # Nothing of a pretended GPU is timed.
    assert all(row["step_s"] is None for row in step["sizes"])
    contents = PeakContents.model_validate(step["contents"])
    assert contents.not_attributed_bytes == contents.missed_releases_bytes == 0
    # The rest of the peak is non-PyTorch memory.
    assert contents.reserved_bytes < step["feasible_peak_bytes"]
    kinds = contents.bytes_by_kind
    assert kinds[ContentKind.OPTIMIZER_STATE] > 1.9 * kinds[ContentKind.PARAMETERS]

    def run_without_autotune(micro_batch_size):
        ended = machine.run(
            "-m", "benchmarks.alone", "subject:build_step", str(micro_batch_size)
        )
        return ended.out.strip().splitlines()[-1]

    assert run_without_autotune(step["feasible_max"]) == "ran"
    assert run_without_autotune(step["infeasible_min"]) in ("out of memory", "retried")


STEP_ON_ALL_GPUS = """
import torch

def build_step(micro_batch_size, device):
    assert torch.cuda.device_count() == 1, f"{torch.cuda.device_count()} GPUs"
    weight = torch.zeros(64, 64, device=device, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)

    def step():
        weight.sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step
"""


@pytest.mark.parametrize("visible", [{}, {"CUDA_VISIBLE_DEVICES": "1,0"}])
def test_trial_of_one_rank_sees_one_gpu(null_gpu, tmp_path, visible):
    (tmp_path / "counts.py").write_text(STEP_ON_ALL_GPUS)
    machine = null_gpu(
        devices=2,
        memory=MEMORY_BYTES,
        variables={"PYTHONPATH": str(tmp_path)} | visible,
    )
    ended = machine.autotune(
        "probe",
        "--step",
        "counts:build_step",
        "--max-micro-batch-size",
        "2",
        "--out",
        tmp_path,
        "--reports",
        tmp_path,
    )
    assert ended.code == 0, ended


STEP_WITH_HOST_MEMORY = """
import torch

def build_step(micro_batch_size, device):
    weight = torch.zeros(64, 64, device=device, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    held = torch.ones(10 * 2**30, dtype=torch.uint8)

    def step():
        weight.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        print(len(held))

    return step
"""


@pytest.mark.soak
def test_host_memory_is_reported_without_limit(null_gpu, tmp_path):
    (tmp_path / "greedy.py").write_text(STEP_WITH_HOST_MEMORY)
    machine = null_gpu(memory=MEMORY_BYTES, variables={"PYTHONPATH": str(tmp_path)})
    options = (
        "--memory",
        "1GB",
        "--out",
        tmp_path,
        "--reports",
        tmp_path,
        "--json",
        "--max-micro-batch-size",
        "4",
    )
    ended = machine.autotune("probe", "--step", "greedy:build_step", *options)
    assert ended.code == 0, ended
    [profile] = json.loads(ended.out)["profiles"]
    assert profile["evidence"]["probe"]["host_peak_bytes"] > 10 * 2**30


LOADER_AND_STEP = """
import torch

def build_loader(num_workers):
    return torch.utils.data.DataLoader(
        range(100000), batch_size=8, num_workers=num_workers
    )

def build_step(micro_batch_size, device):
    return lambda batch: None
"""


def test_pretended_gpu_measures_loaders_by_replay_only(null_gpu, tmp_path):
    (tmp_path / "mine.py").write_text(LOADER_AND_STEP)
    machine = null_gpu(variables={"PYTHONPATH": str(tmp_path)})
    options = (
        "--loader",
        "mine:build_loader",
        "--time-limit",
        "3min",
        "--window",
        "0.2s",
        "--reports",
        tmp_path,
    )
    step = ("--step", "mine:build_step", "--set", "micro_batch_size=8")
    ended = machine.autotune("workers", tmp_path / "a.toml", *options, *step)
    assert ended.code == 5
    assert "cannot be measured on a pretended" in ended.err
    ended = machine.autotune(
        "workers",
        tmp_path / "b.toml",
        *options,
        "--step-time",
        "20ms",
        "--max-workers",
        "1",
    )
    assert ended.code == 0, ended
    assert ended.counts.total("kernel") == 0

"""Training code of others on a pretended GPU: torch's own allocator has the last word
on every answer."""

import json
from pathlib import Path

import pytest

pytestmark = pytest.mark.cuda
EXAMPLES = Path(__file__).parents[2] / "examples"
MEMORY_BYTES = 1_500_000_000


@pytest.mark.parametrize(
    "example", [path.stem for path in sorted(EXAMPLES.glob("*.py"))]
)
def test_example_fits_only_up_to_the_answer(null_gpu, tmp_path, example):
    (tmp_path / "subject.py").write_text(
        "import torch\ntorch.backends.cudnn.enabled = False  # it is not"
        f" pretended\nfrom {example} import build_step\n"
    )
    machine = null_gpu(
        memory=MEMORY_BYTES,
        variables={"PYTHONPATH": f"{EXAMPLES.parent}:{EXAMPLES}:{tmp_path}"},
    )
    words = (
        "--memory",
        f"{MEMORY_BYTES}B",
        "--out",
        tmp_path,
        "--reports",
        tmp_path,
        "--json",
    )
    ended = machine.autotune("probe", "--step", "subject:build_step", *words)
    assert ended.code == 0, ended
    profile = json.loads(ended.out)["steps"][0]
    assert profile["fingerprint"]["device"] == "cuda"
    step = profile["evidence"]["step"]
    assert step["infeasible_min"] == step["feasible_max"] + 1
    # Nothing of a pretended GPU is timed.
    assert all(row["step_s"] is None for row in step["rows"])
    sizes = (step["feasible_max"], step["infeasible_min"])
    alone = ("-m", "benchmarks.alone", "subject:build_step")
    said = [
        machine.run(*alone, str(size)).out.strip().splitlines()[-1] for size in sizes
    ]
    assert said[0] == "ran"
    assert said[1] in ("out of memory", "retried")


@pytest.mark.soak
def test_host_memory_is_reported_without_limit(null_gpu, tmp_path):
    (tmp_path / "greedy.py").write_text(
        "import torch\ndef build_step(micro_batch_size, device):\n    weight ="
        " torch.zeros(64, 64, device=device, requires_grad=True)\n    optimizer, held ="
        " torch.optim.SGD([weight], lr=0.1), torch.ones(10 * 2**30,"
        " dtype=torch.uint8)\n    def step():\n        weight.sum().backward();"
        " optimizer.step(); optimizer.zero_grad(); print(len(held))\n    return step\n"
    )
    machine = null_gpu(memory=MEMORY_BYTES, variables={"PYTHONPATH": str(tmp_path)})
    words = (
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
    ended = machine.autotune("probe", "--step", "greedy:build_step", *words)
    assert ended.code == 0, ended
    assert (
        json.loads(ended.out)["steps"][0]["evidence"]["step"]["host_peak_bytes"]
        > 10 * 2**30
    )


def test_pretended_gpu_measures_loaders_by_replay_only(null_gpu, tmp_path):
    (tmp_path / "mine.py").write_text(
        "import torch\ndef build_loader(num_workers):\n    return"
        " torch.utils.data.DataLoader(range(100000), batch_size=8,"
        " num_workers=num_workers)\ndef build_step(micro_batch_size, device):\n   "
        " return lambda batch: None\n"
    )
    machine = null_gpu(variables={"PYTHONPATH": str(tmp_path)})
    words = (
        "--loader",
        "mine:build_loader",
        "--time-limit",
        "3s",
        "--window",
        "0.2s",
        "--reports",
        tmp_path,
    )
    step = ("--step", "mine:build_step", "--set", "micro_batch_size=8")
    ended = machine.autotune("workers", tmp_path / "a.toml", *words, *step)
    assert ended.code == 5
    assert "cannot be measured on a pretended" in ended.err
    ended = machine.autotune(
        "workers",
        tmp_path / "b.toml",
        *words,
        "--step-time",
        "20ms",
        "--max-workers",
        "1",
    )
    assert ended.code == 0, ended
    assert ended.counts.total("kernel") == 0

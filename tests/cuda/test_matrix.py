"""Optimizer steps in every pair of settings, on two pretended GPUs with values, against two CPUs."""

import json
import random
from pathlib import Path

import pytest
import torch

from tests.conftest import write_dataset
from tests.cuda.cases import Case, all_cases, config_changes, in_pairs, name_of
from tests.nullgpu.environment import ROOT

pytestmark = pytest.mark.cuda
JOB = ROOT / "tests/system/rank_job.py"
STEPS = 3
PAIRS = {name_of(case): case for case in in_pairs()}
MORE = {name_of(case): case for case in random.Random(0).sample(list(all_cases()), 60)}


class Runs:
    """What cases came to on GPUs and on CPUs; all of a group are run when the first is asked for."""

    def __init__(self, place: Path, null_gpus) -> None:
        self._place = place
        self._null_gpus = null_gpus
        self._done: set[str] = set()
        samples = [[5 + (start + step) % 60 for step in range(8 + start % 33)] for start in range(400)]
        self._data = write_dataset(place / "data", samples, vocab_size=128, validation=samples[:60])

    def __call__(self, group: str, cases: dict[str, Case], ranks: int, name: str) -> tuple[dict, dict]:
        if group not in self._done:
            self._done.add(group)
            self._run(group, cases, ranks)
        return tuple(
            torch.load(self._place / group / device / f"{name}.pt", weights_only=True) for device in ("cuda", "cpu")
        )

    def _run(self, group: str, cases: dict[str, Case], ranks: int) -> None:
        for device in ("cpu", "cuda"):  # of one torch, as versions draw other first weights
            machine = self._null_gpus(devices=ranks, values=device == "cuda", variables={"OMP_NUM_THREADS": "1"})
            ended = machine.torchrun(JOB, self._request(group, cases, ranks, device), timeout_s=1800)
            assert ended.code == 0, ended
            assert (ended.counts.total("kernel") > 1000 * len(cases)) == (device == "cuda")

    def _request(self, group: str, cases: dict[str, Case], ranks: int, device: str) -> Path:
        out = self._place / group / device
        out.mkdir(parents=True)
        changes = {name: config_changes(case, ranks) | {"device": device} for name, case in cases.items()}
        if device == "cpu":  # which has no varlen kernel
            changes = {name: its | {"attention": "auto"} for name, its in changes.items()}
        jobs = {name: {"config": its, "steps": STEPS} for name, its in changes.items()}
        request = out / "request.json"
        request.write_text(json.dumps({"cases": jobs, "data": str(self._data), "out": str(out), "device": device}))
        return request


@pytest.fixture(scope="module")
def runs(null_gpus, tmp_path_factory) -> Runs:
    return Runs(tmp_path_factory.mktemp("matrix"), null_gpus)


@pytest.mark.parametrize("name", PAIRS)
def test_two_gpus_step_as_two_cpus_do(runs, name):
    check(*runs("pairs", PAIRS, 2, name), PAIRS[name])


@pytest.mark.soak
@pytest.mark.parametrize("name", MORE)
def test_four_gpus_step_as_four_cpus_do(runs, name):
    """With fsdp2 two of them share a copy of the model, of which there are two."""
    check(*runs("more", MORE, 4, name), MORE[name])


def check(on_gpus: dict, on_cpus: dict, case: Case) -> None:
    exact = case["precision"] == case["gradient_dtype"] == "fp32"
    assert on_gpus["losses"] == pytest.approx(on_cpus["losses"], rel=1e-4 if exact else 5e-3)
    assert on_gpus["norms"] == pytest.approx(on_cpus["norms"], rel=1e-3 if exact else 5e-2)
    assert on_gpus["evaluation"][0] == pytest.approx(on_cpus["evaluation"][0], rel=1e-4 if exact else 5e-3)

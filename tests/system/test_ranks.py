"""The same mathematics on any number of ranks: real torchrun, real gloo."""

import json
import os
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForMaskedLM

from testbed.datasets import write_dataset
from testbed.programs import run_program
from tests.trainer.gradients import relative_distance

pytestmark = pytest.mark.system

JOB = Path(__file__).with_name("rank_job.py")
ROOT = Path(__file__).parents[2]
# 1, 2 and 4 ranks accumulate gradients over 4, 2 and 1 micro-batches.
BATCH = {"micro_batch_size": 4, "global_batch_size": 16}
FIVE_STEPS = {"steps": 5}
OPTIONS_OF_THE_JOB = ("wide", "steps", "lr", "export")


def job_case(*, parallel=None, **changes) -> dict:
    """Return a case for ``rank_job``: changes of the configuration, and its options."""
    options = {
        name: changes.pop(name) for name in OPTIONS_OF_THE_JOB if name in changes
    }
    return {"config": BATCH | {"parallel": parallel or {}} | changes} | options


# Number of ranks and cases of each group. A group is started together: a test that
# needs one of its cases runs all of them.
GROUPS: dict[str, tuple[int, dict[str, dict]]] = {
    "alone": (
        1,
        {
            "fp32": job_case(**FIVE_STEPS),
            "fp64": job_case(wide=True),
            "copies": job_case(**FIVE_STEPS, precision="bf16"),
        },
    ),
    "two": (
        2,
        {
            "fp32": job_case(**FIVE_STEPS, export="ddp"),
            "fp64": job_case(wide=True),
            "copies": job_case(**FIVE_STEPS, precision="bf16"),
            "zero1": job_case(**FIVE_STEPS, parallel={"strategy": "zero1"}),
            "fsdp2-copies": job_case(
                **FIVE_STEPS, precision="bf16", parallel={"strategy": "fsdp2"}
            ),
            "zero1-copies": job_case(
                **FIVE_STEPS, precision="bf16", parallel={"strategy": "zero1"}
            ),
            "fsdp2": job_case(
                **FIVE_STEPS, parallel={"strategy": "fsdp2"}, export="fsdp2"
            ),
            "fsdp2-fp64": job_case(wide=True, parallel={"strategy": "fsdp2"}),
            "checkpointed": job_case(
                **FIVE_STEPS,
                parallel={"strategy": "fsdp2"},
                activation_checkpointing="full",
            ),
            "static": job_case(**FIVE_STEPS, parallel={"static_graph": True}),
            "no-view": job_case(
                **FIVE_STEPS,
                parallel={"gradient_as_bucket_view": False, "bucket_cap_mib": 1},
            ),
            "bf16": job_case(**FIVE_STEPS, parallel={"gradient_dtype": "bf16"}),
            "fp16": job_case(**FIVE_STEPS, parallel={"gradient_dtype": "fp16"}),
            "fsdp2-bf16": job_case(
                **FIVE_STEPS,
                parallel={"strategy": "fsdp2", "gradient_dtype": "bf16"},
                micro_batch_size=8,
            ),
        },
    ),
    "two, compiled": (
        2,
        {
            "compiled": job_case(
                **FIVE_STEPS, parallel={"strategy": "fsdp2"}, compile=True
            ),
            "compiled-ddp": job_case(**FIVE_STEPS, compile=True),
        },
    ),
    "four": (
        4,
        {
            "fp32": job_case(**FIVE_STEPS),
            "fp64": job_case(wide=True),
            "hsdp": job_case(
                **FIVE_STEPS, parallel={"strategy": "fsdp2", "shard_ranks": 2}
            ),
            "modernbert": job_case(family="modernbert", wide=True),
            "modernbert-hsdp": job_case(
                family="modernbert",
                wide=True,
                parallel={"strategy": "fsdp2", "shard_ranks": 2},
            ),
        },
    ),
}


class Results(dict[tuple[int, str], dict]):
    """Result of each case, by its number of ranks and its name.

    All cases of a group run when the first is requested.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        samples = [
            [5 + (start + step) % 60 for step in range(8 + start % 33)]
            for start in range(400)
        ]
        self._data = write_dataset(
            directory / "data", samples, vocab_size=128, validation=samples[:60]
        )

    def __missing__(self, key: tuple[int, str]) -> dict:
        world_size, case_name = key
        for group, (group_world_size, cases) in GROUPS.items():
            if group_world_size == world_size and case_name in cases:
                self._run(group, world_size, cases)
                return self[key]
        raise KeyError(key)

    def _run(self, group: str, world_size: int, cases: dict[str, dict]) -> None:
        out = self._directory / group
        out.mkdir()
        request = out / "request.json"
        request.write_text(
            json.dumps({"cases": cases, "data": str(self._data), "out": str(out)})
        )
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={world_size}",
            str(JOB),
        ]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        run_program([*command, str(request)], timeout_s=400, env=environment)
        for name in cases:
            result = torch.load(out / f"{name}.pt", weights_only=True)
            self[world_size, name] = result | {"out": out}


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> Results:
    return Results(tmp_path_factory.mktemp("ranks"))


def largest_difference(
    first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]
) -> float:
    assert first.keys() == second.keys()
    return max(float((first[name] - second[name]).abs().max()) for name in first)


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.soak)])
def test_gradient_is_independent_of_ranks(results, world_size):
    alone = results[1, "fp32"]
    shared = results[world_size, "fp32"]
    assert shared["losses"][0] == pytest.approx(alone["losses"][0], rel=1e-6)
    assert shared["norms"][0] == pytest.approx(alone["norms"][0], rel=1e-6)
    assert relative_distance(alone["gradients"], shared["gradients"]) <= 1e-6


@pytest.mark.parametrize(
    ("case", "other_case"),
    [
        ((1, "fp64"), (2, "fp64")),
        pytest.param((1, "fp64"), (4, "fp64"), marks=pytest.mark.soak),
        ((1, "fp64"), (2, "fsdp2-fp64")),
        pytest.param((4, "modernbert"), (4, "modernbert-hsdp"), marks=pytest.mark.soak),
    ],
)
def test_fp64_gradients_agree_to_rounding(results, case, other_case):
    gradients = results[case]["gradients"]
    other_gradients = results[other_case]["gradients"]
    assert gradients.keys() == other_gradients.keys()
    largest = max(float(gradient.norm()) for gradient in gradients.values())
    # The true gradient of a key's bias is zero: adding the same to all scores changes
    # no softmax.
    nonzero = {
        name: gradient
        for name, gradient in gradients.items()
        if float(gradient.norm()) > 1e-12 * largest
    }
    assert len(nonzero) >= len(gradients) - 4
    for name, gradient in nonzero.items():
        difference = gradient - other_gradients[name]
        assert float(difference.norm() / gradient.norm()) <= 1e-12, name


@pytest.mark.parametrize(
    ("world_size", "name"),
    [
        (2, "zero1"),
        (2, "fsdp2"),
        (2, "checkpointed"),
        (2, "static"),
        (2, "no-view"),
        pytest.param(2, "compiled", marks=pytest.mark.soak),
        pytest.param(2, "compiled-ddp", marks=pytest.mark.soak),
        pytest.param(4, "hsdp", marks=pytest.mark.soak),
    ],
)
def test_all_strategies_lead_to_the_same_weights(results, world_size, name):
    plain = results[world_size, "fp32"]
    other = results[world_size, name]
    assert other["losses"] == pytest.approx(plain["losses"], rel=1e-5)
    assert other["norms"] == pytest.approx(plain["norms"], rel=1e-5)
    assert largest_difference(plain["parameters"], other["parameters"]) <= 1e-5


@pytest.mark.parametrize(
    "case", [(2, "copies"), (2, "zero1-copies"), (2, "fsdp2-copies")]
)
def test_bf16_weights_follow_their_fp32_copies(results, case):
    alone = results[1, "copies"]
    shared = results[case]
    assert shared["losses"] == pytest.approx(alone["losses"], rel=1e-3)
    assert relative_distance(alone["gradients"], shared["gradients"]) <= 1e-2
    assert largest_difference(alone["parameters"], shared["parameters"]) <= 1e-2


@pytest.mark.parametrize(
    ("name", "rounding"),
    [("bf16", 2**-8), ("fp16", 2**-11), ("fsdp2-bf16", 2**-8)],
)
def test_16_bit_gradients_differ_by_their_rounding(results, name, rounding):
    exact = results[2, "fp32"]
    rounded = results[2, name]
    distance = relative_distance(exact["gradients"], rounded["gradients"])
    assert rounding / 100 < distance < rounding
    assert rounded["losses"] == pytest.approx(exact["losses"], rel=1e-2)


@pytest.mark.parametrize("strategy", ["zero1", "fsdp2"])
def test_sharded_ranks_keep_half_the_optimizer_state(results, strategy):
    whole = results[2, "fp32"]["share_of_state"]
    assert 0.4 * whole < results[2, strategy]["share_of_state"] < 0.6 * whole


@pytest.mark.parametrize(
    "case",
    [(2, "fp64"), (2, "fsdp2-fp64"), pytest.param((4, "fp64"), marks=pytest.mark.soak)],
)
def test_evaluation_is_independent_of_ranks(results, case):
    # After one step of the same gradient.
    assert results[case]["evaluation"] == pytest.approx(
        results[1, "fp64"]["evaluation"], rel=1e-6
    )


def test_each_rank_measures_its_partial_gradient(results):
    square, share = results[2, "fp64"]["partial"]
    assert share == 0.5
    # Half of the tokens has the same signal, and more noise.
    assert square > results[2, "fp64"]["norms"][0] ** 2
    assert results[2, "fsdp2"]["partial"] is None


@pytest.mark.parametrize(
    ("strategy", "name"), [("ddp", "fp32"), ("fsdp2", "fsdp2")], ids=["ddp", "fsdp2"]
)
def test_exported_model_has_the_trained_weights(results, strategy, name):
    result = results[2, name]
    exported = AutoModelForMaskedLM.from_pretrained(result["out"] / strategy)
    weights = {
        f"model.{name}": parameter.detach()
        for name, parameter in exported.named_parameters()
    }
    assert largest_difference(result["parameters"], weights) == 0

"""The same mathematics however it is shared out: real torchrun, real gloo, 1, 2 and 4
ranks."""

import json
import os
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForMaskedLM

from testbed.datasets import write_dataset
from testbed.programs import run_program
from tests.trainer.oracles import relative_distance

pytestmark = pytest.mark.system

JOB = Path(__file__).with_name("rank_job.py")
ROOT = Path(__file__).parents[2]
# Of a global batch of 16 rows each rank computes 4 at once, so 1, 2 and 4 ranks take 4,
# 2 and 1 turns.
ROWS = {"micro_batch_size": 4, "global_batch_size": 16}
FIVE = {"steps": 5}


def _case(*, parallel=None, **more) -> dict:
    options = {
        key: more.pop(key) for key in ("wide", "steps", "lr", "export") if key in more
    }
    return {"config": ROWS | {"parallel": parallel or {}} | more} | options


# Whatever starts together; a test that asks for one of a group's cases has all of them
# run.
GROUPS: dict[str, tuple[int, dict[str, dict]]] = {
    "alone": (
        1,
        {
            "fp32": _case(**FIVE),
            "fp64": _case(wide=True),
            "copies": _case(**FIVE, precision="bf16"),
        },
    ),
    "two": (
        2,
        {
            "fp32": _case(**FIVE, export="ddp"),
            "fp64": _case(wide=True),
            "copies": _case(**FIVE, precision="bf16"),
            "zero1": _case(**FIVE, parallel={"strategy": "zero1"}),
            "fsdp2-copies": _case(
                **FIVE, precision="bf16", parallel={"strategy": "fsdp2"}
            ),
            "zero1-copies": _case(
                **FIVE, precision="bf16", parallel={"strategy": "zero1"}
            ),
            "fsdp2": _case(**FIVE, parallel={"strategy": "fsdp2"}, export="fsdp2"),
            "fsdp2-fp64": _case(wide=True, parallel={"strategy": "fsdp2"}),
            "checkpointed": _case(
                **FIVE, parallel={"strategy": "fsdp2"}, activation_checkpointing="full"
            ),
            "static": _case(**FIVE, parallel={"static_graph": True}),
            "no-view": _case(
                **FIVE, parallel={"gradient_as_bucket_view": False, "bucket_cap_mib": 1}
            ),
            "bf16": _case(**FIVE, parallel={"gradient_dtype": "bf16"}),
            "fp16": _case(**FIVE, parallel={"gradient_dtype": "fp16"}),
            "fsdp2-bf16": _case(
                **FIVE,
                parallel={"strategy": "fsdp2", "gradient_dtype": "bf16"},
                micro_batch_size=8,
            ),
        },
    ),
    "two, compiled": (
        2,
        {
            "compiled": _case(**FIVE, parallel={"strategy": "fsdp2"}, compile=True),
            "compiled-ddp": _case(**FIVE, compile=True),
        },
    ),
    "four": (
        4,
        {
            "fp32": _case(**FIVE),
            "fp64": _case(wide=True),
            "hsdp": _case(**FIVE, parallel={"strategy": "fsdp2", "shard_ranks": 2}),
            "modernbert": _case(family="modernbert", wide=True),
            "modernbert-hsdp": _case(
                family="modernbert",
                wide=True,
                parallel={"strategy": "fsdp2", "shard_ranks": 2},
            ),
        },
    ),
}


class Found(dict[tuple[int, str], dict]):
    """Every case by its number of ranks and its name; those of a group are run when the
    first is asked for."""

    def __init__(self, place: Path) -> None:
        self._place = place
        samples = [
            [5 + (start + step) % 60 for step in range(8 + start % 33)]
            for start in range(400)
        ]
        self._data = write_dataset(
            place / "data", samples, vocab_size=128, validation=samples[:60]
        )

    def __missing__(self, case: tuple[int, str]) -> dict:
        group = next(
            name
            for name, (world, cases) in GROUPS.items()
            if world == case[0] and case[1] in cases
        )
        world, cases = GROUPS[group]
        out = self._place / group
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
            f"--nproc-per-node={world}",
            str(JOB),
        ]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        run_program([*command, str(request)], timeout_s=400, env=environment)
        for name in cases:
            self[world, name] = torch.load(out / f"{name}.pt", weights_only=True) | {
                "out": out
            }
        return self[case]


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> Found:
    return Found(tmp_path_factory.mktemp("ranks"))


def _furthest(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> float:
    assert first.keys() == second.keys()
    return max(float((first[name] - second[name]).abs().max()) for name in first)


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.soak)])
def test_gradient_is_independent_of_ranks(found, world):
    one, many = found[1, "fp32"], found[world, "fp32"]
    assert many["losses"][0] == pytest.approx(one["losses"][0], rel=1e-6)
    assert many["norms"][0] == pytest.approx(one["norms"][0], rel=1e-6)
    assert relative_distance(one["gradients"], many["gradients"]) <= 1e-6


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((1, "fp64"), (2, "fp64")),
        pytest.param((1, "fp64"), (4, "fp64"), marks=pytest.mark.soak),
        ((1, "fp64"), (2, "fsdp2-fp64")),
        pytest.param((4, "modernbert"), (4, "modernbert-hsdp"), marks=pytest.mark.soak),
    ],
)
def test_fp64_gradients_agree_to_rounding(found, one, other):
    first, second = found[one]["gradients"], found[other]["gradients"]
    assert first.keys() == second.keys()
    largest = max(float(gradient.norm()) for gradient in first.values())
    # The true gradient of a key's bias is zero: adding the same to all scores changes
    # no softmax.
    told = {
        name: gradient
        for name, gradient in first.items()
        if float(gradient.norm()) > 1e-12 * largest
    }
    assert len(told) >= len(first) - 4
    for name, gradient in told.items():
        assert float((gradient - second[name]).norm() / gradient.norm()) <= 1e-12, name


IN_SOAK = [
    pytest.param(*one, marks=pytest.mark.soak)
    for one in ((2, "compiled"), (2, "compiled-ddp"), (4, "hsdp"))
]
STRATEGIES = [
    (2, name) for name in ("zero1", "fsdp2", "checkpointed", "static", "no-view")
]


@pytest.mark.parametrize(("world", "name"), [*STRATEGIES, *IN_SOAK])
def test_all_strategies_lead_to_the_same_weights(found, world, name):
    plain, other = found[world, "fp32"], found[world, name]
    assert other["losses"] == pytest.approx(plain["losses"], rel=1e-5)
    assert other["norms"] == pytest.approx(plain["norms"], rel=1e-5)
    assert _furthest(plain["parameters"], other["parameters"]) <= 1e-5


@pytest.mark.parametrize(
    "case", [(2, "copies"), (2, "zero1-copies"), (2, "fsdp2-copies")]
)
def test_bf16_weights_follow_their_fp32_copies(found, case):
    alone, other = found[1, "copies"], found[case]
    assert other["losses"] == pytest.approx(alone["losses"], rel=1e-3)
    assert relative_distance(alone["gradients"], other["gradients"]) <= 1e-2
    assert _furthest(alone["parameters"], other["parameters"]) <= 1e-2


@pytest.mark.parametrize(
    ("name", "error"), [("bf16", 2**-8), ("fp16", 2**-11), ("fsdp2-bf16", 2**-8)]
)
def test_16_bit_gradients_differ_by_their_rounding(found, name, error):
    distance = relative_distance(
        found[2, "fp32"]["gradients"], found[2, name]["gradients"]
    )
    assert error / 100 < distance < error
    assert found[2, name]["losses"] == pytest.approx(
        found[2, "fp32"]["losses"], rel=1e-2
    )


def test_sharded_ranks_keep_half_the_optimizer_state(found):
    whole = found[2, "fp32"]["share_of_state"]
    for name in ("zero1", "fsdp2"):
        assert 0.4 * whole < found[2, name]["share_of_state"] < 0.6 * whole


@pytest.mark.parametrize(
    "case",
    [(2, "fp64"), (2, "fsdp2-fp64"), pytest.param((4, "fp64"), marks=pytest.mark.soak)],
)
def test_evaluation_is_independent_of_ranks(found, case):
    # After one step of the same gradient.
    assert found[case]["evaluation"] == pytest.approx(
        found[1, "fp64"]["evaluation"], rel=1e-6
    )


def test_each_rank_measures_its_partial_gradient(found):
    square, share = found[2, "fp64"]["partial"]
    assert share == 0.5
    # Half of the tokens has the same signal, and more noise.
    assert square > found[2, "fp64"]["norms"][0] ** 2
    assert found[2, "fsdp2"]["partial"] is None


def test_exported_model_has_the_trained_weights(found):
    for name, case in (("ddp", "fp32"), ("fsdp2", "fsdp2")):
        loaded = AutoModelForMaskedLM.from_pretrained(found[2, case]["out"] / name)
        weights = {
            f"model.{name}": parameter.detach()
            for name, parameter in loaded.named_parameters()
        }
        assert _furthest(found[2, case]["parameters"], weights) == 0

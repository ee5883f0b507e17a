"""Optimizer steps on pretended GPUs with values, compared with CPUs.

Few cases have every pair of settings; ``make soak`` has more of them.
"""

import itertools
import json
import random
from collections.abc import Callable, Iterator, Mapping

import pytest
import torch

from testbed.datasets import write_dataset
from testbed.nullgpu.environment import ROOT

pytestmark = pytest.mark.cuda
Case = Mapping[str, object]

GLOBAL_BATCH_SIZE = 16
FACTORS: dict[str, tuple[object, ...]] = {
    "strategy": ("ddp", "zero1", "fsdp2"),
    "family": ("bert", "modernbert", "roberta", "electra", "distilbert", "xlm-roberta"),
    "precision": ("fp32", "bf16"),
    "layout": ("packed", "bucketed", "padded"),
    "attention": ("sdpa", "varlen"),
    "activation_checkpointing": ("none", "selective", "full"),
    "micro_batches": (1, 2),
    "gradient_dtype": ("fp32", "bf16", "fp16"),
}


def is_possible(case: Case) -> bool:
    """Return whether the trainer accepts it; other tests have what it rejects."""
    if case["attention"] == "varlen" and case["precision"] == "fp32":
        return False
    return not (
        case["strategy"] == "fsdp2"
        and case["gradient_dtype"] != "fp32"
        and case["micro_batches"] != 1
    )


def all_cases() -> Iterator[Case]:
    for values in itertools.product(*FACTORS.values()):
        case = dict(zip(FACTORS, values, strict=True))
        if is_possible(case):
            yield case


def cases_with_all_pairs() -> list[Case]:
    """Return few cases in which every possible pair of settings occurs.

    They are of three families, and the same every time.
    """
    cases = [case for case in all_cases() if case["family"] in FACTORS["family"][:3]]
    pairs = {
        case_id: set(itertools.combinations(case.items(), 2))
        for case_id, case in enumerate(cases)
    }
    missing = set().union(*pairs.values())
    chosen = []
    while missing:
        # The case with the most missing pairs.
        best = max(pairs, key=lambda case_id: len(pairs[case_id] & missing))
        missing -= pairs.pop(best)
        chosen.append(cases[best])
    return chosen


def name_of(case: Case) -> str:
    return "-".join(map(str, case.values()))


def config_changes(case: Case, ranks: int) -> dict[str, object]:
    parallel = {
        "strategy": case["strategy"],
        "gradient_dtype": case["gradient_dtype"],
        "bucket_cap_mib": 1,
    }
    if case["strategy"] == "fsdp2" and ranks == 4:
        parallel["shard_ranks"] = 2
    unchanged = (
        "family",
        "precision",
        "layout",
        "activation_checkpointing",
        "attention",
    )
    changes = {name: case[name] for name in unchanged}
    changes["micro_batch_size"] = (
        GLOBAL_BATCH_SIZE // int(str(case["micro_batches"])) // ranks
    )
    changes["global_batch_size"] = GLOBAL_BATCH_SIZE
    changes["parallel"] = parallel
    return changes


JOB = ROOT / "tests/system/rank_job.py"
STEPS = 3
PAIRS = {name_of(case): case for case in cases_with_all_pairs()}
HYBRID = {name: values[0] for name, values in FACTORS.items()} | {"strategy": "fsdp2"}
"""Case in which four ranks have two copies of the model; two ranks share a copy."""
MORE = {name_of(case): case for case in random.Random(0).sample(list(all_cases()), 60)}


@pytest.fixture(scope="module")
def runs(null_gpus, tmp_path_factory) -> Callable[..., dict]:
    """Return a function that returns the result of a case.

    All cases of its group run when the first is requested.
    """
    directory = tmp_path_factory.mktemp("matrix")
    samples = [
        [5 + (start + step) % 60 for step in range(8 + start % 33)]
        for start in range(400)
    ]
    data = write_dataset(
        directory / "data", samples, vocab_size=128, validation=samples[:60]
    )

    def job(case: Case, ranks: int, device: str) -> dict[str, object]:
        config = config_changes(case, ranks) | {"device": device, "compile": False}
        if device == "cpu":
            # A CPU has no varlen kernel.
            config["attention"] = "auto"
        return {"config": config, "steps": STEPS}

    def run(device: str, cases: dict[str, Case], ranks: int, name: str) -> dict:
        out = directory / f"{device}-{ranks}-{len(cases)}"
        if not out.exists():
            out.mkdir()
            request = {
                "cases": {
                    name: job(case, ranks, device) for name, case in cases.items()
                },
                "data": str(data),
                "out": str(out),
                "device": device,
            }
            (out / "request.json").write_text(json.dumps(request))
            # CPUs of the same torch, as versions draw other first weights.
            machine = null_gpus(
                devices=ranks,
                values=device == "cuda",
                variables={"OMP_NUM_THREADS": "1"},
            )
            ended = machine.torchrun(JOB, out / "request.json", timeout_s=1800)
            assert ended.code == 0, ended
            runs_kernels = ended.counts.total("kernel") > 1000 * len(cases)
            assert runs_kernels == (device == "cuda")
        return torch.load(out / f"{name}.pt", weights_only=True)

    return run


@pytest.mark.parametrize("name", PAIRS)
def test_two_gpus_match_two_cpus(runs, name):
    check(runs("cuda", PAIRS, 2, name), runs("cpu", PAIRS, 2, name), PAIRS[name])


@pytest.mark.soak
def test_hybrid_sharding_matches_two_cpus(runs):
    unsharded = next(
        name for name, case in PAIRS.items() if {**case, "strategy": "fsdp2"} == HYBRID
    )
    on_gpus = runs("cuda", {"hybrid": HYBRID}, 4, "hybrid")
    on_cpus = runs("cpu", PAIRS, 2, unsharded)
    check(on_gpus, on_cpus, HYBRID)


@pytest.mark.soak
@pytest.mark.parametrize("name", MORE)
def test_four_gpus_match_four_cpus(runs, name):
    check(runs("cuda", MORE, 4, name), runs("cpu", MORE, 4, name), MORE[name])


def check(on_gpus: dict, on_cpus: dict, case: Case) -> None:
    exact = case["precision"] == case["gradient_dtype"] == "fp32"
    assert on_gpus["losses"] == pytest.approx(
        on_cpus["losses"], rel=1e-4 if exact else 5e-3
    )
    assert on_gpus["norms"] == pytest.approx(
        on_cpus["norms"], rel=1e-3 if exact else 5e-2
    )
    if exact:  # weights have moved by three steps of 1e-3 at most
        torch.testing.assert_close(
            on_gpus["parameters"], on_cpus["parameters"], rtol=1e-4, atol=1e-5
        )
    assert on_gpus["evaluation"][0] == pytest.approx(
        on_cpus["evaluation"][0], rel=1e-4 if exact else 5e-3
    )

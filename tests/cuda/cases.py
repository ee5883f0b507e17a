"""Configurations of a training step, in pairs: every two settings occur together in some case."""

import itertools
from collections.abc import Iterator, Mapping

Case = Mapping[str, object]

FACTORS: dict[str, tuple[object, ...]] = {
    "strategy": ("ddp", "zero1", "fsdp2"),
    "family": ("bert", "modernbert", "roberta", "xlm-roberta", "electra", "distilbert"),
    "precision": ("fp32", "bf16"),
    "layout": ("packed", "bucketed", "padded"),
    "attention": ("sdpa", "varlen"),
    "checkpointing": ("none", "selective", "full"),
    "micro_batches": (1, 2),
    "gradient_dtype": ("fp32", "bf16", "fp16"),
}
_ONLY_PADDING_MASKS = ("electra", "distilbert")


def possible(case: Case) -> bool:
    """Whether the trainer accepts it; what it refuses, other tests test."""
    if case["attention"] == "varlen" and case["precision"] == "fp32":
        return False
    if case["strategy"] == "fsdp2" and case["gradient_dtype"] != "fp32" and case["micro_batches"] != 1:
        return False
    if case["family"] in _ONLY_PADDING_MASKS:
        return case["layout"] != "packed" and case["attention"] == "sdpa" and case["checkpointing"] == "none"
    return True


def all_cases() -> Iterator[Case]:
    """Yield everything possible."""
    for values in itertools.product(*FACTORS.values()):
        case = dict(zip(FACTORS, values, strict=True))
        if possible(case):
            yield case


def in_pairs() -> list[Case]:
    """Return few cases in which every possible pair of settings occurs; the same ones every time."""
    cases = list(all_cases())
    pairs = {case_id: set(itertools.combinations(case.items(), 2)) for case_id, case in enumerate(cases)}
    missing = set().union(*pairs.values())
    chosen = []
    while missing:
        best = max(pairs, key=lambda case_id: len(pairs[case_id] & missing))
        missing -= pairs.pop(best)
        chosen.append(cases[best])
    return chosen


def name_of(case: Case) -> str:
    """Return a name that says everything."""
    return "-".join(map(str, case.values()))


def config_changes(case: Case, ranks: int) -> dict[str, object]:
    """Return the changes of the tests' configuration."""
    known = case["family"] not in _ONLY_PADDING_MASKS
    parallel = {"strategy": case["strategy"], "gradient_dtype": case["gradient_dtype"], "bucket_cap_mib": 1}
    if case["strategy"] == "fsdp2" and ranks == 4:
        parallel["shard_ranks"] = 2
    return {
        "family": case["family"],
        "precision": case["precision"],
        "layout": case["layout"],
        "attention": case["attention"] if known else "auto",
        "head": "masked" if known else "dense",
        "checkpointing": case["checkpointing"],
        "micro_batch_rows": 16 // int(str(case["micro_batches"])) // ranks,
        "global_batch_rows": 16,
        "parallel": parallel,
    }

"""``python -m benchmarks.paper_case``: predicted memory in the paper's case.

It is shown beside the paper's report: ``autotune estimate`` for the paper's GPU and its
two sizes, set up as its trainer is and tuned; and by arithmetic the efficiency of its
cluster. Nothing is measured, so there is no bar: the paper's shape of 350 M and its
vocabulary are not public.
"""

import json
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from autotune.base.tables import text_table
from autotune.evidence.network import GradientSync
from benchmarks.bars import finish, measuring, parser, run
from benchmarks.golden_network import (
    BERT_120M,
    BERT_350M,
    BF16_FLOPS_PER_S,
    FP32_FLOPS_PER_S,
    ROW_TOKENS,
    compute,
    efficiency,
)
from testbed.corpora import LENGTHS_FILE
from testbed.programs import run_program

GPU, RANKS = "h100-nvl-94gb", 2
REPORTED_ROWS = {"bert-120m": 184, "bert-350m": 20}
"""Of the paper, arXiv 2509.05258, recommendation 5."""
SETTINGS: dict[str, tuple[str, ...]] = {
    "as the paper's trainer": (
        "--precision",
        "fp32",
        "--layout",
        "padded",
        "--mlm-head",
        "dense",
        "--no-accumulate",
        "--no-compile",
    ),
    "tuned": (),
    "tuned, full checkpointing": ("--activation-checkpointing", "full"),
}
NODES = (1, 2, 8, 32, 128)
TIMEOUT_S = 600


@measuring
def main(arguments: Sequence[str] | None) -> int:
    """Predict, print and return the exit code."""
    options = parser("paper_case", "Predict the paper's case.").parse_args(arguments)
    cases = {name: predicted(flags) for name, flags in SETTINGS.items()}
    rows = [
        [
            name,
            model,
            str(estimate["micro_batch_size"]),
            f"{estimate['micro_batch_size_low']} to"
            f" {estimate['micro_batch_size_high']}",
        ]
        for name, models in cases.items()
        for model, estimate in models.items()
    ]
    shown = text_table(["settings", "model", "rows (predicted)", "range"], rows)
    finish(
        options.json,
        [],
        {"gpu": GPU, "ranks": RANKS, "cases": cases, **arithmetic()},
        shown,
    )
    return 0


def arithmetic() -> dict[str, Any]:
    """Return the efficiency of the paper's cluster, and the lengths of functions.

    Efficiency is against one node; the functions are of real programs.
    """
    small, fast, large = (
        compute(model, flops_per_s)
        for model, flops_per_s in (
            (BERT_120M, FP32_FLOPS_PER_S),
            (BERT_120M, BF16_FLOPS_PER_S),
            (BERT_350M, FP32_FLOPS_PER_S),
        )
    )
    plain, half = GradientSync(), GradientSync(gradient_dtype="bf16")
    cases = (
        ("120 M, fp32 at 36 TFLOP/s, 184 sequences: the paper's", small, 184, 1, plain),
        ("120 M, bf16 at 292 TFLOP/s, 184 sequences", fast, 184, 1, plain),
        ("the same, gradients in bf16", fast, 184, 1, half),
        ("the same, gradients in bf16, accumulation 4", fast, 184, 4, half),
        ("350 M, fp32, 20 sequences: the paper's", large, 20, 1, plain),
        ("the same, accumulation 3", large, 20, 3, plain),
        ("the same, accumulation 3, gradients in bf16", large, 20, 3, half),
    )
    lengths, counts = np.load(LENGTHS_FILE)
    return {
        "scaling": [
            {
                "name": name,
                "efficiency": [
                    round(
                        efficiency(rank_compute, rows, batches, gradient_sync, nodes), 4
                    )
                    for nodes in NODES
                ],
            }
            for name, rank_compute, rows, batches, gradient_sync in cases
        ],
        "functions": {
            "mean_tokens": float(np.average(lengths, weights=counts)),
            "mean_tokens_cut": float(
                np.average(np.minimum(lengths, ROW_TOKENS), weights=counts)
            ),
        },
    }


def predicted(flags: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return the estimate of each model, without its memory breakdown."""
    models = [word for model in REPORTED_ROWS for word in ("--model", model)]
    command = [
        sys.executable,
        "-m",
        "autotune",
        "estimate",
        *models,
        "--gpu",
        GPU,
        "--ranks",
        str(RANKS),
    ]
    answer = run_program([*command, *flags, "--json"], timeout_s=TIMEOUT_S)
    kept = (
        "parameters",
        "micro_batch_size",
        "micro_batch_size_low",
        "micro_batch_size_high",
        "budget_bytes",
        "attention",
    )
    return {
        estimate["model"]: (
            {key: estimate[key] for key in kept}
            | {"peak_bytes": estimate["breakdown"]["peak_bytes"]}
        )
        for estimate in json.loads(answer)["models"]
    }


if __name__ == "__main__":
    run(main)

"""``python -m benchmarks.cuda_memory --json FILE``: predicted and allocated memory.

The prediction is compared with torch's own CUDA allocator. Each configuration is probed
as a user would, on pretended GPUs: torch's CUDA build, its caching allocator, autograd
and kernels' requests are real, only kernels do nothing. Its memory is predicted on the
meta device, and trials then find the largest micro-batch that the allocator serves.
Some are then trained on packed sequences of documents of real lengths, at the size that
a probe chooses. Figures are the allocator's. Non-PyTorch memory is pretended, and
compared with nothing.
"""

import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from autotune.base.tables import text_table
from benchmarks.bars import (
    Bar,
    Direction,
    bars_of,
    finish,
    keep,
    measuring,
    parser,
    run,
)
from testbed.nullgpu.memory import Case, on_pretended_gpus

BARS: dict[str, tuple[str, Direction, float]] = {
    "peak_error_median_%": ("%", "<=", 0.2),
    "peak_error_worst_%": ("%", "<=", 1.0),
    "peak_error_compiled_worst_%": ("%", "<=", 3.0),
    "largest_exact_or_one_off_%": ("%", ">=", 90),
    "largest_error_worst_%": ("%", "<=", 1.0),
    "largest_error_compiled_worst_%": ("%", "<=", 3.0),
    "trials_median": ("trials", "<=", 3),
    "trials_worst": ("trials", "<=", 6),
    "searches_without_an_answer": ("searches", "<=", 0),
    "retries_in_training": ("retries", "<=", 0),
}
CASES = (
    Case(model="bert-120m", trained=True),
    Case(model="bert-120m", activation_checkpointing="selective"),
    Case(model="bert-120m", activation_checkpointing="full", trained=True),
    Case(model="bert-350m", trained=True),
    Case(model="bert-350m", activation_checkpointing="selective"),
    Case(model="bert-350m", activation_checkpointing="full", trained=True),
    Case(model="bert-350m", activation_checkpointing="full", micro_batches=1),
    Case(model="modernbert-base", trained=True),
    Case(model="modernbert-base", activation_checkpointing="selective"),
    Case(model="modernbert-base", activation_checkpointing="full"),
    Case(model="modernbert-large", trained=True),
    Case(model="modernbert-large", activation_checkpointing="full"),
    Case(model="roberta"),
    Case(model="roberta", activation_checkpointing="full"),
    Case(model="bert-120m", attention="sdpa", dropout=0.1, trained=True),
    Case(
        model="bert-350m",
        attention="sdpa",
        dropout=0.1,
        activation_checkpointing="full",
    ),
    Case(model="modernbert-base", attention="sdpa"),
    Case(model="bert-120m", attention="sdpa", dropout=0.1, width=128),
    Case(
        model="bert-120m",
        precision="fp32",
        attention="sdpa",
        dropout=0.1,
        layout="padded",
        mlm_head="dense",
        micro_batches=1,
    ),
    Case(
        model="bert-350m",
        precision="fp32",
        attention="sdpa",
        dropout=0.1,
        layout="padded",
        mlm_head="dense",
        micro_batches=1,
    ),
    Case(model="modernbert-base", precision="fp32", attention="sdpa"),
    Case(
        model="bert-120m",
        precision="fp32",
        attention="sdpa",
        activation_checkpointing="full",
    ),
    Case(model="modernbert-base", documents=12.0),
    Case(model="bert-120m", compiled=True, trained=True),
    Case(model="modernbert-base", compiled=True),
    Case(model="bert-350m", compiled=True, activation_checkpointing="full"),
    Case(model="bert-120m", compiled=True, attention="sdpa", dropout=0.1),
    Case(model="bert-120m", attention="fa4", documents=1.0),
    Case(model="bert-120m", compiled=True, attention="fa4", documents=1.0),
    Case(model="bert-120m", fused_norms=True, trained=True),
    Case(model="bert-120m", compiled=True, fused_norms=True, trained=True),
    Case(model="bert-120m", gelu_epilogues=True),
    Case(model="bert-120m", fused_norms=True, gelu_epilogues=True, trained=True),
    Case(
        model="bert-120m",
        compiled=True,
        fused_norms=True,
        gelu_epilogues=True,
        trained=True,
    ),
    Case(model="bert-120m", gpu="h100-sxm-80gb"),
    Case(model="bert-120m", gpu="rtx-4090-24gb"),
    Case(model="bert-350m", gpu="rtx-4090-24gb", activation_checkpointing="full"),
    Case(
        model="modernbert-large",
        gpu="rtx-4090-24gb",
        activation_checkpointing="selective",
    ),
    Case(model="bert-350m", gpu="h200-141gb"),
    Case(model="bert-120m", gpu="h200-141gb", activation_checkpointing="full"),
    Case(model="bert-120m", ranks=2),
    Case(model="bert-350m", ranks=2, strategy="zero1", activation_checkpointing="full"),
    Case(model="bert-120m", ranks=2, strategy="fsdp2"),
    Case(model="bert-350m", ranks=2, strategy="fsdp2", activation_checkpointing="full"),
)


@measuring
def main(arguments: Sequence[str] | None) -> int:
    """Probe and train the chosen configurations, print and return the exit code."""
    options_of = parser("cuda_memory", __doc__ or "")
    options_of.add_argument(
        "--only",
        default="",
        metavar="TEXT",
        help="configurations whose names hold this text",
    )
    options = options_of.parse_args(arguments)
    configurations: dict[str, Any] = {}
    content = {"evidence": "allocator", "configurations": configurations}
    for case in (case for case in CASES if options.only in case.name):
        configurations[case.name] = on_pretended_gpus(case)
        sys.stderr.write(f"{case.name}: {json.dumps(configurations[case.name])}\n")
        keep(options.json, make_bars(configurations), content)  # each takes minutes
    return finish(
        options.json,
        make_bars(configurations),
        content,
        text_table(_HEAD, _rows(configurations), align="lrrrrrr"),
    )


def make_bars(configurations: dict[str, Any]) -> list[Bar]:
    """Compare figures with their bars."""
    complete = [
        configuration
        for configuration in configurations.values()
        if configuration.get("largest_micro_batch_size")
    ]
    errors = {
        True: _errors(complete, compiled=True),
        False: _errors(complete, compiled=False),
    }
    rows = {
        compiled: [
            _rows_off(configuration)
            for configuration in complete
            if configuration["compiled"] is compiled and configuration["predicted_rows"]
        ]
        for compiled in (True, False)
    }
    shares = {compiled: [share for _, share in rows[compiled]] for compiled in rows}
    near = [off <= 1 for off, _ in (*rows[False], *rows[True])]
    trials = [len(configuration["trials"]) for configuration in complete]
    bad = ("error", "crashed", "not_traced")
    broken = sum(
        any(configuration.get(key) for key in bad) or not configuration.get("verified")
        for configuration in configurations.values()
    )
    again = [
        configuration["trained"].get("retries")
        for configuration in complete
        if "trained" in configuration
    ]
    retries = sum(again) if again and None not in again else None
    figures = (
        _median(errors[False]),
        _most(errors[False]),
        _most(errors[True]),
        100 * sum(near) / len(near) if near else None,
        _most(shares[False]),
        _most(shares[True]),
        _median(trials),
        _most(trials),
        broken,
        retries,
    )
    return bars_of(BARS, dict(zip(BARS, figures, strict=True)))


def _errors(configurations: list[dict[str, Any]], *, compiled: bool) -> list[float]:
    return [
        100
        * abs(
            configuration["predicted_peak_bytes"]
            / configuration["allocator_peak_bytes"]
            - 1
        )
        for configuration in configurations
        if configuration["compiled"] is compiled
        and "predicted_peak_bytes" in configuration
    ]


def _rows_off(configuration: dict[str, Any]) -> tuple[int, float]:
    off = abs(
        configuration["predicted_rows"] - configuration["largest_micro_batch_size"]
    )
    return off, 100 * off / configuration[
        "largest_micro_batch_size"
    ] if off > 1 else 0.0


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _most(values: Sequence[float]) -> float | None:
    return max(values, default=None)


_HEAD = (
    "configuration",
    "predicted",
    "largest",
    "its peak",
    "predicted peak",
    "trials",
    "retries in training",
)


def _rows(configurations: Mapping[str, Any]) -> list[list[str]]:
    """Return a row of the table for each configuration."""
    rows = []
    for name, configuration in configurations.items():
        if "predicted_peak_bytes" not in configuration:
            rows.append([name, "failed", *[""] * (len(_HEAD) - 2)])
            continue
        allocated_bytes = configuration["allocator_peak_bytes"]
        error = configuration["predicted_peak_bytes"] / allocated_bytes - 1
        rows.append(
            [
                name,
                str(configuration.get("predicted_rows")),
                str(configuration.get("largest_micro_batch_size")),
                f"{allocated_bytes / 1e9:.2f} GB",
                f"{error:+.3%}",
                str(len(configuration["trials"])),
                str(configuration.get("trained", {}).get("retries", "")),
            ]
        )
    return rows


if __name__ == "__main__":
    run(main)

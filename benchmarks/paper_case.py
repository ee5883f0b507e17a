"""``python -m benchmarks.paper_case``: what is predicted to fit in the paper's case, beside what the paper reports.

``autotune estimate`` for the paper's card and its two sizes, set up as its trainer is and tuned. Nothing is measured,
so there is no bar: the paper's shape of 350 M and its vocabulary are not public.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from autotune.show.tables import text_table
from autotune.store import write_atomically

GPU, RANKS = "h100-nvl-94gb", 2
REPORTED_ROWS = {"bert-120m": 184, "bert-350m": 20}
"""Of the paper, arXiv 2509.05258, recommendation 5."""
SETTINGS: dict[str, tuple[str, ...]] = {
    "as the paper's trainer": ("--precision", "fp32", "--layout", "padded", "--head", "dense", "--no-accumulate"),
    "tuned": ("--attention-dropout", "0"),
    "tuned, full checkpointing": ("--attention-dropout", "0", "--checkpointing", "full"),
}
TIMEOUT_S = 600


def main(arguments: Sequence[str] | None = None) -> int:
    """Predict, print and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.paper_case", description="Predict the paper's case.")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there as well")
    options = parser.parse_args(arguments)
    cases = {name: predicted(flags) for name, flags in SETTINGS.items()}
    if options.json:
        write_atomically(options.json, json.dumps({"bars": [], "gpu": GPU, "ranks": RANKS, "cases": cases}, indent=1))
    rows = [
        [name, model, str(one["rows"]), f"{one['rows_low']} to {one['rows_high']}"]
        for name, models in cases.items()
        for model, one in models.items()
    ]
    print(text_table(["settings", "model", "rows (predicted)", "range"], rows))
    return 0


def predicted(flags: Sequence[str]) -> dict[str, dict[str, Any]]:
    """What the estimate says of each model, without where its memory goes."""
    models = [word for model in REPORTED_ROWS for word in ("--model", model)]
    command = [sys.executable, "-m", "autotune", "estimate", *models, "--gpu", GPU, "--ranks", str(RANKS)]
    done = subprocess.run(
        [*command, *flags, "--json"], capture_output=True, text=True, check=True, timeout=TIMEOUT_S, encoding="utf-8"
    )
    kept = ("parameters", "rows", "rows_low", "rows_high", "peak_bytes", "budget_bytes", "attention")
    return {one["model"]: {key: one[key] for key in kept} for one in json.loads(done.stdout)["models"]}


if __name__ == "__main__":
    sys.exit(main())

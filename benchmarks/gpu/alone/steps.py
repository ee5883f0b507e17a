"""``python -m benchmarks.gpu.alone.steps --json FILE``: whether a micro-batch keeps fitting, step after step.

The stage ``endurance`` runs it. It trains on the dataset with the trainer's own loop, loaders and evaluation included,
so that no two micro-batches are alike in documents and in what is to be predicted, as in a long run, under a limit of
device memory. An allocation that the allocator had to try twice ends it, and so does memory outside the allocator that
grows beyond the limit. On a CPU nothing is limited, as a whole run is counted there in other ways than a trial.
"""

import argparse
import json
import statistics
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.alone.bench import FOR_EVER, LOADER_WORKERS, Findings, add_file, add_limit

MOST_STEPS_PER_ROW = 20
EVALUATION_STEPS = 500
PROGRESS_STEPS = 100


def main(arguments: Sequence[str] | None = None) -> int:
    """Train so many steps; returns 1 if they did not fit, else 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.alone.steps", description="A long run.")
    add_file(parser)
    parser.add_argument("--data", type=Path, metavar="DIR", required=True, help="a prepared dataset")
    parser.add_argument("--config", type=Path, metavar="FILE", required=True, help="a trainer's settings, as JSON")
    parser.add_argument("--steps", type=int, required=True)
    add_limit(parser)
    options = parser.parse_args(arguments)
    findings = Findings(options.json, go_on=options.go_on)
    settings: dict[str, Any] = json.loads(options.config.read_text())
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as place:
        return int(not _trains(options, settings, findings, Path(place)))


def _trains(options: argparse.Namespace, settings: dict[str, Any], findings: Findings, place: Path) -> bool:
    """Whether all steps went through; the findings say how many did."""
    from autotune.measure.jobs.budget import enforce
    from benchmarks.rivals import Match, Ours
    from trainer.config import TrainConfig
    from trainer.failure import out_of_memory
    from trainer.parallel import join_ranks

    on_gpu = settings["device"] == "cuda"
    steps_per_row = min(MOST_STEPS_PER_ROW, options.steps)
    config = TrainConfig.model_validate(
        settings
        | {
            "data": {"loader_workers": LOADER_WORKERS if on_gpu else 0},
            "max_steps": FOR_EVER,
            "log_interval_steps": steps_per_row,
            "evaluation": {"interval_steps": max(steps_per_row, EVALUATION_STEPS)},
            "checkpoint": {"enabled": False},
        }
    )
    ranks = join_ranks(config, environment={})
    budget = enforce(options.budget_bytes if on_gpu else None, ranks, options.used_before_bytes)
    training = Ours(Match(config=config, data_dir=options.data, samples_per_step=0, ranks=ranks, place=place))
    done, told, refused = 0, 0, ""
    while done < options.steps and not refused:
        try:
            training.step()
            budget.check()
        except (RuntimeError, MemoryError) as error:
            refused = out_of_memory(error) or ""
            if not refused:
                raise
        else:
            done = training.rows[-1].step
        findings.write("run", "optimizer_steps", done)
        if done - told >= PROGRESS_STEPS:
            sys.stderr.write(f"step {done} of {options.steps}\n")
            told = done
    findings.write("run", "refused", refused)
    if not refused:
        findings.write("run", "peak_bytes", budget.peak_bytes())
    if training.rows:
        findings.write("run", "step_median_s", statistics.median(row.step_s for row in training.rows))
        training.finish()
    return not refused


if __name__ == "__main__":
    warnings.filterwarnings("ignore", category=UserWarning)
    sys.exit(main())

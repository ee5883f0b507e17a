"""``python -m benchmarks.step_ablation SETTING``: one setting of a training step.

Steps with it and without it alternate in windows, in one process. ``--list`` prints the
settings, and why some cannot be measured here. ``benchmarks.gpu.step_settings`` has the
table; to add a setting, add a row.
"""

import argparse
import json
import sys
import time

import torch

from benchmarks.gpu.step_settings import (
    STEP_SETTINGS,
    reason_unavailable,
    row_of,
    step_config,
)
from benchmarks.step_timing import Steps
from trainer.runtime.ranks import join_ranks

WINDOW_STEPS, LEAST_WINDOWS = 5, 3


def main() -> int:
    """Measure one setting, print JSON, and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.step_ablation",
        description="Compare a training step with and without a setting.",
    )
    names = [row.name for row in STEP_SETTINGS]
    parser.add_argument("setting", nargs="?", choices=names)
    parser.add_argument("--model", default="bert-120m")
    parser.add_argument("--size", type=int, default=64, help="sequences of a step")
    parser.add_argument("--seq-length", type=int, default=512)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--tiny", action="store_true", help="do not compile layers")
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args()
    if options.list or options.setting is None:
        for row in STEP_SETTINGS:
            print(f"{row.name}: {reason_unavailable(row) or 'available'}")
        return 0
    row = row_of(options.setting)
    eager = {"compile": False} if options.tiny else {}
    settings = {
        "before": {**row.compared_with, **eager},
        "with it": {**row.changed, **eager},
    }
    configs = {
        name: step_config(
            options.model, options.size, values, seq_length_tokens=options.seq_length
        )
        for name, values in settings.items()
    }
    ranks = join_ranks(configs["before"], environment={})
    steps = {}
    for name, config in configs.items():
        steps[name] = Steps.of(config, ranks)
        sys.stderr.write(f"{name}: first step {steps[name].first_step_s:.1f} s\n")
    end_s = time.monotonic() + (0.0 if options.tiny else options.seconds)
    windows = 0
    while windows < LEAST_WINDOWS or time.monotonic() < end_s:
        for step in steps.values():
            step.times_s.append(step.window(WINDOW_STEPS))
        windows += 1
    answer = {
        "setting": row.name,
        "model": options.model,
        "size": options.size,
        "torch": torch.__version__,
        "steps": [
            {"name": name, "settings": settings[name], **step.figures()}
            for name, step in steps.items()
        ],
    }
    print(json.dumps(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main())

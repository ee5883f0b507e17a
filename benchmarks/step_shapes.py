"""``python -m benchmarks.step_shapes dynamic|static --size N …``: shapes of layers.

Steps of several sizes run one after the other. With dynamic shapes, which torch uses
once a second size occurs, further sizes need no compilation; with static shapes each
size has its kernels. The time of the first step of a size and that of later ones show
what either costs.
"""

import argparse
import json
import sys

import torch

from benchmarks.gpu.step_settings import step_config
from benchmarks.step_timing import WARM_UP, Steps, batches_of
from trainer.runtime.ranks import join_ranks

TIMED = 10


def main() -> int:
    """Measure all sizes, print JSON, and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.step_shapes",
        description="Compare dynamic and static shapes of compiled layers.",
    )
    parser.add_argument("shapes", choices=("dynamic", "static"))
    parser.add_argument("--model", default="bert-120m")
    parser.add_argument("--size", type=int, action="append", required=True)
    parser.add_argument("--seq-length", type=int, default=512)
    parser.add_argument("--tiny", action="store_true", help="do not compile layers")
    options = parser.parse_args()
    torch._dynamo.config.automatic_dynamic_shapes = options.shapes == "dynamic"
    settings = {"compile": False} if options.tiny else {}
    configs = [
        step_config(options.model, size, settings, seq_length_tokens=options.seq_length)
        for size in options.size
    ]
    ranks = join_ranks(configs[0], environment={})
    steps = Steps.of(configs[0], ranks)
    rows = []
    for number, config in enumerate(configs):
        if number:
            steps.batches = batches_of(config)
            steps.first_step_s = steps.window(1)
            steps.window(WARM_UP)
        row = {
            "size": config.micro_batch_size,
            "first_step_s": steps.first_step_s,
            "step_s": steps.window(TIMED),
        }
        rows.append(row)
        sys.stderr.write(f"{row}\n")
    print(json.dumps({"shapes": options.shapes, "model": options.model, "sizes": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())

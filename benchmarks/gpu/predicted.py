"""``python -m benchmarks.gpu.predicted --json FILE``: what the check will find of memory, predicted before any GPU was.

The configurations of the stage ``memory``, traced without a GPU: the largest micro-batch of each on an H200, most of
them with the memory of an H100 NVL. What lies around a traced step on a GPU is assumed, with a range; so are the rows.
``docs/gpu-results.md`` holds them beside what was measured.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from autotune.core.cards import find_card
from autotune.core.hardware import GpuFacts, SlurmFacts
from autotune.decide.surroundings import expected_on_gpu
from autotune.measure.host import SystemHost
from autotune.measure.machine import ForkServerMachine
from autotune.search.estimate import estimate_model, predicted_bytes, predicted_rows, rows_range
from autotune.search.probe import room_of, trace_request
from autotune.search.site import Site
from autotune.show.tables import text_table
from autotune.store import write_atomically
from benchmarks.gpu.check.sizes import FULL
from benchmarks.gpu.stage.memory import SETTINGS, Setting, request_for

CARD = "h200"


def main(arguments: Sequence[str] | None = None) -> int:
    """Predict, print and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.predicted", description="Predict what will fit.")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there as well")
    options = parser.parse_args(arguments)
    site = site_of(CARD)
    with ForkServerMachine() as machine:
        found = {one.name: predict(site, one, machine) for one in SETTINGS}
    if options.json:
        content = {"bars": [], "gpu": CARD, "settings": found}
        write_atomically(options.json, json.dumps(content, indent=1) + "\n")
    rows = [[name, str(one["rows"]), f"{one['rows_low']} to {one['rows_high']}"] for name, one in found.items()]
    print(text_table(["configuration", "rows (predicted)", "range"], rows, align="lrr"))
    return 0


def site_of(key: str) -> Site:
    """A machine with one GPU of a kind, which nothing else is on."""
    card = find_card(key)
    gpu = GpuFacts(
        uuid="",
        index=0,
        name=card.name,
        total_bytes=card.total_bytes,
        mig_enabled=False,
        power_cap_w=None,
        compute_mode="default",
        driver="",
        compute_capability=card.compute_capability,
    )
    return Site(
        device="cuda",
        gpus=(gpu,),
        host=SystemHost().facts([Path.cwd()]),
        slurm=SlurmFacts(job_id=None, end_time_s=None, nodes=None, tasks=None, gpus_per_node=None, commands=()),
        versions={},
        gpu_absent=None,
        device_used_bytes=0,
    )


def predict(site: Site, one: Setting, machine: ForkServerMachine) -> dict[str, Any]:
    """Rows that fit, and their range by all that is assumed; bytes of the usual."""
    request = request_for(site, FULL, one)
    estimate = estimate_model(trace_request(request), machine, room_of(request))
    assert site.gpu is not None
    expected = expected_on_gpu(site.gpu.compute_capability, 1, site.cuda_bytes)
    budget_bytes = request.memory_budget_bytes
    usual = predicted_rows(estimate, budget_bytes, expected.usual, max_rows=request.max_rows)
    low, high = rows_range(estimate, budget_bytes, expected, max_rows=request.max_rows)
    return {
        "rows": usual,
        "rows_low": low,
        "rows_high": high,
        "peak_bytes": round(predicted_bytes(estimate, expected.usual)(usual)),
        "budget_bytes": budget_bytes,
        "parameters": estimate.parameters,
        "attention": estimate.attention,
    }


if __name__ == "__main__":
    sys.exit(main())

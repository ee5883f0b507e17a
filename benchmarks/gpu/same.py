"""Stage ``same``: the fast kernels against plain ones, on the device itself."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.gpu.results import NO_TIME, Sheet
from benchmarks.gpu.rig import NoTimeLeft, Rig, TimeBox, TrialFailed

# What a figure of the benchmark is called here, and what it should be.
_FIGURES = {
    "gradient distance, varlen": ("varlen_gradient_distance_share", 0.0),
    "gradient distance, varlen, whole last layer": ("varlen_whole_last_layer_gradient_distance_share", 0.0),
    "steps without a host wait": ("steps_without_host_wait_count", None),
    "recompilations": ("recompilations_count", 0.0),
}


def measure(rig: Rig, sheet: Sheet, box: TimeBox) -> None:
    """Run that part of the training benchmark in a process of its own, as it takes the device for itself.

    Raises:
        NoTimeLeft: If it did not end in time.
        TrialFailed: If it failed.
    """
    out = Path(rig.scratch) / "same.json"
    command = [sys.executable, "-m", "benchmarks.gpu.train", "--only", "same", "--json", str(out)]
    if rig.site.device == "cpu":
        command.append("--tiny")
    root = Path(__file__).parents[2]
    try:
        ended = subprocess.run(
            command, capture_output=True, text=True, timeout=max(1.0, box.left_s), check=False, cwd=root
        )
    except subprocess.TimeoutExpired as error:
        raise NoTimeLeft(NO_TIME) from error
    found: dict[str, Any] = json.loads(out.read_text())["same"] if out.is_file() else {}
    if not set(_FIGURES) <= set(found):
        raise TrialFailed(f"the comparison failed: {found.get('not measured', ended.stderr[-400:])}")
    sheet.details |= found
    for name, (figure, expected) in _FIGURES.items():
        sheet.measured(figure, found[name], expected=expected)

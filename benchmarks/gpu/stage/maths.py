"""Stage ``maths``: whether the fast ways compute on this device what the plain ones do."""

from collections.abc import Mapping
from typing import Any

from benchmarks.gpu.check.results import Sheet
from benchmarks.gpu.check.rig import Rig, TimeBox, check_end
from benchmarks.gpu.stage.train import program_arguments

PROGRAM = "benchmarks.gpu.alone.maths"
EXPECTED = {
    "documents_varlen_largest_change_of_others": 0.0,
    "documents_masked_largest_change_of_others": 0.0,
    "waits_recompilations_count": 0.0,
}
"""What some figures must be; the others have a bar, or are as small as rounding makes them."""


def measure(rig: Rig, sheet: Sheet, box: TimeBox) -> None:
    """Run the program; what it had when it was cut off is kept.

    Raises:
        NoTimeLeft: If it was cut off.
        TrialFailed: If one of its parts failed.
    """
    found, ended = rig.program(PROGRAM, program_arguments(rig), box)
    for part, figures in found.items():
        _write(sheet, part, figures)
    kernels, compiled = found.get("kernels", {}), found.get("compiled", {})
    plain = kernels.get("masked_to_fp32_distance_share")
    ratio("varlen", kernels.get("varlen_to_fp32_distance_share"), plain, sheet)
    ratio("compiled", compiled.get("to_fp32_distance_share"), plain, sheet)
    check_end(ended)


def ratio(name: str, distance: float | None, plain: float | None, sheet: Sheet) -> None:
    """How far a fast way is from fp32, over how far the plain one of the same precision is."""
    lacking = "the program did not come to it"
    if plain == 0:
        lacking = "on this device the plain way is fp32 itself"
    found = distance / plain if distance is not None and plain else None
    sheet.measured(f"{name}_to_plain_distance_ratio", found, lacking=lacking)


def _write(sheet: Sheet, part: str, figures: Mapping[str, Any]) -> None:
    for name, value in figures.items():
        figure = f"{part}_{name}".replace(" ", "_")
        if name == "not measured":
            sheet.missing(part, value)
        else:
            sheet.measured(figure, value, expected=EXPECTED.get(figure))

"""Stage ``train``: tokens/s and MFU, against what others take, and what each trick is worth alone."""

import statistics
from collections.abc import Mapping
from typing import Any

from benchmarks.gpu.check.results import Sheet, StageResult
from benchmarks.gpu.check.rig import Rig, TimeBox, check_end
from benchmarks.gpu.check.watch import Watch, write_readings

PROGRAM = "benchmarks.gpu.alone.train"
PARTS = ("mfu", "rivals", "ablation")
TIMES = ("window_start_s", "window_end_s")
MODELS = ("bert-120m", "bert-350m")
RIVALS = {
    "paper_style": "paper-style",
    "paper_style_positions_at_once": "paper-style, positions at once",
    "hf_recipe": "HF recipe, plain loop",
    "hf_trainer": "HF Trainer",
}
"""What a figure is called, and what the program calls the rival."""


def measure(rig: Rig, sheet: Sheet, box: TimeBox) -> None:
    """Run the program, and watch the GPU beside it; what it had when it was cut off another time is kept.

    Raises:
        NoTimeLeft: If it was cut off; what it had by then is kept.
        TrialFailed: If one of its parts failed.
    """
    earlier = rig.go_on("train", sheet)
    known = _known(earlier) if earlier else {}
    with rig.watch() as watch:
        found, ended = rig.program(PROGRAM, program_arguments(rig), box, known=known)
    sheet.details |= (earlier.details if earlier else {}) | sheet.details | found
    _write_models(sheet, found.get("mfu", {}), watch, earlier)
    _write_rivals(sheet, found.get("rivals", {}))
    _write_ablation(sheet, found.get("ablation", {}))
    check_end(ended)


def program_arguments(rig: Rig) -> list[str]:
    """What all programs are told."""
    tiny = ["--tiny"] if rig.sizes.name == "tiny" else []
    return ["--data", str(rig.data.resolve()), "--device", rig.site.device, *tiny]


def _known(earlier: StageResult) -> dict[str, Any]:
    """What the program measured then; the times are those of another clock, and the watch of that time is over."""
    known: dict[str, Any] = {}
    for part in PARTS:
        for name, row in earlier.details.get(part, {}).items():
            if isinstance(row, dict) and "not measured" not in row:
                known.setdefault(part, {})[name] = {key: value for key, value in row.items() if key not in TIMES}
    return known


def _write_models(sheet: Sheet, found: Mapping[str, Any], watch: Watch, earlier: StageResult | None) -> None:
    for model in MODELS:
        row, name = found.get(model, {}), model.replace("-", "_")
        lacking = str(row.get("not measured") or found.get("not measured") or "the program did not come to it")
        sheet.measured(f"{name}_real_tokens_per_s", row.get("real_tokens_per_s"), lacking=lacking)
        no_peak = "no peak is known of this device" if row else lacking
        sheet.measured(f"{name}_mfu_share", row.get("mfu"), lacking=no_peak)
        sheet.measured(f"{name}_mfu_6n_share", row.get("mfu_6n"), lacking=no_peak)
        sheet.measured(f"{name}_step_s", row.get("step_s"), lacking=lacking)
        sheet.measured(f"{name}_peak_memory_bytes", row.get("peak_memory_bytes"), lacking=lacking)
        if "window_start_s" in row:
            write_readings(sheet, name, watch, row["window_start_s"], row["window_end_s"], busy_share=None)
        elif earlier:
            readings = (f"{name}_nvml_", f"{name}_gpm_")
            sheet.figures += [figure for figure in earlier.figures if figure.name.startswith(readings)]


def _write_rivals(sheet: Sheet, found: Mapping[str, Any]) -> None:
    """Ratios of each turn, as they were taken one after the other; the median of these."""
    rates = found.get("real_tokens_per_s", {})
    for figure, name in RIVALS.items():
        pairs = list(zip(rates.get("ours", ()), rates.get(name, ()), strict=False))
        ratio = statistics.median(ours / theirs for ours, theirs in pairs) if pairs else None
        reason = found.get(f"{name}: not measured") or found.get("not measured")
        sheet.measured(f"against_{figure}_ratio", ratio, lacking=str(reason or "the program did not come to it"))


def _write_ablation(sheet: Sheet, found: Mapping[str, Any]) -> None:
    everything = found.get("everything", {}).get("real_tokens_per_s")
    for name, row in found.items():
        rate = row.get("real_tokens_per_s") if isinstance(row, dict) else None
        if everything and rate and name != "everything":
            words = "".join(letter if letter.isalnum() else " " for letter in name.lower())
            sheet.measured(f"{'_'.join(words.split())}_of_everything_share", rate / everything)

"""Stages ``ceilings`` and ``nvml``: what the device reaches under a known load, and what its counters say of it."""

from typing import Any

from autotune.core.trial import Trial
from benchmarks.gpu.check.results import Sheet
from benchmarks.gpu.check.rig import NoTimeLeft, Rig, TimeBox
from benchmarks.gpu.check.watch import write_readings

START_ALLOWANCE_S = 60.0
"""A trial may take this much longer than its load: the device's context, libraries, random data, the copy."""
HALF_DUTY_SHARE = 0.5


def measure_ceilings(rig: Rig, sheet: Sheet, box: TimeBox) -> None:
    """The rate of large matrix products and the bandwidth of the device's own memory."""
    trial = load_trial(rig, "ceilings", rig.sizes.ceiling_s, duty_share=1.0, copy_bytes=rig.sizes.copy_bytes)
    figures = rig.figures(trial, "ceilings: products and copies", box)
    dtype = {"bfloat16": "bf16", "float32": "fp32"}[rig.sizes.matmul_dtype]
    sheet.details |= {"matmul_size": rig.sizes.matmul_size, "copy_buffer_bytes": rig.sizes.copy_bytes, "load": figures}
    sheet.measured(f"matmul_{dtype}_flops_per_s", figures["flops_per_s"])
    sheet.measured("copy_read_plus_write_bytes_per_s", figures["copy_bytes_per_s"])


def measure_nvml(rig: Rig, sheet: Sheet, box: TimeBox) -> None:
    """NVML's and GPM's readings on an idle device, under full load, and under a load of half the time."""
    _watch_idle(rig, sheet, box)
    for prefix, duty_share in (("full_load", 1.0), ("half_load", HALF_DUTY_SHARE)):
        trial = load_trial(rig, f"nvml {prefix}", rig.sizes.load_s, duty_share=duty_share, copy_bytes=0)
        with rig.watch() as watch:
            figures = rig.figures(trial, f"nvml: {prefix.replace('_', ' ')}", box)
        busy_share = figures["busy_share"]
        sheet.details[prefix] = figures
        sheet.measured(f"{prefix}_busy_share", busy_share, expected=duty_share)
        sheet.measured(f"{prefix}_matmul_flops_per_s", figures["flops_per_s"])
        start_s = figures["window_start_s"] + rig.sizes.settle_s
        write_readings(sheet, prefix, watch, start_s, figures["window_end_s"], busy_share=busy_share)
    _write_worst_errors(sheet)


def _write_worst_errors(sheet: Sheet) -> None:
    """How far readings are from the load that was known, in the worst of the three."""
    for name, ending in (("gpm", "_gpm_sm_utilisation_share"), ("nvml", "_nvml_utilisation_share")):
        readings = [figure for figure in sheet.figures if figure.name.endswith(ending)]
        errors = [
            abs(one.value - one.expected) for one in readings if one.value is not None and one.expected is not None
        ]
        whole = len(errors) == len(readings) > 0
        lacking = next((one.reason for one in readings if one.reason), None) or "not all loads were read"
        sheet.measured(f"{name}_worst_error_share", max(errors) if whole else None, lacking=lacking)


def load_trial(rig: Rig, purpose: str, seconds: float, *, duty_share: float, copy_bytes: int) -> Trial:
    """A trial of the ``matmul`` job; its purpose tells it apart from equal ones in the ledger."""
    measured: dict[str, Any] = {
        "purpose": purpose,
        "device": rig.site.device,
        "dtype": rig.sizes.matmul_dtype,
        "size": rig.sizes.matmul_size,
        "seconds": seconds,
        "duty_share": duty_share,
        "copy_bytes": copy_bytes,
    }
    return Trial(job="matmul", measured=measured, timeout_s=seconds + START_ALLOWANCE_S)


def _watch_idle(rig: Rig, sheet: Sheet, box: TimeBox) -> None:
    if box.left_s < rig.sizes.idle_s + rig.sizes.settle_s:
        raise NoTimeLeft("no time left to watch the idle device")
    rig.clock.sleep(rig.sizes.settle_s)  # what ran before is still in a driver's window
    start_s = rig.clock.monotonic_s()
    with rig.watch() as watch:
        rig.clock.sleep(rig.sizes.idle_s)
    write_readings(sheet, "idle", watch, start_s, rig.clock.monotonic_s(), busy_share=0.0)

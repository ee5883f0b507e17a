"""Stage ``machine``: what this machine is, which libraries it has, and what is missing."""

import importlib.metadata
from dataclasses import asdict
from typing import Any

from autotune.core.hardware import GpuFacts, Unavailable
from autotune.errors import MachineLacks
from benchmarks.gpu.check.results import Sheet
from benchmarks.gpu.check.rig import Rig, TimeBox

PACKAGES = (
    "torch", "transformers", "numpy", "nvidia-ml-py", "optuna", "psutil", "pydantic", "rich", "safetensors",
    "tokenizers", "tomlkit", "typer", "capstone", "pyelftools",
)  # fmt: skip
"""What the project uses, all of it; a check runs without some of them."""


def measure(rig: Rig, sheet: Sheet, box: TimeBox) -> None:
    """Look, and start the server that trials are forked from."""
    del box  # bounded as a whole
    site, versions = rig.site, package_versions()
    missing = [name for name in PACKAGES if name not in versions]
    sheet.details |= {
        "host": asdict(site.host) | {"allotted_cpus": site.host.allotted_cpus},
        "gpus": [_gpu(rig, gpu) for gpu in site.gpus],
        "gpu_absent": site.gpu_absent,
        "gpu_unreadable": list(rig.monitor.unreadable()),
        "slurm_job": site.slurm.in_job,
        "packages": versions,
        "missing_packages": missing,
    }
    _write_figures(rig, sheet)
    sheet.measured("missing_packages_count", len(missing))
    started_s = rig.clock.monotonic_s()
    rig.machine.start()
    sheet.measured("trial_server_start_s", rig.clock.monotonic_s() - started_s)
    sheet.details["trial_server"] = {"python": site.host.python_version} | rig.machine.versions
    if site.device == "cuda" and rig.machine.versions.get("cuda") is None:
        raise MachineLacks(
            "there is a GPU, and torch is built without CUDA", next_step="Install a CUDA build of torch."
        )


def _gpu(rig: Rig, gpu: GpuFacts) -> dict[str, Any]:
    """What NVML says of a GPU; whose processes are on it is nobody's business."""
    processes = rig.monitor.compute_processes(gpu.uuid)
    used = asdict(processes) if isinstance(processes, Unavailable) else [one.used_bytes for one in processes]
    return {"facts": asdict(gpu), "sample": asdict(rig.monitor.sample(gpu.uuid)), "processes_used_bytes": used}


def package_versions() -> dict[str, str]:
    """Versions of the installed ones of ``PACKAGES``, without importing any."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _write_figures(rig: Rig, sheet: Sheet) -> None:
    host, gpu, reason = rig.site.host, rig.site.gpu, rig.unwatched_reason
    sheet.measured("allotted_cpus_count", host.allotted_cpus)
    sheet.measured("ram_total_bytes", host.ram_total_bytes)
    sheet.measured("ram_available_bytes", host.ram_available_bytes)
    sheet.measured("gpu_count", len(rig.site.gpus))
    lacking = reason if gpu is None else ""
    sheet.measured("gpu_total_bytes", gpu.total_bytes if gpu else None, lacking=lacking)
    sheet.measured("gpu_used_before_bytes", rig.site.device_used_bytes, lacking=lacking)
    sheet.measured("gpu_power_cap_w", gpu.power_cap_w if gpu else None, lacking=lacking)

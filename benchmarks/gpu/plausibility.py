"""Reasons not to keep a check: anything that is not shown to be real and plausible."""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from autotune.errors import AutotuneError
from autotune.machine.values import MeasuredGpu
from autotune.profiles.store import read_profile
from autotune.trials.decide.plausibility import SLACK, GpuRate, check_rates
from autotune.trials.decide.profile_rates import check_profile
from autotune.trials.decide.run_rates import check_run
from benchmarks.gpu.results import ENDED
from benchmarks.gpu.stage import PROFILES, RUNS
from trainer.formats.errors import TrainerError
from trainer.formats.gpu_peaks import peak_flops_per_s
from trainer.formats.run_record import RUN_FILE, read_run

_LEAST_OF_PEAK_SHARE = 0.05


def reasons_against(folder: Path, check: Mapping[str, Any]) -> list[str]:
    """Return the reasons not to keep the check in a folder."""
    made_with, stages = check["made_with"], check["stages"]
    gpu, driver = made_with.get("gpu"), made_with.get("driver")
    reasons = []
    if made_with.get("tiny") is not False:
        reasons.append("it tried the check itself, with tiny sizes")
    if check["pretended_by"]:
        reasons.append(f"a pretended GPU: {', '.join(check['pretended_by'])} is set")
    if not driver:
        reasons.append("its driver is not known")
    elif not _takes_time(driver) or "nullgpu" in json.dumps(stages).lower():
        reasons.append(f"a pretended {gpu} (driver {driver})")
    if gpu is None or peak_flops_per_s(gpu, "bf16") is None:
        reasons.append(
            f"no peak is known of {gpu}, so no rate can be checked: add it to"
            " trainer/formats/gpu_peaks.py"
        )
    reasons += _unproven(check)
    reasons += _implausible_answers(check)
    ended = [stage for stage in stages.values() if stage["status"] == ENDED]
    measured = 0
    for path, read in _measured(folder):
        measured += 1
        name = path.relative_to(folder)
        try:
            measured_gpu, measured_driver = read(path)
        except (AutotuneError, TrainerError) as error:
            reasons.append(f"{name}: {error.message}")
            continue
        # A kept profile may be of an earlier call, with another driver.
        is_known = measured_gpu == gpu and bool(measured_driver)
        if not is_known or not _takes_time(measured_driver):
            reasons.append(f"{name} is of {measured_gpu}, driver {measured_driver}")
    if not measured and len(ended) <= len(check["proofs"]):
        reasons.append("nothing was measured")
    return list(dict.fromkeys(reasons))


def _takes_time(driver: str | None) -> bool:
    return MeasuredGpu(name=None, driver=driver).takes_time


def _unproven(check: Mapping[str, Any]) -> Iterator[str]:
    """Yield a reason for each call in which the GPU did not compute as its kind does.

    Every call may be on another machine.
    """
    gpu = check["made_with"].get("gpu")
    peak = peak_flops_per_s(gpu, "bf16") if gpu else None
    proofs = {proof["call"]: proof.get("answer") or {} for proof in check["proofs"]}
    calls = {stage["call"] for stage in check["stages"].values()} | set(proofs)
    if not calls:
        yield f"a pretended {gpu}: its matmuls were not checked"
    for call in sorted(calls):
        proof = proofs.get(call, {})
        if proof.get("right") is not True:
            yield f"a pretended {gpu}: its matmuls are wrong, or were not checked"
        rate = proof.get("flops_per_s", 0.0)
        if peak is not None and not _LEAST_OF_PEAK_SHARE * peak < rate < SLACK * peak:
            yield f"matmuls at {rate:.3g} FLOP/s are not plausible for {gpu}"


def _implausible_answers(check: Mapping[str, Any]) -> Iterator[str]:
    """Yield a reason for each rate of an answer that the GPU cannot reach."""
    gpu = check["made_with"].get("gpu")
    for name, stage in check["stages"].items():
        rates = [
            GpuRate(name=name, per_s=rate)
            for rate in _rates(stage.get("answer"), "model_flops_per_s")
        ]
        try:
            check_rates(gpu, rates)
        except AutotuneError as error:
            yield error.message


def _rates(value: Any, key: str) -> Iterator[float]:
    """Yield all numbers with this key in nested values."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            if name == key and isinstance(inner, int | float):
                yield float(inner)
            else:
                yield from _rates(inner, key)
    elif isinstance(value, list):
        for inner in value:
            yield from _rates(inner, key)


def _measured(
    folder: Path,
) -> Iterator[tuple[Path, Callable[[Path], tuple[str | None, str | None]]]]:
    """Yield every profile and run.

    Each has a function that checks its rates and returns its GPU and driver.
    """

    def of_profile(path: Path) -> tuple[str | None, str | None]:
        stored = read_profile(path)
        if not stored.intact:
            raise AutotuneError("it was edited", next_step="Probe again.")
        check_profile(stored.profile)
        return stored.profile.fingerprint.gpu_name, stored.profile.fingerprint.driver

    def of_run(path: Path) -> tuple[str | None, str | None]:
        run = read_run(path.parent)
        check_run(run)
        return run.header.device, run.header.driver

    for path in sorted(folder.glob(f"**/{PROFILES}/*.toml")):
        yield path, of_profile
    for path in sorted(folder.glob(f"{RUNS}/*/{RUN_FILE}")):
        yield path, of_run

"""Trials of the example profile, as a trial log keeps them."""

from typing import Any

from autotune.trials.values import TrialRecord

STEP_FIGURES: dict[str, Any] = {
    "steps": 4,
    "optimizer_steps": 4,
    "step_s": [0.1],
    "units_per_step": 90.0,
    "peak_bytes": 10**9,
    "non_pytorch_bytes": None,
    "loss": 1.0,
}
WINDOW_FIGURES: dict[str, Any] = {
    "optimizer_steps": 9,
    "discarded_batches": 2,
    "gradient_accumulation_steps": 1,
    "steps": 7,
    "unit": "tokens",
    "units_per_s": 5.0,
    "padded_units_per_s": 100.0,
    "data_wait_share": 0.5,
    "window_start_s": 1.0,
    "window_end_s": 2.0,
    "local_ranks": 1,
    "memory_bytes": None,
    "worker_bytes": None,
    "storage_bytes_per_s": None,
}
MADE_ON: dict[str, Any] = {
    "cpu_model": "A CPU",
    "allotted_cpus": 2,
    "torch": "2.13.0",
    "model_sha256": "m",
    "dataset_hash": "d",
}


def record(
    job: str = "window",
    outcome: dict[str, Any] | None = None,
    config: dict[str, Any] | None = None,
    *,
    time_utc: str = "2026-01-01T00:00:00+00:00",
    site: str = "here",
    key: str = "k",
    budget_bytes: int | None = None,
    old: bool = False,
    **made_on: Any,
) -> TrialRecord:
    """Return a trial of the example profile.

    Args:
        job: Job of the trial.
        outcome: Its outcome; by default the example figures of the job.
        config: Its settings.
        time_utc: Time of its end.
        site: Hash of its machine, software, model and dataset.
        key: Hash of what it measured.
        budget_bytes: Its memory budget.
        old: Leave out where it was made, as old trial logs do.
        made_on: Differences from the fingerprint of the example profile.
    """
    figures = STEP_FIGURES if job == "step" else WINDOW_FIGURES
    inputs: dict[str, Any] = {"config": config or {}}
    # The functions of a step and of a loader get the settings as an argument.
    if job == "window":
        inputs = {"loader": {"function": "m:loader", "arguments": inputs}}
    elif job == "step":
        inputs = {"arguments": inputs}
    entry: dict[str, Any] = {
        "time_utc": time_utc,
        "site": site,
        "key": key,
        "job": job,
        "label": "x",
        "seconds": 1.0,
        "measured": {**inputs, "memory_budget_bytes": budget_bytes},
        "outcome": outcome or measured(figures),
    }
    if job == "step" and config is not None:
        entry["measured"]["size"] = config["micro_batch_size"]
    if not old:
        entry["made_on"] = MADE_ON | made_on
    trial_record = TrialRecord.of(entry)
    assert trial_record is not None
    return trial_record


def measured(figures: dict[str, Any]) -> dict[str, Any]:
    """Return the outcome of a trial that completed."""
    return {"kind": "measured", "figures": figures}


def example_records() -> tuple[TrialRecord, ...]:
    """Return the trials that gave all the figures of the example profile."""
    fits = record("step", None, {"micro_batch_size": 2}, budget_bytes=2**30, key="fits")
    does_not_fit = record(
        "step",
        {"kind": "out_of_memory", "detail": ""},
        {"micro_batch_size": 3},
        budget_bytes=2**30,
        key="no",
    )
    curve = []
    for micro_batch_size, padded_tokens_per_s in ((1, 500), (2, 900)):
        figures = STEP_FIGURES | {"units_per_step": 0.1 * padded_tokens_per_s}
        curve.append(
            record(
                "step",
                measured(figures),
                {"micro_batch_size": micro_batch_size},
                key=f"s{micro_batch_size}",
            )
        )
    windows = []
    for number, padded_units_per_s in enumerate((99.0, 100.0, 101.0, 102.0)):
        figures = WINDOW_FIGURES | {"padded_units_per_s": padded_units_per_s}
        windows.append(record("window", measured(figures), key=f"f{number}"))
    return (fits, does_not_fit, *curve, *windows)

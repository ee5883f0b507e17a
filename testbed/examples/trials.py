"""Trials of the example profile, as a trial log keeps them."""

from typing import Any

from autotune.trials.values import TrialRecord

STEP: dict[str, Any] = {
    "optimizer_steps": 4,
    "step_s": [0.1],
    "padded_tokens_per_step": 90,
    "peak_bytes": 10**9,
    "non_pytorch_bytes": None,
    "loss": 1.0,
}
FEED: dict[str, Any] = {
    "optimizer_steps": 9,
    "discarded_batches": 2,
    "gradient_accumulation_steps": 1,
    "steps": 7,
    "tokens_per_s": 5.0,
    "padded_tokens_per_s": 100.0,
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
    job: str = "training",
    outcome: dict[str, Any] | None = None,
    config: dict[str, Any] | None = None,
    *,
    time_utc: str = "2026-01-01T00:00:00+00:00",
    site: str = "here",
    key: str = "k",
    budget_bytes: int | None = None,
    old: bool = False,
    **where: Any,
) -> TrialRecord:
    """A trial; ``where`` says otherwise than the example's fingerprint, and ``old``
    leaves all of that out."""
    figures = STEP if job == "step" else FEED
    said: dict[str, Any] = {
        "time_utc": time_utc,
        "site": site,
        "key": key,
        "job": job,
        "label": "x",
        "seconds": 1.0,
        "measured": {"config": config or {}, "memory_budget_bytes": budget_bytes},
        "outcome": outcome or {"kind": "measured", "figures": figures},
    } | ({} if old else {"made_on": MADE_ON | where})
    found = TrialRecord.of(said)
    assert found is not None
    return found


def records_of_example() -> tuple[TrialRecord, ...]:
    """Trials that gave all the figures of the example profile."""
    steps = [
        record(
            "step",
            {
                "kind": "measured",
                "figures": STEP | {"padded_tokens_per_step": round(0.1 * rate)},
            },
            {"micro_batch_size": rows},
            key=f"s{rows}",
        )
        for rows, rate in ((1, 500), (2, 900))
    ]
    bounds = [
        record("step", None, {"micro_batch_size": 2}, budget_bytes=2**30, key="fits"),
        record(
            "step",
            {"kind": "out_of_memory", "detail": ""},
            {"micro_batch_size": 3},
            budget_bytes=2**30,
            key="no",
        ),
    ]
    feeds = [
        FEED | {"padded_tokens_per_s": rate} for rate in (99.0, 100.0, 101.0, 102.0)
    ]
    windows = [
        record("training", {"kind": "measured", "figures": one}, key=f"f{n}")
        for n, one in enumerate(feeds)
    ]
    return (*bounds, *steps, *windows)

"""Complete profiles of your own training code, for tests."""

from autotune.evidence.probe import CurvePoint, ProbeEvidence, SizeRow
from autotune.evidence.profile import (
    Constraints,
    Evidence,
    Profile,
    Provenance,
    SubjectTable,
)
from autotune.evidence.workers import WorkersEvidence, WorkersRow
from testbed.examples.profiles import FINGERPRINT

SOURCES = {"step": "5" * 64, "loader": "6" * 64}


def own_subject(*, seq_length: int = 64) -> SubjectTable:
    """Return functions of yours with a fixed argument as a subject."""
    return SubjectTable(
        kind="own",
        name=f"mine-seq_length-{seq_length}",
        words=f"mine:build_step (seq_length={seq_length})",
        size="batch",
        unit="samples",
        units_per_size=1.0,
        table={
            "step_function": "mine:build_step",
            "loader_function": "mine:build_loader",
            "arguments": {"seq_length": seq_length},
            "along": "batch",
        },
        sources=SOURCES,
    )


def own_profile() -> Profile:
    """Return a profile with the evidence of a probe and of a sweep of workers."""
    return Profile(
        subject=own_subject(),
        settings={"batch": 7, "num_workers": 1},
        constraints=Constraints(memory_budget_bytes=2**30, headroom_share=0.03),
        fingerprint=FINGERPRINT.model_copy(update={"dataset_hash": ""}),
        provenance=Provenance(
            tool_version="0.1.0",
            created_utc="2026-01-01T00:00:00Z",
            commands=["probe", "workers"],
            trial_log_sha256="l",
        ),
        evidence=Evidence(probe=own_probe(), workers=own_sweep()),
    )


def probed_only(profile: Profile) -> Profile:
    """Return the profile as a repeated probe writes it: without a loader."""
    table = {
        name: value
        for name, value in profile.subject.table.items()
        if name != "loader_function"
    }
    subject = profile.subject.model_copy(
        update={"table": table, "sources": {"step": SOURCES["step"]}}
    )
    return profile.model_copy(
        update={
            "subject": subject,
            "settings": {"batch": profile.settings["batch"]},
            "evidence": Evidence(probe=profile.evidence.probe),
        }
    )


def own_probe() -> ProbeEvidence:
    """Return the evidence of a probe of a step of yours."""
    return ProbeEvidence(
        feasible_max=8,
        infeasible_min=9,
        feasible_peak_bytes=10**9,
        kept_bytes=10**8,
        optimizer_steps=3,
        sizes=[
            SizeRow(size=4, fits=True, peak_bytes=5 * 10**8, step_s=0.1),
            SizeRow(size=8, fits=True, peak_bytes=10**9, step_s=0.2),
            SizeRow(size=9, fits=False),
        ],
        search_trials=3,
        seconds=9.5,
        curve=[_curve_point(4, 40.0), _curve_point(7, 70.0)],
        choice="the largest that fits, 8, less the headroom",
    )


def own_sweep() -> WorkersEvidence:
    """Return the evidence of a sweep of a loader of yours."""
    return WorkersEvidence(
        chosen=1,
        choice="the fewest that keep up",
        next_smaller="0 is slow",
        keeps_up=True,
        max_workers=2,
        max_workers_because="2 allotted CPUs",
        window_s=2.0,
        windows=9,
        seconds=18.0,
        gpu_source="n/a (CPU)",
        unit="batches",
        counts_padding=False,
        cached_units_per_s=[10.0, 10.1, 10.2],
        local_ranks=1,
        consumer="your step",
        rows=[_loader_row(0, 0.5, "refuted"), _loader_row(1, 0.99, "verified")],
        worker_bytes=2**20,
        batch_bytes=4096,
    )


def _curve_point(size: int, units_per_s: float) -> CurvePoint:
    return CurvePoint(
        size=size,
        units_per_s=units_per_s,
        step_s=0.1,
        timed_steps=4,
        units_per_s_low=0.99 * units_per_s,
        units_per_s_high=1.01 * units_per_s,
    )


def _loader_row(num_workers: int, ratio_to_cached: float, verdict: str) -> WorkersRow:
    rate = 10 * ratio_to_cached
    return WorkersRow(
        num_workers=num_workers,
        ratio_to_cached=ratio_to_cached,
        ratio_low=ratio_to_cached - 0.005,
        ratio_high=ratio_to_cached + 0.005,
        verdict=verdict,
        data_wait_share=1 - ratio_to_cached,
        memory_bytes=2**29,
        units_per_s=[rate, 1.01 * rate, 1.02 * rate],
        processes=num_workers,
    )

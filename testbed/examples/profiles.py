"""Complete profiles for tests."""

from autotune.evidence.probe import CurvePoint, ProbeEvidence
from autotune.evidence.profile import (
    Constraints,
    Evidence,
    Fingerprint,
    Profile,
    Provenance,
    trainer_subject,
)
from autotune.evidence.workers import WorkersEvidence, WorkersRow
from trainer.formats.train_config import DataSettings, ModelSettings, TrainConfig

FINGERPRINT = Fingerprint(
    device="cpu",
    gpu_count=0,
    torch="2.13.0",
    transformers="5.23.0",
    python="3.11.7",
    cpu_model="A CPU",
    allotted_cpus=2,
    ram_total_bytes=2**34,
    data_filesystem="ext4",
    model_sha256="m",
    dataset_hash="d",
)


def but(profile: Profile, **tables: dict[str, object]) -> Profile:
    """Return the profile with other values in its tables.

    Args:
        profile: Profile to change.
        tables: New values by table, such as ``train={"layout": "packed"}``.
    """
    changed = {
        name: getattr(profile, name).model_copy(update=values)
        for name, values in tables.items()
    }
    train = changed.pop("train", None)
    if train is not None:
        profile = profile.with_train(train)
    return profile.model_copy(update=changed)


def example_profile() -> Profile:
    """Return a profile with the evidence of a probe and of a sweep of workers."""
    train = TrainConfig(
        model=ModelSettings(
            name="tiny",
            config={"model_type": "bert", "hidden_size": 64},
            null_keys=["x"],
        ),
        data=DataSettings(path="../data", dataset_hash="d", num_workers=1),
        micro_batch_size=2,
    )
    return Profile(
        subject=trainer_subject(train),
        train=train,
        constraints=Constraints(
            memory_budget_bytes=2**30, headroom_share=0.03, global_batch_tokens=4096
        ),
        fingerprint=FINGERPRINT,
        provenance=Provenance(
            tool_version="0.1.0",
            created_utc="2026-01-01T00:00:00Z",
            commands=["probe"],
            trial_log_sha256="l",
        ),
        evidence=Evidence(
            probe=ProbeEvidence(
                feasible_max=2,
                infeasible_min=3,
                feasible_peak_bytes=10**9,
                search_trials=5,
                seconds=9.5,
                mean_tokens_per_sequence=33.5,
                curve=[_curve_point(1, 500.0), _curve_point(2, 900.0)],
                choice="because",
            ),
            workers=WorkersEvidence(
                chosen=1,
                choice="so",
                next_smaller="0 is slow",
                keeps_up=True,
                unit="tokens",
                counts_padding=True,
                cached_units_per_s=[102.0],
                rows=[
                    _workers_row(0, 0.5, "refuted"),
                    _workers_row(1, 0.99, "verified"),
                ],
                local_ranks=1,
                max_workers=2,
                max_workers_because="2 allotted CPUs, 1 local rank",
                consumer="the training step",
                window_s=2.0,
                windows=7,
                seconds=14.0,
                gpu_source="n/a (CPU)",
            ),
        ),
    )


def _curve_point(micro_batch_size: int, padded_tokens_per_s: float) -> CurvePoint:
    return CurvePoint(
        size=micro_batch_size,
        units_per_s=padded_tokens_per_s,
        step_s=0.1,
        timed_steps=4,
    )


def _workers_row(num_workers: int, ratio_to_cached: float, verdict: str) -> WorkersRow:
    return WorkersRow(
        num_workers=num_workers,
        units_per_s=[99.0, 100.0, 101.0],
        ratio_to_cached=ratio_to_cached,
        ratio_low=ratio_to_cached - 0.005,
        ratio_high=ratio_to_cached + 0.005,
        verdict=verdict,
        data_wait_share=1 - ratio_to_cached,
        memory_bytes=2**29,
    )

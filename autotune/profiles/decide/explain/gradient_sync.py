"""Explanation of a setting of gradient synchronisation by network tuning. Pure."""

from autotune.evidence.advice import EvidenceFigure, figure
from autotune.evidence.network import GradientSyncRow, NetworkEvidence
from autotune.evidence.profile import Profile
from autotune.profiles.decide.explain.explanation import Explanation
from trainer.formats.train_config import ParallelSettings

_SETTINGS = ("strategy", "shard_ranks", "bucket_cap_mib", "gradient_dtype")
"""Settings that network tuning decides together: names of fields both of
``ParallelSettings`` and of a measured row."""
GRADIENT_SYNC_KEYS = tuple(f"parallel.{name}" for name in _SETTINGS)
"""Dotted names of these settings in a profile."""


def explain_gradient_sync(
    profile: Profile, network: NetworkEvidence, key: str, value: object
) -> Explanation:
    """Explain a setting of gradient synchronisation by the measured configurations.

    Args:
        profile: Profile with the setting.
        network: Evidence of network tuning.
        key: Dotted name of the setting, in ``parallel``.
        value: Its value in the profile.
    """
    figures: list[EvidenceFigure] = []
    rejected: list[str] = []
    is_measured = False
    for row in network.gradient_syncs:
        if not _has_gradient_sync(profile.train.parallel, row):
            rejected.append(_rejected_gradient_sync(row))
            continue
        is_measured = True
        if row.tokens_per_s is not None:
            figures.append(
                figure(
                    f"non-padding tokens/s, {_gradient_sync_words(row)}",
                    row.tokens_per_s,
                    "tokens/s",
                    "evidence.network.gradient_syncs",
                    n=row.steps,
                )
            )
    because = network.choice
    if not is_measured:
        because = (
            f"no measured configuration has {key} = {value} with the other settings;"
            f" chosen was: {network.choice}"
        )
    return Explanation(
        origin="measured" if is_measured else "changed",
        because=because,
        evidence=tuple(figures),
        rejected=tuple(rejected),
    )


def _gradient_sync_words(row: GradientSyncRow) -> str:
    """Return the settings of a measured configuration, in words."""
    strategy = row.strategy if row.shard_ranks is None else "hsdp"
    split = f"{row.gradient_accumulation_steps} x {row.micro_batch_size} sequences"
    return (
        f"{strategy}, {row.gradient_dtype}, {row.bucket_cap_mib} MiB buckets, {split}"
    )


def _rejected_gradient_sync(row: GradientSyncRow) -> str:
    """Return the result of a configuration that was not chosen, in words."""
    rate = "n/a" if row.tokens_per_s is None else f"{row.tokens_per_s:,.0f}"
    settings = _gradient_sync_words(row)
    return f"{settings}: {rate} non-padding tokens/s, {row.outcome}"


def _has_gradient_sync(parallel: ParallelSettings, row: GradientSyncRow) -> bool:
    """Return whether a measured configuration has the settings of a profile."""
    return all(getattr(row, name) == getattr(parallel, name) for name in _SETTINGS)

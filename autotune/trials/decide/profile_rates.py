"""Rates in the evidence of a profile, compared with the peak of its GPU. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass

from autotune.evidence.explore import ExploredRow
from autotune.evidence.profile import Profile, fill_share
from autotune.trials.decide.plausibility import (
    GpuRate,
    check_rates,
    check_takes_time,
    least_flops_per_token,
)
from trainer.formats.gpu_peaks import NumberFormat, matmul_format


@dataclass(frozen=True, slots=True, kw_only=True)
class _TokenRate:
    """Non-padding tokens per second of several ranks together."""

    name: str
    """Name of the measurement, for messages."""
    tokens_per_s: float
    ranks: int
    """Number of ranks, each of one GPU."""
    number_format: NumberFormat
    """Number format of the matmuls."""


def check_profile(profile: Profile) -> None:
    """Check that all rates of a profile are possible on its GPU.

    Raises:
        Undecided: If its GPU cannot reach a rate.
        MachineLacks: If it has any rate, and its GPU takes no time to compute.
    """
    fingerprint = profile.fingerprint
    if not profile.has_train:
        # Rates of your own code have no FLOPs to compare with, and trials measure none
        # on a GPU that takes no time to compute.
        return
    if _has_tokens_per_s(profile):
        check_takes_time(fingerprint.gpu, "a profile's tokens/s")
    check_rates(fingerprint.gpu_name, _rates_of_profile(profile))


def _has_tokens_per_s(profile: Profile) -> bool:
    """Return whether a profile has evidence of a measured rate in tokens/s."""
    evidence = profile.evidence
    probe = evidence.probe
    if probe is not None and (probe.curve or probe.sustained):
        return True
    timed_parts = (
        evidence.workers,
        evidence.network,
        evidence.baseline,
        evidence.explore,
    )
    return any(part is not None for part in timed_parts)


def _rates_of_profile(profile: Profile) -> Iterator[GpuRate]:
    """Yield every rate of a profile, each of one GPU."""
    flops_per_token = least_flops_per_token(profile.train, profile.parameters)
    for token_rate in _token_rates(profile):
        yield GpuRate(
            name=token_rate.name,
            per_s=flops_per_token * token_rate.tokens_per_s / token_rate.ranks,
            kind=token_rate.number_format,
        )
    yield from _counted_flops(profile)
    yield from _rates_of_links(profile)


def _counted_flops(profile: Profile) -> Iterator[GpuRate]:
    """Yield the FLOP/s that windows of the sweep of DataLoader workers counted."""
    workers = profile.evidence.workers
    if workers is None:
        return
    for row in workers.rows:
        for flops_per_s in row.model_flops_per_s_per_rank:
            yield GpuRate(
                name=f"{row.num_workers} DataLoader workers",
                per_s=flops_per_s,
                kind=_profile_format(profile),
            )


def _rates_of_links(profile: Profile) -> Iterator[GpuRate]:
    """Yield the rates of matmuls and links that were measured on all ranks."""
    network = profile.evidence.network
    if network is None:
        return
    for flops_per_s in network.matmul_flops_per_s:
        yield GpuRate(name="matmuls", per_s=flops_per_s)
    for link in network.links:
        yield GpuRate(name=f"links {link.scope}", per_s=link.bytes_per_s, kind="links")


def _token_rates(profile: Profile) -> Iterator[_TokenRate]:
    """Yield every rate of a profile that is given in tokens."""
    yield from _probe_rates(profile)
    yield from _loading_rates(profile)
    yield from _baseline_rates(profile)
    yield from _exploration_rates(profile)
    yield from _network_rates(profile)


def _probe_rates(profile: Profile) -> Iterator[_TokenRate]:
    """Yield the rates of micro-batch sizes, measured on sequences without padding."""
    probe = profile.evidence.probe
    if probe is None:
        return
    points = list(probe.curve)
    if probe.sustained:
        points.append(probe.sustained)
    for point in points:
        yield _TokenRate(
            name=f"micro-batch size {point.size}",
            tokens_per_s=point.units_per_s,
            ranks=probe.local_ranks,
            number_format=_profile_format(profile),
        )


def _loading_rates(profile: Profile) -> Iterator[_TokenRate]:
    """Yield the rates of numbers of DataLoader workers, and of cached batches."""
    workers = profile.evidence.workers
    # A replayed step computes nothing.
    if workers is None or workers.replayed_step_s is not None:
        return
    non_padding_share = fill_share(profile) or 0.0
    windows_by_name = [
        (f"{row.num_workers} DataLoader workers", row.units_per_s)
        for row in workers.rows
    ]
    windows_by_name.append(("cached batches", workers.cached_units_per_s))
    for name, windows in windows_by_name:
        for padded_tokens_per_s in windows:
            yield _TokenRate(
                name=name,
                tokens_per_s=non_padding_share * padded_tokens_per_s,
                ranks=workers.local_ranks,
                number_format=_profile_format(profile),
            )


def _baseline_rates(profile: Profile) -> Iterator[_TokenRate]:
    """Yield the rates of the tuned settings and of the baselines beside them."""
    baseline = profile.evidence.baseline
    if baseline is None or baseline.unit != "tokens":
        return
    for recipe in baseline.rows:
        # Other recipes may have another precision; bf16 has the highest peak.
        number_format: NumberFormat = "bf16"
        if recipe.name == "tuned":
            number_format = _profile_format(profile)
        for tokens_per_s in recipe.units_per_s:
            yield _TokenRate(
                name=recipe.name,
                tokens_per_s=tokens_per_s,
                ranks=baseline.local_ranks,
                number_format=number_format,
            )


def _exploration_rates(profile: Profile) -> Iterator[_TokenRate]:
    """Yield the rates of the configurations that were explored."""
    explore = profile.evidence.explore
    if explore is None:
        return
    for row in explore.rows:
        yield _TokenRate(
            name=row.name,
            tokens_per_s=row.tokens_per_s or 0.0,
            ranks=profile.local_ranks,
            number_format=_explored_format(profile, row),
        )


def _explored_format(profile: Profile, row: ExploredRow) -> NumberFormat:
    """Return the number format of matmuls in a configuration that was explored."""
    precision = row.settings.get("precision", profile.train.precision)
    return matmul_format(
        "bf16" if precision == "bf16" else "fp32", tf32=profile.train.tf32
    )


def _network_rates(profile: Profile) -> Iterator[_TokenRate]:
    """Yield the rates of gradient synchronisations and of numbers of nodes."""
    network = profile.evidence.network
    if network is None:
        return
    for gradient_sync in network.gradient_syncs:
        yield _TokenRate(
            name=gradient_sync.strategy,
            tokens_per_s=gradient_sync.tokens_per_s or 0.0,
            ranks=network.nodes * network.ranks_per_node,
            number_format=_profile_format(profile),
        )
    for row in network.scaling:
        yield _TokenRate(
            name=f"{row.nodes} nodes",
            tokens_per_s=row.tokens_per_s,
            ranks=row.nodes * network.ranks_per_node,
            number_format=_profile_format(profile),
        )


def _profile_format(profile: Profile) -> NumberFormat:
    """Return the number format of matmuls with the profile's settings."""
    return matmul_format(profile.train.precision, tf32=profile.train.tf32)

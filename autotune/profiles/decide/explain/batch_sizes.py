"""Explanation of the micro-batch size and of the global batch size. Pure."""

from collections.abc import Iterator

from autotune.base.window_statistics import estimate_windows
from autotune.base.wording import plural
from autotune.evidence.advice import EvidenceFigure, figure
from autotune.evidence.probe import LOWER_BOUND, CurvePoint, ProbeEvidence
from autotune.evidence.profile import Profile
from autotune.profiles.decide.batch_split import (
    DEFAULT_GLOBAL_BATCH_TOKENS,
    global_batch_size_of,
    split_global_batch,
)
from autotune.profiles.decide.explain.explanation import Explanation, Origin
from autotune.profiles.decide.micro_batch import choose_micro_batch


def is_split_by_network(profile: Profile) -> bool:
    """Return whether network tuning chose the micro-batch size, by its batch split."""
    network = profile.evidence.network
    if network is None:
        return False
    sizes = [row.micro_batch_size for row in network.gradient_syncs]
    return profile.train.micro_batch_size in sizes


def explain_micro_batch(profile: Profile, probe: ProbeEvidence) -> Explanation:
    """Explain the micro-batch size by the probe, or by a later split of the batch."""
    size = profile.train.micro_batch_size
    best_size = _best_size(profile, probe)
    origin: Origin = "measured"
    because = probe.choice
    if best_size is None:
        # The size was decided by memory alone.
        origin = profile.fingerprint.bytes_known
    elif size != best_size and _is_confirmed(profile):
        because = (
            "surely faster than the probe's choice in windows of training; the probe"
            f" chose {best_size}"
        )
    elif size != best_size and is_split_by_network(profile):
        because = (
            "split of the global batch by the chosen gradient synchronisation; the"
            f" probe chose {best_size}"
        )
    elif size != best_size:
        origin = "changed"
        because = f"{best_size} was measured to be the best choice: {probe.choice}"
    return Explanation(
        origin=origin,
        because=because,
        evidence=(
            *_confirmed_figures(profile),
            *_throughput_figures(probe, size),
            *_memory_figures(profile, probe),
        ),
        rejected=tuple(_rejected_sizes(profile, probe, size)),
    )


def _is_confirmed(profile: Profile) -> bool:
    """Return whether windows of training chose the micro-batch size."""
    confirm = profile.evidence.confirm
    if confirm is None:
        return False
    return confirm.rows[0].micro_batch_size == profile.train.micro_batch_size


def _confirmed_figures(profile: Profile) -> Iterator[EvidenceFigure]:
    """Yield the rate of each split in windows of training, the used one first."""
    confirm = profile.evidence.confirm
    if confirm is None:
        return
    for row in confirm.rows:
        rate = estimate_windows(row.tokens_per_s).interval()
        yield figure(
            f"tokens/s of training at micro-batch size {row.micro_batch_size}",
            rate,
            "tokens/s",
            "evidence.confirm.rows",
            n=len(row.tokens_per_s),
        )


def _best_size(profile: Profile, probe: ProbeEvidence) -> int | None:
    """Choose the micro-batch size from the probe's curve again.

    The setting in the profile may have been edited since the probe chose it.

    Returns:
        None if the probe measured no throughput.
    """
    if not probe.curve:
        return None
    choice = choose_micro_batch(
        probe.curve,
        probe.feasible_max,
        global_batch_size=profile.train.global_batch_size,
        ranks=probe.local_ranks,
    )
    return choice.micro_batch_size


def _throughput_figures(probe: ProbeEvidence, size: int) -> Iterator[EvidenceFigure]:
    """Yield the throughput to expect at a micro-batch size, and at the fastest one."""
    curve = {point.size: point for point in probe.curve}
    points = (probe.expected_throughput(size), curve.get(size), _fastest(probe))
    # The throughput to expect may be that of a warm GPU. Equal points are shown once.
    for point in dict.fromkeys(points):
        if point is None:
            continue
        part = "sustained" if point is probe.sustained else "curve"
        yield figure(
            f"tokens/s with padding at micro-batch size {point.size}",
            point.rate,
            "tokens/s",
            f"evidence.probe.{part}",
            n=point.timed_steps,
        )


def _fastest(probe: ProbeEvidence) -> CurvePoint | None:
    """Return the point of the curve with the most tokens/s; None without a curve."""
    return max(probe.curve, key=lambda point: point.units_per_s, default=None)


def _memory_figures(
    profile: Profile, probe: ProbeEvidence
) -> tuple[EvidenceFigure, ...]:
    """Return the largest micro-batch size that fits, its peak, and the budget."""
    known = profile.fingerprint.bytes_known
    budget_bytes = profile.memory_budget_bytes
    return (
        figure(
            "largest that fits",
            probe.feasible_max,
            "sequences",
            "evidence.probe.feasible_max",
            known=known,
        ),
        figure(
            "its peak",
            probe.feasible_peak_bytes,
            "bytes",
            "evidence.probe.feasible_peak_bytes",
            known=known,
        ),
        figure("memory budget", budget_bytes, "bytes", "constraints", known="assumed"),
    )


def _rejected_sizes(profile: Profile, probe: ProbeEvidence, size: int) -> Iterator[str]:
    """Yield the other micro-batch sizes that were tried, with the results.

    Args:
        profile: Profile with the global batch.
        probe: Probe that tried the sizes.
        size: Micro-batch size of the profile.
    """
    yield from _other_sizes(profile, probe, size)
    if probe.infeasible_min is not None:
        yield f"{probe.infeasible_min}: out of memory"
    if probe.is_lower_bound:
        yield f"{probe.feasible_max}: {LOWER_BOUND}; larger sizes may fit"


def _other_sizes(profile: Profile, probe: ProbeEvidence, size: int) -> Iterator[str]:
    """Yield the other micro-batch sizes of the curve, with their rates.

    A size that splits the global batch alike takes the same steps: its split is shown
    in place of its rate.
    """
    fastest = _fastest(probe)
    if fastest is None:
        return
    ranks = probe.local_ranks
    # A rank has at least one sequence.
    global_batch_size = max(profile.train.global_batch_size, ranks)
    split = split_global_batch(global_batch_size, size, ranks)
    for point in probe.curve:
        other_size = point.size
        if other_size == size:
            continue
        if split_global_batch(global_batch_size, other_size, ranks) == split:
            yield f"{other_size}: the same split, {split.words(ranks)}"
        elif other_size == fastest.size:
            yield f"{other_size}: the highest rate"
        else:
            share = point.units_per_s / fastest.units_per_s
            yield f"{other_size}: {share:.1%} of the rate at {fastest.size}"


def explain_global_batch(profile: Profile, tokens_per_sequence: float) -> Explanation:
    """Explain the global batch in sequences, which follows from its tokens.

    Args:
        profile: Profile with the global batch in tokens.
        tokens_per_sequence: Non-padding tokens of a sequence, on average.
    """
    tokens = profile.global_batch_tokens
    sequences = global_batch_size_of(tokens, tokens_per_sequence)
    origin: Origin = "constraint"
    hold = "hold"
    # The setting may have been edited since.
    if profile.train.global_batch_size != sequences:
        origin = "changed"
        hold = "would hold"
    is_default = tokens == DEFAULT_GLOBAL_BATCH_TOKENS
    origin_of_tokens = "the default" if is_default else "as you set"
    return Explanation(
        origin=origin,
        because=(
            f"{plural(sequences, 'sequence')} {hold} {tokens:,} non-padding tokens,"
            f" {origin_of_tokens}"
        ),
        evidence=(
            figure(
                "non-padding tokens per sequence, average",
                tokens_per_sequence,
                "tokens",
                "evidence.probe",
            ),
            figure(
                "global batch",
                tokens,
                "tokens",
                "default" if is_default else "constraints",
                known="assumed",
            ),
        ),
    )

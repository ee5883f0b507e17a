"""Sentences on the size that a probe chose, and on its global batch."""

from collections.abc import Iterator

from autotune.base.units import format_bytes
from autotune.base.wording import plural
from autotune.evidence.probe import LOWER_BOUND, ProbeEvidence
from autotune.evidence.profile import Profile
from autotune.machine.values import NOTHING_TIMED
from autotune.memory.decide.throughput_dip import dip_words, fastest_point
from autotune.profiles.decide.batch_split import (
    SPLIT_FACTORS,
    GlobalBatchSplit,
    profile_split,
)
from autotune.profiles.sections import global_batch_words

_FASTER = 1.1
"""Advantage of half the largest size, or less, in the few timed steps of trials from
which it is mentioned."""


def rate_unit(profile: Profile) -> str:
    """Return the unit of a probe's rates, such as ``samples/s``.

    Trials of the bundled trainer take full sequences, whose padding counts.
    """
    probe = profile.evidence.probe
    has_padding = probe is not None and probe.mean_tokens_per_sequence is not None
    return f"{profile.subject.unit}/s{' incl. padding' if has_padding else ''}"


def reasons_of(profile: Profile) -> Iterator[str]:
    """Yield sentences on the size of a profile with a probe.

    They are the reason for the size, what bounds it, the knee of the throughput curve,
    the split of the global batch, and warnings about the probe.
    """
    probe = profile.evidence.probe
    assert probe is not None
    yield probe.choice
    yield _bound_words(probe)
    yield from _throughput_reasons(profile, probe)
    split = profile_split(profile, probe.local_ranks)
    if split is not None:
        yield batch_split_words(split, probe.local_ranks)
        yield (
            f"each optimizer step has {global_batch_words(profile.global_batch_tokens)}"
        )
    yield from _warnings(profile, probe)


def _bound_words(probe: ProbeEvidence) -> str:
    """Return what is known of sizes above the largest that ran."""
    if probe.is_lower_bound:
        return (
            f"{LOWER_BOUND}: time ended before the limit was verified; for the largest"
            " size, run the same command with a longer --time-limit"
        )
    if probe.infeasible_min is None:
        return (
            f"more may fit: sizes above {probe.feasible_max} were not tried"
            " (--max-micro-batch-size)"
        )
    where = (
        "each in a fresh process"
        if probe.verified_in == "fresh processes"
        else "in one process, twice"
    )
    return (
        f"verified: {probe.feasible_max:,} ran, and {probe.infeasible_min:,} was out of"
        f" memory, {where}"
    )


def _throughput_reasons(profile: Profile, probe: ProbeEvidence) -> Iterator[str]:
    """Yield sentences on the throughput curve, or on the times of trials without it."""
    subject = profile.subject
    if probe.knee_micro_batch_sizes and probe.curve:
        low = min(probe.knee_micro_batch_sizes)
        high = max(probe.knee_micro_batch_sizes)
        knee = subject.size_words(high)
        if low == high:
            yield f"throughput levels off at {knee}"
        elif subject.noun is None:
            yield f"throughput levels off between {subject.size_words(low)} and {knee}"
        else:
            yield f"throughput levels off between {low} and {knee}"
    if probe.curve:
        fastest = fastest_point(probe.curve).size
        yield f"largest {probe.feasible_max:,}; fastest {fastest:,}"
    else:
        yield from _faster_sizes(profile, probe)
    if probe.dip is not None:
        yield dip_words(probe.dip, subject)


def _faster_sizes(profile: Profile, probe: ProbeEvidence) -> Iterator[str]:
    """Yield the sizes of at most half the largest that computed more per second."""
    rates = {
        row.size: row.size / row.step_s
        for row in probe.sizes
        if row.fits and row.step_s is not None
    }
    if not rates:
        return
    largest = max(rates)
    for size, rate in rates.items():
        if size <= largest / 2 and rate > _FASTER * rates[largest]:
            yield (
                f"larger need not be faster: {profile.subject.size_words(size)}"
                f" computed {rate / rates[largest]:.2f} times as much per second"
            )


def _warnings(profile: Profile, probe: ProbeEvidence) -> Iterator[str]:
    """Yield sentences on what the probe could not do, or found odd."""
    if probe.traced_micro_batch_size is not None:
        yield f"a trace predicted {probe.traced_micro_batch_size:,} before any trial"
    if probe.not_traced is not None:
        yield f"no memory prediction: {probe.not_traced}"
    if probe.contents_not_recorded is not None:
        yield f"contents of memory were not recorded: {probe.contents_not_recorded}"
    if not probe.optimizer_steps:
        yield "none of torch's optimizers took a step: steps were counted by calls"
    if probe.varies_bytes:
        yield (
            f"steps of one size differ by {format_bytes(probe.varies_bytes)}: a later"
            " step may need more memory"
        )
    if profile.fingerprint.bytes_known == "allocator":
        yield NOTHING_TIMED


def batch_split_words(split: GlobalBatchSplit, local_ranks: int) -> str:
    """Return the split of the global batch in words.

    If sequences of the split stay empty, name global batches that avoid it.
    """
    words = f"global batch of {split.words(local_ranks)} ({SPLIT_FACTORS})"
    if split.empty_sequences:
        without_empty = " or ".join(map(str, split.without_empty))
        words += (
            f"; {plural(split.empty_sequences, 'sequence')} empty, none with a global"
            f" batch of {without_empty}"
        )
    return words

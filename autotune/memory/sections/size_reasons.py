"""Sentences on the micro-batch size that a probe chose, and on its global batch."""

from collections.abc import Iterator

from autotune.base.wording import plural
from autotune.evidence.probe import LOWER_BOUND
from autotune.evidence.profile import Profile
from autotune.machine.values import NOTHING_TIMED
from autotune.memory.decide.throughput_dip import dip_words, fastest_point
from autotune.profiles.decide.batch_split import SPLIT_FACTORS, split_global_batch
from autotune.profiles.sections import global_batch_words
from trainer.formats.train_config import TrainConfig


def reasons_of(profile: Profile) -> Iterator[str]:
    """Yield sentences on the micro-batch size of a profile with a probe.

    They are the reason for the size, the knee of the throughput curve, the split of the
    global batch, and warnings about the probe.
    """
    probe = profile.evidence.probe
    assert probe is not None
    yield probe.choice
    if probe.knee_micro_batch_sizes and probe.curve:
        low = min(probe.knee_micro_batch_sizes)
        high = max(probe.knee_micro_batch_sizes)
        knee = plural(high, "sequence")
        if low == high:
            yield f"throughput levels off at {knee}"
        else:
            yield f"throughput levels off between {low} and {knee}"
    if probe.curve:
        fastest = fastest_point(probe.curve).size
        yield f"largest {probe.feasible_max:,}; fastest {fastest:,}"
    if probe.dip is not None:
        yield dip_words(probe.dip)
    yield batch_split_words(profile.train, probe.local_ranks)
    yield (f"each optimizer step has {global_batch_words(profile.global_batch_tokens)}")
    if probe.is_lower_bound:
        yield (
            f"{LOWER_BOUND}: time ended before the limit was verified; for the largest"
            " size, run the same command with a longer --time-limit"
        )
    elif probe.infeasible_min is None:
        yield (
            f"more may fit: sizes above {probe.feasible_max} were not tried"
            " (--max-micro-batch-size)"
        )
    if profile.fingerprint.bytes_known == "allocator":
        yield NOTHING_TIMED
    if probe.not_traced:
        yield f"no memory prediction: {probe.not_traced}"


def batch_split_words(train: TrainConfig, local_ranks: int) -> str:
    """Return the split of the global batch in words.

    If sequences of the split stay empty, name global batches that avoid it.
    """
    split = split_global_batch(
        train.global_batch_size, train.micro_batch_size, local_ranks
    )
    words = f"global batch of {split.words(local_ranks)} ({SPLIT_FACTORS})"
    if split.empty_sequences:
        without_empty = " or ".join(map(str, split.without_empty))
        words += (
            f"; {plural(split.empty_sequences, 'sequence')} empty, none with a global"
            f" batch of {without_empty}"
        )
    return words

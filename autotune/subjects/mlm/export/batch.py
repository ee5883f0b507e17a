"""Optimizer step of an export, and its steps between checkpoints. Pure."""

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from autotune.corpus.values import SequenceMeans
from autotune.evidence.profile import Profile
from autotune.profiles.decide.rates import expected_rate, tuned_rate
from autotune.subjects.mlm.export.table import ExportedBatch, RunToExport
from trainer.formats.train_config import TrainConfig

_LEAST_STEP_S = 1e-9
"""Least time of an optimizer step, far below that of any GPU."""


def exported_batch(profile: Profile, means: SequenceMeans, ranks: int) -> ExportedBatch:
    """Return the optimizer step of a profile, and the nearest one of whole samples.

    The exported step has as few micro-batches as the profile's size allows, which was
    verified to fit. With that many, equal on all ranks, it comes closest to the
    samples of the profile's step.

    Args:
        profile: Profile to export.
        means: Tokens and samples of a sequence, on average; an unknown number of
            samples counts as one.
        ranks: Ranks over all nodes.
    """
    train = profile.train
    sequences = _sequences_per_step(train, means)
    samples = max(1, round(sequences * (means.samples or 1.0)))
    # As many micro-batches as the profile's size needs, then the nearest size.
    accumulation_steps = math.ceil(samples / (train.micro_batch_size * ranks))
    micro_batches = accumulation_steps * ranks
    micro_batch_size = max(1, round(samples / micro_batches))
    exported_samples = micro_batch_size * micro_batches
    tokens_per_step: float | None = None
    if means.non_padding_tokens is not None:
        tokens_per_step = sequences * means.non_padding_tokens
    exported_tokens: float | None = None
    if means.non_padding_tokens and means.samples:
        tokens_per_sample = means.non_padding_tokens / means.samples
        exported_tokens = exported_samples * tokens_per_sample
    return ExportedBatch(
        ranks=ranks,
        sequences_per_step=sequences,
        samples_per_sequence=means.samples,
        tokens_per_step=tokens_per_step,
        per_device_batch_size=micro_batch_size,
        gradient_accumulation_steps=accumulation_steps,
        exported_samples_per_step=exported_samples,
        exported_tokens_per_step=exported_tokens,
    )


def _sequences_per_step(train: TrainConfig, means: SequenceMeans) -> int:
    """Return the sequences of an optimizer step in this project's trainer.

    A profile may set the global batch in tokens or samples instead of sequences.
    """
    if train.global_batch_tokens is not None and means.non_padding_tokens:
        return max(1, round(train.global_batch_tokens / means.non_padding_tokens))
    if train.global_batch_samples is not None and means.samples:
        return max(1, round(train.global_batch_samples / means.samples))
    return train.global_batch_size


def steps_between_checkpoints(run: RunToExport) -> int | None:
    """Convert the interval between checkpoints from seconds to optimizer steps.

    The time of a step follows from a measured rate. Without such a rate, the interval
    is the one in steps, which a profile need not have; without checkpoints, it is None.
    """
    checkpoint = run.train.checkpoint
    if not checkpoint.enabled:
        return None
    step_time = _step_time(run.profile, run.batch)
    if step_time is None:
        return checkpoint.interval_steps
    # A foreign profile may hold any rate and interval: the bounds avoid a division by 0
    # and the conversion of infinity to an integer.
    step_s = max(_LEAST_STEP_S, step_time.step_s)
    steps = max(1, math.floor(min(checkpoint.interval_s / step_s, sys.maxsize)))
    # A profile may limit the interval in both units.
    return min(steps, checkpoint.interval_steps or steps)


def checkpoint_interval_remark(run: RunToExport) -> str | None:
    """Return the source of the steps between checkpoints, or why they are unknown."""
    if not run.train.checkpoint.enabled:
        return None
    step_time = _step_time(run.profile, run.batch)
    if step_time is None:
        return "no measured step time to convert seconds into steps"
    return (
        f"steps of {step_time.step_s:.3g} s by this project's trainer"
        f" ({step_time.source})"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _StepTime:
    """Time of an optimizer step of this project's trainer."""

    step_s: float
    source: str
    """Origin of the time, in words."""


def _step_time(profile: Profile, batch: ExportedBatch) -> _StepTime | None:
    """Return the time of an optimizer step of this project's trainer.

    The rate is that of as many ranks, else a measured one, which is assumed to be the
    same for each rank.

    Returns:
        None if no rate was measured, or the tokens of a step are unknown.
    """
    tokens = batch.tokens_per_step
    if tokens is None:
        return None
    expected = expected_rate(profile, batch.ranks)
    if expected is not None:
        return _StepTime(
            step_s=tokens / expected.value,
            source=f"{expected.known}: {expected.source}",
        )
    tuned = tuned_rate(profile)
    if tuned is None:
        return None
    return _StepTime(
        step_s=tokens / (tuned.value * batch.ranks / tuned.ranks),
        source=f"assumed: per rank as fast as in {tuned.source}",
    )


def batch_warnings(
    train: TrainConfig, batch: ExportedBatch, means: SequenceMeans
) -> Iterator[str]:
    """Yield the warnings to read before training with the exported step."""
    size = train.micro_batch_size
    if train.layout == "packed" and batch.samples_per_sequence is None:
        yield (
            f"The number of samples per packed sequence is unknown ({means.source}):"
            " the export assumes one, so its optimizer step has fewer tokens. Pass the"
            " dataset: --data DIR."
        )
    elif train.layout == "packed":
        yield (
            f"{size} packed sequences are not {size} samples: each holds"
            f" {batch.samples_per_sequence:.2f} on average. The export accumulates"
            " gradients up to the same number of non-padding tokens."
        )
    if batch.per_device_batch_size < size:
        yield (
            f"Micro-batch size {batch.per_device_batch_size} instead of {size}, to come"
            " closest to the global batch."
        )
    yield (
        "The micro-batch was measured to fit with this project's trainer; the other may"
        " need more memory."
    )

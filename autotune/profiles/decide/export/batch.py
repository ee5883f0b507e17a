"""Optimizer step of an export: whole samples, as near a profile's as fit. Pure."""

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from autotune.corpus.values import SequenceMeans
from autotune.profiles.decide.export.table import ExportedBatch
from autotune.profiles.decide.rates import expected_rate, tuned_rate
from autotune.profiles.values import Profile
from trainer.config.train_config import TrainConfig


def exported_batch(profile: Profile, means: SequenceMeans, ranks: int) -> ExportedBatch:
    """Return the optimizer step of a profile, and the nearest one of whole samples.

    Its micro-batch has at most the profile's size, which was verified to fit. Within
    this limit, its non-padding tokens come as near to the profile's as whole
    micro-batches of all ranks allow.

    Args:
        profile: Profile to export.
        means: Tokens and samples of a sequence, on average; one sample is assumed if it
            is not known.
        ranks: Ranks over all nodes.
    """
    train = profile.train
    sequences = _sequences_per_step(train, means)
    samples = max(1, round(sequences * (means.samples or 1.0)))
    # As many micro-batches as the profile's size needs, then the nearest size.
    samples_per_accumulation_step = train.micro_batch_size * ranks
    accumulation_steps = max(1, math.ceil(samples / samples_per_accumulation_step))
    nearest_size = max(1, round(samples / (accumulation_steps * ranks)))
    micro_batch_size = min(train.micro_batch_size, nearest_size)
    exported_samples = micro_batch_size * accumulation_steps * ranks
    tokens_per_step = means.non_padding_tokens
    exported_tokens = None
    if means.non_padding_tokens:
        tokens_per_step = sequences * means.non_padding_tokens
        if means.samples:
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
    """Return the sequences of an optimizer step in this project's trainer."""
    if train.global_batch_tokens is not None and means.non_padding_tokens:
        return max(1, round(train.global_batch_tokens / means.non_padding_tokens))
    if train.global_batch_samples is not None and means.samples:
        return max(1, round(train.global_batch_samples / means.samples))
    return train.global_batch_size


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointInterval:
    """Interval between checkpoints in optimizer steps."""

    steps: int | None
    """Steps between checkpoints; None if the interval is not known in steps."""
    remark: str
    """Source of the number of steps, or the reason why it cannot be converted."""


def checkpoint_interval(profile: Profile, batch: ExportedBatch) -> CheckpointInterval:
    """Convert the interval between checkpoints from seconds to optimizer steps.

    It takes the measured rate. Without one, the interval is the profile's in steps, if
    it has one.
    """
    checkpoint = profile.train.checkpoint
    step_time = _step_time(profile, batch)
    if step_time is None:
        return CheckpointInterval(
            steps=checkpoint.interval_steps,
            remark="no measured step time to convert seconds into steps",
        )
    # Bounded, as a foreign profile may hold any rate: at least a nanosecond a step.
    steps_in_interval = checkpoint.interval_s / max(1e-9, step_time.step_s)
    whole_steps = max(1, math.floor(min(steps_in_interval, sys.maxsize)))
    return CheckpointInterval(
        # A profile may limit the interval in both units.
        steps=min(whole_steps, checkpoint.interval_steps or sys.maxsize),
        remark=(
            f"steps of {step_time.step_s:.3g} s by this project's trainer"
            f" ({step_time.source})"
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Time of an optimizer step of this project's trainer."""

    step_s: float
    source: str
    """Origin of the time, in words."""


def _step_time(profile: Profile, batch: ExportedBatch) -> StepTime | None:
    """Return the time of this trainer's optimizer step; None if none was measured."""
    tokens = batch.tokens_per_step
    if tokens is None:
        return None
    expected = expected_rate(profile, batch.ranks)
    if expected is not None:
        return StepTime(
            step_s=tokens / expected.value,
            source=f"{expected.known}: {expected.source}",
        )
    tuned = tuned_rate(profile)
    if tuned is None:
        return None
    return StepTime(
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

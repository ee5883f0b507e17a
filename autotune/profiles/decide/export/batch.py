"""Optimizer step of an export, its checkpoint interval in steps, and warnings about both. Pure."""

import math
import sys

from autotune.corpus.values import SequenceMeans
from autotune.profiles.decide.export.table import ExportedBatch
from autotune.profiles.decide.rates import expected_rate, tuned_rate
from autotune.profiles.values import Profile
from trainer.config.train_config import TrainConfig


def exported_batch(profile: Profile, means: SequenceMeans, ranks: int) -> ExportedBatch:
    """Return the optimizer step of a profile, and the nearest one of whole samples.

    It keeps, in this order: at most as many sequences in a micro-batch as were verified to fit; the non-padding tokens
    of an optimizer step, as near as whole micro-batches of all ranks allow.
    """
    train, rows = profile.train, profile.train.global_batch_size
    if train.global_batch_tokens is not None and means.non_padding_tokens:
        rows = max(1, round(train.global_batch_tokens / means.non_padding_tokens))
    elif train.global_batch_samples is not None and means.samples:
        rows = max(1, round(train.global_batch_samples / means.samples))
    samples = max(1, round(rows * (means.samples or 1.0)))
    steps = max(1, math.ceil(samples / (train.micro_batch_size * ranks)))
    each = min(train.micro_batch_size, max(1, round(samples / (steps * ranks))))
    exported = each * steps * ranks
    known = means.non_padding_tokens / means.samples if means.non_padding_tokens and means.samples else None
    return ExportedBatch(
        ranks=ranks, sequences_per_step=rows, samples_per_sequence=means.samples,
        tokens_per_step=means.non_padding_tokens and rows * means.non_padding_tokens, per_device_batch_size=each,
        gradient_accumulation_steps=steps, exported_samples_per_step=exported,
        exported_tokens_per_step=known and exported * known,
    )  # fmt: skip


def checkpoint_steps(profile: Profile, batch: ExportedBatch) -> tuple[int | None, str]:
    """Return the steps between checkpoints, as seconds become steps at the measured rate, and their source."""
    saving = profile.train.checkpoint
    if (step := _step_s(profile, batch)) is None:
        return saving.interval_steps, "no measured step time to convert seconds into steps"
    every = max(1, math.floor(min(saving.interval_s / max(1e-9, step[0]), sys.maxsize)))
    how = f"steps of {step[0]:.3g} s by this project's trainer ({step[1]})"
    return min(every, saving.interval_steps or sys.maxsize), how


def _step_s(profile: Profile, batch: ExportedBatch) -> tuple[float, str] | None:
    """Return the seconds of this trainer's optimizer step and their source; None if nothing was measured."""
    tokens, rate, tuned = batch.tokens_per_step, expected_rate(profile, batch.ranks), tuned_rate(profile)
    if tokens is None:
        return None
    if rate is not None:
        return tokens / rate.value, f"{rate.known}: {rate.source}"
    if tuned is None:
        return None
    return tokens / (tuned.value * batch.ranks / tuned.ranks), f"assumed: per rank as fast as in {tuned.source}"


def batch_warnings(train: TrainConfig, batch: ExportedBatch, means: SequenceMeans) -> list[str]:
    """Return what to know before the exported step is trained."""
    each, rows, found = batch.per_device_batch_size, train.micro_batch_size, []
    if train.layout == "packed" and batch.samples_per_sequence is None:
        found.append(
            f"The number of samples per packed sequence is unknown ({means.source}): the export assumes one, so its "
            "optimizer step has fewer tokens. Pass the dataset: --data DIR."
        )
    elif train.layout == "packed":
        found.append(
            f"{rows} packed sequences are not {rows} samples: each holds {batch.samples_per_sequence:.2f} on average. "
            "The export accumulates gradients up to the same number of non-padding tokens."
        )
    if each < rows:
        found.append(f"Micro-batch size {each} instead of {rows}, to come closest to the global batch.")
    return [*found, "The micro-batch was measured to fit with this project's trainer; the other may need more memory."]

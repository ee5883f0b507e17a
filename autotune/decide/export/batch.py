"""The global batch of packed rows as a number of samples, on as many ranks. Pure.

A packed row holds several samples, and the other trainer's row holds one. Kept are, in this order: at most as many
rows in a micro-batch as were shown to fit; the real tokens of an optimizer step, as near as whole micro-batches of all
ranks allow.
"""

import math

from autotune.core.export import ExportedBatch, RowsHold
from autotune.core.profile import Profile


def rows_per_step(profile: Profile, hold: RowsHold) -> int:
    """Rows of an optimizer step over all ranks, whatever the batch is given in."""
    train = profile.train
    if train.global_batch_tokens is not None and hold.real_tokens:
        return max(1, round(train.global_batch_tokens / hold.real_tokens))
    if train.global_batch_samples is not None and hold.samples:
        return max(1, round(train.global_batch_samples / hold.samples))
    return train.global_batch_rows


def exported_batch(profile: Profile, hold: RowsHold, ranks: int) -> ExportedBatch:
    """The step of a profile, and the nearest one of whole samples.

    Args:
        profile: The profile.
        hold: What its rows hold; where the samples are not known, one for each row is taken.
        ranks: All that train together.
    """
    rows, train = rows_per_step(profile, hold), profile.train
    samples = max(1, round(rows * (hold.samples or 1.0)))
    steps = max(1, math.ceil(samples / (train.micro_batch_rows * ranks)))
    each = min(train.micro_batch_rows, max(1, round(samples / (steps * ranks))))
    exported = each * steps * ranks
    per_sample = hold.real_tokens / hold.samples if hold.real_tokens and hold.samples else None
    places = train.seq_length_tokens
    return ExportedBatch(
        ranks=ranks,
        rows_per_microbatch_per_rank=train.micro_batch_rows,
        rows_per_step=rows,
        samples_per_row=hold.samples,
        samples_per_row_source=hold.source,
        real_tokens_per_row=hold.real_tokens,
        real_tokens_per_step=None if hold.real_tokens is None else rows * hold.real_tokens,
        fill_share=None if hold.real_tokens is None else min(1.0, hold.real_tokens / places),
        samples_per_microbatch_per_rank=each,
        accumulation_steps=steps,
        exported_samples_per_step=exported,
        exported_real_tokens_per_step=None if per_sample is None else exported * per_sample,
        exported_fill_share=None if per_sample is None else min(1.0, per_sample / places),
    )

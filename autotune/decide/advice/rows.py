"""Advice on what rows hold: padding, and rows that hold nothing."""

import statistics
from dataclasses import replace

from autotune.core.advice import Advice, Change, Figure
from autotune.core.bottleneck import Part
from autotune.decide.advice.gains import times, without
from autotune.decide.advice.situation import Situation, part_figure
from autotune.decide.choose import deal
from autotune.decide.work import place_share

PADDING_SHARE = 0.05
"""Padding that is worth a word: packing leaves about one per cent."""
PACKED_LEAVES = 0.02
EMPTY_SHARE = 0.03
"""Empty rows that are worth a word."""


def padding(now: Situation) -> Advice | None:
    """Rows that hold padding, which is computed like everything else."""
    lost, train = _padding_within_rows(now), now.train
    if train is None or lost is None or now.bottleneck is None:
        return None
    evidence = (part_figure(lost, "computing of padding", now.bottleneck.steps),)
    if train.layout == "packed":
        return Advice(
            rule="padding",
            severity="could",
            claim=f"{lost.share:.0%} of the step computes places that hold nothing, though rows are packed: they are "
            "too long for this dataset",
            evidence=evidence,
            gain=without(lost, left=0.5, left_low=0.0, left_high=1.0),
            cost="samples longer than a row are cut",
            command=now.probe_command(seq_length=train.seq_length_tokens // 2),
            would_change="a larger dataset: a small one does not fill its last rows",
        )
    layout = "packed" if now.knows_the_model else "bucketed"
    if layout == train.layout:
        return None
    left = PACKED_LEAVES if layout == "packed" else 0.5
    gain = without(_with_others_places(now, lost), left=left, left_low=0.0, left_high=left + 0.15)
    if layout == "packed" and train.device == "cuda" and now.attention_dropout == 0:
        row = train.seq_length_tokens  # packed rows attend within samples, padded ones over the whole row
        share = row / (6 * now.hidden_size + row)
        gain = times(gain, (1.0, 1 + share / 2, 1 + 2 * share))
    return Advice(
        rule="padding",
        severity="should",
        claim=f"{lost.share:.0%} of the step computes padding: {layout} rows hold "
        + ("several samples, none of which attends to another" if layout == "packed" else "samples of like length"),
        evidence=evidence,
        gain=gain,
        cost="the micro-batch is to be probed again, as attention takes other memory; the global batch in real tokens "
        "stays, so it has fewer rows",
        changes=(Change(key="layout", old=train.layout, new=layout), *_same_tokens(now, layout)),
        command=now.probe_command(layout=layout),
        would_change="samples that are all as long as a row; a global batch of hardly more rows than there are ranks",
    )


def empty_rows(now: Situation) -> Advice | None:
    """A global batch that does not divide by ranks and micro-batches, so that some compute rows without samples."""
    empty, lost = _empty_share(now), now.loss("padding", 0.0)
    if now.run is None or now.train is None or lost is None or now.bottleneck is None or empty < EMPTY_SHARE:
        return None
    dealing = deal(now.global_batch_rows, now.train.micro_batch_rows, now.ranks)
    part = _scaled(lost, _share_of_empty(now, empty))
    nearest = min(dealing.without_empty, key=lambda rows: abs(rows - now.global_batch_rows), default=None)
    if nearest is None or part.share < EMPTY_SHARE / 2:
        return None
    return Advice(
        rule="empty-rows",
        severity="could",
        claim=f"{empty:.0%} of all rows are empty: {now.global_batch_rows} rows do not divide by {now.ranks} ranks in "
        f"micro-batches of at most {now.train.micro_batch_rows}",
        evidence=(
            Figure(name="empty rows", value=empty, unit="share", known="predicted", source="the dealing of rows"),
            part_figure(part, "computing of empty rows", now.bottleneck.steps),
        ),
        # Slots of the head are made for empty rows too, which padding within rows does not cost.
        gain=times(without(part, left=0.0, left_low=0.0, left_high=0.5), (1.0, 1.03, 1.1)),
        cost=f"a global batch of {nearest} rows instead of {now.global_batch_rows}, which is a change of recipe, if a "
        "small one",
        changes=(Change(key="global_batch_rows", old=now.global_batch_rows, new=nearest),),
        would_change="another number of ranks",
    )


def _empty_share(now: Situation) -> float:
    """Of all rows that are computed, as they are dealt."""
    if now.run is None:
        return 0.0
    header = now.run.header
    places = header.accumulation_steps * header.rows_per_microbatch_per_rank * header.world_size
    return max(0.0, 1 - header.global_batch_rows / places) if places else 0.0


def _share_of_empty(now: Situation, empty: float) -> float:
    """Part of all padding that lies in empty rows."""
    assert now.run is not None
    full = statistics.median(row.packing_efficiency for row in now.run.steps)
    return min(1.0, empty / (1 - full)) if full < 1 else 0.0


def _scaled(part: Part, factor: float) -> Part:
    bounds = [None if bound is None else bound * factor for bound in (part.low, part.high)]
    return replace(part, share=part.share * factor, low=bounds[0], high=bounds[1])


def _with_others_places(now: Situation, lost: Part) -> Part:
    """With what is no product, and so is not counted in the part: at most as much as would make all go by places.

    Normalisation, activations and dropout are done at every place; how much of a step they are, nobody has counted.
    """
    assert now.train is not None
    most = 1 / place_share(now.train, now.parameters)
    low, high = (lost.share if bound is None else bound for bound in (lost.low, lost.high))
    return replace(lost, share=lost.share * (1 + most) / 2, low=low, high=high * most)


def _padding_within_rows(now: Situation) -> Part | None:
    """The padding part without empty rows; None where that is too little."""
    lost = now.loss("padding", PADDING_SHARE)
    if lost is None or now.run is None or not now.run.steps:
        return lost
    inside = _scaled(lost, 1 - _share_of_empty(now, _empty_share(now)))
    return inside if inside.share >= PADDING_SHARE else None


def _same_tokens(now: Situation, layout: str) -> tuple[Change, ...]:
    """As many rows as hold the same real tokens; where the batch is given in tokens or samples it keeps itself."""
    train = now.train
    if now.run is None or train is None or train.global_batch_tokens or train.global_batch_samples:
        return ()
    if layout != "packed":  # one sample to a row, as before
        return ()
    tokens = statistics.median(row.real_tokens for row in now.run.steps)
    rows = max(1, round(tokens / (train.seq_length_tokens * (1 - PACKED_LEAVES))))
    return (Change(key="global_batch_rows", old=train.global_batch_rows, new=rows),)

"""Advice on micro-batch size and global batch.

The rules look at memory, throughput, padding and the gradient noise scale.
"""

import math
import statistics
from dataclasses import replace

from autotune.advice.decide.bottleneck import steps_of_this_start
from autotune.advice.decide.context import TrainingContext, faster_with, times, without
from autotune.advice.decide.rule import rule
from autotune.base.estimates import change_between
from autotune.base.interval import Interval
from autotune.base.units import format_percent
from autotune.base.window_statistics import estimate_from_bounds
from autotune.evidence.advice import Advice, Gain, SettingChange, figure
from autotune.evidence.peak_contents import ContentKind
from autotune.evidence.probe import CurvePoint, ProbeEvidence
from autotune.memory.decide.sharding import model_share, parts_of_terms, zero_share
from autotune.memory.values import Term
from autotune.profiles.decide.batch_split import split_global_batch
from autotune.profiles.decide.micro_batch import (
    choose_by_throughput,
    choose_micro_batch,
    with_headroom,
)
from autotune.subjects.mlm.model_work import position_share
from trainer.formats.model_config import HIDDEN_SIZE, attention_dropout, config_count

WORTH_RATIO = 1.02
STILL_GROWS_RATIO = 1.05
"""Least ratio of throughput at the largest micro-batch to that at half of it, for which
a larger one would be faster."""
NOISE_ROWS, NOISE_STEPS = 8, 1000
"""Least measurements of the noise scale, and steps of the run, before it is used: in
the first steps, when all samples still agree, it is hundreds of times smaller than
later."""
BEYOND_NOISE_RATIO = 2.0
PADDING_SHARE, EMPTY_SHARE = 0.05, 0.03
"""Least shares of padding, and of empty sequences, that are reported: packing leaves
about 1 %."""
PACKED_LEAVES = 0.02
STATE_SHARE = 0.4
"""Least share of the memory budget in weights, gradients and optimizer for which
sharding is considered."""
WORTH_SHARING_RATIO = 1.03
_PROBE = "autotune probe"


@rule("R5")
def beyond_memory(now: TrainingContext) -> Advice | None:
    """Find a micro-batch size that was not verified to fit."""
    probe, size = now.evidence.probe, now.size
    if size is None or probe is None or now.profile is None:
        return None
    if size <= probe.feasible_max:
        return None
    oom = probe.infeasible_min is not None and size >= probe.infeasible_min
    known = now.profile.fingerprint.bytes_known
    return Advice(
        severity="error",
        claim=(
            f"{_size_name(now)} {size}"
            f" {'runs out of memory' if oom else 'was not verified to fit'}:"
            f" {probe.feasible_max} is the largest that ran"
        ),
        evidence=(
            figure(
                f"largest {_size_name(now)} that ran",
                probe.feasible_max,
                _size_unit(now),
                _PROBE,
            ),
            figure(
                "its peak memory",
                probe.feasible_peak_bytes,
                "bytes",
                _PROBE,
                known=known,
            ),
        ),
        cost=_cost_of_smaller(now),
        changes=(now.size_change(_largest(now, probe)),),
        would_change="more memory than on the probed machine",
        safe=True,
    )


@rule("R5")
def no_headroom(now: TrainingContext) -> Advice | None:
    """Find a micro-batch size that leaves less memory free than was asked for."""
    probe, size = now.evidence.probe, now.size
    if size is None or probe is None or now.profile is None:
        return None
    most = _largest(now, probe)
    if not most < size <= probe.feasible_max:
        return None
    headroom = now.profile.constraints.headroom_share
    return Advice(
        claim=(
            f"{_size_name(now)} {size} fits, but leaves less than the headroom of"
            f" {format_percent(headroom)}: fragmentation or a longer batch can run out"
            " of memory"
        ),
        evidence=(
            figure(
                f"largest {_size_name(now)} that ran",
                probe.feasible_max,
                _size_unit(now),
                _PROBE,
            ),
            figure("headroom", headroom, "share", "constraints", known="assumed"),
        ),
        cost=_cost_of_smaller(now),
        changes=(now.size_change(most),),
        would_change="a probe with a smaller --headroom",
        safe=True,
    )


@rule("R5, memory")
def memory_limits_size(now: TrainingContext) -> Advice | None:
    """Find throughput that still grows at the largest micro-batch that fits."""
    probe, size = now.evidence.probe, now.size
    if size is None or probe is None or len(probe.curve) < 2:
        return None
    # Only if memory, and not the global batch, is the limit.
    if size < _largest(now, probe) or now.split_micro_batch_size(size + 1) <= size:
        return None
    largest = max(probe.curve, key=lambda point: point.size)
    half = _nearest(probe, largest.size / 2)
    if half is None or half.size >= largest.size:
        return None
    growth = change_between(
        estimate_from_bounds(half.rate),
        estimate_from_bounds(largest.rate),
    )
    if growth.low is None or growth.low < STILL_GROWS_RATIO:
        return None
    gain = faster_with(now, size, 2 * size)
    kind = _largest_kind(probe)
    evidence = [
        figure(
            f"{now.rate_unit} with {now.size_words(largest.size)} relative"
            f" to {now.size_words(half.size)}",
            growth,
            "ratio",
            _PROBE,
        )
    ]
    if kind is not None:
        evidence.append(
            figure(f"share of {kind[0]} in the peak", kind[1], "share", _PROBE)
        )
    freed = ""
    if kind is not None:
        freed = f"; {kind[0]} take the most, {format_percent(kind[1])} of the peak"
    return Advice(
        claim=(
            f"memory limits the {_size_name(now)}, and throughput still grows with it:"
            f" free memory to train with more than {size}{freed}"
        ),
        evidence=tuple(evidence),
        gain=None if gain is None else Gain.between(*gain),
        cost=_WAYS_TO_FREE.get("" if kind is None else kind[0], _USUAL_WAYS),
        command=now.probe_command(),
        would_change="a global batch that does not need larger micro-batches",
    )


_USUAL_WAYS = (
    "16-bit precision, activation checkpointing (which recomputes layers), or a"
    " sharded optimizer; then probe again"
)
_WAYS_TO_FREE: dict[str, str] = {
    ContentKind.ACTIVATIONS: (
        "activation checkpointing, which recomputes layers in backward, or 16-bit"
        " precision; then probe again"
    ),
    ContentKind.TEMPORARIES: (
        "fused kernels (compile the step, a fused loss) or 16-bit precision; then probe"
        " again"
    ),
    ContentKind.OPTIMIZER_STATE: (
        "sharding of the optimizer over ranks, or one with a smaller state; then probe"
        " again"
    ),
    ContentKind.PARAMETERS: "sharding of the weights over ranks; then probe again",
    ContentKind.GRADIENTS: "sharding of the gradients over ranks; then probe again",
}
"""Ways to free memory by the kind of contents that takes the most."""


def _largest_kind(probe: ProbeEvidence) -> tuple[str, float] | None:
    """Return the kind of contents with the most bytes at the peak, and its share."""
    contents = probe.contents
    if contents is None or not contents.peak_bytes:
        return None
    sizes = {
        kind: sum(row.bytes_of(kind) for row in contents.rows) for kind in ContentKind
    }
    kind = max(sizes, key=sizes.__getitem__)
    return kind.value, sizes[kind] / contents.peak_bytes


def _nearest(probe: ProbeEvidence, size: float) -> CurvePoint | None:
    """Return the point of the curve that is nearest to a size."""
    return min(probe.curve, key=lambda point: abs(point.size - size), default=None)


def _size_name(now: TrainingContext) -> str:
    """Return the searched argument in words."""
    subject = now.subject
    return "micro-batch size" if subject is None or subject.noun else subject.size


def _size_unit(now: TrainingContext) -> str:
    """Return the unit of the searched argument."""
    return "sequences" if now.subject is None or now.subject.noun else "count"


def _cost_of_smaller(now: TrainingContext) -> str:
    if now.global_batch_size is None:
        return "a smaller global batch, unless your code accumulates more micro-batches"
    return (
        "none: the global batch stays the same, with more gradient accumulation steps"
    )


def _largest(now: TrainingContext, probe: ProbeEvidence) -> int:
    """Return the largest micro-batch size that leaves the headroom free."""
    assert now.profile is not None
    limit = now.profile.constraints.headroom_share
    unit = probe.multiple_of
    return with_headroom(probe.feasible_max // unit, limit) * unit


def _chosen(now: TrainingContext, probe: ProbeEvidence) -> int:
    """Return the micro-batch size that the throughput curve favours."""
    size, fits = now.global_batch_size, probe.feasible_max
    if size is None:
        return choose_by_throughput(
            probe.curve, fits, in_words=now.size_words
        ).micro_batch_size
    return choose_micro_batch(
        probe.curve, fits, global_batch_size=size, ranks=now.ranks
    ).micro_batch_size


@rule("R5")
def beyond_knee(now: TrainingContext) -> Advice | None:
    """Find a micro-batch size beyond the knee of the throughput curve."""
    probe, size = now.evidence.probe, now.size
    if size is None or probe is None or len(probe.curve) < 2:
        return None
    chosen = _chosen(now, probe)
    if (
        now.split_micro_batch_size(size) <= max([chosen, *probe.knee_micro_batch_sizes])
        or size > probe.feasible_max
    ):
        return None
    here, there = _at(now, probe, size), now.point(chosen)
    # Network tuning chose this size.
    if now.evidence.network is not None or here is None or there is None:
        return None
    speed = change_between(estimate_from_bounds(here), estimate_from_bounds(there.rate))
    before, after = now.peak_bytes(size), now.peak_bytes(chosen)
    return Advice(
        claim=(
            f"{_size_name(now)} {chosen} is as fast as the profile's {size}: throughput"
            " no longer grows"
        ),
        evidence=(
            figure(
                f"{now.rate_unit} with {now.size_words(chosen)} relative to {size}",
                speed,
                "ratio",
                _PROBE,
                n=there.timed_steps,
                known="interpolated" if now.point(size) is None else "measured",
            ),
        ),
        gain=(
            Gain(of="GPU memory", ratio=after / before, known="measured")
            if before and after
            else None
        ),
        cost=(
            "none measured; the freed memory has room for longer sequences or a larger"
            " model"
        ),
        changes=(now.size_change(chosen),),
        would_change=(
            "a slow network: the last micro-batch overlaps more of the synchronisation"
            " if it is larger"
        ),
        safe=now.nodes == 1 and now.global_batch_size is not None,
    )


@rule("R5, launch-bound")
def below_knee(now: TrainingContext) -> Advice | None:
    """Find a micro-batch size that is slow although a larger one fits."""
    probe, size = now.evidence.probe, now.size
    if size is None or probe is None or len(probe.curve) < 2:
        return None
    chosen = _chosen(now, probe)
    rows, then = now.split_micro_batch_size(size), now.split_micro_batch_size(chosen)
    # The batch split may need less than the size that was chosen.
    if now.point(then) is not None:
        chosen = then
    here, there = _at(now, probe, rows), now.point(chosen)
    # A smaller size than the setting's was limited by the global batch, or split by
    # network tuning.
    if not size <= rows < min(then, chosen) or here is None or there is None:
        return None
    ratio = change_between(estimate_from_bounds(here), estimate_from_bounds(there.rate))
    known = here.low is not None and there.rate.low is not None
    if ratio.value < WORTH_RATIO or (known and (ratio.low is None or ratio.low <= 1)):
        return None
    is_measured = now.point(rows) is not None
    gain = Gain.measured(ratio)
    if not is_measured:
        gain = replace(gain, known="predicted")
    shared = faster_with(now, rows, then)
    global_batch_size = now.global_batch_size
    # Accumulation shares each optimizer step.
    if (
        global_batch_size is not None
        and global_batch_size > rows * now.ranks
        and shared is not None
    ):
        gain = Gain.between(shared[0], shared[1], max(shared[2], ratio.value))
    cost = (
        "memory, verified to suffice; the global batch stays the same, with fewer"
        " accumulation steps"
    )
    if global_batch_size is None:
        cost = (
            "memory, verified to suffice; the global batch grows, unless your code"
            " accumulates fewer micro-batches"
        )
    return Advice(
        claim=(
            f"{_size_name(now)} {rows} leaves the device partly idle: {chosen} fits and"
            " is faster"
        ),
        evidence=(
            figure(
                f"{now.rate_unit} with {now.size_words(rows)}",
                here,
                now.rate_unit,
                _PROBE,
                known="measured" if is_measured else "interpolated",
            ),
            figure(
                f"{now.rate_unit} with {now.size_words(chosen)}",
                there.rate,
                now.rate_unit,
                _PROBE,
                n=there.timed_steps,
            ),
        ),
        gain=gain,
        cost=cost,
        changes=(now.size_change(chosen),),
        would_change=(
            "less memory than on the probed machine, or a global batch too small for"
            " such micro-batches"
        ),
        safe=global_batch_size is not None,
    )


def _at(now: TrainingContext, probe: ProbeEvidence, rows: int) -> Interval | None:
    """Return padded tokens/s at a micro-batch size, measured or interpolated.

    Returns:
        The rate with its interval, or None outside the measured range.
    """
    point = now.point(rows)
    if point is not None:
        return point.rate
    curve = sorted(probe.curve, key=lambda point: point.size)
    place = sum(point.size < rows for point in curve)
    if not 0 < place < len(curve):
        return None
    one, other = curve[place - 1 : place + 1]
    part = (rows - one.size) / (other.size - one.size)
    step_s = one.step_s + part * (other.step_s - one.step_s)
    return Interval(value=one.units_per_s * one.step_s / one.size * rows / step_s)


@rule()
def beyond_noise_scale(now: TrainingContext) -> Advice | None:
    """Find a global batch far beyond the noise scale (McCandlish et al. 2018)."""
    run, train = now.run, now.train
    if (
        run is None
        or train is None
        or not run.steps
        or run.steps[-1].step < max(NOISE_STEPS, 2 * train.warmup_steps)
    ):
        return None
    rows = steps_of_this_start(run)
    scales = sorted(
        one
        for row in rows[len(rows) // 2 :]
        if (one := row.gradient_noise_scale_tokens) is not None
    )
    if len(scales) < NOISE_ROWS:
        return None
    noise, batch = (
        statistics.median(scales),
        statistics.median(row.non_padding_tokens for row in rows),
    )
    low, high = scales[len(scales) // 4], scales[-1 - len(scales) // 4]
    if batch <= BEYOND_NOISE_RATIO * high:
        return None
    before = run.header.global_batch_size
    fewer = max(run.header.world_size, round(before * noise / batch))
    smaller = batch * fewer / before
    # For the same loss, a batch B needs 1 + B / B_noise times the tokens of the
    # smallest.
    needed, least, most = (
        (1 + smaller / scale) / (1 + batch / scale) for scale in (noise, low, high)
    )
    change = SettingChange(key="global_batch_size", old=before, new=fewer)
    if train.global_batch_tokens is not None:
        change = SettingChange(
            key="global_batch_tokens", old=train.global_batch_tokens, new=round(smaller)
        )
    elif train.global_batch_samples is not None:
        samples = train.global_batch_samples
        change = SettingChange(
            key="global_batch_samples",
            old=samples,
            new=max(1, round(samples * fewer / before)),
        )
    scale = Interval(value=noise, low=low, high=high)
    return Advice(
        claim=(
            f"a global batch of {batch:,.0f} tokens is {batch / noise:.1f} times the"
            " gradient noise scale: most of its tokens hardly improve the gradient"
        ),
        evidence=(
            figure(
                "global batch",
                batch,
                "tokens",
                f"run {run.directory.name}",
                n=len(rows),
            ),
            figure(
                "gradient noise scale",
                scale,
                "tokens",
                f"run {run.directory.name}",
                n=len(scales),
            ),
        ),
        gain=Gain(of="tokens to the same loss", ratio=needed, low=least, high=most),
        cost=(
            "a change of recipe: more and smaller steps, the learning rate times"
            f" {math.sqrt(smaller / batch):.2f} (square-root rule), and less compute"
            " per step to overlap with gradient synchronisation"
        ),
        changes=(change,),
        would_change=(
            "a later stage of training: the noise scale grows as the loss falls"
        ),
    )


@rule("padding")
def padding(now: TrainingContext) -> Advice | None:
    """Find padding, which costs as much compute as other tokens."""
    lost, train = now.loss("padding", PADDING_SHARE), now.train
    if (
        train is None
        or lost is None
        or (lost := lost.scaled(1 - _empty(now)[1])).share < PADDING_SHARE
    ):
        return None
    evidence = (now.part_figure(lost, "compute on padding"),)
    if train.layout == "packed":
        return Advice(
            claim=(
                f"padding takes {format_percent(lost.share)} of the step"
                " although sequences are packed: they are too long for this dataset"
            ),
            evidence=evidence,
            gain=without(lost, (0.0, 0.5, 1.0)),
            cost="samples longer than a sequence are cut",
            command=now.probe_command(seq_length=train.seq_length_tokens // 2),
            would_change="a larger dataset, which fills more of its sequences",
        )
    layout = "packed" if now.knows_the_model else "bucketed"
    if layout == train.layout:
        return None
    # The part counts matmuls only. Other kernels run at every position too; at most,
    # all costs follow positions.
    most = 1 / position_share(train, now.parameters)
    low, high = (
        lost.share if bound is None else bound for bound in (lost.low, lost.high)
    )
    left = PACKED_LEAVES if layout == "packed" else 0.5
    lost_there = replace(
        lost, share=lost.share * (1 + most) / 2, low=low, high=high * most
    )
    gain = without(lost_there, (0.0, left, left + 0.15))
    if layout == "packed" and train.device == "cuda" and attention_dropout(train) == 0:
        # Packed sequences attend within documents, padded ones over all positions.
        length, hidden = (
            train.seq_length_tokens,
            config_count(train, "hidden_size", HIDDEN_SIZE),
        )
        share = length / (6 * hidden + length)
        gain = times(gain, (1.0, 1 + share / 2, 1 + 2 * share))
    changes = [SettingChange(key="layout", old=train.layout, new=layout)]
    if (
        layout == "packed"
        and now.run is not None
        and not train.global_batch_tokens
        and not train.global_batch_samples
    ):
        # Keep the tokens of a batch; one that is given in tokens or samples stays the
        # same.
        tokens = statistics.median(row.non_padding_tokens for row in now.run.steps)
        rows = max(1, round(tokens / (train.seq_length_tokens * (1 - PACKED_LEAVES))))
        changes.append(
            SettingChange(
                key="global_batch_size", old=train.global_batch_size, new=rows
            )
        )
    return Advice(
        claim=(
            f"padding takes {format_percent(lost.share)} of the step:"
            f" {layout} sequences hold "
        )
        + (
            "documents without cross-document attention"
            if layout == "packed"
            else "samples of similar length"
        ),
        evidence=evidence,
        gain=gain,
        cost=(
            "another probe of the micro-batch, as attention needs different memory; the"
            " global batch keeps its non-padding tokens and has fewer sequences"
        ),
        changes=tuple(changes),
        command=now.probe_command(layout=layout),
        would_change=(
            "samples that all fill a sequence, or a global batch of few sequences per"
            " rank"
        ),
    )


@rule("padding")
def empty_rows(now: TrainingContext) -> Advice | None:
    """Find a global batch whose split over ranks leaves empty sequences."""
    (empty, of_padding), lost = _empty(now), now.loss("padding", 0.0)
    if now.train is None or lost is None or empty < EMPTY_SHARE:
        return None
    rows, micro_batch = now.global_batch_size, now.train.micro_batch_size
    assert rows is not None
    split = split_global_batch(rows, micro_batch, now.ranks)
    part = lost.scaled(of_padding)
    if not split.without_empty or part.share < EMPTY_SHARE / 2:
        return None
    nearest = min(split.without_empty, key=lambda count: abs(count - rows))
    return Advice(
        claim=(
            f"{format_percent(empty)} of the sequences are empty: {rows} do not"
            f" divide by {now.ranks} ranks in micro-batches of at most {micro_batch}"
        ),
        evidence=(
            figure("empty sequences", empty, "share", "batch split", known="predicted"),
            now.part_figure(part, "compute on empty sequences"),
        ),
        # The head also computes positions of empty sequences, which padding within
        # sequences does not cost.
        gain=times(without(part, (0.0, 0.0, 0.5)), (1.0, 1.03, 1.1)),
        cost=(
            f"a small change of recipe: a global batch of {nearest} sequences instead"
            f" of {rows}"
        ),
        changes=(SettingChange(key="global_batch_size", old=rows, new=nearest),),
        would_change="another number of ranks",
    )


def _empty(now: TrainingContext) -> tuple[float, float]:
    """Return the share of computed sequences that are empty, and their part of padding.

    Both are 0 without a run.
    """
    if now.run is None or not now.run.steps:
        return 0.0, 0.0
    header = now.run.header
    places = (
        header.gradient_accumulation_steps
        * header.sequences_per_micro_batch
        * header.world_size
    )
    empty = max(0.0, 1 - header.global_batch_size / places) if places else 0.0
    full = statistics.median(row.packing_efficiency for row in now.run.steps)
    return empty, min(1.0, empty / (1 - full)) if full < 1 else 0.0


@rule("R5")
def too_big_for_ddp(now: TrainingContext) -> Advice | None:
    """Find sharding of weights and optimizer state that allows larger micro-batches."""
    probe, profile, train = now.evidence.probe, now.profile, now.train
    if (
        train is None
        or probe is None
        or profile is None
        or train.parallel.strategy != "ddp"
    ):
        return None
    terms, budget_bytes, fit = (
        probe.traced_terms_bytes,
        profile.memory_budget_bytes,
        probe.feasible_max,
    )
    state_bytes = sum(
        terms.get(name, 0) for name in (Term.PARAMETERS, Term.GRADIENTS, Term.OPTIMIZER)
    )
    ranks = (
        now.nodes * max(profile.local_ranks, profile.fingerprint.gpu_count)
        if now.run is None
        else now.ranks
    )
    if not terms or state_bytes < STATE_SHARE * budget_bytes or ranks < 2:
        return None
    state = parts_of_terms(terms)
    # Gathered at once: the embeddings are the largest unit of most encoders.
    layer_bytes = state.parameters_bytes // 8
    row_bytes = max(1.0, (state.activations_bytes + state.head_and_loss_bytes) / fit)
    taken = {
        name: (
            zero_share(state, stage, ranks, largest_layer_bytes=layer_bytes).total_bytes
        )
        for name, stage in (("ddp", 0), ("zero1", 1), ("fsdp2", 3))
    }
    rows = {
        name: max(1, int(fit + (budget_bytes - size) / row_bytes))
        for name, size in taken.items()
    }
    best = "zero1" if rows["zero1"] >= 0.9 * rows["fsdp2"] else "fsdp2"
    speed = faster_with(now, rows["ddp"], rows[best])
    gain = Gain(of="GPU memory", ratio=taken[best] / taken["ddp"])
    if speed is not None and speed[1] >= WORTH_SHARING_RATIO:
        gain = Gain.between(min(1.0, speed[0]), speed[1], speed[2])
    sizes = taken | {"two tensor-parallel ranks": model_share(state, 2, 1).total_bytes}
    return Advice(
        claim=(
            "weights, gradients and optimizer state take"
            f" {format_percent(state_bytes / budget_bytes)} of each rank's memory:"
            f" {best} over {ranks} ranks allows micro-batches of {rows[best]}"
            f" sequences instead of {rows['ddp']}"
        ),
        evidence=tuple(
            figure(
                f"memory of {fit} sequences with {name}",
                size,
                "bytes",
                "traced memory",
                known="predicted",
            )
            for name, size in sizes.items()
        ),
        gain=gain,
        cost=(
            "weights are communicated as well as gradients: cheap within a node,"
            " perhaps slower between nodes; this trainer has no tensor parallelism"
        ),
        changes=(SettingChange(key="parallel.strategy", old="ddp", new=best),),
        command=now.command("network"),
        would_change="throughput that no longer grows with the micro-batch size",
    )

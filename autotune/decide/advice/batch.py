"""Advice on the micro-batch and the global batch."""

import math
import statistics

from autotune.core.advice import Advice, Change, Figure, Gain
from autotune.core.evidence import ProbeEvidence
from autotune.core.interval import Interval
from autotune.decide.advice.situation import Situation, faster_with
from autotune.decide.bottleneck import rows_of_this_start
from autotune.decide.choose import MicroBatchChoice, choose_micro_batch, rows_with_headroom
from autotune.decide.statistics import difference, of_bounds

WORTH_RATIO = 1.02
"""Within two per cent nothing is faster than anything."""
NOISE_ROWS, NOISE_STEPS = 8, 1000
"""Readings of the noise scale, and steps of the run, before it is believed: in the first steps, when every sample says
the same, it is hundreds of times smaller than it will be."""
BEYOND_NOISE_RATIO = 2.0


def beyond_memory(now: Situation) -> Advice | None:
    """A micro-batch that was not shown to fit."""
    probe = now.probe
    if now.train is None or probe is None or now.profile is None:
        return None
    rows, limit = (
        now.train.micro_batch_rows,
        rows_with_headroom(probe.feasible_max, now.profile.constraints.headroom_share),
    )
    if rows <= probe.feasible_max:
        return None
    refused = probe.infeasible_min is not None and rows >= probe.infeasible_min
    return Advice(
        rule="beyond-memory",
        severity="must",
        claim=f"micro-batches of {rows} rows {'were refused for memory' if refused else 'were never shown to fit'}: "
        f"{probe.feasible_max} is the largest that ran",
        evidence=(
            Figure(name="largest that ran", value=float(probe.feasible_max), unit="rows", source="autotune probe"),
            Figure(
                name="its peak", value=float(probe.feasible_peak_bytes), unit="bytes",
                known=now.profile.fingerprint.bytes_known, source="autotune probe",
            ),
        ),
        gain=None,
        cost="none: the global batch stays, in more micro-batches",
        changes=(Change(key="micro_batch_rows", old=rows, new=limit),),
        would_change="more memory than where it was probed",
        safe=True,
    )  # fmt: skip


def _chosen(now: Situation, probe: ProbeEvidence) -> MicroBatchChoice:
    return choose_micro_batch(probe.curve, probe.feasible_max, global_rows=now.global_batch_rows, ranks=now.ranks)


def beyond_knee(now: Situation) -> Advice | None:
    """A micro-batch larger than any gain from it."""
    probe = now.probe
    if now.train is None or probe is None or len(probe.curve) < 2:
        return None
    rows, choice = now.train.micro_batch_rows, _chosen(now, probe)
    latest = max(probe.knee_rows, default=choice.rows)
    if now.dealt_rows(rows) <= max(choice.rows, latest) or rows > probe.feasible_max:
        return None
    if now.network is not None and now.network.exchanges:  # it chose the rows, with what they hide of the exchange
        return None
    here, there = _at(now, rows), now.point(choice.rows)
    if here is None or there is None:
        return None
    speed = difference(of_bounds(here), of_bounds(there.slot_rate))
    before, after = now.peak_bytes(rows), now.peak_bytes(choice.rows)
    memory = None
    if before is not None and after is not None:
        memory = Gain(of="GPU memory", ratio=after / before, known="measured")
    return Advice(
        rule="beyond-knee",
        severity="could",
        claim=f"{choice.rows} rows are as fast as the {rows} of the profile: throughput has levelled off",
        evidence=(
            Figure.of(
                speed, name=f"tokens/s with {choice.rows} rows, of {rows} rows", unit="ratio", n=there.timed_steps,
                source="autotune probe",
            ),
        ),
        gain=memory,
        cost="none that was seen; the memory it frees has room for longer rows or a larger model",
        changes=(Change(key="micro_batch_rows", old=rows, new=choice.rows),),
        would_change="gradients that travel slowly: a larger last micro-batch hides more of their exchange",
        safe=now.nodes == 1,
    )  # fmt: skip


def below_knee(now: Situation) -> Advice | None:
    """A micro-batch too small to be fast, where a larger one fits."""
    probe = now.probe
    if now.train is None or probe is None or len(probe.curve) < 2:
        return None
    choice = _chosen(now, probe)
    rows, then = now.dealt_rows(now.train.micro_batch_rows), now.dealt_rows(choice.rows)
    here, there = _at(now, rows), now.point(choice.rows)
    if rows >= min(then, choice.rows) or here is None or there is None:
        return None
    if now.train.micro_batch_rows > rows:  # the global batch gives no more, or network tuning dealt it so
        return None
    ratio = difference(of_bounds(here), of_bounds(there.slot_rate))
    known = here.low is not None and there.slot_rate.low is not None
    if ratio.value < WORTH_RATIO or (known and (ratio.low is None or ratio.low <= 1)):
        return None
    gain = Gain.of_rates(ratio)
    shared = faster_with(now, rows, then)
    if now.global_batch_rows > rows * now.ranks and shared is not None:  # the update of every step is shared out
        gain = Gain(
            of="real tokens/s", ratio=shared[1], low=shared[0], high=max(shared[2], ratio.value), known="predicted"
        )
    return Advice(
        rule="below-knee",
        severity="should",
        claim=f"micro-batches of {rows} rows leave the device idle: {choice.rows} rows fit, and are faster",
        evidence=(
            Figure.of(here, name=f"tokens/s with {rows} rows", unit="tokens/s", source="autotune probe"),
            Figure.of(
                there.slot_rate, name=f"tokens/s with {choice.rows} rows", unit="tokens/s", n=there.timed_steps,
                source="autotune probe",
            ),
        ),
        gain=gain,
        cost="memory that was shown to be there; the global batch stays, in fewer micro-batches",
        changes=(Change(key="micro_batch_rows", old=rows, new=choice.rows),),
        would_change="less memory than where it was probed, or a global batch too small to fill such micro-batches",
        safe=True,
    )  # fmt: skip


def beyond_noise_scale(now: Situation) -> Advice | None:
    """A global batch so large that its tokens hardly make the gradient better (McCandlish et al. 2018).

    To the same loss a batch B needs 1 + B / B_noise times the tokens that the smallest one needs.
    """
    if now.run is None or now.train is None or not now.run.steps:
        return None
    if now.run.steps[-1].step < max(NOISE_STEPS, 2 * now.train.warmup_steps):
        return None
    rows = rows_of_this_start(now.run)
    readings = [row.gradient_noise_scale_tokens for row in rows[len(rows) // 2 :]]
    scales = sorted(value for value in readings if value is not None)
    if len(scales) < NOISE_ROWS:
        return None
    noise, batch = statistics.median(scales), statistics.median(row.real_tokens for row in rows)
    low, high = scales[len(scales) // 4], scales[-1 - len(scales) // 4]
    if batch <= BEYOND_NOISE_RATIO * high:
        return None

    before = now.run.header.global_batch_rows
    fewer = max(now.run.header.world_size, round(before * noise / batch))
    smaller = batch * fewer / before

    def needed(scale: float) -> float:
        return (1 + smaller / scale) / (1 + batch / scale)

    change = Change(key="global_batch_rows", old=before, new=fewer)
    if now.train.global_batch_tokens is not None:
        change = Change(key="global_batch_tokens", old=now.train.global_batch_tokens, new=round(smaller))
    elif now.train.global_batch_samples is not None:
        samples = now.train.global_batch_samples
        change = Change(key="global_batch_samples", old=samples, new=max(1, round(samples * fewer / before)))
    return Advice(
        rule="beyond-noise-scale",
        severity="could",
        claim=f"a global batch of {batch:,.0f} tokens is {batch / noise:.1f} times the gradient noise scale: most of "
        "its tokens only average noise that was gone already",
        evidence=(
            Figure(name="global batch", value=batch, unit="tokens", n=len(rows), source=_run_name(now)),
            Figure(
                name="gradient noise scale", value=noise, unit="tokens", low=low, high=high, n=len(scales),
                source=_run_name(now),
            ),
        ),
        gain=Gain(
            of="tokens to the same loss", ratio=needed(noise), low=needed(low), high=needed(high), known="predicted"
        ),
        cost=f"a change of recipe: more and smaller steps, and the learning rate with the root of the batch (times "
        f"{math.sqrt(smaller / batch):.2f}); smaller steps leave less computing to hide the exchange behind",
        changes=(change,),
        would_change="the noise scale grows as the loss falls: later in training the same batch may be right",
    )  # fmt: skip


def _run_name(now: Situation) -> str:
    return f"run {now.run.directory.name}" if now.run is not None else "run"


def _at(now: Situation, rows: int) -> Interval | None:
    """Slot tokens/s of a micro-batch: as measured, or between its measured neighbours; None outside of them."""
    point = now.point(rows)
    if point is not None:
        return point.slot_rate
    assert now.probe is not None
    below = [point for point in now.probe.curve if point.rows < rows]
    above = [point for point in now.probe.curve if point.rows > rows]
    if not below or not above:
        return None
    one, other = max(below, key=lambda point: point.rows), min(above, key=lambda point: point.rows)
    part = (rows - one.rows) / (other.rows - one.rows)
    step_s = one.step_s + part * (other.step_s - one.step_s)
    tokens = one.slot_tokens_per_s * one.step_s / one.rows
    return Interval(value=tokens * rows / step_s)

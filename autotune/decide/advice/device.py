"""Advice on what a device waits for: launches, its memory, the update."""

from autotune.core.advice import Advice, Change, Figure, Gain
from autotune.core.bottleneck import Part
from autotune.decide.advice.gains import times, without
from autotune.decide.advice.situation import Situation, part_figure
from autotune.decide.bottleneck import MATTERS_SHARE

LAUNCHES_LEFT = (0.0, 0.25, 1.0)
"""Of the wait for launches that compiling layers leaves: none, usual, nothing gained."""
TRAFFIC_LEFT = (0.25, 0.5, 1.0)
"""Of the wait for memory."""
COMPILED_GAIN = (1.0, 1.1, 1.3)
"""What fusing brings beside fewer launches: less traffic to memory."""
LOG_INTERVAL_STEPS = 10


def host_bound(now: Situation) -> Advice | None:
    """A device that waits for the program."""
    gaps = now.loss("host", MATTERS_SHARE)
    if now.train is None or gaps is None or now.bottleneck is None:
        return None
    inside = "counters" in gaps.source
    figure = part_figure(gaps, "device without work" if inside else "between steps", now.bottleneck.steps)
    if inside and not now.train.compile_layers:
        return Advice(
            rule="host-bound",
            severity="could",
            claim=f"{gaps.share:.0%} of the step multiprocessors have no work: late launches, or small kernels",
            evidence=(figure,),
            gain=times(_compiled(gaps, LAUNCHES_LEFT), COMPILED_GAIN),
            cost="minutes at the start of every run, and other rounding; memory is to be probed again",
            changes=(Change(key="compile_layers", old=False, new=True),),
            would_change="larger micro-batches, which take longer than their launches",
        )
    if inside or now.train.log_interval_steps > 1 or _saves(now):
        return None
    return Advice(
        rule="host-bound",
        severity="could",
        claim=f"{gaps.share:.0%} of the time goes by between steps, with every step logged",
        evidence=(figure,),
        gain=without(gaps, left=1 / LOG_INTERVAL_STEPS, left_low=1 / LOG_INTERVAL_STEPS, left_high=1.0),
        cost="rows of the record are means over ten steps",
        changes=(Change(key="log_interval_steps", old=1, new=LOG_INTERVAL_STEPS),),
        would_change="saves that hold training up, which the run's events tell",
        safe=True,
    )


SAVES_SHARE = 0.05
"""Of all steps, from which on time between steps may well be that of saving."""


def _saves(now: Situation) -> bool:
    """Whether the run saved so often that this is what takes the time."""
    if now.run is None:
        return False
    saves = sum(event.kind in ("saved", "save_failed", "record_waits") for event in now.run.events)
    return saves > SAVES_SHARE * max(1, len(now.run.steps))


def _compiled(part: Part, left: tuple[float, float, float]) -> Gain:
    least, usual, most = left
    return without(part, left=usual, left_low=least, left_high=most)


def memory_bound(now: Situation) -> Advice | None:
    """Kernels that wait for the device's memory."""
    waits = now.loss("memory", MATTERS_SHARE)
    if now.train is None or waits is None or now.bottleneck is None or now.train.compile_layers:
        return None
    return Advice(
        rule="memory-bound",
        severity="could",
        claim=f"about {waits.share:.0%} of the step kernels wait for memory, and matrix units with them",
        evidence=(part_figure(waits, "kernels that wait for memory", now.bottleneck.steps),),
        gain=_compiled(waits, TRAFFIC_LEFT),
        cost="minutes at the start of every run, and other rounding; memory is to be probed again",
        changes=(Change(key="compile_layers", old=False, new=True),),
        would_change="products in 32 bits: bf16 halves the traffic, and comes first",
    )


def update_bound(now: Situation) -> Advice | None:
    """An optimizer that takes long beside a small step."""
    updating = now.loss("update", MATTERS_SHARE)
    if now.train is None or updating is None or now.bottleneck is None:
        return None
    ranks = now.run.header.world_size if now.run is not None else 1
    figure = part_figure(updating, "clipping and update", now.bottleneck.steps)
    if ranks > 1 and now.nodes == 1 and now.train.parallel.strategy == "ddp":
        return Advice(
            rule="update-bound",
            severity="could",
            claim=f"{updating.share:.0%} of the step updates weights, on every one of {ranks} ranks the same ones",
            evidence=(figure,),
            gain=without(updating, left=2 / ranks, left_low=1 / ranks, left_high=1.0),
            cost="what others updated travels once a step; each rank holds its share of the optimizer's state only",
            changes=(Change(key="parallel.strategy", old="ddp", new="zero1"),),
            command=now.command("network", "--profile", now.profile_path),
            would_change="a slow network, which costs more than it saves: measure both",
        )
    return Advice(
        rule="update-bound",
        severity="note",
        claim=f"{updating.share:.0%} of the step updates weights: steps are small for a model of this size",
        evidence=(figure,),
        gain=None,
        cost="a larger global batch has fewer updates, and is another recipe",
        would_change="a larger global batch",
    )


def foreach_optimizer(now: Situation) -> Advice | None:
    """An optimizer that makes a copy of all weights at its step, with little memory left."""
    foreign, budget = now.foreign, now.budget_bytes
    if foreign is None or foreign.optimizer != "foreach" or now.parameters is None or budget is None:
        return None
    copy_bytes = 4 * now.parameters
    peak = now.peak_bytes(now.train.micro_batch_rows) if now.train is not None else None
    if peak is None or peak + copy_bytes < 0.95 * budget:
        return None
    known = "measured" if now.fingerprint is None else now.fingerprint.bytes_known
    return Advice(
        rule="foreach-optimizer",
        severity="should",
        claim="the foreach optimizer of the other trainer makes a copy as large as the weights at every step, and the "
        "memory is nearly full",
        evidence=(
            Figure(name="copy", value=float(copy_bytes), unit="bytes", known="predicted", source="4 bytes a weight"),
            Figure(name="peak with a fused one", value=float(peak), unit="bytes", known=known, source="autotune probe"),
            Figure(name="budget", value=float(budget), unit="bytes", known="assumed", source="the profile"),
        ),
        gain=Gain(of="GPU memory", ratio=peak / (peak + copy_bytes), known="predicted"),
        cost="none: the same update in one kernel; in transformers it is optim=adamw_torch_fused",
        would_change="activations that are freed before the update and leave room for the copy",
    )

"""All rules, and the advice that they give: ranked by what it is expected to gain."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from autotune.core.advice import SEVERITIES, Advice, Figure
from autotune.core.bottleneck import Cause
from autotune.core.interval import SHOWN_CONFIDENCE
from autotune.decide.advice import batch, compute, condition, device, loader, network, rows, size
from autotune.decide.advice.situation import Situation

Recommendation = str
"""Of the paper: ``R1`` to ``R5``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One thing that may be wrong."""

    name: str
    looks: Callable[[Situation], Advice | None]
    covers: tuple[Recommendation | Cause, ...] = ()
    """What of the paper, and which bottlenecks."""

    @property
    def looks_for(self) -> str:
        """In one line."""
        return (self.looks.__doc__ or "").splitlines()[0]


RULES = (
    Rule(name="raw-data", looks=loader.raw_data, covers=("R1", "input")),
    Rule(name="staging", looks=loader.staging, covers=("R2", "input")),
    Rule(name="more-workers", looks=loader.more_workers, covers=("R3", "input")),
    Rule(name="starved-rank", looks=loader.starved_rank, covers=("input",)),
    Rule(name="fewer-workers", looks=loader.fewer_workers, covers=("R3",)),
    Rule(name="undecided-workers", looks=loader.undecided_workers, covers=("R3",)),
    Rule(name="beyond-memory", looks=batch.beyond_memory, covers=("R5",)),
    Rule(name="below-knee", looks=batch.below_knee, covers=("R5", "host")),
    Rule(name="beyond-knee", looks=batch.beyond_knee, covers=("R5",)),
    Rule(name="beyond-noise-scale", looks=batch.beyond_noise_scale),
    Rule(name="padding", looks=rows.padding, covers=("padding",)),
    Rule(name="empty-rows", looks=rows.empty_rows, covers=("padding",)),
    Rule(name="full-precision", looks=compute.full_precision, covers=("computation", "memory")),
    Rule(name="half-precision", looks=compute.half_precision),
    Rule(name="dense-head", looks=compute.dense_head, covers=("computation",)),
    Rule(name="whole-last-layer", looks=compute.whole_last_layer, covers=("computation",)),
    Rule(name="attention-dropout", looks=compute.attention_dropout, covers=("computation",)),
    Rule(name="host-bound", looks=device.host_bound, covers=("host",)),
    Rule(name="memory-bound", looks=device.memory_bound, covers=("memory",)),
    Rule(name="update-bound", looks=device.update_bound, covers=("update",)),
    Rule(name="foreach-optimizer", looks=device.foreach_optimizer),
    Rule(name="computing", looks=compute.computing, covers=("computation",)),
    Rule(name="too-big-for-ddp", looks=size.too_big, covers=("R5",)),
    Rule(name="exchange", looks=network.exchange, covers=("R4", "network")),
    Rule(name="network-bound", looks=network.network_bound, covers=("R4", "network")),
    Rule(name="too-many-nodes", looks=network.too_many_nodes, covers=("R4", "network")),
    Rule(name="below-t-min", looks=network.below_t_min, covers=("R4", "network")),
    Rule(name="slow-rank", looks=network.slow_rank, covers=("straggler",)),
    Rule(name="uneven-ranks", looks=network.uneven_ranks, covers=("straggler",)),
    Rule(name="slow-link", looks=network.slow_link, covers=("network",)),
    Rule(name="thermal", looks=condition.thermal),
    Rule(name="company", looks=condition.company),
    Rule(name="utilisation", looks=condition.utilisation),
    Rule(name="edited", looks=condition.edited),
    Rule(name="not-measured", looks=condition.not_measured),
)
NOTHING, TOO_LITTLE = "change-nothing", "too-little-known"


def advise(now: Situation) -> tuple[Advice, ...]:
    """What to do, the largest expected gain first; to change nothing where nothing was found that is worth it."""
    found = [advice for rule in RULES if (advice := rule.looks(now)) is not None]
    if not now.intact:  # what its figures are of is not what it says
        found = [replace(one, safe=False) for one in found]
    if all(one.severity == "note" for one in found):
        found.append(_change_nothing(now) if _is_known(now) else _too_little(now))
    return tuple(sorted(found, key=rank))


def rank(advice: Advice) -> tuple[bool, float, int]:
    """What makes a run fail comes first; then what ends it sooner; then the rest by how much it matters."""
    speedup = 1.0 if advice.gain is None else advice.gain.speedup
    return advice.severity != "must", -speedup, SEVERITIES.index(advice.severity)


def _is_known(now: Situation) -> bool:
    """Whether enough was looked at to say that nothing is to be done."""
    return now.bottleneck is not None and now.bottleneck.decided


def _too_little(now: Situation) -> Advice:
    return Advice(
        rule=TOO_LITTLE,
        severity="note",
        claim="too little is known to say what limits this training",
        evidence=(),
        gain=None,
        cost="minutes of this machine",
        command=now.command("workers", "--profile", now.profile_path) if now.run is None else None,
        would_change="a sweep of loader workers, or a longer run: both tell where a step's time goes",
    )


def _change_nothing(now: Situation) -> Advice:
    limit = now.bottleneck
    figures: tuple[Figure, ...] = ()
    if limit is not None and limit.parts:
        first = limit.parts[0]
        figures = (
            Figure(name=f"largest part of the step: {first.cause}", value=first.share, unit="share", low=first.low,
                   high=first.high, confidence=None if first.low is None else SHOWN_CONFIDENCE, n=limit.steps,
                   source=first.source),
        )  # fmt: skip
    return Advice(
        rule=NOTHING,
        severity="note",
        claim="change nothing: of all that was looked at, nothing is worth a change",
        evidence=figures,
        gain=None,
        cost="none",
        command=None if now.profile is None else now.command("launch", "local", "--profile", now.profile_path),
        would_change="another machine, model or dataset; or a figure that was not measured",
    )

"""All rules, the advice that they give, ranked by what it is expected to gain, and settings with it followed. Pure."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from autotune.core.advice import SEVERITIES, Advice, SettingChange
from autotune.decide.advice import batch, compute, condition, loader, network
from autotune.decide.advice.situation import Situation
from autotune.errors import BadInput
from trainer.config import TrainConfig, dotted
from trainer.errors import BadConfig
from trainer.schema import parse_table


@dataclass(frozen=True, slots=True, kw_only=True)
class AdviceRule:
    """One thing that may be wrong."""

    name: str
    looks: Callable[[Situation], Advice | None]
    covers: tuple[str, ...] = ()
    """Recommendations of the paper, ``R1`` to ``R5``, and bottlenecks."""

    @property
    def looks_for(self) -> str:
        """In one line."""
        return (self.looks.__doc__ or "").splitlines()[0]


RULES = (
    AdviceRule(name="raw-data", looks=loader.raw_data, covers=("R1", "input")),
    AdviceRule(name="staging", looks=loader.staging, covers=("R2", "input")),
    AdviceRule(name="more-workers", looks=loader.more_workers, covers=("R3", "input")),
    AdviceRule(name="starved-rank", looks=loader.starved_rank, covers=("input",)),
    AdviceRule(name="fewer-workers", looks=loader.fewer_workers, covers=("R3",)),
    AdviceRule(name="undecided-workers", looks=loader.undecided_workers, covers=("R3",)),
    AdviceRule(name="beyond-memory", looks=batch.beyond_memory, covers=("R5",)),
    AdviceRule(name="below-knee", looks=batch.below_knee, covers=("R5", "host")),
    AdviceRule(name="beyond-knee", looks=batch.beyond_knee, covers=("R5",)),
    AdviceRule(name="beyond-noise-scale", looks=batch.beyond_noise_scale),
    AdviceRule(name="padding", looks=batch.padding, covers=("padding",)),
    AdviceRule(name="empty-rows", looks=batch.empty_rows, covers=("padding",)),
    AdviceRule(name="full-precision", looks=compute.full_precision, covers=("computation", "memory")),
    AdviceRule(name="half-precision", looks=compute.half_precision),
    AdviceRule(name="dense-head", looks=compute.dense_head, covers=("computation",)),
    AdviceRule(name="whole-last-layer", looks=compute.whole_last_layer, covers=("computation",)),
    AdviceRule(name="attention-dropout", looks=compute.attention_dropout, covers=("computation",)),
    AdviceRule(name="host-bound", looks=compute.host_bound, covers=("host",)),
    AdviceRule(name="memory-bound", looks=compute.memory_bound, covers=("memory",)),
    AdviceRule(name="update-bound", looks=compute.update_bound, covers=("update",)),
    AdviceRule(name="foreach-optimizer", looks=compute.foreach_optimizer),
    AdviceRule(name="computing", looks=compute.computing, covers=("computation",)),
    AdviceRule(name="too-big-for-ddp", looks=batch.too_big, covers=("R5",)),
    AdviceRule(name="exchange", looks=network.exchange, covers=("R4", "network")),
    AdviceRule(name="network-bound", looks=network.network_bound, covers=("R4", "network")),
    AdviceRule(name="too-many-nodes", looks=network.too_many_nodes, covers=("R4", "network")),
    AdviceRule(name="below-t-min", looks=network.below_t_min, covers=("R4", "network")),
    AdviceRule(name="slow-rank", looks=network.slow_rank, covers=("straggler",)),
    AdviceRule(name="uneven-ranks", looks=network.uneven_ranks, covers=("straggler",)),
    AdviceRule(name="slow-link", looks=network.slow_link, covers=("network",)),
    AdviceRule(name="thermal", looks=condition.thermal),
    AdviceRule(name="company", looks=condition.company),
    AdviceRule(name="utilisation", looks=condition.utilisation),
    AdviceRule(name="edited", looks=condition.edited),
    AdviceRule(name="not-measured", looks=condition.not_measured),
)
NOTHING, TOO_LITTLE = "change-nothing", "too-little-known"


def advise(now: Situation) -> tuple[Advice, ...]:
    """What to do, the largest expected gain first; to change nothing where nothing was found that is worth it."""
    found = [replace(advice, rule=rule.name) for rule in RULES if (advice := rule.looks(now)) is not None]
    if not now.intact:  # what its figures are of is not what it says
        found = [replace(one, safe=False) for one in found]
    if all(one.severity == "note" for one in found):
        is_known = now.bottleneck is not None and now.bottleneck.decided
        found.append(_change_nothing(now) if is_known else _too_little(now))
    return tuple(sorted(found, key=rank))


def rank(advice: Advice) -> tuple[bool, float, int]:
    """What makes a run fail comes first; then what ends it sooner; then the rest by how much it matters."""
    speedup = 1.0 if advice.gain is None else advice.gain.speedup
    return advice.severity != "must", -speedup, SEVERITIES.index(advice.severity)


def _too_little(now: Situation) -> Advice:
    return Advice(
        rule=TOO_LITTLE,
        severity="note",
        claim="too little is known to say what limits this training",
        cost="minutes of this machine",
        command=now.command("workers") if now.run is None else None,
        would_change="a sweep of loader workers, or a longer run: both tell where a step's time goes",
    )


def _change_nothing(now: Situation) -> Advice:
    first = None if now.bottleneck is None else next(iter(now.bottleneck.parts), None)
    return Advice(
        rule=NOTHING,
        severity="note",
        claim="change nothing: of all that was looked at, nothing is worth a change",
        evidence=() if first is None else (now.part_figure(first, f"largest part of the step: {first.cause}"),),
        cost="none",
        command=None if now.profile is None else now.command("launch local"),
        would_change="another machine, model or dataset; or a figure that was not measured",
    )


def safe_changes(train: TrainConfig, advice: Iterable[Advice]) -> tuple[SettingChange, ...]:
    """Return what may be written without a second thought, from these settings; of two wishes the first counts."""
    settings = dotted(train.model_dump(mode="json"))
    wishes = [change for one in advice if one.safe for change in one.changes]
    found = {change.key: replace(change, old=settings[change.key]) for change in reversed(wishes)}
    return tuple(change for change in reversed(found.values()) if change.old != change.new)


def with_changes(train: TrainConfig, changes: Sequence[SettingChange]) -> TrainConfig:
    """The settings with these changes.

    Raises:
        BadInput: If they are no settings any more.
    """
    tables = train.model_dump(mode="json")
    for change in changes:
        *path, last = change.key.split(".")
        table = tables
        for name in path:
            table = table[name]
        table[last] = change.new
    try:
        return parse_table(TrainConfig, tables, where="advice")
    except BadConfig as error:
        raise BadInput(error.message, next_step=error.next_step) from error

"""From what is known of a model, its data and its machines to what a training takes. Pure arithmetic on figures."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from autotune.core.plan import CheckpointPlan, Figure, Fleet, Goal, MemoryPlan, Plan
from autotune.core.units import format_amount, format_share
from autotune.decide import compute_optimal
from autotune.decide.checkpoints import checkpoints_of
from autotune.decide.figures import computed, given, over, times
from autotune.decide.scaling import USEFUL_EFFICIENCY
from autotune.decide.spread import Spread
from autotune.errors import BadInput
from trainer.config import CheckpointSettings

SECONDS_PER_HOUR = 3600.0
WATT_SECONDS_PER_KWH = 3.6e6
MOST_PASSES = 40
MOST_REMEDIES = 3
_USEFUL = f"{100 * USEFUL_EFFICIENCY:.0f} %"
LEFT_OUT = ("queues, starts, restarts, compiling, validation, saving, nodes that fail",)
_NO_GPU_LEFT_OUT = "energy, as no CPU's power was measured"
_GPU_LEFT_OUT = "energy of hosts, network and cooling (PUE)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """All that a plan is computed from. What nothing tells is None."""

    model: str
    goal: Goal
    fleet: Fleet
    parameters: Figure | None
    flops_per_token: Figure | None
    """As the mathematics asks for."""
    tokens_per_row: Figure
    """Real ones, in the mean."""
    tokens_per_pass: Figure | None
    """Real ones of one pass over the dataset."""
    batch_rows: int
    """Of a step over all ranks."""
    rate: Figure | None
    """Real tokens/s of one rank on one node."""
    rate_missing: str = ""
    """Why there is none, and what to do."""
    spread: Spread | None
    checkpoint: CheckpointSettings
    power_w: Figure | None
    price_per_device_hour: float | None
    memory: MemoryPlan | None
    memory_missing: str | None = None
    warnings: tuple[str, ...] = ()
    """Found on the way."""
    next_command: str


def plan_of(known: Inputs) -> Plan:
    """Everything that follows.

    Raises:
        BadInput: If what was asked for cannot be turned into tokens: passes over a dataset that is not here, hours at
            a rate that nobody knows, operations of a model whose size nobody knows.
    """
    total = known.spread.tokens_per_s if known.spread is not None else None
    per_row = known.tokens_per_row
    told = f"{known.batch_rows:,} rows of {per_row.value:,.4g} real tokens ({per_row.source})"
    batch = computed(per_row, known.batch_rows, told)
    tokens = _tokens(known, batch, total)
    steps = _steps(known, tokens, batch)
    wall = _wall(known, tokens, total)
    fleet = known.fleet
    device_hours = None if wall is None else _device_hours(wall, fleet)
    price, power = known.price_per_device_hour, known.power_w
    cost = energy = None
    if device_hours is not None and price is not None:
        cost = times(device_hours, given(price, "the price"), "at the price that you gave")
    if device_hours is not None and power is not None:
        energy = computed(times(device_hours, power, power.source), 1e-3, power.source)
    by_6n = None
    if known.parameters is not None:
        by_6n = computed(times(known.parameters, tokens, ""), compute_optimal.FLOPS_PER_PARAMETER_AND_TOKEN, "6·N·D")
    counted = None
    if known.flops_per_token is not None:
        counted = times(known.flops_per_token, tokens, "layers, attention within documents, head at predicted tokens")
    plan = Plan(
        model=known.model,
        fleet=fleet,
        goal=known.goal,
        parameters=known.parameters,
        tokens=tokens,
        batch_tokens=batch,
        micro_batches=1 if known.spread is None else known.spread.micro_batches,
        steps=steps,
        passes=_passes(known, tokens),
        rank_tokens_per_s=known.rate,
        efficiency=None if known.spread is None else known.spread.efficiency,
        tokens_per_s=total,
        wall_s=wall,
        device_hours=device_hours,
        price_per_device_hour=price,
        cost=cost,
        power_w=power,
        energy_kwh=energy,
        flops_counted=counted,
        flops_6n=by_6n,
        optimal=None if by_6n is None else compute_optimal.optimal_for(by_6n.value),
        checkpoints=_checkpoints(known, steps),
        memory=known.memory,
        memory_missing=known.memory_missing,
        warnings=(),
        left_out=(*LEFT_OUT, _GPU_LEFT_OUT if fleet.device == "cuda" else _NO_GPU_LEFT_OUT),
        next_command=known.next_command,
    )
    return replace(plan, warnings=(*known.warnings, *_warnings(plan, known.spread)))


def _tokens(known: Inputs, batch: Figure, total: Figure | None) -> Figure:
    goal = known.goal
    amount = given(goal.amount, goal.source)
    if goal.kind == "tokens":
        return amount
    if goal.kind == "steps":
        return times(amount, batch, f"{goal.source}, of such batches")
    if goal.kind == "epochs":
        if known.tokens_per_pass is None:
            raise BadInput(
                f"{goal.source}: how many tokens a pass has, only the dataset says, and none is here",
                next_step="Name it: --data DIR; or say how many tokens: --tokens 45.2B",
            )
        return times(amount, known.tokens_per_pass, f"{goal.source} of the dataset")
    if goal.kind == "flops":
        if known.parameters is None:
            raise BadInput(
                f"{goal.source}: how many parameters {known.model} has is not known ({known.memory_missing})",
                next_step="Say how many tokens instead: --tokens 10B",
            )
        per_token = computed(known.parameters, compute_optimal.FLOPS_PER_PARAMETER_AND_TOKEN, "6·N")
        return over(amount, per_token, f"{goal.source}, by 6·N·D")
    if total is None:
        raise BadInput(
            f"{goal.source}: {known.rate_missing}", next_step="Say the rate: --tokens-per-s 100k, of one GPU"
        )
    return times(total, given(SECONDS_PER_HOUR * goal.amount, goal.source), f"{goal.source} at that rate")


def _passes(known: Inputs, tokens: Figure) -> Figure | None:
    if known.goal.kind == "epochs":
        return given(known.goal.amount, known.goal.source)
    return None if known.tokens_per_pass is None else over(tokens, known.tokens_per_pass, "tokens of the dataset")


def _steps(known: Inputs, tokens: Figure, batch: Figure) -> Figure:
    if known.goal.kind == "steps":
        return given(known.goal.amount, known.goal.source)
    found = over(tokens, batch, f"{format_amount(batch.value)} real tokens a step")
    low, high = (None if end is None else _whole(end) for end in (found.low, found.high))
    return replace(found, value=_whole(found.value), low=low, high=high)


def _whole(steps: float) -> float:
    return float(max(1, math.ceil(steps)))


def _wall(known: Inputs, tokens: Figure, total: Figure | None) -> Figure | None:
    if known.goal.kind == "hours":
        return given(SECONDS_PER_HOUR * known.goal.amount, known.goal.source)
    return None if total is None else over(tokens, total, "tokens by the rate of all ranks")


def _device_hours(wall: Figure, fleet: Fleet) -> Figure:
    per_rank = fleet.cpus_per_rank or 1.0
    kind = "GPUs" if fleet.device == "cuda" else "CPUs"
    return computed(wall, fleet.ranks * per_rank / SECONDS_PER_HOUR, f"wall time of {fleet.ranks * per_rank:g} {kind}")


def _checkpoints(known: Inputs, steps: Figure) -> CheckpointPlan | None:
    if known.parameters is None:
        return None
    return checkpoints_of(known.parameters, known.checkpoint, steps.high or steps.value)


def _warnings(plan: Plan, spread: Spread | None) -> Iterator[str]:
    if spread is not None and plan.efficiency is not None and plan.efficiency.value < USEFUL_EFFICIENCY:
        yield _inefficient(plan, spread, plan.efficiency)
    if plan.memory is not None and plan.memory.rows and plan.memory.rows[0].fits is False:
        yield _does_not_fit(plan.memory)
    if plan.passes is not None and plan.passes.value > MOST_PASSES:
        yield (
            f"{plan.passes.value:,.0f} passes over the data: of decoder models hardly anything is gained by the "
            f"{MOST_PASSES}th (Muennighoff et al. 2023, arXiv 2305.16264); BERT, which masks anew, took about "
            f"{MOST_PASSES} (Devlin et al. 2018). More data, or a validation loss that still falls, decides."
        )
    if plan.optimal is not None and plan.parameters is not None:
        ratio = compute_optimal.off_optimum(plan.parameters.value, plan.tokens.value)
        if compute_optimal.is_far(ratio):
            yield _far_from_optimal(ratio)


def _inefficient(plan: Plan, spread: Spread, efficiency: Figure) -> str:
    nodes = plan.fleet.nodes
    parts = [
        f"{nodes} nodes are {format_share(efficiency.value)} efficient ({efficiency.basis}), below "
        f"{_USEFUL}; at this batch {_nodes_are(spread.useful_nodes or 1)} useful."
    ]
    if spread.remedies:
        told = "; ".join(f"{one.change}: {format_share(one.efficiency)}" for one in spread.remedies[:MOST_REMEDIES])
        parts.append(f"Instead, {told} (predicted).")
    if spread.enough_times is not None:
        tokens = format_amount(spread.enough_times * plan.batch_tokens.value)
        parts.append(f"About {tokens} tokens a step would be enough, which changes the recipe.")
    return " ".join(parts)


def _nodes_are(count: int) -> str:
    return "one node is" if count == 1 else f"{count} nodes are"


def _does_not_fit(memory: MemoryPlan) -> str:
    rows = f"a micro-batch of {memory.micro_batch_rows} row{'s' if memory.micro_batch_rows > 1 else ''}"
    fitting = [row.name for row in memory.rows if row.fits and row.trains_here]
    other = [row.name for row in memory.rows if row.fits and not row.trains_here]
    if fitting:
        return f"The model does not fit one GPU with {rows} (predicted); it does with {' or '.join(fitting)}."
    if other:
        return (
            f"The model does not fit one GPU with {rows} (predicted); by formula it would with {' or '.join(other)}, "
            "which this trainer does not do."
        )
    return f"The model does not fit with {rows} in any of these ways (predicted): take more or larger GPUs."


def _far_from_optimal(ratio: float) -> str:
    more = ratio > 1
    off = format_amount(float(f"{ratio if more else 1 / ratio:.3g}"))
    means = (
        "for that compute a larger model on fewer tokens would reach a lower loss; a small one is cheaper to use"
        if more
        else "for that compute a smaller model on more tokens would reach a lower loss"
    )
    return (
        f"{off} times {'more' if more else 'fewer'} tokens than are compute-optimal for this size, by "
        f"{compute_optimal.AUTHORS}: {means}."
    )

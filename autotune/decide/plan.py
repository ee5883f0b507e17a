"""From what is known of a model, its data and its machines to what a training takes. Pure arithmetic on figures."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from autotune.core.plan import Figure, Fleet, Goal, derived
from autotune.core.units import format_amount, format_share
from autotune.decide.compute_optimal import (
    AUTHORS,
    FLOPS_PER_PARAMETER_AND_TOKEN,
    Optimal,
    is_far,
    off_optimum,
    optimal_for,
)
from autotune.decide.scaling import USEFUL_EFFICIENCY
from autotune.decide.sharding import Share
from autotune.decide.spread import Spread
from autotune.errors import BadInput
from trainer.config import CheckpointSettings

SECONDS_PER_HOUR = 3600.0
MOST_PASSES = 40
CHECKPOINT_BYTES_PER_PARAMETER = 12
"""The weight and both of AdamW's averages, in 32 bits whatever the precision. Left out: headers, manifests and the
optimizer's step counts, some KiB; the tokenizer; logs."""
EXPORTED_BYTES_PER_PARAMETER = 4
"""The model that a finished run leaves beside its checkpoints."""
LEFT_OUT = ("queues, starts, restarts, compiling, validation, saving, nodes that fail",)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Memory of one rank."""

    shares: tuple[Share, ...]
    """One for each way of sharing the model."""
    micro_batch_rows: int
    """Of a rank, for which the figures are."""
    most_rows: int
    """That fit with the headroom left; 0 if not one does without sharing."""
    source: str
    """Where the prediction comes from, in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodesRow:
    """The same training on another number of nodes."""

    nodes: int
    efficiency: float
    """Against as many times one node."""
    tokens_per_s: float
    wall_s: float
    device_hours: float
    cost: float | None


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a training takes. A figure that nothing tells is None."""

    model: str
    fleet: Fleet
    goal: Goal
    parameters: Figure | None
    """Of the model, shared ones once."""
    tokens: Figure
    """Real ones, special tokens included."""
    batch_tokens: Figure
    """Real tokens of a step over all ranks."""
    micro_batches: int
    """Of a step on each rank."""
    steps: Figure
    """Of the optimizer."""
    passes: Figure | None
    """Over the dataset."""
    rank_tokens_per_s: Figure | None
    """Real tokens/s of one rank, on one node."""
    efficiency: Figure | None
    """Of all nodes, against as many times one; None on one."""
    tokens_per_s: Figure | None
    """Real ones, of all ranks."""
    wall_s: Figure | None
    """Of all training steps."""
    device_hours: Figure | None
    """GPU-hours; on a CPU, CPU-hours."""
    price_per_device_hour: float | None
    """The user's."""
    cost: Figure | None
    """In the currency of the price."""
    power_w: Figure | None
    """Of one GPU."""
    energy_kwh: Figure | None
    """Of the GPUs alone."""
    flops_counted: Figure | None
    """What the mathematics of the real tokens asks for, as for MFU."""
    flops_6n: Figure | None
    """Six operations for each parameter and token."""
    optimal: Optimal | None
    """Model and tokens of the lowest loss for ``flops_6n``."""
    checkpoint_bytes: Figure | None
    """Of one checkpoint, of all ranks' files together."""
    disk_bytes: Figure | None
    """At most at once: checkpoints that are kept, the one being written, the one a rollback would take, the export."""
    by_nodes: tuple[NodesRow, ...]
    """The same tokens on fewer nodes, and on those that are meant; empty on one."""
    memory: MemoryPlan | None
    memory_missing: str | None
    """Why there is none."""
    warnings: tuple[str, ...]
    left_out: tuple[str, ...]
    next_command: str


def plan_of(known: Inputs) -> Plan:
    """Return everything that follows.

    Raises:
        BadInput: If what was asked for cannot be turned into tokens: passes over a dataset that is not here, hours at
            a rate that nobody knows, operations of a model whose size nobody knows.
    """
    total = None if known.spread is None else known.spread.tokens_per_s
    per_row, goal, fleet = known.tokens_per_row, known.goal, known.fleet
    batch = derived(
        lambda tokens: tokens * known.batch_rows,
        per_row,
        source=f"{known.batch_rows:,} rows of {per_row.value:,.4g} real tokens ({per_row.source})",
    )
    tokens = _tokens(known, batch, total)
    asked = Figure(value=goal.amount, basis="given", source=goal.source)
    wall = device_hours = cost = energy = None
    if goal.kind == "hours":
        wall = derived(lambda hours: hours * SECONDS_PER_HOUR, asked, source=goal.source)
    elif total is not None:
        wall = derived(lambda all_, rate: all_ / rate, tokens, total, source="tokens by the rate of all ranks")
    devices = fleet.ranks * (fleet.cpus_per_rank or 1.0)
    price, power = known.price_per_device_hour, known.power_w
    if wall is not None:
        kind = "GPUs" if fleet.device == "cuda" else "CPUs"
        told = f"wall time of {devices:g} {kind}"
        device_hours = derived(lambda seconds: seconds * devices / SECONDS_PER_HOUR, wall, source=told)
    if device_hours is not None and price is not None:
        cost = derived(lambda hours: hours * price, device_hours, source="at the price that you gave")
    if device_hours is not None and power is not None:
        energy = derived(lambda hours, watt: hours * watt / 1000, device_hours, power, source=power.source)
    size, by_6n, counted = known.parameters, None, None
    if size is not None:
        by_6n = derived(lambda n, d: FLOPS_PER_PARAMETER_AND_TOKEN * n * d, size, tokens, source="6·N·D")
    if known.flops_per_token is not None:
        told = "layers, attention within documents, head at predicted tokens"
        counted = derived(lambda one, d: one * d, known.flops_per_token, tokens, source=told)
    passes = None
    if goal.kind == "epochs":
        passes = asked
    elif known.tokens_per_pass is not None:
        passes = derived(lambda all_, one: all_ / one, tokens, known.tokens_per_pass, source="tokens of the dataset")
    steps = asked
    if goal.kind != "steps":
        told = f"{format_amount(batch.value)} real tokens a step"
        steps = derived(lambda all_, one: max(1.0, math.ceil(all_ / one)), tokens, batch, source=told)
    on_disk = disk_of(size, known.checkpoint, steps.value) if size is not None else (None, None)
    energy_left_out = "energy of hosts, network and cooling (PUE)"
    plan = Plan(
        model=known.model,
        fleet=fleet,
        goal=goal,
        parameters=size,
        tokens=tokens,
        batch_tokens=batch,
        micro_batches=1 if known.spread is None else known.spread.micro_batches,
        steps=steps,
        passes=passes,
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
        optimal=None if by_6n is None else optimal_for(by_6n.value),
        checkpoint_bytes=on_disk[0],
        disk_bytes=on_disk[1],
        by_nodes=tuple(_by_nodes(known, tokens.value)),
        memory=known.memory,
        memory_missing=known.memory_missing,
        warnings=(),
        left_out=(
            *LEFT_OUT,
            energy_left_out if fleet.device == "cuda" else "energy, as no CPU's power was measured",
        ),
        next_command=known.next_command,
    )
    return replace(plan, warnings=(*known.warnings, *_warnings(plan, known.spread)))


def _tokens(known: Inputs, batch: Figure, total: Figure | None) -> Figure:
    goal, size = known.goal, known.parameters
    amount = Figure(value=goal.amount, basis="given", source=goal.source)
    if goal.kind == "tokens":
        return amount
    if goal.kind == "steps":
        return derived(lambda steps, one: steps * one, amount, batch, source=f"{goal.source}, of such batches")
    if goal.kind == "epochs":
        if known.tokens_per_pass is None:
            raise BadInput(
                f"{goal.source}: how many tokens a pass has, only the dataset says, and none is here",
                next_step="Name it: --data DIR; or say how many tokens: --tokens 45.2B",
            )
        told = f"{goal.source} of the dataset"
        return derived(lambda passes, one: passes * one, amount, known.tokens_per_pass, source=told)
    if goal.kind == "flops":
        if size is None:
            raise BadInput(
                f"{goal.source}: how many parameters {known.model} has is not known ({known.memory_missing})",
                next_step="Say how many tokens instead: --tokens 10B",
            )
        told = f"{goal.source}, by 6·N·D"
        return derived(lambda flops, n: flops / FLOPS_PER_PARAMETER_AND_TOKEN / n, amount, size, source=told)
    if total is None:
        raise BadInput(
            f"{goal.source}: {known.rate_missing}", next_step="Say the rate: --tokens-per-s 100k, of one GPU"
        )
    told = f"{goal.source} at that rate"
    return derived(lambda rate, hours: rate * hours * SECONDS_PER_HOUR, total, amount, source=told)


def disk_of(parameters: Figure, settings: CheckpointSettings, steps: float) -> tuple[Figure, Figure]:
    """Return the bytes of one checkpoint, and of all that lie on the disk at once."""
    each = CHECKPOINT_BYTES_PER_PARAMETER
    told = f"{each} bytes for each parameter: weights and two averages of AdamW, 32 bits"
    one = derived(lambda count: count * each, parameters, source=told)
    at_once = 0
    if settings.enabled:
        # Before the oldest goes, the new one is written; and the newest good one stays however old it is.
        at_once = settings.keep_last + 2
        if settings.keep_every_steps is not None:
            at_once += int(steps // settings.keep_every_steps)
    told = f"at most {at_once} checkpoints at once (keep_last = {settings.keep_last}) and the exported model"
    per_parameter = at_once * each + EXPORTED_BYTES_PER_PARAMETER
    return one, derived(lambda count: count * per_parameter, parameters, source=told)


def _by_nodes(known: Inputs, tokens: float) -> Iterator[NodesRow]:
    if known.spread is None or known.rate is None:
        return
    fleet, price = known.fleet, known.price_per_device_hour
    for nodes, efficiency in known.spread.by_nodes.items():
        ranks = nodes * fleet.ranks_per_node
        rate = known.rate.value * ranks * efficiency
        hours = tokens / rate * ranks * (fleet.cpus_per_rank or 1.0) / SECONDS_PER_HOUR
        yield NodesRow(
            nodes=nodes,
            efficiency=efficiency,
            tokens_per_s=rate,
            wall_s=tokens / rate,
            device_hours=hours,
            cost=None if price is None else price * hours,
        )


def _warnings(plan: Plan, spread: Spread | None) -> Iterator[str]:
    efficiency = plan.efficiency
    if spread is not None and efficiency is not None and efficiency.value < USEFUL_EFFICIENCY:
        useful = spread.useful_nodes or 1
        are = "one node is" if useful == 1 else f"{useful} nodes are"
        yield (
            f"{plan.fleet.nodes} nodes are {format_share(efficiency.value)} efficient ({efficiency.basis}), below "
            f"{100 * USEFUL_EFFICIENCY:.0f} %; at this batch {are} useful. What would help: autotune scale."
        )
    if plan.memory is not None and plan.memory.shares and plan.memory.shares[0].fits is False:
        yield _does_not_fit(plan.memory)
    if plan.passes is not None and plan.passes.value > MOST_PASSES:
        yield (
            f"{plan.passes.value:,.0f} passes over the data: of decoder models hardly anything is gained by the "
            f"{MOST_PASSES}th (Muennighoff et al. 2023, arXiv 2305.16264); BERT, which masks anew, took about "
            f"{MOST_PASSES} (Devlin et al. 2018). More data, or a validation loss that still falls, decides."
        )
    if plan.optimal is not None and plan.parameters is not None:
        ratio = off_optimum(plan.parameters.value, plan.tokens.value)
        if is_far(ratio):
            yield _far_from_optimal(ratio)


def _does_not_fit(memory: MemoryPlan) -> str:
    rows = f"a micro-batch of {memory.micro_batch_rows} row{'s' if memory.micro_batch_rows > 1 else ''}"
    fitting = [one.name for one in memory.shares if one.fits and one.trains_here]
    other = [one.name for one in memory.shares if one.fits and not one.trains_here]
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
        f"{AUTHORS}: {means}."
    )

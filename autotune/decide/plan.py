"""From what is known of a model, its data and its machines to what a training takes. Pure arithmetic on figures.

The size of a model and the tokens that give the lowest loss for an amount of compute are those of Hoffmann et al. 2022
(arXiv 2203.15556). Training takes about C = 6·N·D operations for N parameters and D tokens (Kaplan et al. 2020). The
first of their three ways finds that N and D should both grow with the square root of C; their model of 70 B parameters
on 1.4 T tokens has D = 20·N. Together: N = √(C/120), D = 20·N. The other two ways find N to grow with C to the 0.49
and the 0.46. ``docs/plan.md`` says for which models it was fitted.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace

from autotune.core.plan import Fleet, Goal, PlanFigure, derived
from autotune.core.units import format_amount, format_share
from autotune.decide.scaling import USEFUL_EFFICIENCY, AllRanks
from autotune.decide.sharding import Share, StateBytes
from autotune.errors import BadInput
from trainer.config import CheckpointSettings

FLOPS_PER_PARAMETER_AND_TOKEN = 6
TOKENS_PER_PARAMETER = 20
FAR_RATIO = 4.0
"""Tokens per parameter so many times above or below are far: there even the exponents of the three ways part."""
FITTED_PARAMETERS = (70e6, 16e9)
AUTHORS = "Hoffmann et al. 2022"
OPTIMUM_SOURCE = f"{AUTHORS}, arXiv 2203.15556: C = 6·N·D, D = 20·N"
OPTIMUM_LIMITS = "fitted on decoder models, under one pass"

SECONDS_PER_HOUR = 3600.0
MOST_PASSES = 40
CHECKPOINT_BYTES_PER_PARAMETER = 12
"""The weight and both of AdamW's averages, in 32 bits whatever the precision. Left out: headers, manifests and the
optimizer's step counts, some KiB; the tokenizer; logs."""
EXPORTED_BYTES_PER_PARAMETER = 4
"""The model that a finished run leaves beside its checkpoints."""
LEFT_OUT = "queues, starts, restarts, compiling, validation, saving, nodes that fail"


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimal:
    """The size of a model and the tokens that go with an amount of compute."""

    parameters: float
    tokens: float

    @property
    def was_fitted(self) -> bool:
        """Whether models of that size were among those that were fitted."""
        return FITTED_PARAMETERS[0] <= self.parameters <= FITTED_PARAMETERS[1]


def optimal_for(flops: float) -> Optimal:
    """Return the model and the tokens for so many operations, a positive number."""
    parameters = math.sqrt(flops / (FLOPS_PER_PARAMETER_AND_TOKEN * TOKENS_PER_PARAMETER))
    return Optimal(parameters=parameters, tokens=TOKENS_PER_PARAMETER * parameters)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """What is known of a model's memory."""

    parameters: PlanFigure
    state: StateBytes
    """Of a rank alone, with that micro-batch."""
    largest_bytes: int
    """The largest unit that FSDP gathers."""
    micro_batch_rows: int
    """Of a rank, for which the figures are."""
    most_rows: int
    """That fit a rank alone with the headroom left; 0 if not one does."""
    source: str
    """Where the prediction comes from, in words."""
    shares: tuple[Share, ...] = ()
    """One for each way of sharing the model."""


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
class PlanInputs(AllRanks):
    """All that a plan is computed from. What nothing tells is None."""

    model: str
    goal: Goal
    fleet: Fleet
    parameters: PlanFigure | None
    """Of the model, shared ones once."""
    flops_per_token: PlanFigure | None
    """As the mathematics asks for."""
    tokens_per_row: PlanFigure
    """Real ones, on average."""
    tokens_per_pass: PlanFigure | None
    """Real ones of one pass over the dataset."""
    batch_rows: int
    """Of a step over all ranks."""
    rank_tokens_per_s: PlanFigure | None
    """Real tokens/s of one rank, on one node."""
    rate_missing: str = ""
    """Why there is none, and what to do."""
    checkpoint: CheckpointSettings
    power_w: PlanFigure | None
    """Of one GPU."""
    price_per_device_hour: float | None
    """The user's."""
    memory: MemoryPlan | None
    memory_missing: str | None = None
    """Why there is none."""
    warnings: tuple[str, ...] = ()
    next_command: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(PlanInputs):
    """What a training takes. A figure that nothing tells is None."""

    tokens: PlanFigure
    """Real ones, special tokens included."""
    batch_tokens: PlanFigure
    """Real tokens of a step over all ranks."""
    steps: PlanFigure
    """Of the optimizer."""
    passes: PlanFigure | None
    """Over the dataset."""
    wall_s: PlanFigure | None
    """Of all training steps."""
    device_hours: PlanFigure | None
    """GPU-hours; on a CPU, CPU-hours."""
    cost: PlanFigure | None
    """In the currency of the price."""
    energy_kwh: PlanFigure | None
    """Of the GPUs alone."""
    flops_counted: PlanFigure | None
    """What the mathematics of the real tokens asks for, as for MFU."""
    flops_6n: PlanFigure | None
    """Six operations for each parameter and token."""
    optimal: Optimal | None
    """Model and tokens of the lowest loss for ``flops_6n``."""
    checkpoint_bytes: PlanFigure | None
    """Of one checkpoint, of all ranks' files together."""
    disk_bytes: PlanFigure | None
    """At most at once: checkpoints that are kept, the one being written, the one a rollback would take, the export."""
    by_nodes: tuple[NodesRow, ...]
    """The same tokens on fewer nodes, and on those that are meant; empty on one."""
    left_out: tuple[str, ...]


def plan_of(known: PlanInputs) -> Plan:
    """Return everything that follows.

    Raises:
        BadInput: If what was asked for cannot be turned into tokens: passes over a dataset that is not here, hours at
            a rate that nobody knows, operations of a model whose size nobody knows.
    """
    goal, fleet, size, per_row, rows = known.goal, known.fleet, known.parameters, known.tokens_per_row, known.batch_rows
    told = f"{rows:,} rows of {per_row.value:,.4g} real tokens ({per_row.source})"
    batch = derived(lambda tokens: tokens * rows, per_row, source=told)
    asked = PlanFigure(value=goal.amount, basis="given", source=goal.source)
    tokens = _tokens(known, asked, batch)
    told = f"{format_amount(batch.value)} real tokens a step"
    steps = asked
    if goal.kind != "steps":
        steps = derived(lambda all_, one: max(1.0, math.ceil(all_ / one)), tokens, batch, source=told)
    passes = _if_known(lambda all_, one: all_ / one, tokens, known.tokens_per_pass, source="tokens of the dataset")
    if goal.kind == "epochs":
        passes = asked
    wall = _if_known(
        lambda all_, rate: all_ / rate, tokens, known.tokens_per_s, source="tokens by the rate of all ranks"
    )
    if goal.kind == "hours":
        wall = derived(lambda hours: hours * SECONDS_PER_HOUR, asked, source=goal.source)
    price, power, on_gpus = known.price_per_device_hour, known.power_w, fleet.device == "cuda"
    devices = fleet.ranks * (fleet.cpus_per_rank or 1.0)
    told = f"wall time of {devices:g} {'GPUs' if on_gpus else 'CPUs'}"
    device_hours = _if_known(lambda seconds: seconds * devices / SECONDS_PER_HOUR, wall, source=told)
    cost = None
    if price is not None:
        cost = _if_known(lambda hours: hours * price, device_hours, source="at the price that you gave")
    energy = _if_known(
        lambda hours, watt: hours * watt / 1000, device_hours, power, source="" if power is None else power.source
    )
    told = "layers, attention within documents, head at predicted tokens"
    by_6n = _if_known(lambda n, d: FLOPS_PER_PARAMETER_AND_TOKEN * n * d, size, tokens, source="6·N·D")
    on_disk = disk_of(size, known.checkpoint, steps.value) if size is not None else (None, None)
    plan = Plan(
        **{one.name: getattr(known, one.name) for one in fields(known)},
        tokens=tokens,
        batch_tokens=batch,
        steps=steps,
        passes=passes,
        wall_s=wall,
        device_hours=device_hours,
        cost=cost,
        energy_kwh=energy,
        flops_counted=_if_known(lambda one, d: one * d, known.flops_per_token, tokens, source=told),
        flops_6n=by_6n,
        optimal=None if by_6n is None else optimal_for(by_6n.value),
        checkpoint_bytes=on_disk[0],
        disk_bytes=on_disk[1],
        by_nodes=tuple(_by_nodes(known, tokens.value)),
        left_out=(
            LEFT_OUT,
            "energy of hosts, network and cooling (PUE)" if on_gpus else "energy, as no CPU's power was measured",
        ),
    )
    return replace(plan, warnings=(*known.warnings, *_warnings(plan)))


def _if_known(compute: Callable[..., float], *of: PlanFigure | None, source: str) -> PlanFigure | None:
    there = [one for one in of if one is not None]
    return derived(compute, *there, source=source) if len(there) == len(of) else None


def _tokens(known: PlanInputs, amount: PlanFigure, batch: PlanFigure) -> PlanFigure:
    goal, size, total = known.goal, known.parameters, known.tokens_per_s
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


def disk_of(parameters: PlanFigure, settings: CheckpointSettings, steps: float) -> tuple[PlanFigure, PlanFigure]:
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


def _by_nodes(known: PlanInputs, tokens: float) -> Iterator[NodesRow]:
    if known.rank_tokens_per_s is None:
        return
    fleet, price = known.fleet, known.price_per_device_hour
    for nodes, efficiency in known.efficiency_by_nodes.items():
        ranks = nodes * fleet.ranks_per_node
        rate = known.rank_tokens_per_s.value * ranks * efficiency
        hours = tokens / rate * ranks * (fleet.cpus_per_rank or 1.0) / SECONDS_PER_HOUR
        yield NodesRow(
            nodes=nodes,
            efficiency=efficiency,
            tokens_per_s=rate,
            wall_s=tokens / rate,
            device_hours=hours,
            cost=None if price is None else price * hours,
        )


def _warnings(plan: Plan) -> Iterator[str]:
    efficiency = plan.efficiency
    if efficiency is not None and efficiency.value < USEFUL_EFFICIENCY:
        useful = plan.useful_nodes or 1
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
    if plan.parameters is None:
        return
    ratio = plan.tokens.value / plan.parameters.value / TOKENS_PER_PARAMETER
    if not 1 / FAR_RATIO <= ratio <= FAR_RATIO:
        more = ratio > 1
        means = (
            "for that compute a larger model on fewer tokens would reach a lower loss; a small one is cheaper to use"
            if more
            else "for that compute a smaller model on more tokens would reach a lower loss"
        )
        yield (
            f"{format_amount(float(f'{ratio if more else 1 / ratio:.3g}'))} times {'more' if more else 'fewer'} tokens "
            f"than are compute-optimal for this size, by {AUTHORS}: {means}."
        )


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

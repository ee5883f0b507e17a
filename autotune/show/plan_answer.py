"""What ``autotune plan --json`` answers. Bytes, seconds and counts; shares are between 0 and 1."""

from dataclasses import dataclass

from autotune.core.plan import Basis, Figure, Fleet, Goal, MemoryPlan, MemoryRow, Plan
from autotune.decide.compute_optimal import LIMITS, SOURCE


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFigures:
    """Every figure with its bounds, what it rests on, and its source; null where nothing tells it."""

    tokens: Figure
    """Real ones, special tokens included."""
    batch_tokens: Figure
    """Real tokens of a step over all ranks."""
    steps: Figure
    """Of the optimizer."""
    passes: Figure | None
    """Over the dataset."""
    parameters: Figure | None
    """Of the model, shared ones once."""
    rank_tokens_per_s: Figure | None
    """Real tokens/s of one rank, on one node."""
    efficiency: Figure | None
    """Of all nodes, against as many times one; null on one."""
    tokens_per_s: Figure | None
    """Real ones, of all ranks."""
    wall_s: Figure | None
    """Of all training steps, in seconds."""
    gpu_hours: Figure | None
    """Null on a CPU."""
    cpu_hours: Figure | None
    """Null on GPUs."""
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
    checkpoint_bytes: Figure | None
    """Of one."""
    checkpoints_disk_bytes: Figure | None
    """At most at once, the exported model included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeOptimal:
    """The model and the tokens of the lowest loss for ``flops_6n``, after Hoffmann et al. 2022."""

    parameters: float
    """N."""
    tokens: float
    """D."""
    basis: Basis
    """What that rests on."""
    source: str
    """Whose formula."""
    limits: tuple[str, ...]
    """For which models it was not fitted, a sentence each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanMemory:
    """Memory of one rank under each way of sharing the model."""

    rows: tuple[MemoryRow, ...]
    """One for each way."""
    total_bytes: tuple[int, ...]
    """Of each of them."""
    micro_batch_rows: int
    """For which the figures are."""
    most_rows: int
    """That fit alone with the headroom left; 0 where not one does."""
    basis: Basis
    """What the figures rest on."""
    source: str
    """Where they come from, in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanAnswer:
    """What a training takes."""

    model: str
    """Its name."""
    fleet: Fleet
    """The machines."""
    ranks: int
    """Of all nodes."""
    goal: Goal
    """How long to train."""
    figures: PlanFigures
    """What that takes."""
    micro_batches: int
    """Of a step on each rank."""
    price_per_gpu_hour: float | None
    """The user's."""
    checkpoints_kept: int | None
    """At the end, at most."""
    compute_optimal: ComputeOptimal | None
    """Null where the number of parameters is not known."""
    memory: PlanMemory | None
    """Null where the model cannot be traced."""
    memory_missing: str | None
    """Why there is none."""
    warnings: tuple[str, ...]
    """What to think about, a sentence or two each."""
    left_out: tuple[str, ...]
    """What none of the figures counts."""
    next: str
    """The command to run."""


def plan_answer(plan: Plan) -> PlanAnswer:
    """The plan for machines."""
    checkpoints, optimal = plan.checkpoints, plan.optimal
    return PlanAnswer(
        model=plan.model,
        fleet=plan.fleet,
        ranks=plan.fleet.ranks,
        goal=plan.goal,
        figures=_figures(plan),
        micro_batches=plan.micro_batches,
        price_per_gpu_hour=plan.price_per_device_hour,
        checkpoints_kept=None if checkpoints is None else checkpoints.kept,
        compute_optimal=None
        if optimal is None
        else ComputeOptimal(
            parameters=optimal.parameters, tokens=optimal.tokens, basis="predicted", source=SOURCE, limits=LIMITS
        ),
        memory=None if plan.memory is None else _memory(plan.memory),
        memory_missing=plan.memory_missing,
        warnings=plan.warnings,
        left_out=plan.left_out,
        next=plan.next_command,
    )


def _figures(plan: Plan) -> PlanFigures:
    checkpoints, on_gpus = plan.checkpoints, plan.fleet.device == "cuda"
    return PlanFigures(
        tokens=plan.tokens,
        batch_tokens=plan.batch_tokens,
        steps=plan.steps,
        passes=plan.passes,
        parameters=plan.parameters,
        rank_tokens_per_s=plan.rank_tokens_per_s,
        efficiency=plan.efficiency,
        tokens_per_s=plan.tokens_per_s,
        wall_s=plan.wall_s,
        gpu_hours=plan.device_hours if on_gpus else None,
        cpu_hours=None if on_gpus else plan.device_hours,
        cost=plan.cost,
        power_w=plan.power_w,
        energy_kwh=plan.energy_kwh,
        flops_counted=plan.flops_counted,
        flops_6n=plan.flops_6n,
        checkpoint_bytes=None if checkpoints is None else checkpoints.one,
        checkpoints_disk_bytes=None if checkpoints is None else checkpoints.disk,
    )


def _memory(memory: MemoryPlan) -> PlanMemory:
    return PlanMemory(
        rows=memory.rows,
        total_bytes=tuple(row.total_bytes for row in memory.rows),
        micro_batch_rows=memory.micro_batch_rows,
        most_rows=memory.most_rows,
        basis=memory.basis,
        source=memory.source,
    )

"""Steps, time, cost and compute of a training.

They follow from facts about its model, data and machines. Everything here is pure
arithmetic.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from autotune.base.units import format_amount, format_share
from autotune.base.wording import plural
from autotune.errors import BadInput
from autotune.evidence.plan import Fleet, Goal, GoalKind, PlanFigure, derived
from autotune.network.decide.scaling_model import USEFUL_EFFICIENCY, AllRanks
from autotune.subjects.mlm.memory.values import MemoryPlan

FLOPS_PER_PARAMETER_AND_TOKEN = 6
"""FLOPs of training by the 6·N·D convention (Kaplan et al. 2020, arXiv 2001.08361)."""
SECONDS_PER_HOUR = 3600.0
MOST_PASSES = 40
NOT_INCLUDED = (
    "queueing, start-up, restarts, compilation, validation, checkpoints, node failures,"
    " energy, disk"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodesRow:
    """Prediction for the same training on another number of nodes."""

    nodes: int
    efficiency: float
    units_per_s: float
    wall_s: float
    device_hours: float
    cost: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Inputs of a plan, and the results computed from them.

    Unknown figures are None.
    """

    model: str
    goal: Goal
    fleet: Fleet
    unit: str = "tokens"
    """Unit of all amounts and rates, as a plural: ``tokens`` without padding, or the
    unit of your code."""
    of_code: bool = False
    """True for code of yours, which has its own data and counts its own units."""
    noun: str = "sequence"
    """One of the micro-batch size in words."""
    units_per_size: PlanFigure
    """Units of one of the micro-batch size, on average: tokens of a sequence."""
    units_per_pass: PlanFigure | None
    """Units of one pass over the dataset."""
    global_batch_size: int
    """Sequences, or whatever the micro-batch size counts, of an optimizer step over all
    ranks."""
    price_per_device_hour: float | None
    rank_units_per_s: PlanFigure | None = None
    """Units/s of one rank, on one node."""
    rank_bytes: PlanFigure | None = None
    """Peak memory of one rank as probed, without any sharing; None if ``memory`` has
    it."""
    counted_parameters: PlanFigure | None = None
    """Parameters that a probe counted; None if ``memory`` has them."""
    rate_missing: str = ""
    all_ranks: AllRanks = field(default_factory=AllRanks)
    memory: MemoryPlan | None = None
    memory_missing: str = ""
    warnings: tuple[str, ...] = ()
    next_command: str = ""

    units: PlanFigure | None = None
    """Units of the training; special tokens are included."""
    batch_units: PlanFigure | None = None
    """Units of an optimizer step over all ranks."""
    steps: PlanFigure | None = None
    passes: PlanFigure | None = None
    wall_s: PlanFigure | None = None
    """Wall time of all training steps, in seconds."""
    device_hours: PlanFigure | None = None
    """GPU-hours; on a CPU, CPU-hours."""
    cost: PlanFigure | None = None
    flops_6n: PlanFigure | None = None
    by_nodes: tuple[NodesRow, ...] = ()
    """Predictions on fewer nodes and on the intended number; empty on one node."""

    @property
    def unit_words(self) -> str:
        """Unit in words: only the bundled trainer tells padding from other tokens."""
        return self.unit if self.of_code else "non-padding tokens"

    @property
    def unit_option(self) -> str:
        """Option that gives an amount in the unit."""
        return f"--{self.unit if self.unit in ('tokens', 'samples') else 'units'}"

    @property
    def parameters(self) -> PlanFigure | None:
        """Parameters of the model, shared ones counted once."""
        if self.memory is None:
            return self.counted_parameters
        return self.memory.parameters


def plan_of(known: Plan) -> Plan:
    """Return the plan with all results of its inputs.

    Raises:
        BadInput: If its goal cannot be converted to units.
    """
    goal, fleet, per_row, rows = (
        known.goal,
        known.fleet,
        known.units_per_size,
        known.global_batch_size,
    )
    told = (
        f"{plural(rows, known.noun)} of {per_row.value:,.4g} {known.unit_words}"
        f" ({per_row.source})"
    )
    batch = derived(lambda units: units * rows, per_row, source=told)
    asked = PlanFigure(value=goal.amount, basis="given", source=goal.source)
    units = _units(known, asked, batch)
    told = f"{format_amount(batch.value)} {known.unit_words} per step"
    steps = derived(
        lambda all_, one: max(1.0, math.ceil(all_ / one)), units, batch, source=told
    )
    passes = _if_known(
        lambda all_, one: all_ / one,
        units,
        known.units_per_pass,
        source=f"{known.unit} of the dataset",
    )
    told = f"{known.unit} / throughput of all ranks"
    wall = _if_known(
        lambda all_, rate: all_ / rate,
        units,
        known.all_ranks.units_per_s,
        source=told,
    )
    if goal.kind == "hours":
        wall = derived(
            lambda hours: hours * SECONDS_PER_HOUR, asked, source=goal.source
        )
    devices, price = (
        fleet.ranks * (fleet.cpus_per_rank or 1.0),
        known.price_per_device_hour,
    )
    told = f"wall time on {devices:g} {'GPUs' if fleet.device == 'cuda' else 'CPUs'}"
    hours = _if_known(
        lambda seconds: seconds * devices / SECONDS_PER_HOUR, wall, source=told
    )
    flops = _if_known(
        lambda n, d: FLOPS_PER_PARAMETER_AND_TOKEN * n * d,
        known.parameters if known.unit == "tokens" else None,
        units,
        source="6·N·D",
    )
    plan = replace(
        known,
        units=units,
        batch_units=batch,
        steps=asked if goal.kind == "steps" else steps,
        passes=asked if goal.kind == "epochs" else passes,
        wall_s=wall,
        device_hours=hours,
        cost=(
            None
            if price is None
            else _if_known(lambda one: one * price, hours, source="at your price")
        ),
        flops_6n=flops,
        by_nodes=tuple(_by_nodes(known, units.value)),
    )
    return replace(plan, warnings=(*known.warnings, *_warnings(plan)))


def _if_known(
    compute: Callable[..., float], *of: PlanFigure | None, source: str
) -> PlanFigure | None:
    there = [one for one in of if one is not None]
    return derived(compute, *there, source=source) if len(there) == len(of) else None


def _units(known: Plan, amount: PlanFigure, batch: PlanFigure) -> PlanFigure:
    if known.goal.kind == "units":
        return amount
    ways: dict[
        GoalKind, tuple[PlanFigure | None, Callable[..., float], str, str, str]
    ] = {
        "steps": (batch, lambda steps, one: steps * one, "with this batch", "", ""),
        "epochs": (
            known.units_per_pass,
            lambda passes, one: passes * one,
            "of the dataset",
            f"the {known.unit} of an epoch require a dataset",
            (
                f"{'Give' if known.of_code else 'Add --data DIR, or give'} the number"
                f" of {known.unit}: {known.unit_option} 45.2B"
            ),
        ),
        "flops": (
            known.parameters if known.unit == "tokens" else None,
            lambda flops, n: flops / FLOPS_PER_PARAMETER_AND_TOKEN / n,
            "by 6·N·D",
            (
                f"the number of parameters of {known.model} is unknown"
                f" ({known.memory_missing})"
            ),
            f"Give the number of {known.unit} instead: {known.unit_option} 10B",
        ),
        "hours": (
            known.all_ranks.units_per_s,
            lambda hours, rate: rate * hours * SECONDS_PER_HOUR,
            "at this throughput",
            known.rate_missing,
            "Give the throughput of one GPU: --units-per-s 100k",
        ),
    }
    of, compute, told, missing, next_step = ways[known.goal.kind]
    if of is None:
        raise BadInput(f"{known.goal.source}: {missing}", next_step=next_step)
    return derived(compute, amount, of, source=f"{known.goal.source}, {told}")


def _by_nodes(known: Plan, units: float) -> Iterator[NodesRow]:
    if known.rank_units_per_s is None:
        return
    fleet, price = known.fleet, known.price_per_device_hour
    for nodes, efficiency in known.all_ranks.efficiency_by_nodes.items():
        ranks = nodes * fleet.ranks_per_node
        rate = known.rank_units_per_s.value * ranks * efficiency
        hours = units / rate * ranks * (fleet.cpus_per_rank or 1.0) / SECONDS_PER_HOUR
        yield NodesRow(
            nodes=nodes,
            efficiency=efficiency,
            units_per_s=rate,
            wall_s=units / rate,
            device_hours=hours,
            cost=None if price is None else price * hours,
        )


def _warnings(plan: Plan) -> Iterator[str]:
    efficiency, useful = plan.all_ranks.efficiency, plan.all_ranks.useful_nodes or 1
    if efficiency is not None and efficiency.value < USEFUL_EFFICIENCY:
        yield (
            f"{plan.fleet.nodes} nodes reach {format_share(efficiency.value)}"
            f" efficiency ({efficiency.basis}). With this batch, at most {useful}"
            f" {'reaches' if useful == 1 else 'reach'} {100 * USEFUL_EFFICIENCY:.0f} %."
            " For changes that help, run autotune network PROFILE --predict."
        )
    if (
        plan.memory is not None
        and plan.memory.shares
        and plan.memory.shares[0].fits is False
    ):
        rows = f"with micro-batch size {plan.memory.micro_batch_size}"
        fitting, other = (
            " or ".join(
                one.name
                for one in plan.memory.shares
                if one.fits and one.trains_here == here
            )
            for here in (True, False)
        )
        if fitting:
            yield (
                f"The model does not fit one GPU {rows} (predicted). It fits with"
                f" {fitting}."
            )
        elif other:
            yield (
                f"The model does not fit one GPU {rows} (predicted). By formula it fits"
                f" with {other}, which this trainer does not support."
            )
        else:
            yield (
                f"The model does not fit {rows} in any of these ways (predicted). Use"
                " more or larger GPUs."
            )
    if plan.passes is not None and plan.passes.value > MOST_PASSES:
        yield (
            f"{plan.passes.value:,.0f} epochs: decoder models gain almost nothing after"
            f" {MOST_PASSES} (Muennighoff et al. 2023, arXiv 2305.16264), and BERT"
            f" trained for about {MOST_PASSES} (Devlin et al. 2018). Use more data, or"
            " continue only while the validation loss falls."
        )

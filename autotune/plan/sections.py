"""A plan as text: every figure is marked as given, measured, predicted or assumed."""

import textwrap
from collections.abc import Callable

from autotune.base.document import table_of
from autotune.base.render_console import console_text
from autotune.base.tables import printable_line, terminal_table
from autotune.base.units import (
    format_amount,
    format_bytes,
    format_count,
    format_seconds,
    format_share,
)
from autotune.base.wording import format_bounds_with_confidence, plural
from autotune.evidence.plan import PlanFigure
from autotune.memory.sections import shares_table
from autotune.plan.decide import NOT_INCLUDED, Plan

WIDTH = 100
_DAY_S = 86_400.0
_MOST_SHOWN_S = 96 * 3600.0
"""Limit above which times are shown in days."""


def plan_text(plan: Plan) -> str:
    """Format the plan.

    It has a table, the sources of its figures, warnings, and the next command.
    """
    fleet = plan.fleet
    each = plural(fleet.ranks_per_node, "GPU" if fleet.device == "cuda" else "rank")
    machines = (
        f"{plural(fleet.nodes, 'node')}, {each} each ({printable_line(fleet.name)})"
    )
    sources = {
        f"{plan.unit}/s": plan.rank_units_per_s,
        "efficiency": plan.all_ranks.efficiency,
        "batch": plan.batch_units,
        "memory": plan.rank_bytes,
    }
    model, goal = printable_line(plan.model), printable_line(plan.goal.source)
    parts = [
        _wrapped(f"{model} on {machines}: {goal}"),
        _figures(plan),
        "\n".join(
            _wrapped(f"{name}: {printable_line(one.source)}", bullet="  ")
            for name, one in sources.items()
            if one
        ),
    ]
    if plan.by_nodes:
        table = table_of(
            # The table above shows all nodes.
            "",
            (one for one in plan.by_nodes if one.nodes < fleet.nodes),
            ("nodes", "r", lambda one: f"{one.nodes:,}"),
            ("efficiency", "r", lambda one: format_share(one.efficiency)),
            (f"{plan.unit}/s", "r", lambda one: format_amount(one.units_per_s)),
            ("wall time", "r", lambda one: _duration(one.wall_s, one.wall_s)),
            (
                f"{'GPU' if fleet.device == 'cuda' else 'CPU'}-hours",
                "r",
                lambda one: format_amount(one.device_hours),
            ),
            (
                "cost",
                "r",
                lambda one: None if one.cost is None else format_amount(one.cost),
            ),
        )
        parts.append(console_text((table,)))
    if (memory := plan.memory) is not None:
        most, size = (
            memory.max_micro_batch_size,
            f"micro-batch size {memory.micro_batch_size:,}",
        )
        limit = (
            f"largest with headroom: {most:,}"
            if most
            else "one sequence does not fit one GPU"
        )
        shown = (
            f"predicted for {size} ({limit}) and {format_bytes(fleet.memory_bytes)};"
            f" from {memory.source}"
        )
        parts += [
            console_text((shares_table(memory.shares),)),
            _wrapped(shown, bullet="  "),
        ]
    elif plan.rank_bytes is None:
        parts.append(_wrapped(f"Memory: n/a, {printable_line(plan.memory_missing)}"))
    parts += (
        [
            "\n".join(
                _wrapped(f"! {printable_line(line)}", bullet="  ")
                for line in plan.warnings
            )
        ]
        if plan.warnings
        else []
    )
    parts.append(
        f"{_wrapped(f'Not included: {NOT_INCLUDED}.')}\nnext:"
        f" {printable_line(plan.next_command)}"
    )
    return "\n".join(parts)


def _figures(plan: Plan) -> str:
    kind, every, price = (
        "GPU" if plan.fleet.device == "cuda" else "CPU",
        plan.all_ranks,
        plan.price_per_device_hour,
    )
    rank = "GPU" if kind == "GPU" else "rank"
    scaling = f"scaling efficiency, {plural(plan.fleet.nodes, 'node')}"
    rows = [
        _row(plan.unit_words, plan.units, format_amount),
        _row("optimizer steps", plan.steps, format_count),
        _row(
            "wall time",
            plan.wall_s,
            lambda seconds: _duration(
                plan.wall_s.value if plan.wall_s else 0.0, seconds
            ),
        ),
        _row(f"{kind}-hours", plan.device_hours, format_amount),
        *(
            []
            if price is None
            else [_row(f"cost at {price:g} per {kind}-hour", plan.cost, format_amount)]
        ),
        _row(
            f"{plan.unit}/s of one {rank}",
            plan.rank_units_per_s,
            format_amount,
        ),
        _row(f"{plan.unit}/s of all", every.units_per_s, format_amount),
        *(
            []
            if every.efficiency is None
            else [_row(scaling, every.efficiency, format_share)]
        ),
        _row(f"{plan.unit_words} per step", plan.batch_units, format_amount),
        *(
            []
            if plan.rank_bytes is None
            else [_row(f"memory of one {rank}", plan.rank_bytes, format_bytes)]
        ),
        _row("epochs", plan.passes, lambda value: f"{value:,.3g}", _epochs(plan)),
        _row("parameters", plan.parameters, format_amount),
        _row("FLOPs, 6·N·D", plan.flops_6n, lambda value: f"{value:.3g}"),
    ]
    return terminal_table(("", "plan", "interval", "basis"), rows, align="lrll")


def _epochs(plan: Plan) -> str:
    """Return why epochs may be unknown."""
    return "your code has its data" if plan.of_code else "requires --data"


def _row(
    name: str,
    figure: PlanFigure | None,
    form: Callable[[float], str],
    missing: str = "",
) -> list[str | None]:
    if figure is None:
        return [name, None, "", missing]
    return [
        name,
        form(figure.value),
        format_bounds_with_confidence(figure, form) or "",
        figure.basis,
    ]


def _duration(of: float, seconds: float) -> str:
    """Format a time in hours or days.

    It is in days if ``of``, the figure that it bounds, is long, so that their units are
    the same.
    """
    return (
        format_seconds(seconds)
        if of < _MOST_SHOWN_S
        else f"{seconds / _DAY_S:,.1f} days"
    )


def _wrapped(text: str, *, bullet: str = "") -> str:
    return textwrap.fill(
        text,
        WIDTH,
        subsequent_indent=bullet,
        break_on_hyphens=False,
        break_long_words=False,
    )

"""Sections on links, gradient synchronisation, and scaling to more nodes."""

import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

from autotune.base import document as doc
from autotune.base.document import bulleted, facts_table, table_of
from autotune.base.render_console import console_text
from autotune.base.units import format_bytes, format_count, format_seconds, format_share
from autotune.base.wording import format_bounds, format_bytes_per_s, plural
from autotune.evidence.network import (
    ComputeEvidence,
    GradientSyncSplit,
    NetworkEvidence,
    ScalingRow,
    StepOnRanks,
)
from autotune.network.decide.own_scaling import OwnScaling
from autotune.network.decide.scaling_model import Scaling
from autotune.profiles.decide.follow_up import command, missing_probe_commands
from autotune.profiles.reported_profile import ReportedProfile


def network_text(found: NetworkEvidence, profile: Path) -> str:
    """Return the evidence and the next command, for the console."""
    following = command("network", profile, predict=True, bandwidth="25Gbit")
    if found.on_ranks is None:
        predict = command("network", profile, predict=True)
        following = f"{predict}, or {command('train', profile, slurm=True)}"
    pairs = (("profile", (str(profile),)), ("next", (following,)))
    return console_text((*_measured(found, profile.stem), doc.Pairs(pairs=pairs)))


def scaling_text(scaled: Scaling) -> str:
    """Return the scaling to more nodes, for the console."""
    nodes, bound = scaled.bound[-1] if scaled.bound else (1, 1.0)
    batch = (
        f"{scaled.name}: global batch of {scaled.global_batch_tokens:,} non-padding"
        " tokens on any number of nodes; steps per epoch:"
        f" {format_count(scaled.steps_per_epoch)}"
    )
    lines = (
        *(
            f"not predicted on {plural(skipped.nodes, 'node')}: {skipped.reason}"
            for skipped in scaled.skipped
        ),
        *scaled.sources,
        (
            f"upper bound: {format_share(bound)} efficiency on"
            f" {plural(nodes, 'node')} if synchronisation overlapped all of backward"
        ),
        (
            "T_min, to overlap fp32 gradients with backward:"
            f" {scaled.least_tokens_per_rank:,.0f} non-padding tokens per rank and step"
        ),
        *_useful_lines(scaled.useful_nodes, scaled.levers),
    )
    return console_text(
        (
            doc.Paragraph(words=(batch,)),
            _scaling(scaled.name, scaled.rows),
            bulleted(lines),
        )
    )


def network_section(one: ReportedProfile) -> tuple[doc.Block, ...]:
    """Return the report's blocks on the network and on scaling to more nodes."""
    found = one.profile.evidence.network
    command = f"autotune network {one.quoted} --slurm"
    if found is None:
        return (
            doc.Missing(
                subject="Network between nodes",
                commands=(*missing_probe_commands(one.profile, one.path), command),
            ),
        )
    unscaled = (
        ()
        if found.scaling or found.on_ranks is not None
        else (doc.Missing(subject="Scaling to more nodes", commands=(command,)),)
    )
    return (*unscaled, *_measured(found, one.name))


def _measured(found: NetworkEvidence, name: str) -> tuple[doc.Block, ...]:
    links = table_of(
        "Links",
        found.links,
        ("link", "l", lambda one: one.scope),
        ("members", "r", lambda one: str(one.members)),
        ("latency per hop", "r", lambda one: f"{1e6 * one.latency_s:.3g} µs"),
        (
            "bandwidth per direction",
            "r",
            lambda one: format_bytes_per_s(one.bytes_per_s),
        ),
        (
            "98 % CI",
            "r",
            lambda one: format_bounds(
                one.bytes_per_s_low, one.bytes_per_s_high, format_bytes_per_s
            ),
        ),
        ("largest fit error", "r", lambda one: format_share(one.worst_error_share)),
    )
    gradient_syncs = table_of(
        "Gradient synchronisation",
        found.gradient_syncs,
        ("strategy", "l", lambda row: row.sync.name),
        ("accumulation", "r", lambda row: str(row.gradient_accumulation_steps)),
        ("micro-batch", "r", lambda row: str(row.micro_batch_size)),
        ("step predicted", "r", lambda row: format_seconds(row.predicted_step_s)),
        (
            "step measured",
            "r",
            lambda row: (
                f"{format_seconds(row.step_s)}{_added(row)}" if row.step_s else None
            ),
        ),
        ("tokens/s", "r", lambda row: format_count(row.tokens_per_s)),
        ("compute", "r", lambda row: format_share(row.compute_share)),
        ("wait", "r", lambda row: format_share(row.communication_share)),
        ("peak memory", "r", lambda row: format_bytes(row.peak_bytes)),
        ("outcome", "l", lambda row: row.outcome),
    )
    scaling = (_scaling(name, found.scaling),) if found.scaling else ()
    tables = tuple(table for table in (links, gradient_syncs) if table.rows)
    if found.compute is not None:
        tables = (*tables, _compute(found.compute))
    if found.on_ranks is not None:
        tables = (*tables, _on_ranks(found.on_ranks, found.ranks_per_node))
    return (*scaling, *tables, bulleted(network_lines(found)))


def _scaling(name: str, rows: Sequence[ScalingRow]) -> doc.Chart:
    rows = sorted(rows, key=lambda row: (row.nodes, row.measured))
    shares = "; ".join(
        f"{plural(row.nodes, 'node')}: {format_share(row.efficiency)},"
        f" {'measured' if row.measured else 'predicted'}"
        for row in rows
    )
    return doc.Chart(
        title="Non-padding tokens/s by number of nodes, at the same global batch",
        description=(
            f"Strong-scaling efficiency; bands: 98 % CI from the links. {shares}."
        ),
        drawing=scaling_lines(name, rows),
        table=table_of(
            "Data table",
            rows,
            ("nodes", "r", lambda row: str(row.nodes)),
            ("strategy", "l", lambda row: row.sync.name),
            ("accumulation", "r", lambda row: str(row.gradient_accumulation_steps)),
            ("micro-batch", "r", lambda row: str(row.micro_batch_size)),
            ("step", "r", lambda row: format_seconds(row.step_s)),
            ("tokens/s", "r", lambda row: format_count(row.tokens_per_s)),
            ("efficiency", "r", lambda row: format_share(row.efficiency)),
            (
                "98 % CI",
                "r",
                lambda row: format_bounds(
                    row.efficiency_low, row.efficiency_high, format_share
                ),
            ),
            (
                "bottleneck",
                "l",
                lambda row: (
                    f"{row.limit}: {format_share(row.limit_share)}".removesuffix(
                        ": n/a"
                    )
                ),
            ),
            (
                "source",
                "l",
                lambda row: f"measured{_added(row)}" if row.measured else "predicted",
            ),
        ),
    )


def scaling_lines(name: str, rows: Sequence[ScalingRow]) -> doc.LineChart:
    """Return the chart of throughput by nodes.

    It shows the prediction with its interval, the ideal, and measured points.
    """
    predicted = sorted(
        (row for row in rows if not row.measured), key=lambda row: row.nodes
    )
    measured = sorted((row for row in rows if row.measured), key=lambda row: row.nodes)
    lines = []
    if predicted:
        alone = predicted[0].tokens_per_s / predicted[0].nodes / predicted[0].efficiency
        ideal = tuple(doc.Point(x=row.nodes, y=alone * row.nodes) for row in predicted)
        lines.append(
            doc.Line(
                name=f"{name}, predicted",
                points=tuple(map(_point, predicted)),
                kind="line",
            )
        )
        lines.append(doc.Line(name="", points=ideal, kind="dotted"))
    if measured:
        lines.append(
            doc.Line(
                name=f"{name}, measured",
                points=tuple(map(_point, measured)),
                kind="dots",
            )
        )
    x = doc.Axis(
        label="nodes (dotted: ideal)",
        unit="count",
        log=2,
        ticks=tuple(sorted({row.nodes for row in rows})),
    )
    return doc.LineChart(
        x=x,
        y=doc.Axis(label="non-padding tokens/s", unit="count", log=10),
        lines=tuple(lines),
    )


def _point(row: ScalingRow) -> doc.Point:
    """Return a row's point.

    It has the non-padding tokens/s at both ends of the efficiency's interval.
    """
    low, high = (
        None if end is None else row.tokens_per_s * end / row.efficiency
        for end in (row.efficiency_low, row.efficiency_high)
    )
    return doc.Point(x=row.nodes, y=row.tokens_per_s, low=low, high=high)


def own_scaling_text(scaled: OwnScaling) -> str:
    """Return the prediction of more nodes for code of yours, for the console."""
    table = table_of(
        f"{scaled.name}, predicted",
        scaled.rows,
        ("nodes", "r", lambda row: str(row.nodes)),
        ("step", "r", lambda row: format_seconds(row.step_s)),
        (f"{scaled.unit}/s", "r", lambda row: format_count(row.units_per_s)),
        ("efficiency", "r", lambda row: format_share(row.efficiency)),
    )
    return console_text((table, bulleted(scaled.sources)))


def _on_ranks(steps: StepOnRanks, ranks: int) -> doc.Table:
    """Return the table of a step on one rank and on all."""
    one_s = statistics.median(steps.one_rank_step_s)
    all_s = statistics.median(steps.all_ranks_step_s)
    bounds = format_bounds(steps.efficiency_low, steps.efficiency_high, format_share)
    size_of_gradients = "not known"
    if steps.gradient_bytes is not None:
        size_of_gradients = (
            f"{format_bytes(steps.gradient_bytes)}, from {steps.gradient_bytes_from}"
        )
    rows: list[list[str | None]] = [
        ["size on each rank", str(steps.size)],
        ["step on one rank, measured", format_seconds(one_s)],
        [f"step on {ranks} ranks, measured", format_seconds(all_s)],
        ["added by more ranks, measured", format_seconds(max(0.0, steps.added_s))],
        ["efficiency, measured", format_share(steps.efficiency)],
        ["98 % CI", bounds],
        [
            f"{steps.unit}/s of all ranks",
            format_count(ranks * steps.units_per_step / all_s),
        ],
        ["gradients", size_of_gradients],
        ["all-reduce of them, predicted", format_seconds(steps.all_reduce_s)],
    ]
    return facts_table("Step on one rank and on all", rows)


def _compute(compute: ComputeEvidence) -> doc.Table:
    """Return the table of a step without gradient synchronisation.

    Predictions are based on it.
    """
    rows: list[list[str | None]] = [
        ["micro-batch size", str(compute.micro_batch_size)],
        [
            "forward and backward of a micro-batch",
            format_seconds(compute.micro_batch_s),
        ],
        ["constant part of it", format_seconds(compute.fixed_s)],
        ["optimizer step", format_seconds(compute.optimizer_step_s)],
        ["share of forward", format_share(compute.forward_share)],
        ["jitter of a rank", format_share(compute.jitter_share)],
        [
            "slowdown of compute by synchronisation",
            format_share(compute.slowdown_share),
        ],
        ["gradient elements", format_count(sum(compute.gradient_elements))],
    ]
    return facts_table("Step without gradient synchronisation", rows)


def _useful_lines(nodes: int, levers: Sequence[str]) -> Iterator[str]:
    yield (
        "max. nodes at 90 % efficiency or more with this global batch (predicted):"
        f" {nodes}"
    )
    yield from (f"more nodes with {lever} (predicted)" for lever in levers)


def network_lines(found: NetworkEvidence) -> Iterator[str]:
    """Yield the lines under the tables."""
    nodes = f"{plural(found.nodes, 'node')} of {plural(found.ranks_per_node, 'rank')}"
    speed = found.interface_bytes_per_s
    nominal = "" if speed is None else f" ({8 * speed / 1e9:g} Gbit/s)"
    yield (
        f"measured on {nodes}: {found.backend}, {found.transport}, interface"
        f" {found.interface or 'n/a'}{nominal}"
    )
    if found.all_reduce_factor != 1.0:
        yield (
            f"all-reduces over all ranks take {found.all_reduce_factor:.2f} times the"
            " time predicted from the links"
        )
    yield from (f"warning: {warning}" for warning in found.warnings)
    if found.equal_loss is not None:
        yield f"equal loss: {found.equal_loss}"
    if found.useful_nodes is not None:
        yield from _useful_lines(found.useful_nodes, found.levers)
    elif found.on_ranks is None:
        yield "max. nodes at 90 % efficiency or more: not measured (requires two nodes)"
    yield f"gradient synchronisation: {found.choice}"


def _added(row: GradientSyncSplit) -> str:
    """Return the note that some micro-batches of a measured step are predicted.

    It is empty if none are.
    """
    return f" (+{row.added_micro_batches} predicted)" if row.added_micro_batches else ""

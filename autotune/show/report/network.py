"""Scaling: measured points and the predicted line, links, and ways to exchange gradients."""

from autotune.core.evidence import NetworkEvidence
from autotune.core.units import format_count, format_seconds, format_share
from autotune.show import network as cells
from autotune.show.charts import scaling_lines
from autotune.show.report.document import Block, Bullets, Chart, Missing, Table, sentence
from autotune.show.report.figures import plural
from autotune.show.report.inputs import ReportedProfile


def network(one: ReportedProfile) -> tuple[Block, ...]:
    """What more nodes bring, and what they cost."""
    found = one.profile.evidence.network
    command = f"autotune network --profile {one.quoted} --slurm"
    if found is None:
        what = "The network, and how far nodes are useful, on two nodes"
        return (Missing(what=what, commands=(*one.probe_first, command)),)
    scaling: Block = Missing(what="Scaling over nodes, on two nodes", commands=(command,))
    if found.scaling:
        scaling = _scaling(one, found)
    lines = Bullets(items=tuple((sentence(line),) for line in cells.network_lines(found)))
    return (scaling, *_links(found), *_exchanges(found), *_compute(found), lines)


def _scaling(one: ReportedProfile, found: NetworkEvidence) -> Chart:
    rows = sorted(found.scaling, key=lambda row: (row.nodes, row.measured))
    said = "; ".join(
        f"{plural(row.nodes, 'node')}: {format_share(row.efficiency)}, {'measured' if row.measured else 'predicted'}"
        for row in rows
    )
    return Chart(
        title="Real tokens per second by number of nodes, with the same global batch",
        description=f"Efficiency against as many times one node; bands are 98 % intervals, by the links. {said}.",
        drawing=scaling_lines([(one.name, rows)]),
        table=Table(
            caption="The same as figures",
            headers=cells.SCALING_HEADERS,
            rows=tuple(cells.scaling_cells(row) for row in rows),
            align=cells.SCALING_ALIGN,
        ),
    )


def _links(found: NetworkEvidence) -> tuple[Block, ...]:
    if not found.links:
        return ()
    rows = tuple(cells.link_cells(link) for link in found.links)
    return (Table(caption="Links", headers=cells.LINK_HEADERS, rows=rows, align=cells.LINK_ALIGN),)


def _exchanges(found: NetworkEvidence) -> tuple[Block, ...]:
    if not found.exchanges:
        return ()
    rows = tuple(cells.exchange_cells(row) for row in found.exchanges)
    return (
        Table(
            caption="Ways to exchange gradients", headers=cells.EXCHANGE_HEADERS, rows=rows, align=cells.EXCHANGE_ALIGN
        ),
    )


def _compute(found: NetworkEvidence) -> tuple[Block, ...]:
    """What a step costs while nothing travels: what predictions rest on."""
    compute = found.compute
    if compute is None:
        return ()
    rows: list[list[str | None]] = [
        ["rows of the micro-batch", str(compute.rows)],
        ["forward and backward of it", format_seconds(compute.micro_batch_s)],
        ["part of it that does not grow with rows", format_seconds(compute.fixed_s)],
        ["clipping and update", format_seconds(compute.update_s)],
        ["forward's share", format_share(compute.forward_share)],
        ["a rank's jitter", format_share(compute.jitter_share)],
        ["what computing loses while gradients travel", format_share(compute.slowdown_share)],
        ["gradient elements", format_count(sum(compute.gradient_elements))],
    ]
    table = Table(caption="A step while nothing travels", headers=("what", "value"), rows=tuple(rows), align="lr")
    return (table,)

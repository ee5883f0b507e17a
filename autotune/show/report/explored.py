"""Settings of the step that were searched together: what was tried and taken, and what each knob has to do with it."""

from autotune.core.exploration import ExploreEvidence
from autotune.core.units import format_share
from autotune.show import exploration as cells
from autotune.show.charts.drawing import Axis, Bar, Bars
from autotune.show.report.document import Block, Bullets, Chart, Missing, Paragraph, Strong, Table, sentence
from autotune.show.report.inputs import ReportedProfile


def explored(one: ReportedProfile) -> tuple[Block, ...]:
    """The search, its answer and its trials."""
    found = one.profile.evidence.explore
    if found is None:
        command = f"autotune tune --model {one.name} --data DIR --explore"
        return (
            Missing(what="Other settings of the step, searched together", state="not asked for", commands=(command,)),
        )
    answer = Paragraph(words=(Strong(text=found.chosen.name), f": {sentence(found.choice)}"))
    told = Bullets(items=tuple((sentence(line),) for line in list(cells.exploration_lines(found))[1:]))
    return (answer, told, *_knobs(found), _rows(found))


def _knobs(found: ExploreEvidence) -> tuple[Block, ...]:
    if not found.knobs:
        return ()
    table = Table(
        caption="What each knob has to do with throughput",
        headers=cells.KNOB_HEADERS,
        rows=tuple(cells.knob_cells(one) for one in found.knobs),
        align=cells.KNOB_ALIGN,
    )
    said = ", ".join(f"{one.knob} {format_share(one.importance_share)}" for one in found.knobs)
    bars = tuple(
        Bar(label=one.knob, value=one.importance_share, shown=format_share(one.importance_share))
        for one in found.knobs
    )  # fmt: skip
    note = (
        "Shares are each knob's own part of the variance of the logarithm of real tokens/s over the whole space, as "
        "modelled from the trials; what only pairs of knobs do is in none of them, and parts overlap where cells do "
        "not fit. Worth alone is the chosen value against the unexplored one, the other knobs as chosen: modelled too."
    )
    chart = Chart(
        title="What each knob has to do with throughput",
        description=f"Share of the variance: {said}.",
        drawing=Bars(axis=Axis(label="share of the variance", unit="share"), bars=bars),
        table=table,
    )
    return (chart, Paragraph(words=(note,)))


def _rows(found: ExploreEvidence) -> Table:
    """What was tried, the fastest first; what did not run stands last."""
    rows = sorted(found.rows, key=lambda row: -(row.ratio_to_unexplored or (row.settings == found.unexplored)))
    return Table(
        caption="Settings that were tried, against the unexplored ones in the same round",
        headers=cells.ROW_HEADERS,
        rows=tuple(cells.row_cells(row) for row in rows),
        align=cells.ROW_ALIGN,
        long=True,
    )

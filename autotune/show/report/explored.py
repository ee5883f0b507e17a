"""Settings of the step that were searched together: what was tried and taken."""

from autotune.core.exploration import ExploreEvidence
from autotune.show import exploration as cells
from autotune.show.report.document import Block, Bullets, Missing, Paragraph, Strong, Table, sentence
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
    return (answer, told, _rows(found))


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

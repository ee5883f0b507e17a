"""What needs attention in runs."""

from collections.abc import Sequence

from autotune.show.report.document import LONG_TABLE_ROWS, Block, LeftOut, Section, Table
from autotune.show.report.seen import SeenRun
from trainer.events import EventRow

MOST_EVENTS = 20
"""Of one run that are told, the latest; its record has all."""


def events(every: Sequence[SeenRun]) -> tuple[Block, ...]:
    """What needs attention; the latest, where there is much."""
    rows = [(one.reported.name, event) for one in every for event in one.told[-MOST_EVENTS:]]
    if not rows:
        return ()
    of = sum(len(one.told) for one in every)
    which = f"the latest {MOST_EVENTS} of a run at most"
    left = (LeftOut(what="events", shown=len(rows), of=of, which=which, where="each run's record"),)
    table = Table(
        caption="Events of runs",
        headers=("run", "step", "kind", "what happened", "likely causes", "done", "next"),
        rows=tuple(_event_cells(name, event) for name, event in rows),
        align="lrlllll",
        long=len(rows) > LONG_TABLE_ROWS,
    )
    blocks = (*(left if len(rows) < of else ()), table)
    return (Section(title="What needs attention", key="events", blocks=blocks),)


def _event_cells(name: str, event: EventRow) -> list[str | None]:
    causes = "; ".join(event.causes) or None
    kind = f"{event.level}: {event.kind}"
    return [name, str(event.step), kind, event.message, causes, event.action, event.next_step or None]

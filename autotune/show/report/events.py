"""What needs attention in runs."""

from collections.abc import Sequence

from autotune.show.report.document import Block, LeftOut, Section, Table
from autotune.show.report.limits import LONG_TABLE_ROWS, MOST_EVENTS, MOST_ROWS
from autotune.show.report.seen import SeenRun
from trainer.events import EventRow


def events(every: Sequence[SeenRun]) -> tuple[Block, ...]:
    """What needs attention; the latest, where there is much."""
    rows = [(one.reported.name, event) for one in every for event in one.told[-MOST_EVENTS:]]
    if not rows:
        return ()
    of = sum(len(one.told) for one in every)
    kept = rows if len(rows) <= MOST_ROWS else _spread(rows)
    which = f"the latest {MOST_EVENTS} of a run at most, errors before warnings"
    left = (LeftOut(what="events", shown=len(kept), of=of, which=which, where="each run's record"),)
    table = Table(
        caption="Events of runs",
        headers=("run", "step", "kind", "what happened", "likely causes", "done", "next"),
        rows=tuple(_event_cells(name, event) for name, event in kept),
        align="lrlllll",
        long=len(kept) > LONG_TABLE_ROWS,
    )
    blocks = (*(left if len(kept) < of else ()), table)
    return (Section(title="What needs attention", key="events", blocks=blocks),)


def _spread(rows: Sequence[tuple[str, EventRow]]) -> Sequence[tuple[str, EventRow]]:
    """As many as fit: errors, then the last of every run, before the others."""
    last = dict(rows)
    order = sorted(
        range(len(rows)), key=lambda n: (rows[n][1].level != "error", rows[n][1] is not last[rows[n][0]])
    )  # fmt: skip
    return [rows[number] for number in sorted(order[:MOST_ROWS])]


def _event_cells(name: str, event: EventRow) -> list[str | None]:
    causes = "; ".join(event.causes) or None
    kind = f"{event.level}: {event.kind}"
    return [name, str(event.step), kind, event.message, causes, event.action, event.next_step or None]

"""What is to be said of each of several profiles."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from autotune.show.report.document import Block, Chart, Paragraph, Section
from autotune.show.report.inputs import ReportedProfile
from autotune.show.report.limits import MOST_DRAWN_PROFILES


def part_of_each(
    profiles: Sequence[ReportedProfile], key: str, make: Callable[[ReportedProfile], tuple[Block, ...]]
) -> tuple[Block, ...]:
    """Each under its own title where there are several; charts are drawn of the first ones only."""
    if len(profiles) == 1:
        return make(profiles[0])
    every = [make(one) for one in profiles]
    undrawn = [_without_charts(blocks) for blocks in every[MOST_DRAWN_PROFILES:]]
    said = (
        f"Charts of the first {MOST_DRAWN_PROFILES} of {len(profiles)} profiles are drawn; of the others the same "
        "figures stand in tables."
    )
    told = (Paragraph(words=(said,)),) if undrawn != every[MOST_DRAWN_PROFILES:] else ()
    parts = zip(profiles, [*every[:MOST_DRAWN_PROFILES], *undrawn], strict=True)
    return (
        *told,
        *(
            Section(title=one.title, key=f"{key}-{number}", blocks=blocks)
            for number, (one, blocks) in enumerate(parts, start=1)
        ),
    )


def _without_charts(blocks: Sequence[Block]) -> tuple[Block, ...]:
    """Every chart as the table that has its figures, under the chart's title."""
    found: list[Block] = []
    for block in blocks:
        if isinstance(block, Section):
            found.append(replace(block, blocks=_without_charts(block.blocks)))
        elif isinstance(block, Chart):
            found.append(replace(block.table, caption=block.title))
        else:
            found.append(block)
    return tuple(found)

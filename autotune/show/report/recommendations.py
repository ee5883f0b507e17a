"""Recommendations with their evidence, and changes of the recipe."""

from autotune.core.advice import Advice, EvidenceFigure, SettingChange
from autotune.decide.advice.table import rank
from autotune.show.advice import gain_text, in_unit, setting_text
from autotune.show.document import (
    LONG_TABLE_ROWS,
    Block,
    Bullets,
    Code,
    Document,
    Missing,
    Pairs,
    Paragraph,
    Section,
    Strong,
    Table,
    Words,
    blocks_of,
    sentence,
)
from autotune.show.intervals import listed, told_bounds
from autotune.show.report.inputs import ReportedProfile, ReportedRun


def recommendations(
    profiles: tuple[ReportedProfile, ...], runs: tuple[ReportedRun, ...], sections: tuple[Section, ...]
) -> tuple[Block, ...]:
    """All advice, what gains most first, and then what was not measured."""
    given = [(one.title, advice) for one in profiles for advice in one.advice]
    given += [(run.name, advice) for run in runs for advice in run.advice]
    given.sort(key=lambda one: rank(one[1]))
    several = len({name for name, _ in given}) > 1
    cards = tuple(_card(name if several else None, advice, number) for number, (name, advice) in enumerate(given, 1))
    nothing = Paragraph(words=("Nothing to recommend: by what was measured, no change is known to pay.",))
    return (*(cards or (nothing,)), *_unmeasured(sections))


def _card(about: str | None, advice: Advice, number: int) -> Section:
    pairs: list[tuple[str, Words]] = [("Gain", (gain_text(advice.gain),)), ("Cost and risk", (sentence(advice.cost),))]
    if advice.changes:
        pairs.append(("SettingChange", _changes(advice.changes)))
    if advice.command is not None:
        pairs.append(("Run", (Code(text=advice.command),)))
    pairs.append(("What would change this", (sentence(advice.would_change),)))
    applied = "written by --apply" if advice.safe else "not written by --apply"
    pairs.append(("Rule", (Code(text=advice.rule), f", {applied}")))
    evidence = Table(
        caption=f"Evidence of {advice.rule}",
        headers=("evidence", "figure", "interval", "n", "known", "source"),
        rows=tuple(_cells(figure) for figure in advice.evidence),
        align="lrrrll",
    )
    return Section(
        title=f"{number}. {f'{about}: ' if about else ''}{advice.claim}",
        key=f"advice-{number}",
        badge=advice.severity,
        blocks=(*((evidence,) if advice.evidence else ()), Pairs(pairs=tuple(pairs))),
    )


def _cells(figure: EvidenceFigure) -> list[str | None]:
    form, unit = in_unit(figure.unit)
    return [
        figure.name,
        f"{form(figure.value)}{unit}",
        told_bounds(figure.low, figure.high, form, figure.confidence),
        None if figure.n is None else str(figure.n),
        figure.known,
        figure.source,
    ]


def _changes(changes: tuple[SettingChange, ...]) -> Words:
    words: list[str | Code | Strong] = []
    for change in changes:
        setting = Code(text=f"{change.key} = {setting_text(change.new)}")
        words += ["; " if words else "", setting, f" (now {setting_text(change.old)})"]
    return tuple(words)


def _unmeasured(sections: tuple[Section, ...]) -> tuple[Block, ...]:
    """Every part of the report that is missing, by the command for it: one often gives several."""
    by_command: dict[tuple[str | None, str], list[tuple[str, str]]] = {}
    for section in sections:
        for block in blocks_of(Document(title="", subtitle="", sections=(section,))):
            if isinstance(block, Missing):
                for command in block.commands or (None,):
                    alone = block.what if command is None else ""
                    by_command.setdefault((command, alone), []).append((section.title, block.what))
    if not by_command:
        return ()
    rows: list[list[str | None]] = []
    for (command, _), parts in by_command.items():
        titles, whats = ("; ".join(dict.fromkeys(some)) for some in zip(*parts, strict=True))
        rows.append([titles, whats, command])
    headers = ("section", "what is missing", "what would change that")
    table = Table(caption="What is missing", headers=headers, rows=tuple(rows), long=len(rows) > LONG_TABLE_ROWS)
    return (Section(title="What is missing", key="missing", blocks=(table,)),)


def recipe(profiles: tuple[ReportedProfile, ...], runs: tuple[ReportedRun, ...]) -> tuple[Block, ...]:
    """What differs from the recipe of the model and of 32-bit gradients: speed that was not for nothing."""
    changed: dict[str, list[str]] = {}
    for one in profiles:
        for change in profile_changes(one):
            changed.setdefault(sentence(change), []).append(one.title)
    for run in runs:
        for change in run.run.header.recipe_changes:
            changed.setdefault(sentence(change), []).append(run.name)
    if not changed:
        return (Paragraph(words=("None: model and gradients are as their recipe has them.",)),)
    items = tuple((Strong(text=listed(names, "of them")), f": {change}") for change, names in changed.items())
    return (Bullets(items=items),)


def profile_changes(one: ReportedProfile) -> list[str]:
    """Of a profile."""
    train, network = one.profile.train, one.profile.evidence.network
    changes = []
    if train.attention_dropout is not None:
        changes.append(f"attention dropout is {train.attention_dropout:g} instead of the model's own")
    if train.parallel.gradient_dtype != "fp32":
        equal = "" if network is None or network.equal_loss is None else f"; equal loss: {network.equal_loss}"
        changes.append(f"gradients travel as {train.parallel.gradient_dtype} instead of fp32{equal}")
    return changes

"""The document of a report: the answer on the first screen, then its evidence.

The same facts are available for machines.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from autotune.advice.decide.rules import rank
from autotune.advice.sections import gain_text
from autotune.base import document as doc
from autotune.base.answer_json import jsonable
from autotune.base.wording import format_setting, shorten_list
from autotune.baseline.decide.pay_back import cost_rows, pay_back
from autotune.baseline.sections import baseline_section
from autotune.confirm.sections import confirm_section, kernels_section
from autotune.corpus.values import LengthDistribution
from autotune.evidence.advice import Advice
from autotune.evidence.profile import fill_share
from autotune.memory.sections import curve_section, memory_section
from autotune.memory.sections.own_step import step_section
from autotune.network.sections import network_section
from autotune.profiles.decide.rates import Rate, tuned_rate
from autotune.profiles.decide.run_rates import run_rate
from autotune.profiles.explanation_text import figure_text
from autotune.profiles.fingerprint_table import fingerprint_table
from autotune.profiles.reported_profile import ReportedProfile
from autotune.profiles.reproduction import reproduction_blocks, tuning_commands
from autotune.profiles.review_text import approval_blocks
from autotune.report.dataset_sections import lengths_section
from autotune.report.decide import main_bottleneck, quality_of
from autotune.report.runs import (
    MOST_EVENTS,
    drifts_of,
    loss_points,
    needs_attention,
    profile_of,
    runs,
    train_commands,
)
from autotune.report.sections import URGENT, answer, bottleneck_words, recipe_changes
from autotune.report.trial_sections import trials_section
from autotune.report.values import ReportedRun
from autotune.search.sections import exploration_section
from autotune.workers.sections import workers_section

if TYPE_CHECKING:
    from pathlib import Path

    from autotune.base.tables import Row

Made = tuple[doc.Block, ...]


@dataclass(slots=True)
class _Parts:
    """Sections with content, and everything that was not measured.

    What was not measured is by part and profile; ``""`` is all profiles.
    """

    sections: list[doc.Section] = field(default_factory=list)
    missing: dict[str, dict[str, list[doc.Missing]]] = field(default_factory=dict)

    def add(self, title: str, key: str, made: Mapping[str, Made]) -> None:
        """Add a section of the blocks of each profile, unless it is empty.

        Missing parts are only noted.
        """
        for name, blocks in made.items():
            if lacking := [block for block in blocks if isinstance(block, doc.Missing)]:
                self.missing.setdefault(title, {})[name] = lacking
        kept = {
            name: tuple(one for one in blocks if not isinstance(one, doc.Missing))
            for name, blocks in made.items()
        }
        if any(kept.values()):
            self.sections.append(
                doc.Section(title=title, key=key, blocks=together(kept))
            )

    def lacking(self) -> Iterator[tuple[str, doc.Missing]]:
        """Yield each part that was not measured, with the commands of all profiles."""
        for title, by_profile in self.missing.items():
            found = list(itertools.chain.from_iterable(by_profile.values()))
            what = "; ".join(dict.fromkeys(block.subject for block in found))
            commands = dict.fromkeys(
                command for block in found for command in block.commands
            )
            yield (
                title,
                doc.Missing(
                    subject=what, state=found[0].state, commands=tuple(commands)
                ),
            )


def report_document(
    profiles: tuple[ReportedProfile, ...], reported: tuple[ReportedRun, ...]
) -> doc.Document:
    """Return the whole report.

    It has the answer of each model, then evidence. Parts that were not measured are
    listed once.
    """
    parts = _evidence(profiles, reported)
    answers: list[doc.Section] = []
    for one in profiles:
        unmeasured = [
            part.lower()
            for part, found in parts.missing.items()
            if {"", one.title} & found.keys()
        ]
        blocks = answer(one, reported, unmeasured)
        answers.append(
            doc.Section(title=one.title, key=f"answer-{len(answers)}", blocks=blocks)
        )
    first = (
        answers[0].blocks
        if len(answers) == 1
        else (doc.SideBySide(groups=tuple((one,) for one in answers)),)
    )
    names = shorten_list(list(dict.fromkeys(one.name for one in profiles)), "models")
    sections = (
        doc.Section(title="Result", key="answer", blocks=first),
        *parts.sections,
    )
    leading, made = profiles[0].profile, profiles[0].profile.fingerprint
    place = made.gpu_name or made.cpu_model or made.device
    several = f"{made.gpu_count} x " if made.gpu_count > 1 else ""
    pretended = [
        one.title
        for one in profiles
        if one.profile.fingerprint.bytes_known == "allocator"
    ]
    measured = (
        " Measured, unless called predicted." if len(pretended) < len(profiles) else ""
    )
    if pretended:
        measured += (
            f" Nothing of {shorten_list(pretended, 'profiles')} was measured on a GPU:"
            " it is a pretended one, and "
        )
        measured += "memory is that of torch's allocator."
    made_on = (
        f"{several}{place}, torch {made.torch}, {leading.provenance.created_utc[:10]}"
    )
    unit = ""
    if any(one.profile.has_train for one in profiles):
        unit = " tokens/s: non-padding tokens."
    subtitle = f"{made_on}.{unit}{measured}"
    return doc.Document(
        title=f"Tuning report: {names}", subtitle=subtitle, sections=sections
    )


def _evidence(
    profiles: tuple[ReportedProfile, ...], reported: tuple[ReportedRun, ...]
) -> _Parts:
    parts = _Parts()

    def add(title: str, key: str, make: Callable[[ReportedProfile], Made]) -> None:
        parts.add(title, key, {one.title: make(one) for one in profiles})

    def add_of_trainer(
        title: str, key: str, make: Callable[[ReportedProfile], Made]
    ) -> None:
        made = {one.title: make(one) for one in profiles if one.profile.has_train}
        parts.add(title, key, made)

    # Charts of the first screen are not repeated.
    add(
        "Speedup",
        "before",
        lambda one: tuple(
            it for it in baseline_section(one) if type(it) is not doc.Chart
        ),
    )
    add_of_trainer("Step time", "steps", lambda one: _step(one, reported))
    add("Memory", "memory", _memory)
    add_of_trainer("Throughput by micro-batch", "curve", curve_section)
    add("Data loading", "workers", workers_section)
    add("Promised and delivered", "confirm", confirm_section)
    add_of_trainer("Kernels", "kernels", kernels_section)
    parts.add("Sample lengths", "lengths", lengths_section(profiles, reported))
    add("Network", "network", network_section)
    add("Joint search", "explored", exploration_section)
    # Nothing measures these for code of yours yet.
    unavailable = doc.Missing(
        subject="require settings of the bundled trainer",
        state="not available",
        commands=(),
    )
    parts.add(
        "Step time and kernels",
        "unavailable",
        {one.title: (unavailable,) for one in profiles if not one.profile.has_train},
    )
    parts.add("Training runs", "runs", {"": runs(profiles, reported)})
    # Advice with a gain or of an urgent severity, the largest gain first.
    given = _recommendations(profiles, reported)
    several = len({name for name, _ in given}) > 1
    cards = (
        _card(name if several else None, advice, number)
        for number, (name, advice) in enumerate(given, 1)
    )
    parts.add("Recommendations", "advice", {"": tuple(cards)})
    evidence, parts.sections = parts.sections, []
    add("Trials", "trials", trials_section)
    machines = fingerprint_table(
        [one.profile.fingerprint for one in profiles], [one.title for one in profiles]
    )
    parts.add("Machine", "machine", {"": (machines,)})
    review = together(
        {
            one.title: (*reproduction_blocks(one), *approval_blocks(one))
            for one in profiles
        }
    )
    parts.sections.append(
        doc.Section(title="Reproduce and approve", key="reproduce", blocks=review)
    )
    if lacking := tuple(
        replace(block, subject=f"{title}: {block.subject}")
        for title, block in parts.lacking()
    ):
        evidence.append(
            doc.Section(title="Not measured", key="missing", blocks=lacking)
        )
    parts.sections = [
        *evidence,
        doc.Section(title="Appendix", key="appendix", blocks=tuple(parts.sections)),
    ]
    return parts


def _recommendations(
    profiles: tuple[ReportedProfile, ...], reported: tuple[ReportedRun, ...]
) -> list[tuple[str, Advice]]:
    """Return what to change, with the name of its profile or run, best first.

    A profile and its runs often give the same recommendation, which is returned once.
    """
    given = [(one.title, one.path, advice) for one in profiles for advice in one.advice]
    given += [
        (run.name, run.profile_path or run.run.directory, advice)
        for run in reported
        for advice in run.advice
    ]
    urgent = [
        (name, path, advice)
        for name, path, advice in given
        if advice.gain is not None or advice.severity in URGENT
    ]
    urgent.sort(key=lambda entry: rank(entry[2]))
    first_by_target: dict[tuple[Path, tuple[str, ...]], tuple[str, Advice]] = {}
    for name, path, advice in urgent:
        first_by_target.setdefault((path, advice.target), (name, advice))
    return list(first_by_target.values())


def _memory(one: ReportedProfile) -> Made:
    """Return the section on memory, of the bundled trainer or of a step of yours."""
    return memory_section(one) if one.profile.has_train else step_section(one)


def _step(one: ReportedProfile, reported: tuple[ReportedRun, ...]) -> Made:
    found = main_bottleneck(one, reported)
    if found is None:
        return (
            doc.Missing(
                subject="The parts of a step's time", commands=train_commands(one)
            ),
        )
    return (
        doc.Bullets(
            items=(
                bottleneck_words(found),
                *((f"Not known: {untold}.",) for untold in found.untold),
            )
        ),
    )


def together(made: Mapping[str, Made]) -> Made:
    """Return the blocks of profiles, by name, as one.

    There is a column for each profile, and tables with the same headers are joined.
    """
    if len(made) == 1:
        return next(iter(made.values()))
    if len(kept := [(title, blocks) for title, blocks in made.items() if blocks]) == 1:
        return (doc.Paragraph(words=(doc.Strong(text=kept[0][0]),)), *kept[0][1])
    tables: dict[tuple[str, ...], list[tuple[str, doc.Table]]] = {}
    columns: list[Made] = []
    for title, blocks in made.items():
        column: list[doc.Block] = []
        for block in blocks:
            if isinstance(block, doc.Table):
                key = (
                    *block.headers,
                    block.caption if block.headers == doc.FACTS else "",
                )
                tables.setdefault(key, []).append((title, block))
            else:
                column.append(
                    replace(block, small=True)
                    if isinstance(block, doc.Chart)
                    else block
                )
        if column:
            columns.append((doc.Paragraph(words=(doc.Strong(text=title),)), *column))
    return (
        *((doc.SideBySide(groups=tuple(columns)),) if columns else ()),
        *map(_joined, tables.values()),
    )


def _joined(tables: Sequence[tuple[str, doc.Table]]) -> doc.Table:
    """Return tables of several models as one.

    A table of facts gets a column for each model. Others get a column with the model's
    name.
    """
    titles, first = [title for title, _ in tables], tables[0][1]
    rows: list[Row] = []
    if first.headers != doc.FACTS:
        rows += [[title, *row] for title, table in tables for row in table.rows]
        return replace(
            first,
            headers=("model", *first.headers),
            rows=tuple(rows),
            align="l" + first.align,
        )
    known = [{str(name): value for name, value in table.rows} for _, table in tables]
    rows += [
        [name, *(one.get(name) for one in known)]
        for name in dict.fromkeys(itertools.chain(*known))
    ]
    return replace(first, headers=(doc.FACTS[0], *titles), rows=tuple(rows))


def _card(about: str | None, advice: Advice, number: int) -> doc.Section:
    changes: list[str | doc.Code] = []
    for change in advice.changes:
        name = change.argument or change.key
        setting = doc.Code(text=f"{name} = {format_setting(change.new)}")
        changes += [
            "; " if changes else "",
            setting,
            f" (now {format_setting(change.old)})",
        ]
    evidence = "; ".join(map(figure_text, advice.evidence))
    pairs: dict[str, doc.Words] = {
        "Gain": (gain_text(advice.gain),) if advice.gain else (),
        "Change": tuple(changes),
        "Run": () if advice.command is None else (doc.Code(text=advice.command),),
        "Cost and risk": (doc.sentence(advice.cost),),
        "Evidence": (doc.sentence(evidence),) if evidence else (),
        "What would change this": (doc.sentence(advice.would_change),),
        "Rule": (
            doc.Code(text=advice.rule),
            f", {'' if advice.safe else 'not '}written by --apply",
        ),
    }
    return doc.Section(
        title=f"{number}. {f'{about}: ' if about else ''}{advice.claim}",
        key=f"advice-{number}",
        badge=advice.severity,
        blocks=(
            doc.Pairs(
                pairs=tuple((name, words) for name, words in pairs.items() if words)
            ),
        ),
    )


def report_facts(
    profiles: tuple[ReportedProfile, ...], reported: tuple[ReportedRun, ...]
) -> dict[str, Any]:
    """Return all facts of the document, with units in the names.

    A fact that is null was not measured, or is infinite.
    """
    from pydantic_core import to_jsonable_python

    lacking = _evidence(profiles, reported).lacking()
    said = {
        "schema_version": 3,
        "profiles": [_profile(one, reported) for one in profiles],
        "missing": [
            {"section": title, "what": one.subject, "commands": one.commands}
            for title, one in lacking
        ],
        "runs": [_run(profile_of(run, profiles), run) for run in reported],
    }
    facts: dict[str, Any] = to_jsonable_python(jsonable(said), inf_nan_mode="null")
    return facts


def _profile(one: ReportedProfile, reported: Sequence[ReportedRun]) -> dict[str, Any]:
    rows = cost_rows(one.trials)
    spent_s = sum(row.rank_seconds for row in rows)
    kept = (
        "path",
        "intact",
        "content_sha256",
        "trial_log",
        "profile",
        "bottlenecks",
        "advice",
        "approval",
    )
    return {
        **{name: getattr(one, name) for name in kept},
        "name": one.title,
        "fill_share": fill_share(one.profile),
        "tuned": _rate(tuned_rate(one.profile)),
        "quality": quality_of(one),
        "cost": {"by_job": rows, "rank_seconds": spent_s},
        "pay_back": pay_back(spent_s, one.profile.evidence.baseline),
        "dataset": _dataset(one),
        "dataset_lacking": None if one.dataset is not None else one.dataset_lacking,
        "bottleneck": main_bottleneck(one, reported),
        "recipe_changes": recipe_changes(one),
        "trials": [
            {
                "label": done.label,
                "job": done.trial.job,
                "seconds": done.seconds,
                "ranks": done.trial.ranks,
                "outcome": asdict(done.outcome),
            }
            for done in one.trials
        ],
        "corrupt_trial_log_lines": one.corrupt_lines,
        "commands": tuning_commands(one),
    }


def _dataset(one: ReportedProfile) -> dict[str, Any] | None:
    manifest = one.dataset
    if manifest is None:
        return None
    histogram = manifest.train.length_histogram
    spread = LengthDistribution(edges=histogram.edges, counts=histogram.counts)
    seq_length_tokens = one.profile.train.seq_length_tokens
    return {
        "dataset_hash": manifest.dataset_hash,
        "train_samples": manifest.train.samples,
        "train_tokens": manifest.train.tokens,
        "validation_samples": manifest.validation.samples,
        "vocab_size": manifest.vocab_size,
        "used_vocab_size": manifest.used_vocab_size,
        "length_histogram": histogram,
        "source": manifest.source,
        "seq_length_tokens": seq_length_tokens,
        "mean_tokens": spread.mean_tokens(),
        "padding_waste_share": spread.padding_waste(seq_length_tokens),
    }


def _run(one: ReportedProfile | None, reported: ReportedRun) -> dict[str, Any]:
    run = reported.run
    told = needs_attention(run)
    return {
        "name": reported.name,
        "directory": run.directory,
        "profile": reported.profile_path,
        "matched_by": reported.matched_by,
        "header": run.header,
        "startup": run.startup,
        "end": run.end,
        "steps": len(run.steps),
        "first_step": run.steps[0] if run.steps else None,
        "last_step": run.steps[-1] if run.steps else None,
        "achieved": _rate(run_rate(run)),
        "expected_and_achieved": drifts_of(one, reported),
        "loss": loss_points(run),
        "evaluation": run.evaluations[-1] if run.evaluations else None,
        "events": told[-MOST_EVENTS:],
        "earlier_events": max(0, len(told) - MOST_EVENTS),
        "bottlenecks": reported.bottlenecks,
        "advice": reported.advice,
    }


def _rate(rate: Rate | None) -> dict[str, Any] | None:
    if rate is None:
        return None
    more = {
        "value": rate.value,
        "known": rate.known,
        "ranks": rate.ranks,
        "source": rate.source,
    }
    return {**jsonable(rate.interval), **more}

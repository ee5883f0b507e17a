"""The document of a report: the answer on the first screen, then its evidence.

Begin with ``report_document``. ``report_facts`` returns the same facts as JSON.
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
from autotune.network.sections import network_section
from autotune.profiles.decide.follow_up import workers_command
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
    runs_section,
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

Blocks = tuple[doc.Block, ...]
_ALL_PROFILES = ""
"""Key of the blocks that belong to no single profile."""


@dataclass(slots=True)
class _Parts:
    """Sections with content, and everything that was not measured."""

    sections: list[doc.Section] = field(default_factory=list)
    missing: dict[str, dict[str, list[doc.Missing]]] = field(default_factory=dict)
    """Missing blocks by the title of their section, then by profile."""

    def add(
        self, title: str, key: str, blocks_by_profile: Mapping[str, Blocks]
    ) -> None:
        """Add a section of the blocks of each profile, unless it is empty.

        Missing parts are only noted.
        """
        present: dict[str, Blocks] = {}
        for profile, blocks in blocks_by_profile.items():
            missing = [block for block in blocks if isinstance(block, doc.Missing)]
            if missing:
                self.missing.setdefault(title, {})[profile] = missing
            present[profile] = tuple(
                block for block in blocks if not isinstance(block, doc.Missing)
            )
        if any(present.values()):
            self.sections.append(
                doc.Section(title=title, key=key, blocks=_side_by_side(present))
            )

    def unmeasured(self, profile: str) -> list[str]:
        """Return the titles of the sections that a profile lacks, in lower case."""
        return [
            title.lower()
            for title, by_profile in self.missing.items()
            if profile in by_profile or _ALL_PROFILES in by_profile
        ]

    def missing_sections(self) -> Iterator[tuple[str, doc.Missing]]:
        """Yield what each section lacks, with the commands of all profiles."""
        for title, by_profile in self.missing.items():
            blocks = list(itertools.chain.from_iterable(by_profile.values()))
            subjects = dict.fromkeys(block.subject for block in blocks)
            commands = dict.fromkeys(
                command for block in blocks for command in block.commands
            )
            merged = doc.Missing(
                subject="; ".join(subjects),
                state=blocks[0].state,
                commands=tuple(commands),
            )
            yield title, merged


def report_document(
    profiles: tuple[ReportedProfile, ...], runs: tuple[ReportedRun, ...]
) -> doc.Document:
    """Return the complete report.

    It has the answer of each model, then evidence. Parts that were not measured are
    listed once.
    """
    parts = _evidence(profiles, runs)
    answers = [
        doc.Section(
            title=reported.title,
            key=f"answer-{number}",
            blocks=answer(reported, runs, parts.unmeasured(reported.title)),
        )
        for number, reported in enumerate(profiles)
    ]
    if len(answers) == 1:
        first_screen = answers[0].blocks
    else:
        groups = tuple((section,) for section in answers)
        first_screen = (doc.SideBySide(groups=groups),)
    result = doc.Section(title="Result", key="answer", blocks=first_screen)
    names = list(dict.fromkeys(reported.name for reported in profiles))
    return doc.Document(
        title=f"Tuning report: {shorten_list(names, 'models')}",
        subtitle=_subtitle(profiles),
        sections=(result, *parts.sections),
    )


def _subtitle(profiles: Sequence[ReportedProfile]) -> str:
    """Return the machine of the first profile, its date, and the meaning of figures."""
    profile = profiles[0].profile
    machine = profile.fingerprint
    device = machine.gpu_name or machine.cpu_model or machine.device
    if machine.gpu_count > 1:
        device = f"{machine.gpu_count} x {device}"
    date = profile.provenance.created_utc[:10]
    sentences = [f"{device}, torch {machine.torch}, {date}."]
    if any(fill_share(reported.profile) is not None for reported in profiles):
        sentences.append("tokens/s: non-padding tokens.")
    pretended = [
        reported.title
        for reported in profiles
        if reported.profile.fingerprint.bytes_known == "allocator"
    ]
    if len(pretended) < len(profiles):
        sentences.append("Measured, unless called predicted.")
    if pretended:
        sentences.append(
            f"Nothing of {shorten_list(pretended, 'profiles')} was measured on a GPU:"
            " it is a pretended one, and memory is that of torch's allocator."
        )
    return " ".join(sentences)


def _evidence(
    profiles: tuple[ReportedProfile, ...], runs: tuple[ReportedRun, ...]
) -> _Parts:
    """Return all sections after the answer, in the order of the page."""
    parts = _Parts()
    _add_measurements(parts, profiles, runs)
    parts.add("Training runs", "runs", {_ALL_PROFILES: runs_section(profiles, runs)})
    parts.add(
        "Recommendations", "advice", {_ALL_PROFILES: _advice_cards(profiles, runs)}
    )
    # Missing parts of the appendix are listed with the others.
    appendix = _Parts(missing=parts.missing)
    _add_appendix(appendix, profiles)
    missing = tuple(
        replace(block, subject=f"{title}: {block.subject}")
        for title, block in parts.missing_sections()
    )
    if missing:
        parts.sections.append(
            doc.Section(title="Not measured", key="missing", blocks=missing)
        )
    parts.sections.append(
        doc.Section(title="Appendix", key="appendix", blocks=tuple(appendix.sections))
    )
    return parts


def _add_measurements(
    parts: _Parts,
    profiles: tuple[ReportedProfile, ...],
    runs: tuple[ReportedRun, ...],
) -> None:
    """Add a section for each measurement, in the order of the page."""

    def add(title: str, key: str, section: Callable[[ReportedProfile], Blocks]) -> None:
        parts.add(title, key, {each.title: section(each) for each in profiles})

    add("Speedup", "before", _speedup)
    add("Step time", "steps", lambda each: _step_time(each, runs))
    add("Memory", "memory", memory_section)
    add("Throughput by size", "curve", curve_section)
    add("Data loading", "workers", workers_section)
    add("Promised and delivered", "confirm", confirm_section)
    add("Kernels", "kernels", kernels_section)
    parts.add("Sample lengths", "lengths", lengths_section(profiles, runs))
    add("Network", "network", network_section)
    add("Joint search", "explored", exploration_section)


def _add_appendix(appendix: _Parts, profiles: tuple[ReportedProfile, ...]) -> None:
    """Add the trials, the machine, and how to reproduce and approve the profiles."""
    appendix.add(
        "Trials",
        "trials",
        {reported.title: trials_section(reported) for reported in profiles},
    )
    machines = fingerprint_table(
        [reported.profile.fingerprint for reported in profiles],
        [reported.title for reported in profiles],
    )
    appendix.add("Machine", "machine", {_ALL_PROFILES: (machines,)})
    review = {
        reported.title: (*reproduction_blocks(reported), *approval_blocks(reported))
        for reported in profiles
    }
    # ``add`` would list a missing approval as not measured.
    appendix.sections.append(
        doc.Section(
            title="Reproduce and approve",
            key="reproduce",
            blocks=_side_by_side(review),
        )
    )


def _speedup(reported: ReportedProfile) -> Blocks:
    """Return the comparison with baselines without its charts.

    The first screen shows those.
    """
    return tuple(
        block
        for block in baseline_section(reported)
        if not isinstance(block, doc.Chart)
    )


def _step_time(reported: ReportedProfile, runs: tuple[ReportedRun, ...]) -> Blocks:
    """Return the bottleneck of a step, and the figures that are not known."""
    bottleneck = main_bottleneck(reported, runs)
    if bottleneck is None:
        commands = train_commands(reported)
        if not reported.profile.has_train:
            # A run of yours records no parts; the sweep measures their source.
            commands = (workers_command(reported.profile, reported.path),)
        return (doc.Missing(subject="The parts of a step's time", commands=commands),)
    unknown = [(f"Not known: {figure}.",) for figure in bottleneck.untold]
    return (doc.Bullets(items=(bottleneck_words(bottleneck), *unknown)),)


def _advice_cards(
    profiles: tuple[ReportedProfile, ...], runs: tuple[ReportedRun, ...]
) -> Blocks:
    """Return the recommendations; with their profile or run if there are several."""
    recommendations = _recommendations(profiles, runs)
    has_several = len({name for name, _ in recommendations}) > 1
    return tuple(
        _advice_card(advice, number, name if has_several else None)
        for number, (name, advice) in enumerate(recommendations, 1)
    )


def _recommendations(
    profiles: tuple[ReportedProfile, ...], runs: tuple[ReportedRun, ...]
) -> list[tuple[str, Advice]]:
    """Return advice with a gain or an urgent severity, the largest gain first.

    Each has the name of its profile or run. A profile and its runs often give the same
    recommendation, which is returned once.
    """
    candidates: list[tuple[str, Path, Advice]] = []
    for reported in profiles:
        for advice in reported.advice:
            candidates.append((reported.title, reported.path, advice))
    for run in runs:
        origin = run.profile_path or run.run.directory
        for advice in run.advice:
            candidates.append((run.name, origin, advice))
    worthwhile = [
        (name, origin, advice)
        for name, origin, advice in candidates
        if advice.gain is not None or advice.severity in URGENT
    ]
    worthwhile.sort(key=lambda candidate: rank(candidate[2]))
    first_by_target: dict[tuple[Path, tuple[str, ...]], tuple[str, Advice]] = {}
    for name, origin, advice in worthwhile:
        first_by_target.setdefault((origin, advice.target), (name, advice))
    return list(first_by_target.values())


def _advice_card(advice: Advice, number: int, name: str | None) -> doc.Section:
    """Return a recommendation as a section; ``name`` is its profile or run."""
    pairs: dict[str, doc.Words] = {}
    if advice.gain is not None:
        pairs["Gain"] = (gain_text(advice.gain),)
    if advice.changes:
        pairs["Change"] = _changes(advice)
    if advice.command is not None:
        pairs["Run"] = (doc.Code(text=advice.command),)
    pairs["Cost and risk"] = (doc.sentence(advice.cost),)
    if advice.evidence:
        figures = "; ".join(map(figure_text, advice.evidence))
        pairs["Evidence"] = (doc.sentence(figures),)
    pairs["What would change this"] = (doc.sentence(advice.would_change),)
    written = "written by --apply" if advice.safe else "not written by --apply"
    pairs["Rule"] = (doc.Code(text=advice.rule), f", {written}")
    subject = "" if name is None else f"{name}: "
    return doc.Section(
        title=f"{number}. {subject}{advice.claim}",
        key=f"advice-{number}",
        badge=advice.severity,
        blocks=(doc.Pairs(pairs=tuple(pairs.items())),),
    )


def _changes(advice: Advice) -> doc.Words:
    """Return the settings that advice changes, with their current values."""
    words: list[str | doc.Code | doc.Strong] = []
    for change in advice.changes:
        if words:
            words.append("; ")
        name = change.argument or change.key
        words.append(doc.Code(text=f"{name} = {format_setting(change.new)}"))
        words.append(f" (now {format_setting(change.old)})")
    return tuple(words)


def _side_by_side(blocks_by_profile: Mapping[str, Blocks]) -> Blocks:
    """Return the blocks of several profiles as one part of the page.

    There is a column for each profile, below which tables with the same headers are
    joined. Blocks of a single profile stay as they are.
    """
    if len(blocks_by_profile) == 1:
        return next(iter(blocks_by_profile.values()))
    present = [(title, blocks) for title, blocks in blocks_by_profile.items() if blocks]
    if len(present) == 1:
        title, blocks = present[0]
        return (_heading(title), *blocks)
    tables: dict[tuple[str, ...], list[tuple[str, doc.Table]]] = {}
    columns: list[Blocks] = []
    for title, blocks in present:
        column: list[doc.Block] = []
        for block in blocks:
            if isinstance(block, doc.Table):
                tables.setdefault(_join_key(block), []).append((title, block))
            elif isinstance(block, doc.Chart):
                column.append(replace(block, small=True))
            else:
                column.append(block)
        if column:
            columns.append((_heading(title), *column))
    joined = [_join_tables(group) for group in tables.values()]
    if not columns:
        return tuple(joined)
    return (doc.SideBySide(groups=tuple(columns)), *joined)


def _heading(title: str) -> doc.Paragraph:
    return doc.Paragraph(words=(doc.Strong(text=title),))


def _join_key(table: doc.Table) -> tuple[str, ...]:
    """Return a key that tables share if they can be joined.

    All tables of facts have the same headers, so that their captions count too.
    """
    caption = table.caption if table.headers == doc.FACTS else ""
    return (*table.headers, caption)


def _join_tables(tables: Sequence[tuple[str, doc.Table]]) -> doc.Table:
    """Return tables of several models, each with the model's name, as one.

    A table of facts gets a column for each model. Others get a column with the model's
    name.
    """
    first = tables[0][1]
    rows: list[Row] = []
    if first.headers != doc.FACTS:
        for title, table in tables:
            rows += [[title, *row] for row in table.rows]
        return replace(
            first,
            headers=("model", *first.headers),
            rows=tuple(rows),
            align="l" + first.align,
        )
    facts_by_table = [
        {str(name): value for name, value in table.rows} for _, table in tables
    ]
    names = dict.fromkeys(itertools.chain.from_iterable(facts_by_table))
    for name in names:
        rows.append([name, *(facts.get(name) for facts in facts_by_table)])
    titles = [title for title, _ in tables]
    return replace(first, headers=(doc.FACTS[0], *titles), rows=tuple(rows))


def report_facts(
    profiles: tuple[ReportedProfile, ...], runs: tuple[ReportedRun, ...]
) -> dict[str, Any]:
    """Return all facts of the document, with units in the names.

    A fact that is null was not measured, or is infinite.
    """
    from pydantic_core import to_jsonable_python

    missing = _evidence(profiles, runs).missing_sections()
    facts = {
        "schema_version": 3,
        "profiles": [_profile_facts(reported, runs) for reported in profiles],
        "missing": [
            {"section": title, "what": block.subject, "commands": block.commands}
            for title, block in missing
        ],
        "runs": [_run_facts(run, profile_of(run, profiles)) for run in runs],
    }
    finite: dict[str, Any] = to_jsonable_python(jsonable(facts), inf_nan_mode="null")
    return finite


def _profile_facts(
    reported: ReportedProfile, runs: Sequence[ReportedRun]
) -> dict[str, Any]:
    rows = cost_rows(reported.trials)
    spent_s = sum(row.rank_seconds for row in rows)
    return {
        "path": reported.path,
        "intact": reported.intact,
        "content_sha256": reported.content_sha256,
        "trial_log": reported.trial_log,
        "profile": reported.profile,
        "bottlenecks": reported.bottlenecks,
        "advice": reported.advice,
        "approval": reported.approval,
        "name": reported.title,
        "fill_share": fill_share(reported.profile),
        "tuned": _rate_facts(tuned_rate(reported.profile)),
        "quality": quality_of(reported),
        "cost": {"by_job": rows, "rank_seconds": spent_s},
        "pay_back": pay_back(spent_s, reported.profile.evidence.baseline),
        "dataset": _dataset_facts(reported),
        "dataset_lacking": (
            reported.dataset_lacking if reported.dataset is None else None
        ),
        "bottleneck": main_bottleneck(reported, runs),
        "recipe_changes": recipe_changes(reported),
        "trials": [
            {
                "label": finished.label,
                "job": finished.trial.job,
                "seconds": finished.seconds,
                "ranks": finished.trial.ranks,
                "outcome": asdict(finished.outcome),
            }
            for finished in reported.trials
        ],
        "corrupt_trial_log_lines": reported.corrupt_lines,
        "commands": tuning_commands(reported),
    }


def _dataset_facts(reported: ReportedProfile) -> dict[str, Any] | None:
    manifest = reported.dataset
    if manifest is None:
        return None
    histogram = manifest.train.length_histogram
    spread = LengthDistribution(edges=histogram.edges, counts=histogram.counts)
    seq_length_tokens = reported.profile.train.seq_length_tokens
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


def _run_facts(
    reported: ReportedRun, profile: ReportedProfile | None
) -> dict[str, Any]:
    run = reported.run
    events = needs_attention(run)
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
        "achieved": _rate_facts(run_rate(run)),
        "expected_and_achieved": drifts_of(profile, reported),
        "loss": loss_points(run),
        "evaluation": run.evaluations[-1] if run.evaluations else None,
        "events": events[-MOST_EVENTS:],
        "earlier_events": max(0, len(events) - MOST_EVENTS),
        "bottlenecks": reported.bottlenecks,
        "advice": reported.advice,
    }


def _rate_facts(rate: Rate | None) -> dict[str, Any] | None:
    if rate is None:
        return None
    return {
        **jsonable(rate.interval),
        "value": rate.value,
        "known": rate.known,
        "ranks": rate.ranks,
        "source": rate.source,
    }

"""The document of a report: all sections in order, the answer first; and the same facts for machines."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

from autotune.advice.decide.rules import rank
from autotune.advice.sections import gain_text, in_unit
from autotune.advice.values import Advice
from autotune.base.document import (
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
    plain,
    sentence,
    table_of,
)
from autotune.base.interval import SHOWN_CONFIDENCE, Interval
from autotune.base.units import format_count, format_share
from autotune.base.wording import bounds_with_confidence, count, listed, plural, setting_text, with_interval
from autotune.baseline.decide.pay_back import cost_rows, pay_back
from autotune.baseline.sections import baseline_section, cost_section
from autotune.baseline.values import RecipeRow, row_of
from autotune.corpus.sections import lengths_section
from autotune.corpus.values import LengthDistribution
from autotune.memory.sections import curve_section, memory_section
from autotune.network.sections import network_section
from autotune.profiles.decide.batch_split import split_global_batch
from autotune.profiles.decide.follow_up import probe_first
from autotune.profiles.decide.rates import Rate, run_rate, tuned_rate
from autotune.profiles.sections import commands, global_batch_words, machine, reproduce, sign_off
from autotune.profiles.values import Profile, fill_share
from autotune.report.runs import (
    CAUSES,
    MOST_EVENTS,
    drifts_of,
    loss_points,
    needs_attention,
    profile_of,
    runs,
    runs_only,
    steps,
)
from autotune.report.values import ReportedProfile, ReportedRun, part_of_each
from autotune.search.sections import exploration_section
from autotune.trials.sections import trials_section
from autotune.workers.sections import chosen_loader, workers_section

SCHEMA_VERSION = 3


def report_document(profiles: tuple[ReportedProfile, ...], reported: tuple[ReportedRun, ...]) -> Document:
    """Return the whole report; each missing part names the command that would measure it.

    Raises:
        ValueError: If there is no profile.
    """
    if not profiles:
        raise ValueError("a report needs a profile")

    def of_each(
        title: str,
        key: str,
        make: Callable[[ReportedProfile], tuple[Block, ...]],
        *more: Block,
        first: tuple[Block, ...] = (),
    ) -> Section:
        return Section(title=title, key=key, blocks=(*first, *part_of_each(profiles, key, make), *more))

    known = {one.path for one in profiles}
    others = runs_only([run for run in reported if run.profile_path not in known])
    beside = profiles_table([one.profile for one in profiles], [one.title for one in profiles])
    several = (replace(beside, caption="All profiles"),) if len(profiles) > 1 else ()
    measured = (
        of_each("The answer", "answer", lambda one: _answer(one, reported), first=several),
        of_each("Before and after", "before", baseline_section),
        of_each("What the tuning cost", "cost", cost_section),
        of_each("Memory", "memory", memory_section),
        of_each("Throughput by micro-batch", "curve", curve_section),
        of_each("Settings searched together", "explored", exploration_section),
        of_each("Loader workers", "workers", workers_section),
        of_each("Scaling and network", "network", network_section),
        of_each("Where a step's time goes", "steps", lambda one: steps(one, reported), *others),
        Section(title="Lengths and packing", key="lengths", blocks=lengths_section(profiles, reported)),
    )
    later = (
        Section(title="Changes of the recipe", key="recipe", blocks=_recipe(profiles, reported)),
        Section(title="Training runs: expected and achieved", key="runs", blocks=runs(profiles, reported)),
        of_each("Every trial", "trials", trials_section),
        Section(title="The machine", key="machine", blocks=machine(profiles)),
        of_each("How to reproduce it", "reproduce", reproduce),
        of_each("Sign-off", "sign-off", sign_off),
    )
    advice = _recommendations(profiles, reported, (*measured, *later))
    names = listed(list(dict.fromkeys(one.name for one in profiles)), "models")
    return Document(
        title=f"Tuning report: {names}",
        subtitle=_subtitle(profiles),
        sections=(*measured, Section(title="Recommendations", key="advice", blocks=advice), *later),
    )


def _answer(one: ReportedProfile, runs: tuple[ReportedRun, ...]) -> tuple[Block, ...]:
    """Return the chosen settings, the throughput and the bottleneck."""
    pairs = (("Set", _settings(one)), ("It yields", _yield(one)), ("What limits it", _limit(one, runs)))
    return (Pairs(pairs=pairs),)


def _settings(one: ReportedProfile) -> Words:
    train, workers = one.profile.train, one.profile.evidence.workers
    tokens = global_batch_words(one.profile.constraints.global_batch_tokens)
    said = (
        f" of {train.seq_length_tokens} tokens, {train.layout}, {train.precision}; global batch "
        f"{plural(train.global_batch_size, 'row')}, {tokens}; "
    )
    loader = chosen_loader(workers) if workers else str(train.data.num_workers)
    doubt = ""
    if workers is None:
        doubt = " (not measured)"
    elif workers.undecided_between:
        doubt = f" (undecided between {' and '.join(map(str, workers.undecided_between))})"
    parallel = train.parallel
    gradient_sync = f"{parallel.strategy}, {parallel.gradient_dtype} gradients, {parallel.bucket_cap_mib} MiB buckets"
    network = gradient_sync if one.profile.evidence.network is not None else f"{gradient_sync} (not measured)"
    return (
        Strong(text=f"micro-batch {plural(train.micro_batch_size, 'row')}"),
        said,
        Strong(text=f"loader workers {loader}"),
        f"{doubt}; exchange {network}. All of it stands in ",
        Code(text=str(one.path)),
        ".",
    )


def _yield(one: ReportedProfile) -> Words:
    rate = tuned_rate(one.profile)
    if rate is None:
        command = next(iter(probe_first(one.profile, one.path)), f"autotune baseline {one.quoted}")
        return ("not measured: ", Code(text=command))
    evidence, stale = one.profile.evidence, ""
    advised = "advise" in one.profile.provenance.commands and evidence.workers is None and evidence.baseline is None
    if not one.intact:
        stale = " The profile was edited by hand since: this is what it yielded before."
    elif advised:
        stale = " Advice has changed the step since: this is what it yielded before."
    network = evidence.network
    useful = "" if network is None or network.useful_nodes is None else (
        f" Up to {plural(network.useful_nodes, 'node')} are useful at this global batch (predicted)."
    )  # fmt: skip
    return (
        Strong(text=f"{with_interval(rate.interval, count)} real tokens/s"),
        f" on {plural(rate.ranks, 'rank')}, {rate.known}: {rate.source}.{stale}{useful}",
    )


def _limit(one: ReportedProfile, runs: tuple[ReportedRun, ...]) -> Words:
    """Return the bottleneck, from training runs if possible or else from the tuning, and the first change to make."""
    own = [run for run in runs if run.profile_path == one.path]
    found = next((found for run in own for found in run.bottlenecks), next(iter(one.bottlenecks), None))
    given = [*one.advice, *(advice for run in own for advice in run.advice)]
    advice = next((advice for advice in given if advice.severity != "info"), None)
    first: Words = ("No change is known to pay.",)
    if advice is not None:
        command: Words = () if advice.command is None else (" ", Code(text=advice.command))
        first = ("First: ", advice.claim.rstrip("."), ".", *command)
    if found is None:
        return ("not measured: the parts of a step are read from a training run. ", *first)
    part = found.part(found.limit)
    share = ""
    if part is not None:
        known = Interval.of(part.share, part.low, part.high, SHOWN_CONFIDENCE)
        share = f", {with_interval(known, format_share)} of a step"
    decided = "" if found.decided else "; the interval leaves it open"
    return (Strong(text=CAUSES[found.limit]), f"{share} ({found.source}){decided}. ", *first)


def _subtitle(profiles: tuple[ReportedProfile, ...]) -> str:
    first = profiles[0].profile
    place = first.fingerprint.gpu_name or first.fingerprint.cpu_model or first.fingerprint.device
    several = f"{first.fingerprint.gpu_count} GPUs: " if first.fingerprint.gpu_count > 1 else ""
    pretended = [one.title for one in profiles if one.profile.fingerprint.bytes_known == "allocator"]
    measured_words = (
        " All figures are measured unless they are called predicted; intervals say how far noise reaches, and with "
        "which confidence."
    )
    allocator_words = (
        f" Nothing of {listed(pretended, 'profiles')} was measured on a GPU: it is a pretended one, and memory is that "
        "of torch's allocator."
    )
    return (
        f"{several}{place}, torch {first.fingerprint.torch}, {first.provenance.created_utc}."
        f"{measured_words if len(pretended) < len(profiles) else ''}{allocator_words if pretended else ''}"
    )


def _recommendations(
    profiles: tuple[ReportedProfile, ...], runs: tuple[ReportedRun, ...], sections: tuple[Section, ...]
) -> tuple[Block, ...]:
    """Return all advice, the largest gain first, and then what was not measured."""
    given = [(one.title, advice) for one in profiles for advice in one.advice]
    given += [(run.name, advice) for run in runs for advice in run.advice]
    given.sort(key=lambda one: rank(one[1]))
    several = len({name for name, _ in given}) > 1
    cards = tuple(_card(name if several else None, advice, number) for number, (name, advice) in enumerate(given, 1))
    nothing = Paragraph(words=("Nothing to recommend: by what was measured, no change is known to pay.",))
    return (*(cards or (nothing,)), *_unmeasured(sections))


def _card(about: str | None, advice: Advice, number: int) -> Section:
    pairs: list[tuple[str, Words]] = [("Gain", (gain_text(advice.gain),)), ("Cost and risk", (sentence(advice.cost),))]
    changes: list[str | Code] = []
    for change in advice.changes:
        setting = Code(text=f"{change.key} = {setting_text(change.new)}")
        changes += ["; " if changes else "", setting, f" (now {setting_text(change.old)})"]
    if changes:
        pairs.append(("Change", tuple(changes)))
    if advice.command is not None:
        pairs.append(("Run", (Code(text=advice.command),)))
    pairs.append(("What would change this", (sentence(advice.would_change),)))
    applied = "written by --apply" if advice.safe else "not written by --apply"
    pairs.append(("Rule", (Code(text=advice.rule), f", {applied}")))
    evidence = table_of(
        f"Evidence of {advice.rule}", [(figure, *in_unit(figure.unit)) for figure in advice.evidence],
        ("evidence", "l", lambda one: one[0].name),
        ("figure", "r", lambda one: f"{one[1](one[0].value)}{one[2]}"),
        ("interval", "r", lambda one: bounds_with_confidence(one[0], one[1])),
        ("n", "r", lambda one: None if one[0].n is None else str(one[0].n)),
        ("known", "l", lambda one: one[0].known),
        ("source", "l", lambda one: one[0].source),
    )  # fmt: skip
    return Section(
        title=f"{number}. {f'{about}: ' if about else ''}{advice.claim}",
        key=f"advice-{number}",
        badge=advice.severity,
        blocks=(*((evidence,) if advice.evidence else ()), Pairs(pairs=tuple(pairs))),
    )


def _unmeasured(sections: tuple[Section, ...]) -> tuple[Block, ...]:
    """Return every missing part of the report, grouped by its command: one often measures several."""
    by_command: dict[tuple[str | None, str], list[tuple[str, str]]] = {}
    for section in sections:
        for block in blocks_of(Document(title="", subtitle="", sections=(section,))):
            if isinstance(block, Missing):
                for command in block.commands or (None,):
                    alone = block.what if command is None else ""
                    by_command.setdefault((command, alone), []).append((section.title, block.what))
    if not by_command:
        return ()
    table = table_of(
        "What is missing", by_command.items(),
        ("section", "l", lambda one: "; ".join(dict.fromkeys(title for title, _ in one[1]))),
        ("what is missing", "l", lambda one: "; ".join(dict.fromkeys(what for _, what in one[1]))),
        ("what would change that", "l", lambda one: one[0][0]),
        long=len(by_command) > LONG_TABLE_ROWS,
    )  # fmt: skip
    return (Section(title="What is missing", key="missing", blocks=(table,)),)


def _recipe(profiles: tuple[ReportedProfile, ...], runs: tuple[ReportedRun, ...]) -> tuple[Block, ...]:
    """Return the changes to the model's recipe and to 32-bit gradients, which gained speed at a price."""
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
    """Return a profile's changes to the recipe."""
    train, network = one.profile.train, one.profile.evidence.network
    changes = []
    if train.attention_dropout is not None:
        changes.append(f"attention dropout is {train.attention_dropout:g} instead of the model's own")
    if train.parallel.gradient_dtype != "fp32":
        equal = "" if network is None or network.equal_loss is None else f"; equal loss: {network.equal_loss}"
        changes.append(f"gradients travel as {train.parallel.gradient_dtype} instead of fp32{equal}")
    return changes


def report_facts(
    profiles: Sequence[ReportedProfile], reported: Sequence[ReportedRun], document: Document
) -> dict[str, Any]:
    """Return all facts of the document, with units in the names; what was not measured, or is infinite, is null."""
    from pydantic_core import to_jsonable_python

    missing = [
        {"section": section.title, "what": block.what, "commands": block.commands}
        for section in document.sections
        for block in blocks_of(section)
        if isinstance(block, Missing)
    ]
    said = {
        "schema_version": SCHEMA_VERSION,
        "profiles": [_profile(one) for one in profiles],
        "missing": missing,
        "runs": [_run(profile_of(run, profiles), run) for run in reported],
    }
    facts: dict[str, Any] = to_jsonable_python(plain(said), inf_nan_mode="null")
    return facts


def _profile(one: ReportedProfile) -> dict[str, Any]:
    rows = cost_rows(one.trials)
    spent_s = sum(row.rank_seconds for row in rows)
    return {
        "name": one.title,
        "path": one.path,
        "intact": one.intact,
        "content_sha256": one.content_sha256,
        "trial_log": one.trial_log,
        "profile": one.profile,
        "fill_share": fill_share(one.profile),
        "tuned": _rate(tuned_rate(one.profile)),
        "cost": {"by_job": rows, "rank_seconds": spent_s},
        "pay_back": pay_back(spent_s, one.profile.evidence.baseline),
        "dataset": _dataset(one),
        "dataset_lacking": None if one.dataset is not None else one.dataset_lacking,
        "bottlenecks": one.bottlenecks,
        "advice": one.advice,
        "recipe_changes": profile_changes(one),
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
        "commands": commands(one),
        "approval": one.approval,
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
    more = {"value": rate.value, "known": rate.known, "ranks": rate.ranks, "source": rate.source}
    return {**plain(rate.interval), **more}


def profiles_table(profiles: Sequence[Profile], names: Sequence[str]) -> Table:
    """Return each profile's settings and speedups side by side; what was not measured is missing."""
    return table_of(
        "", zip(names, profiles, strict=True),
        ("model", "l", lambda one: one[0]),
        ("fits (rows)", "r", lambda one: f"{found.feasible_max:,}" if (found := one[1].evidence.probe) else None),
        ("a step", "l", lambda one: _step(one[1])),
        ("loader workers", "r", lambda one: str(found.chosen) if (found := one[1].evidence.workers) else None),
        ("real tokens/s", "r", lambda one: _speed(row_of(one[1].evidence.baseline, "tuned"))),
        ("against HF Trainer", "r", lambda one: _times(row_of(one[1].evidence.baseline, "hf-trainer"))),
        ("against paper", "r", lambda one: _times(row_of(one[1].evidence.baseline, "paper"))),
    )  # fmt: skip


def _step(profile: Profile) -> str:
    train, ranks = profile.train, 1 if profile.evidence.probe is None else profile.evidence.probe.local_ranks
    split = split_global_batch(train.global_batch_size, train.micro_batch_size, ranks)
    return f"{split.gradient_accumulation_steps} x {split.micro_batch_size} rows" + (
        f" x {ranks} ranks" if ranks > 1 else ""
    )


def _speed(row: RecipeRow | None) -> str | None:
    return format_count(statistics.median(row.tokens_per_s)) if row and row.tokens_per_s else None


def _times(row: RecipeRow | None) -> str | None:
    return None if row is None or row.speedup is None else f"{row.speedup:.2f} x"

"""The same report for machines: numbers as they were measured or computed, not as they are shown."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from autotune.core.dataset import LengthDistribution
from autotune.decide.cost import cost_rows, pay_back, ranks_of
from autotune.decide.rates import Rate, run_rate, tuned_rate
from autotune.show.answers import plain
from autotune.show.document import Document, Missing, blocks_of
from autotune.show.profile import commands
from autotune.show.report.build import profile_changes
from autotune.show.report.inputs import ReportedProfile, ReportedRun
from autotune.show.report.runs import MOST_EVENTS, drifts_of, loss_points, needs_attention, profile_of

SCHEMA_VERSION = 2


def report_facts(
    profiles: Sequence[ReportedProfile], reported: Sequence[ReportedRun], document: Document
) -> dict[str, Any]:
    """Everything the document is built from, units in the names; what was not measured, or is infinite, is null."""
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
        "ledger": one.ledger,
        "profile": one.profile,
        "fill_share": one.fill_share,
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
                "ranks": ranks_of(done.trial.measured),
                "outcome": asdict(done.outcome),
            }
            for done in one.trials
        ],
        "damaged_ledger_lines": one.damaged_lines,
        "commands": commands(one),
        "standing": one.standing,
    }


def _dataset(one: ReportedProfile) -> dict[str, Any] | None:
    manifest = one.dataset
    if manifest is None:
        return None
    histogram = manifest.train.length_histogram
    spread = LengthDistribution(edges=histogram.edges, counts=histogram.counts)
    row_tokens = one.profile.train.seq_length_tokens
    return {
        "dataset_hash": manifest.dataset_hash,
        "train_samples": manifest.train.samples,
        "train_tokens": manifest.train.tokens,
        "validation_samples": manifest.validation.samples,
        "vocab_size": manifest.vocab_size,
        "used_vocab_size": manifest.used_vocab_size,
        "length_histogram": histogram,
        "source": manifest.source,
        "row_tokens": row_tokens,
        "mean_tokens": spread.mean_tokens(),
        "padding_waste_share": spread.padding_waste(row_tokens),
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

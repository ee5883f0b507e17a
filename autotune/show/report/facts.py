"""The same report for machines: numbers as they were measured or computed, not as they are shown."""

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Literal

from autotune.core.dataset import LengthDistribution
from autotune.decide.cost import cost_rows, pay_back, ranks_of
from autotune.decide.rates import Rate, run_rate, tuned_rate
from autotune.show.answers import plain
from autotune.show.document import Document, Missing, blocks_of
from autotune.show.profile import commands
from autotune.show.report.inputs import ReportedProfile, ReportedRun
from autotune.show.report.recommendations import profile_changes
from autotune.show.report.runs import MOST_EVENTS, drifts_of, loss_points, needs_attention, profile_of

SCHEMA_VERSION: Literal[2] = 2


def report_facts(
    profiles: Sequence[ReportedProfile], reported: Sequence[ReportedRun], document: Document
) -> dict[str, Any]:
    """Everything the document is built from, units in the names; what was not measured is null."""
    facts: dict[str, Any] = _finite(
        {
            "schema_version": SCHEMA_VERSION,
            "profiles": [_profile(one) for one in profiles],
            "missing": [
                {"section": section.title, "what": block.what, "commands": list(block.commands)}
                for section in document.sections
                for block in blocks_of(section)
                if isinstance(block, Missing)
            ],
            "runs": [_run(profile_of(run, profiles), run) for run in reported],
        }
    )
    return facts


def _finite(value: Any) -> Any:  # noqa: ANN401 - any JSON value
    """JSON knows no infinity, which files of others may hold: there is no such figure."""
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _profile(one: ReportedProfile) -> dict[str, Any]:
    rows = cost_rows(one.trials)
    spent_s = sum(row.rank_seconds for row in rows)
    return {
        "name": one.title,
        "path": str(one.path),
        "intact": one.intact,
        "content_sha256": one.content_sha256,
        "ledger": plain(one.ledger),
        "profile": one.profile.model_dump(mode="json"),
        "fill_share": one.fill_share,
        "tuned": _rate(tuned_rate(one.profile)),
        "cost": {"by_job": [plain(row) for row in rows], "rank_seconds": spent_s},
        "pay_back": plain(pay_back(spent_s, one.profile.evidence.baseline)),
        "dataset": _dataset(one),
        "dataset_lacking": None if one.dataset is not None else one.dataset_lacking,
        "bottlenecks": [plain(found) for found in one.bottlenecks],
        "advice": [plain(advice) for advice in one.advice],
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
        "standing": plain(one.standing),
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
        "length_histogram": histogram.model_dump(mode="json"),
        "source": manifest.source.model_dump(mode="json"),
        "row_tokens": row_tokens,
        "mean_tokens": spread.mean_tokens(),
        "padding_waste_share": spread.padding_waste(row_tokens),
    }


def _run(one: ReportedProfile | None, reported: ReportedRun) -> dict[str, Any]:
    run = reported.run
    told = needs_attention(run)
    return {
        "name": reported.name,
        "directory": str(run.directory),
        "profile": None if reported.profile_path is None else str(reported.profile_path),
        "matched_by": reported.matched_by,
        "header": run.header.model_dump(mode="json"),
        "startup": None if run.startup is None else run.startup.model_dump(mode="json"),
        "end": None if run.end is None else run.end.model_dump(mode="json"),
        "steps": len(run.steps),
        "first_step": run.steps[0].model_dump(mode="json") if run.steps else None,
        "last_step": run.steps[-1].model_dump(mode="json") if run.steps else None,
        "achieved": _rate(run_rate(run)),
        "expected_and_achieved": [plain(drift) for drift in drifts_of(one, reported)],
        "loss": [plain(point) for point in loss_points(run)],
        "evaluation": run.evaluations[-1].model_dump(mode="json") if run.evaluations else None,
        "events": [event.model_dump(mode="json") for event in told[-MOST_EVENTS:]],
        "earlier_events": max(0, len(told) - MOST_EVENTS),
        "bottlenecks": [plain(found) for found in reported.bottlenecks],
        "advice": [plain(advice) for advice in reported.advice],
    }


def _rate(rate: Rate | None) -> dict[str, Any] | None:
    if rate is None:
        return None
    return {
        **plain(rate.interval),
        "value": rate.value,
        "known": rate.known,
        "ranks": rate.ranks,
        "source": rate.source,
    }

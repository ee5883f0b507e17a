"""Answers of ``autotune probe``, as JSON and as text."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from autotune.base import document as doc
from autotune.base.answer_json import jsonable
from autotune.base.document import table_of
from autotune.base.render_console import console_text
from autotune.base.units import format_bytes, format_count, format_seconds
from autotune.memory.sections.size_reasons import reasons_of
from autotune.profiles.decide.follow_up import command
from autotune.profiles.store import WrittenProfile


def probe_answer(probed: WrittenProfile) -> dict[str, Any]:
    """Return the JSON of one model: evidence, path of its profile, and every trial."""
    profile = probed.profile
    trials = [
        {
            "micro_batch_size": finished.trial.config["micro_batch_size"],
            "label": finished.label,
            "seconds": round(finished.seconds, 3),
            "from_trial_log": finished.from_trial_log,
            "outcome": finished.outcome,
        }
        for finished in probed.trials
    ]
    return {
        "model": profile.train.model.name,
        "profile": probed.path,
        "micro_batch_size": profile.train.micro_batch_size,
        "global_batch_size": profile.train.global_batch_size,
        "memory_budget_bytes": profile.constraints.memory_budget_bytes,
        "bytes_known": profile.fingerprint.bytes_known,
        **jsonable(probed.probe),
        "trials": trials,
    }


def probe_text(probed: Sequence[WrittenProfile], data: Path) -> str:
    """Return the text about probed models.

    It begins with a table, which has a line for each model. Then come the reasons for
    each micro-batch size, the paths of profiles, and the commands to run next.
    """
    table = table_of(
        "",
        probed,
        ("model", "l", lambda model: model.profile.train.model.name),
        ("parameters", "r", lambda model: _millions(model.probe.parameters)),
        ("max micro-batch", "r", _largest),
        (
            "out of memory at",
            "r",
            lambda model: _number_or_none(model.probe.infeasible_min),
        ),
        ("micro-batch", "r", lambda model: str(model.profile.train.micro_batch_size)),
        ("tokens/s incl. padding", "r", _expected_rate),
        (
            "peak memory",
            "r",
            lambda model: format_bytes(model.probe.feasible_peak_bytes),
        ),
        ("predicted", "r", _predicted_peak),
        ("trials", "r", lambda model: str(model.probe.search_trials)),
        ("time", "r", lambda model: format_seconds(model.probe.seconds)),
    )
    reasons: list[tuple[str, doc.Words]] = []
    paths: list[tuple[str, doc.Words]] = []
    next_commands: list[tuple[str, doc.Words]] = []
    for model in probed:
        name = model.profile.train.model.name
        reasons += [(name, (reason,)) for reason in reasons_of(model.profile)]
        previous = f" (previous one: {model.previous})" if model.previous else ""
        paths.append(("profile", (f"{model.path}{previous}",)))
        next_commands.append(("next", (command("workers", model.path, data=data),)))
    return console_text((table, doc.Pairs(pairs=(*reasons, *paths, *next_commands))))


def _millions(parameters: int | None) -> str | None:
    return f"{parameters / 1e6:.1f} M" if parameters else None


def _largest(probed: WrittenProfile) -> str:
    """Return the largest micro-batch that ran, marked if more may fit."""
    sign = "≥ " if probed.probe.is_lower_bound else ""
    return f"{sign}{probed.probe.feasible_max}"


def _number_or_none(number: int | None) -> str | None:
    return str(number) if number else None


def _expected_rate(probed: WrittenProfile) -> str | None:
    """Return the throughput to expect of the chosen micro-batch, in tokens/s."""
    size = probed.profile.train.micro_batch_size
    expected = probed.probe.expected_throughput(size)
    return format_count(expected.units_per_s if expected else None)


def _predicted_peak(probed: WrittenProfile) -> str | None:
    """Return the peak memory that the trace predicted, or else smaller trials."""
    evidence = probed.probe
    return format_bytes(evidence.traced_peak_bytes or evidence.predicted_peak_bytes)

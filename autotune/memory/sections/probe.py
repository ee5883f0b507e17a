"""Answers of ``autotune probe``, as JSON and as text."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.base import document as doc
from autotune.base.document import jsonable, table_of
from autotune.base.render_console import console_text
from autotune.base.units import format_bytes, format_count, format_seconds
from autotune.base.wording import plural
from autotune.memory.values import LOWER_BOUND, ProbeEvidence
from autotune.profiles.decide.batch_split import SPLIT_FACTORS, split_global_batch
from autotune.profiles.decide.follow_up import command
from autotune.profiles.sections import global_batch_words
from autotune.profiles.values import Profile
from autotune.trials.values import FinishedTrial
from trainer.config.train_config import TrainConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbedModel:
    """A probed model: its profile, and every trial."""

    path: Path
    """Path of the profile."""
    profile: Profile
    trials: tuple[FinishedTrial, ...]
    """Trials in their order, with those that an earlier probe recorded."""
    previous: Path | None
    """Path to which the previous profile was moved; None if there was none."""

    @property
    def evidence(self) -> ProbeEvidence:
        """Evidence that the probe put into the profile."""
        assert self.profile.evidence.probe is not None
        return self.profile.evidence.probe


def probe_answer(probed: ProbedModel) -> dict[str, Any]:
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
        **jsonable(probed.evidence),
        "trials": trials,
    }


def probe_text(probed: list[ProbedModel], data: Path) -> str:
    """Return the text about probed models.

    It begins with a table, which has a line for each model. Then come the reasons for
    each micro-batch size, the paths of profiles, and the commands to run next.
    """
    table = table_of(
        "",
        probed,
        ("model", "l", lambda model: model.profile.train.model.name),
        ("parameters", "r", lambda model: _millions(model.evidence.parameters)),
        ("max micro-batch", "r", _largest),
        (
            "out of memory at",
            "r",
            lambda model: _number_or_none(model.evidence.infeasible_min),
        ),
        ("micro-batch", "r", lambda model: str(model.profile.train.micro_batch_size)),
        ("tokens/s incl. padding", "r", _expected_rate),
        (
            "peak memory",
            "r",
            lambda model: format_bytes(model.evidence.feasible_peak_bytes),
        ),
        ("predicted", "r", _predicted_peak),
        ("trials", "r", lambda model: str(model.evidence.search_trials)),
        ("time", "r", lambda model: format_seconds(model.evidence.seconds)),
    )
    reasons: list[tuple[str, doc.Words]] = []
    written: list[tuple[str, doc.Words]] = []
    following: list[tuple[str, doc.Words]] = []
    for model in probed:
        name = model.profile.train.model.name
        reasons += [(name, (reason,)) for reason in reasons_of(model.profile)]
        previous = f" (previous one: {model.previous})" if model.previous else ""
        written.append(("profile", (f"{model.path}{previous}",)))
        following.append(("next", (command("workers", model.path, data=data),)))
    return console_text((table, doc.Pairs(pairs=(*reasons, *written, *following))))


def _millions(parameters: int | None) -> str | None:
    return f"{parameters / 1e6:.1f} M" if parameters else None


def _largest(probed: ProbedModel) -> str:
    """Return the largest micro-batch that ran, marked if more may fit."""
    sign = "≥ " if probed.evidence.is_lower_bound else ""
    return f"{sign}{probed.evidence.feasible_max}"


def _number_or_none(number: int | None) -> str | None:
    return str(number) if number else None


def _expected_rate(probed: ProbedModel) -> str | None:
    """Return the throughput to expect of the chosen micro-batch, in tokens/s."""
    size = probed.profile.train.micro_batch_size
    expected = probed.evidence.expected_throughput(size)
    return format_count(expected.padded_tokens_per_s if expected else None)


def _predicted_peak(probed: ProbedModel) -> str | None:
    """Return the peak memory that the trace predicted, or else smaller trials."""
    evidence = probed.evidence
    return format_bytes(evidence.traced_peak_bytes or evidence.predicted_peak_bytes)


def reasons_of(profile: Profile) -> Iterator[str]:
    """Yield sentences on the micro-batch size of a probed profile.

    They are the reason for the size, the knee of the throughput curve, the split of the
    global batch, and warnings about the probe.
    """
    probe = profile.evidence.probe
    assert probe is not None
    yield probe.choice
    if probe.knee_micro_batch_sizes and probe.curve:
        low = min(probe.knee_micro_batch_sizes)
        high = max(probe.knee_micro_batch_sizes)
        knee = plural(high, "sequence")
        if low == high:
            yield f"throughput levels off at {knee}"
        else:
            yield f"throughput levels off between {low} and {knee}"
    yield batch_split_words(profile.train, probe.local_ranks)
    yield (
        "each optimizer step has"
        f" {global_batch_words(profile.constraints.global_batch_tokens)}"
    )
    if probe.is_lower_bound:
        yield (
            f"{LOWER_BOUND}: time ended before the limit was verified; for the largest"
            " size, run the same command with a longer --time-limit"
        )
    elif probe.infeasible_min is None:
        yield (
            f"more may fit: sizes above {probe.feasible_max} were not tried"
            " (--max-micro-batch-size)"
        )
    if profile.fingerprint.bytes_known == "allocator":
        yield (
            "pretended GPU: memory is that of torch's allocator, and throughput was not"
            " measured"
        )
    if probe.not_traced:
        yield f"no memory prediction: {probe.not_traced}"


def batch_split_words(train: TrainConfig, local_ranks: int) -> str:
    """Return the split of the global batch in words.

    If sequences of the split stay empty, name global batches that avoid it.
    """
    split = split_global_batch(
        train.global_batch_size, train.micro_batch_size, local_ranks
    )
    words = f"global batch of {split.words(local_ranks)} ({SPLIT_FACTORS})"
    if split.empty_sequences:
        without_empty = " or ".join(map(str, split.without_empty))
        words += (
            f"; {plural(split.empty_sequences, 'sequence')} empty, none with a global"
            f" batch of {without_empty}"
        )
    return words

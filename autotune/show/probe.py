"""What a probe found, as text and as JSON."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.core.evidence import ProbeEvidence
from autotune.core.profile import Profile
from autotune.core.trial import FinishedTrial
from autotune.core.units import format_bytes, format_count, format_seconds
from autotune.show.answers import plain
from autotune.show.dealing import dealing_words
from autotune.show.tables import text_table


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbedModel:
    """One probed model: its profile, where that lies, and every trial."""

    path: Path
    profile: Profile
    trials: tuple[FinishedTrial, ...]
    previous: Path | None
    """Where the profile that lay there before was kept."""

    @property
    def evidence(self) -> ProbeEvidence:
        """What the probe put into the profile."""
        assert self.profile.evidence.probe is not None
        return self.profile.evidence.probe


def probe_answer(one: ProbedModel) -> dict[str, Any]:
    """The JSON of one model: what the probe found, where that was written, and every trial."""
    train = one.profile.train
    return {
        "model": train.model.name,
        "profile": one.path,
        "micro_batch_rows": train.micro_batch_rows,
        "global_batch_rows": train.global_batch_rows,
        "memory_budget_bytes": one.profile.constraints.memory_budget_bytes,
        "bytes_known": one.profile.fingerprint.bytes_known,
        **plain(one.evidence),
        "trials": [
            {
                "rows": done.trial.measured["config"]["micro_batch_rows"],
                "label": done.label,
                "seconds": round(done.seconds, 3),
                "from_ledger": done.from_ledger,
                "outcome": done.outcome,
            }
            for done in one.trials
        ],
    }


def probe_text(probed: list[ProbedModel], data: Path) -> str:
    """The answer for people: one line per model, why, where it was written, and what to run next."""
    headers = (
        "model",
        "parameters",
        "fits (rows)",
        "refused (rows)",
        "used (rows)",
        "tokens/s",
        "peak",
        "predicted",
        "trials",
        "time",
    )
    table = text_table(headers, [_row(one) for one in probed], align="lrrrrrrrrr")
    reasons = [line for one in probed for line in _reasons(one)]
    written = [f"profile: {one.path}" + (f" (the old one: {one.previous})" if one.previous else "") for one in probed]
    following = [f"next: autotune workers --profile {one.path} --data {data}" for one in probed]
    return "\n".join([table, "", *reasons, "", *written, *following])


def _reasons(one: ProbedModel) -> list[str]:
    name, evidence, train = one.profile.train.model.name, one.evidence, one.profile.train
    lines = [f"{name}: {evidence.choice}"]
    if len(set(evidence.knee_rows)) > 1:
        lines.append(f"{name}: the knee lies between {evidence.knee_rows[0]} and {evidence.knee_rows[1]} rows")
    lines.append(f"{name}: {dealing_words(train, evidence.local_ranks)}")
    if evidence.infeasible_min is None:
        lines.append(f"{name}: more may fit: nothing above {evidence.feasible_max} rows was tried (--max-rows)")
    if one.profile.fingerprint.bytes_known == "allocator":
        lines.append(f"{name}: a pretended GPU: sizes are those of torch's allocator, and nothing was timed")
    if evidence.not_traced:
        lines.append(f"{name}: not predicted beforehand: {evidence.not_traced}")
    return lines


def _row(one: ProbedModel) -> list[str | None]:
    evidence = one.evidence
    used = evidence.promised(one.profile.train.micro_batch_rows)
    return [
        one.profile.train.model.name,
        None if evidence.parameters is None else f"{evidence.parameters / 1e6:.1f} M",
        str(evidence.feasible_max),
        None if evidence.infeasible_min is None else str(evidence.infeasible_min),
        str(one.profile.train.micro_batch_rows),
        format_count(None if used is None else used.slot_tokens_per_s),
        format_bytes(evidence.feasible_peak_bytes),
        format_bytes(evidence.traced_peak_bytes or evidence.predicted_peak_bytes),
        str(evidence.search_trials),
        format_seconds(evidence.seconds),
    ]

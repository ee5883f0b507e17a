"""Profiles that an estimate wrote, as text: what they say, where they lie, and that nothing in them was measured."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from autotune.core.evidence import EstimateEvidence
from autotune.core.profile import Profile
from autotune.core.units import format_count
from autotune.show.dealing import dealing_words
from autotune.show.tables import inert


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimatedProfile:
    """One profile that was written."""

    path: Path
    profile: Profile
    previous: Path | None
    """Where the profile that lay there before was kept."""


def estimated_text(written: Sequence[EstimatedProfile]) -> str:
    """What each decides, and where it lies."""
    lines = [line for one in written for line in _lines(one)]
    for one in written:
        old = f"; the old one: {one.previous}" if one.previous else ""
        lines.append(f"profile: {one.path} (nothing in it was measured{old})")
    return "\n".join(lines)


def not_probed(profile: Profile) -> str:
    """That the micro-batch of an estimated profile was never tried, in one sentence."""
    rows, there = profile.train.micro_batch_rows, inert(estimated_for(profile))
    return (
        f"the micro-batch of {rows} row{'' if rows == 1 else 's'} is predicted for {there} and was never tried: it may "
        "not fit, and no speed was measured"
    )


def estimated_for(profile: Profile) -> str:
    """The machine, as far as it is known."""
    if profile.fingerprint.gpu_name is not None:
        return profile.fingerprint.gpu_name
    return "a CPU" if profile.fingerprint.device == "cpu" else "a GPU"


def batch_words(profile: Profile, estimate: EstimateEvidence) -> str:
    """The global batch in real tokens, and how far that is known."""
    tokens = format_count(profile.constraints.global_batch_tokens)
    each = f"{estimate.mean_real_tokens_per_row:,.1f} in a row"
    if not estimate.rows_assumed:
        return f"about {tokens} real tokens, {each} of the dataset"
    if profile.train.global_batch_tokens is not None:
        return f"{tokens} real tokens as asked for; rows of the dataset decide, {each} are assumed"
    return f"about {tokens} real tokens, {each} assumed for want of a dataset"


def _lines(one: EstimatedProfile) -> list[str]:
    profile, estimate = one.profile, one.profile.evidence.estimate
    assert estimate is not None  # it was written by an estimate
    name = profile.train.model.name
    return [
        f"{name}: micro-batch {profile.train.micro_batch_rows} rows, {estimate.choice}",
        f"{name}: {dealing_words(profile.train, estimate.local_ranks)} ({batch_words(profile, estimate)})",
    ]

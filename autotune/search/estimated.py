"""Profiles of machines that are not here: what was predicted becomes settings, and says that nothing was measured."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from autotune import __version__
from autotune.core.evidence import EstimateEvidence, Evidence
from autotune.core.profile import Constraints, Fingerprint, Profile, Provenance, model_sha256
from autotune.core.rows import RowContents
from autotune.decide.choose import DEFAULT_GLOBAL_BATCH_TOKENS, choose_predicted, deal, global_batch_rows
from autotune.errors import AutotuneError, ProfileRefused
from autotune.search.prediction import Asked, Choices, Target, config_of, contents
from autotune.search.profiles import profile_paths, read_profile, relative_data_path, write_profile
from autotune.show.estimate import Answer, Predicted
from autotune.show.estimated import EstimatedProfile
from autotune.store import check_writable
from trainer.config import DataSettings, TrainConfig
from trainer.errors import TrainerError
from trainer.events import utc_now


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfilesAsked:
    """What is to be written of a prediction."""

    asked: Asked
    """What the prediction is of."""
    target: Target
    """The card, or the memory of one."""
    out: Path
    """Profile file; with several models a directory."""
    headroom_share: float
    global_batch_tokens: int | None
    """None takes those of 256 samples."""

    @property
    def place_name(self) -> str:
        """Of the machine, for the names of files: the card's key, or the memory."""
        if self.target.card is not None:
            return self.target.card.key
        kind = "cpu" if self.asked.device == "cpu" else "gpu"
        return f"{kind}-{re.sub(r'[^a-z0-9.]', '', (self.asked.memory or '').lower())}"

    def batch(self, rows_hold: RowContents) -> tuple[int, int]:
        """The global batch, in real tokens and in rows, which is dealt exactly.

        Raises:
            BadInput: If there are fewer rows than ranks.
        """
        tokens = self.global_batch_tokens or DEFAULT_GLOBAL_BATCH_TOKENS
        rows = global_batch_rows(tokens, rows_hold.mean_real_tokens)
        deal(rows, 1, self.asked.ranks)
        return tokens, rows


def profile_places(wish: ProfilesAsked, choices: Choices) -> dict[str, Path]:
    """Where each model's profile goes, before minutes are spent on predicting.

    Raises:
        UsageError: If two models, or several and one file, have the same place.
        BadInput: If it cannot be written there, or the global batch has fewer rows than there are ranks.
        ProfileRefused: If a measured profile lies there.
        TrainerError: If the dataset is none.
    """
    asked = wish.asked
    names = [model.name for model in asked.models]
    places = dict(zip(names, profile_paths(wish.out, names, wish.place_name), strict=True))
    for model in asked.models:
        wish.batch(contents(asked, config_of(asked, choices, model)))
    for path in places.values():
        _keep_measured(path)
        check_writable(path.parent)
    return places


def write_profiles(answer: Answer, wish: ProfilesAsked, places: Mapping[str, Path]) -> tuple[EstimatedProfile, ...]:
    """Write a profile of each model that is predicted to fit; what lay there is kept beside it."""
    written = []
    for one in answer.predicted:
        path = places[one.config.model.name]
        profile = estimated_profile(one, wish, path, traced_with=answer.traced_with)
        written.append(EstimatedProfile(path=path, profile=profile, previous=write_profile(path, profile)))
    return tuple(written)


def estimated_profile(one: Predicted, wish: ProfilesAsked, path: Path, *, traced_with: str) -> Profile:
    """The profile that a prediction alone supports.

    Args:
        one: What was predicted of a model.
        wish: What it is for.
        path: Where the profile is to lie, from where its dataset is named.
        traced_with: Versions of the libraries whose step was traced.
    """
    card, on_cpu = wish.target.card, wish.asked.device == "cpu"
    choice = choose_predicted(one.rows_low, one.rows_high, wish.headroom_share)
    return Profile(
        train=_train(one, choice.rows, wish, path),
        constraints=Constraints(
            memory_budget_bytes=one.budget_bytes,
            headroom_share=wish.headroom_share,
            global_batch_tokens=wish.batch(one.contents)[0],
        ),
        fingerprint=Fingerprint(
            device=wish.asked.device,
            gpu_name=None if card is None else card.name,
            gpu_count=0 if on_cpu else None,
            gpu_total_bytes=None if card is None else card.total_bytes,
            model_sha256=model_sha256(one.config.model),
            dataset_hash=one.contents.dataset_hash,
        ),
        provenance=Provenance(tool_version=__version__, created_utc=utc_now(), commands=["estimate"]),
        evidence=Evidence(estimate=_evidence(one, wish, choice.reason, traced_with)),
    )


def _train(one: Predicted, micro_batch_rows: int, wish: ProfilesAsked, path: Path) -> TrainConfig:
    data = wish.asked.data
    settings: dict[str, object] = {
        "data": DataSettings(
            path=None if data is None else relative_data_path(data, path), dataset_hash=one.contents.dataset_hash
        ),
        "micro_batch_rows": micro_batch_rows,
        "global_batch_rows": wish.batch(one.contents)[1],
    }
    if one.contents.assumed and wish.global_batch_tokens is not None:
        # What rows hold is assumed, and the batch was asked for in tokens: on its dataset, training deals it anew.
        settings["global_batch_tokens"] = wish.global_batch_tokens
    return one.config.model_copy(update=settings)


def _evidence(one: Predicted, wish: ProfilesAsked, choice: str, traced_with: str) -> EstimateEvidence:
    return EstimateEvidence(
        card=None if wish.target.card is None else wish.target.card.key,
        rows_least=one.rows_low,
        rows_usual=one.rows,
        rows_most=one.rows_high,
        limited=one.limited,
        predicted_peak_bytes=one.ledger.peak_bytes,
        terms_bytes=dict(one.ledger.terms_bytes),
        parameters=one.parameters,
        attention=one.attention,
        attention_reason=one.attention_reason,
        local_ranks=wish.asked.ranks,
        micro_batches_per_step=2 if wish.asked.accumulate else 1,
        vocab_size=one.contents.vocab_size,
        documents_per_row=one.contents.documents,
        mean_real_tokens_per_row=one.contents.mean_real_tokens,
        rows_assumed=one.contents.assumed,
        traced_with=traced_with,
        choice=choice,
    )


def _keep_measured(path: Path) -> None:
    """A prediction does not take the place of a measurement."""
    try:
        lies_there = read_profile(path).profile
    except (TrainerError, AutotuneError):
        return  # none, or none that can be read: what lies there is kept when it is replaced
    if not lies_there.is_estimated:
        raise ProfileRefused(
            f"{path} was measured, and a prediction does not take its place",
            next_step="Name another place with --out, or move that profile away.",
        )

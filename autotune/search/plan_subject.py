"""What a plan is about: which model with which settings, on which machines, and whose measurements count for it."""

from dataclasses import dataclass
from typing import Literal

from autotune.cluster.training import default_ranks
from autotune.core.cards import CARDS, Card, card_of, find_card
from autotune.core.plan import Fleet
from autotune.core.profile import Profile
from autotune.errors import UsageError
from autotune.search.profiles import StoredProfile
from trainer.config import ModelSettings, Precision, TrainConfig
from trainer.families import FAMILIES

DEFAULT_ROW_TOKENS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A model without a profile, and how it would be trained."""

    model: ModelSettings
    seq_length_tokens: int = DEFAULT_ROW_TOKENS
    precision: Precision = "bf16"

    def train(self) -> TrainConfig:
        """Packed rows where this project knows the architecture, as ``probe`` would."""
        packed = self.model.config["model_type"] in FAMILIES
        return TrainConfig(
            model=self.model,
            seq_length_tokens=self.seq_length_tokens,
            layout="packed" if packed else "padded",
            precision=self.precision,
            device="cuda",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The model, its settings and the machines."""

    train: TrainConfig
    """As it would run there."""
    stored: StoredProfile | None
    own: bool
    """Whether the profile's evidence is of these machines."""
    card: Card | None
    """None of a CPU, and of a GPU that is not in the table."""
    fleet: Fleet
    said: tuple[str, ...]
    """What differs from the profile."""

    @property
    def profile(self) -> Profile | None:
        """None where there is a model only."""
        return None if self.stored is None else self.stored.profile

    @property
    def measured(self) -> Profile | None:
        """The profile, where its evidence counts."""
        return self.profile if self.own else None


def subject_of(source: StoredProfile | Shape, *, gpu: str | None, nodes: int, ranks_per_node: int | None) -> Subject:
    """Put model and machines together.

    Raises:
        BadInput: If there is no such card, with the nearest one.
        UsageError: If a model is to be planned for and no card is named.
    """
    asked = None if gpu is None else find_card(gpu)
    if isinstance(source, StoredProfile):
        return _of_profile(source, asked, nodes, ranks_per_node)
    if asked is None:
        raise UsageError(
            "a model without a profile needs a card to be planned for",
            next_step=f"Use --gpu with one of {', '.join(card.key for card in CARDS)}; or --profile PROFILE.toml.",
        )
    fleet = _on_card(asked, nodes, ranks_per_node or 1)
    return Subject(train=source.train(), stored=None, own=False, card=asked, fleet=fleet, said=())


def _of_profile(stored: StoredProfile, asked: Card | None, nodes: int, ranks_per_node: int | None) -> Subject:
    profile = stored.profile
    there = _card_of_profile(profile)
    train, fingerprint = profile.train, profile.fingerprint
    if asked is not None and asked is not there:
        measured_on = fingerprint.gpu_name or fingerprint.cpu_model or f"a {fingerprint.device}"
        said = [f"The profile is of {measured_on}: its rates, memory and batch say nothing of {asked.name}."]
        if train.device == "cpu":
            train = train.model_copy(update={"device": "cuda", "precision": "bf16"})
            said.append("It is planned with bf16 there.")
        fleet = _on_card(asked, nodes, ranks_per_node or 1)
        return Subject(train=train, stored=stored, own=False, card=asked, fleet=fleet, said=(" ".join(said),))
    local_ranks, cpus = ranks_per_node or default_ranks(profile), fingerprint.allotted_cpus
    device: Literal["cuda", "cpu"] = fingerprint.device
    fleet = Fleet(
        device=device,
        name=fingerprint.gpu_name
        or (there.name if there is not None else None)
        or ("a GPU" if device == "cuda" else fingerprint.cpu_model or "a CPU"),
        nodes=nodes,
        ranks_per_node=local_ranks,
        cpus_per_rank=cpus / default_ranks(profile) if device == "cpu" and cpus is not None else None,
        memory_bytes=profile.constraints.memory_budget_bytes,
    )
    return Subject(train=train, stored=stored, own=True, card=there, fleet=fleet, said=())


def _on_card(card: Card, nodes: int, ranks_per_node: int) -> Fleet:
    return Fleet(
        device="cuda",
        name=card.name,
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        memory_bytes=card.default_budget_bytes,
    )


def _card_of_profile(profile: Profile) -> Card | None:
    fingerprint, estimate = profile.fingerprint, profile.evidence.estimate
    if estimate is not None and estimate.card is not None:
        return find_card(estimate.card)
    if fingerprint.gpu_name is None or fingerprint.gpu_total_bytes is None or fingerprint.gpu_mig:
        return None
    return card_of(fingerprint.gpu_name, fingerprint.gpu_total_bytes)

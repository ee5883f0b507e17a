"""The probe that would measure what a profile says, as a shell takes it. Pure."""

import shlex

from autotune.core.cards import card_of
from autotune.core.evidence import EstimateEvidence
from autotune.core.profile import Profile
from autotune.core.units import exact_bytes
from trainer.config import TrainConfig
from trainer.families import FAMILIES
from trainer.presets import PRESETS

_ROW_TOKENS, _HEADROOM_SHARE = 512, 0.03
"""What ``autotune probe`` takes by itself."""


def probe_command(profile: Profile, path: str, *, model: str | None = None, data: str = "DIR") -> str:
    """The probe whose profile takes this one's place; of an estimated one, with the settings it was estimated for.

    Args:
        profile: The profile.
        path: Where it lies.
        model: As the user named it; None for the preset, or what stands for its config.
        data: The dataset's directory.
    """
    name = profile.train.model.name
    known = model or (name if name in PRESETS else "CONFIG.json")
    words = ["autotune", "probe", "--model", known, "--data", data, "--out", path]
    if profile.is_estimated and profile.evidence.estimate is not None:
        words += _as_estimated(profile, profile.evidence.estimate)
    return shlex.join(words)


def takes_the_whole_card(profile: Profile) -> bool:
    """Return whether the budget is the default of the GPU that it was estimated for: a probe takes it by itself."""
    there = profile.fingerprint
    if not profile.is_estimated or there.gpu_name is None or there.gpu_total_bytes is None:
        return False
    card = card_of(there.gpu_name, there.gpu_total_bytes)
    return card is not None and profile.constraints.memory_budget_bytes == card.default_budget_bytes


def _as_estimated(profile: Profile, estimate: EstimateEvidence) -> list[str]:
    """What a probe does not choose by itself."""
    train, constraints = profile.train, profile.constraints
    tokens = train.global_batch_tokens if estimate.rows_assumed else constraints.global_batch_tokens
    options: dict[str, object] = {
        "memory": None if takes_the_whole_card(profile) else exact_bytes(constraints.memory_budget_bytes),
        "device": "cpu" if train.device == "cpu" else None,
        "seq-length": _unless(train.seq_length_tokens, _ROW_TOKENS),
        "layout": _unless(train.layout, _usual_layout(train)),
        "precision": _unless(train.precision, "fp32" if train.device == "cpu" else "bf16"),
        "attention-dropout": train.attention_dropout,
        "checkpointing": _unless(train.checkpointing, "none"),
        "ranks": _unless(estimate.local_ranks, 1),
        "global-batch-tokens": tokens,
        "headroom": _unless(constraints.headroom_share, _HEADROOM_SHARE),
    }
    words = [word for name, value in options.items() if value is not None for word in (f"--{name}", str(value))]
    return words + ([] if estimate.micro_batches_per_step > 1 else ["--no-accumulate"])


def _unless(value: object, usual: object) -> object:
    return None if value == usual else value


def _usual_layout(train: TrainConfig) -> str:
    return "packed" if train.model.config["model_type"] in FAMILIES else "padded"

"""Explanation of each setting of a profile. Pure.

A setting was measured, set by you, or left at its default.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from autotune.errors import BadInput
from autotune.profiles.decide.explain.batch_sizes import (
    explain_global_batch,
    explain_micro_batch,
)
from autotune.profiles.decide.explain.explanation import Explanation
from autotune.profiles.decide.explain.explored import explain_explored
from autotune.profiles.decide.explain.gradient_sync import (
    GRADIENT_SYNC_SETTINGS,
    explain_gradient_sync,
)
from autotune.profiles.decide.explain.loader import explain_loader
from autotune.profiles.values import Profile
from trainer.config.tables import nearest
from trainer.config.train_config import (
    DataSettings,
    Tag,
    TrainConfig,
    dotted,
    tagged,
)

_PROBED_SETTINGS = tagged(TrainConfig, Tag.PROBED)
_LOADER_SETTINGS = tagged(DataSettings, Tag.LOADER)
_SUBJECT_OF_SETTING = {
    "model.name": "model",
    "model.config": "model",
    "model.null_keys": "model",
    "data.path": "dataset",
    "data.dataset_hash": "dataset",
}
"""What the user tuned for, by the setting that names it."""


def explanations(profile: Profile) -> tuple[Explanation, ...]:
    """Return every setting of a profile with its reason, in the order of the schema."""
    train = profile.train
    values = dotted(train.model_dump(mode="json"))
    defaults = dotted(TrainConfig(model=train.model).model_dump(mode="json"))
    return tuple(
        replace(
            _explain(profile, key, value, defaults[key]),
            key=key,
            value=value,
            meaning=meaning_of(key),
        )
        for key, value in values.items()
    )


def meaning_of(key: str) -> str | None:
    """Return the schema's description of a dotted key, on one line.

    None for a key of the model's own config.
    """
    table: Any = TrainConfig
    description: str | None = None
    for part in key.split("."):
        field = getattr(table, "model_fields", {}).get(part)
        if field is None:
            return None
        table = field.annotation
        description = field.description
    return description and " ".join(description.split())


def select_explanations(
    all_explanations: Sequence[Explanation], key: str
) -> tuple[Explanation, ...]:
    """Return explanations of a setting, or of a group such as ``data``.

    Raises:
        BadInput: If it is unknown.
    """
    name = key.removeprefix("train.")
    selected = tuple(
        explanation
        for explanation in all_explanations
        if explanation.key == name or explanation.key.startswith(f"{name}.")
    )
    if selected:
        return selected
    suggestion = _nearest_key(name, [known.key for known in all_explanations])
    raise BadInput(
        f"unknown setting {key[:80]!r}",
        next_step=(
            "Omit the key to list all settings with their reasons."
            if suggestion is None
            else f"Did you mean {suggestion!r}?"
        ),
    )


def _nearest_key(name: str, keys: Sequence[str]) -> str | None:
    """Return the dotted key closest to a misspelt one, or to its last part."""
    match = nearest(name, list(keys))
    if match is None:
        match = nearest(name, [_last_part(key) for key in keys])
    for key in keys:
        if match in (key, _last_part(key)):
            return key
    return None


def _last_part(key: str) -> str:
    return key.rpartition(".")[2]


def _explain(profile: Profile, key: str, value: object, default: object) -> Explanation:
    """Explain a setting by the evidence that decided it.

    Its key, value and meaning are left out.
    """
    evidence = profile.evidence
    explored = explain_explored(profile, key, value)
    if explored is not None:
        return explored
    if key == "micro_batch_size" and evidence.probe is not None:
        return explain_micro_batch(profile, evidence.probe)
    if key == "global_batch_size" and evidence.probe is not None:
        tokens_per_sequence = evidence.probe.mean_tokens_per_sequence
        return explain_global_batch(profile, tokens_per_sequence)
    table, _, name = key.rpartition(".")
    if evidence.workers is not None and table == "data":
        joint = evidence.workers.joint
        is_searched = joint is not None and joint.adopted and name in _LOADER_SETTINGS
        if name == "num_workers" or is_searched:
            return explain_loader(profile, evidence.workers, name)
    is_gradient_sync = table == "parallel" and name in GRADIENT_SYNC_SETTINGS
    if evidence.network is not None and is_gradient_sync:
        return explain_gradient_sync(profile, evidence.network, key, value)
    return _explain_given(profile, key, value, default)


def _explain_given(
    profile: Profile, key: str, value: object, default: object
) -> Explanation:
    """Explain a setting that no measurement decided."""
    if key in _SUBJECT_OF_SETTING:
        subject = _SUBJECT_OF_SETTING[key]
        return Explanation(
            origin="constraint",
            because=f"the {subject} you tuned for; a different one is rejected",
        )
    is_probed = profile.evidence.probe is not None and key in _PROBED_SETTINGS
    if value == default:
        because = "the trainer's default"
        if is_probed:
            because += "; all figures were measured with it"
        return Explanation(origin="default", because=because)
    if is_probed:
        return Explanation(
            origin="requested",
            because=(
                "an option of the probe, or its default for this device; all figures"
                " hold only for it"
            ),
        )
    return Explanation(
        origin="changed",
        because=(
            f"set by hand or by autotune advise; the default is {default}, and no"
            " measurement decides it"
        ),
    )

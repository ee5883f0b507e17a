"""Explanation of each setting of a profile. Pure.

A setting was measured, set by you, or left at its default.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from autotune.errors import BadInput
from autotune.evidence.profile import Profile
from autotune.profiles.decide.explain.batch_sizes import (
    explain_global_batch,
    explain_micro_batch,
)
from autotune.profiles.decide.explain.explanation import Explanation
from autotune.profiles.decide.explain.explored import explain_explored
from autotune.profiles.decide.explain.gradient_sync import (
    GRADIENT_SYNC_KEYS,
    explain_gradient_sync,
)
from autotune.profiles.decide.explain.loader import explain_loader, is_decided_by_sweep
from autotune.profiles.decide.explain.own_settings import explain_own_settings
from trainer.formats.tables import nearest
from trainer.formats.train_config import Tag, TrainConfig, flatten_settings, tagged

_PROBED_SETTINGS = tagged(TrainConfig, Tag.PROBED)
"""Settings that the probe measured with, so that all figures hold only for them."""
_SUBJECT_OF_SETTING = {
    "model.name": "model",
    "model.config": "model",
    "model.null_keys": "model",
    "data.path": "dataset",
    "data.dataset_hash": "dataset",
}
"""Subject of the tuning, in words, by each setting that identifies it."""


def explanations(profile: Profile) -> tuple[Explanation, ...]:
    """Return every setting of a profile with its reason.

    Settings of the bundled trainer have the order of the schema. Those of your own code
    come first if they were tuned, then your fixed arguments.
    """
    if not profile.has_train:
        return tuple(explain_own_settings(profile))
    train = profile.train
    values = flatten_settings(train.model_dump(mode="json"))
    defaults = flatten_settings(TrainConfig(model=train.model).model_dump(mode="json"))
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

    Returns:
        None for a key of the model's config, which the schema does not describe.
    """
    table: Any = TrainConfig
    description: str | None = None
    for part in key.split("."):
        # The model's config is a plain dictionary, whose type has no ``model_fields``.
        field = getattr(table, "model_fields", {}).get(part)
        if field is None:
            return None
        table = field.annotation
        description = field.description
    if description is None:
        return None
    return " ".join(description.split())


def select_explanations(
    all_explanations: Sequence[Explanation], key: str
) -> tuple[Explanation, ...]:
    """Return the explanations of a setting, or of a group of settings such as ``data``.

    Args:
        all_explanations: Explanations of all settings.
        key: Dotted name of the setting or group, with or without ``train.`` or
            ``settings.``.

    Raises:
        BadInput: If there is no such setting or group.
    """
    name = key.removeprefix("train.").removeprefix("settings.")
    selected = tuple(
        explanation
        for explanation in all_explanations
        if explanation.key == name or explanation.key.startswith(f"{name}.")
    )
    if selected:
        return selected
    next_step = "Omit the key to list all settings with their reasons."
    suggestion = _nearest_key(name, [known.key for known in all_explanations])
    if suggestion is not None:
        next_step = f"Did you mean {suggestion!r}?"
    # Shortened, so that a pasted file does not fill the terminal.
    raise BadInput(f"unknown setting {key[:80]!r}", next_step=next_step)


def _nearest_key(name: str, keys: Sequence[str]) -> str | None:
    """Return the dotted key closest to a misspelt one.

    If no key is close, the last parts of the keys are compared with it.

    Returns:
        None if no last part is close either.
    """
    nearest_key = nearest(name, list(keys))
    if nearest_key is not None:
        return nearest_key
    nearest_part = nearest(name, [_last_part(key) for key in keys])
    for key in keys:
        if _last_part(key) == nearest_part:
            return key
    return None


def _last_part(key: str) -> str:
    """Return the name of a dotted key without its tables."""
    return key.rpartition(".")[2]


def _explain(profile: Profile, key: str, value: object, default: object) -> Explanation:
    """Explain a setting, without its key, value and meaning."""
    measured = _explain_measured(profile, key, value)
    if measured is not None:
        return measured
    return _explain_given(profile, key, value, default)


def _explain_measured(profile: Profile, key: str, value: object) -> Explanation | None:
    """Explain a setting by the evidence that decided it.

    Returns:
        None if no measurement decided it.
    """
    # First, as an exploration may replace what earlier commands decided.
    explored = explain_explored(profile, key, value)
    if explored is not None:
        return explored
    probe = profile.evidence.probe
    if probe is not None and key == "micro_batch_size":
        return explain_micro_batch(profile, probe)
    if probe is not None and key == "global_batch_size":
        return explain_global_batch(profile, probe.tokens_per_sequence)
    workers = profile.evidence.workers
    if workers is not None and is_decided_by_sweep(workers, key):
        return explain_loader(profile, workers, key)
    network = profile.evidence.network
    if network is not None and key in GRADIENT_SYNC_KEYS:
        return explain_gradient_sync(profile, network, key, value)
    return None


def _explain_given(
    profile: Profile, key: str, value: object, default: object
) -> Explanation:
    """Explain a setting that no measurement decided: you set it, or it is a default."""
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

"""Settings and profiles with advice applied.

Everything here is pure: the caller gives the creation time of the profile.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from autotune.errors import BadInput
from autotune.evidence.advice import Advice, SettingChange
from autotune.evidence.profile import Profile, update_profile
from trainer.formats.errors import BadConfig
from trainer.formats.tables import parse_table
from trainer.formats.train_config import TrainConfig, flatten_settings


def safe_changes(
    profile: Profile, advice: Iterable[Advice]
) -> tuple[SettingChange, ...]:
    """Return the changes of safe advice that differ from a profile's settings.

    If several change the same key, the first one counts.
    """
    settings: Mapping[str, Any] = {**profile.subject.arguments, **profile.settings}
    if profile.has_train:
        settings = flatten_settings(profile.train.model_dump(mode="json"))
    wishes = [change for one in advice if one.safe for change in one.changes]
    found = {
        change.key: replace(change, old=settings.get(change.key))
        for change in reversed(wishes)
    }
    return tuple(
        change for change in reversed(found.values()) if change.old != change.new
    )


def apply_changes(train: TrainConfig, changes: Sequence[SettingChange]) -> TrainConfig:
    """Return the settings with these changes.

    Raises:
        BadInput: If the result is not valid.
    """
    tables = train.model_dump(mode="json")
    for change in changes:
        *path, last = change.key.split(".")
        table = tables
        for name in path:
            table = table[name]
        table[last] = change.new
    try:
        return parse_table(TrainConfig, tables, where="advice")
    except BadConfig as error:
        raise BadInput(error.message, next_step=error.next_step) from error


_WITHOUT_COMPUTE = (
    "data.",
    "parallel.",
    "log_interval_steps",
    "num_workers",
    "prefetch_factor",
    "pin_memory",
)
"""Prefixes of settings that do not change the compute of a micro-batch."""


def apply_advice(
    profile: Profile, changes: Sequence[SettingChange], created_utc: str
) -> Profile:
    """Return the profile with these changes, without the evidence that they invalidate.

    Raises:
        BadInput: If the resulting settings are not valid.
    """
    other = [
        change.key for change in changes if not change.key.startswith(_WITHOUT_COMPUTE)
    ]
    without = ("explore", "workers", "network") if other else ()
    evidence, probe = dict[str, object](), profile.evidence.probe
    if other and probe is not None:
        choice = f"{probe.choice}; measured before advice changed {', '.join(other)}"
        evidence["probe"] = probe.model_copy(update={"choice": choice})
    if profile.has_train:
        changed = profile.with_train(apply_changes(profile.train, changes))
    else:
        settings = {change.key: change.new for change in changes}
        changed = profile.model_copy(
            update={"settings": {**profile.settings, **settings}}
        )
    return update_profile(
        profile,
        command="advise",
        evidence=evidence,
        changed=changed,
        dropped_commands=without,
        provenance={"created_utc": created_utc},
    )

"""What differs between two profiles, field by field. Pure."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autotune.core.profile import Profile
from trainer.config import TrainConfig
from trainer.schema import MAX_DEPTH

_NAMED_BY: dict[str, tuple[str, ...]] = {
    "curve": ("rows",),
    "workers.rows": ("loader_workers",),
    "links": ("scope",),
    "exchanges": ("strategy", "shard_ranks", "gradient_dtype", "bucket_cap_mib", "micro_batches", "rows"),
    "scaling": ("nodes",),
    "baseline.rows": ("name",),
}
"""Which fields name a row of a list of tables; rows of the same name are held against each other."""
_READINGS = ("slot_tokens_per_s", "ceiling_slot_tokens_per_s", "real_tokens_per_s", "products_flops_per_s")
"""Lists of readings of one thing, of which the median is compared; other lists are settings."""


MEASURED = "measured"
"""Stands for a whole table, or a row of one, that the other side does not have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One field that differs; None on the side that does not have it."""

    key: str
    """Dotted; a row of a list is named by what it is of: ``probe.curve[rows=16].step_s``."""
    old: Any
    new: Any

    @property
    def ratio(self) -> float | None:
        """The new figure over the old one; None where they are not both figures."""
        numbers = [value for value in (self.old, self.new) if _is_number(value)]
        return self.new / self.old if len(numbers) == 2 and self.old else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileChanges:
    """All that differs, by table; how the profiles came to be is left out."""

    train: tuple[Change, ...]
    constraints: tuple[Change, ...]
    fingerprint: tuple[Change, ...]
    evidence: tuple[Change, ...]


def profile_changes(old: Profile, new: Profile) -> ProfileChanges:
    """What the second profile has otherwise than the first."""
    return ProfileChanges(
        train=setting_changes(flat_settings(old.train), flat_settings(new.train)),
        constraints=_changes(old.constraints.model_dump(mode="json"), new.constraints.model_dump(mode="json")),
        fingerprint=_changes(old.fingerprint.model_dump(mode="json"), new.fingerprint.model_dump(mode="json")),
        evidence=_evidence_changes(old.evidence.model_dump(mode="json"), new.evidence.model_dump(mode="json")),
    )


def flat_settings(config: TrainConfig) -> dict[str, Any]:
    """Every setting by its dotted key; the model's own config is one level of keys more."""
    return flat_table(config.model_dump(mode="json"))


def flat_table(table: Mapping[str, Any]) -> dict[str, Any]:
    """Every value of nested tables by its dotted key."""
    return dict(_flat(table))


def setting_changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[Change, ...]:
    """What differs between flat settings; one that a side does not have counts as None."""
    keys = [*old, *(key for key in new if key not in old)]
    found = (Change(key=key, old=old.get(key), new=new.get(key)) for key in keys)
    return tuple(change for change in found if change.old != change.new)


def _changes(old: dict[str, Any], new: dict[str, Any]) -> tuple[Change, ...]:
    return setting_changes(dict(_flat(old)), dict(_flat(new)))


def _evidence_changes(old: dict[str, Any], new: dict[str, Any]) -> tuple[Change, ...]:
    """The same; a table or a row that only one side has is one change."""
    lonely = [name for name in old if (old[name] is None) != (new[name] is None)]
    whole = [Change(key=name, old=old[name] and MEASURED, new=new[name] and MEASURED) for name in lonely]
    parts = _changes(*({name: table[name] for name in table if name not in lonely} for table in (old, new)))
    rows = tuple(f"{change.key}." for change in parts if change.key.endswith("]"))
    return (*whole, *(change for change in parts if not change.key.startswith(rows)))


def _flat(table: Mapping[str, Any], prefix: str = "", depth: int = 1) -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        key = f"{prefix}{name}"
        if depth > MAX_DEPTH:  # of a stranger's ledger; files of ours are not nested so deep
            yield key, "nested too deep"
        elif isinstance(value, dict) and value:
            yield from _flat(value, f"{key}.", depth + 1)
        elif isinstance(value, list) and value and all(isinstance(row, dict) for row in value):
            for row_name, row in _rows(key, value):
                yield f"{key}[{row_name}]", MEASURED
                yield from _flat(row, f"{key}[{row_name}].", depth + 1)
        elif name in _READINGS and isinstance(value, list):
            yield f"{key} (median)", statistics.median(value) if value else None
        else:
            yield key, value


def _rows(key: str, rows: Sequence[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    names = next((fields for end, fields in _NAMED_BY.items() if key == end or key.endswith(f".{end}")), ())
    for number, row in enumerate(rows):
        named = [f"{name}={row[name]}" for name in names if row.get(name) is not None]
        yield ", ".join(named) or str(number), row


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)

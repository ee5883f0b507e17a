"""Settings with advice followed. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from autotune.core.advice import Advice, Change
from autotune.errors import BadInput
from trainer.config import TrainConfig
from trainer.errors import BadConfig
from trainer.schema import parse_table


def safe_changes(advice: Iterable[Advice]) -> tuple[Change, ...]:
    """What may be written without a second thought; of two wishes for one setting the first counts."""
    found: dict[str, Change] = {}
    for one in advice:
        if one.safe:
            for change in one.changes:
                found.setdefault(change.key, change)
    return tuple(found.values())


def changes_of(train: TrainConfig, changes: Iterable[Change]) -> tuple[Change, ...]:
    """The changes as they are of these settings: from what these say, without those that change nothing."""
    tables = train.model_dump(mode="json")
    found = []
    for change in changes:
        old = tables
        for name in change.key.split("."):
            old = old[name]
        if old != change.new:
            found.append(replace(change, old=old))
    return tuple(found)


def with_changes(train: TrainConfig, changes: Sequence[Change]) -> TrainConfig:
    """The settings with these changes.

    Raises:
        BadInput: If they are no settings any more.
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

"""The kinds of subjects, by name: those of this project, and of installed packages."""

import importlib
from importlib.metadata import entry_points

from autotune.errors import BadInput
from autotune.subjects.subject import Subject

GROUP = "autotune.subjects"
"""Group of entry points by which other packages register kinds."""
BUILT_IN = {
    "own": "autotune.subjects.own.subject:OwnCode",
    "transformers": "autotune.subjects.transformers.subject:TransformersSubject",
    "lightning": "autotune.subjects.lightning.subject:LightningSubject",
    "accelerate": "autotune.subjects.accelerate.subject:AccelerateSubject",
    "mlm": "autotune.subjects.mlm.subject:MlmSubject",
}
"""Class of each kind of this project."""


def kinds() -> list[str]:
    """Return the names of all kinds, those of this project first."""
    others = {entry.name for entry in entry_points(group=GROUP)}
    return [*BUILT_IN, *sorted(others - set(BUILT_IN))]


def subject_class(kind: str) -> type[Subject]:
    """Return the class of a kind.

    Raises:
        BadInput: If there is no such kind, or its package cannot be imported.
    """
    name = BUILT_IN.get(kind)
    if name is None:
        found = entry_points(group=GROUP, name=kind)
        if not found:
            raise BadInput(
                f"there is no kind of subject {kind!r}",
                next_step=f"Choose one of {', '.join(kinds())}.",
            )
        (entry, *_) = found
        name = entry.value
    module, _, attribute = name.partition(":")
    try:
        loaded: type[Subject] = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise BadInput(
            f"the kind of subject {kind!r} cannot be imported from {name}: {error}",
            next_step=f"Install or repair its package: python -c 'import {module}'",
        ) from error
    return loaded

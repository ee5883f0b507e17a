"""Names of the kinds of subjects, and where the class of each is."""

from importlib.metadata import entry_points

GROUP = "autotune.subjects"
"""Group of entry points by which other packages register kinds."""
BUILT_IN = {
    "own": "autotune.subjects.own.subject:FunctionSubject",
    "transformers": "autotune.subjects.transformers.subject:TransformersSubject",
    "lightning": "autotune.subjects.lightning.subject:LightningSubject",
    "accelerate": "autotune.subjects.accelerate.subject:AccelerateSubject",
    "mlm": "autotune.subjects.mlm.subject:MlmSubject",
}
"""Class of each kind of this project, as entry points write it."""


def subject_kinds() -> dict[str, str]:
    """Return the class of each kind by its name, those of this project first.

    A package cannot replace a kind of this project.
    """
    others = {
        entry.name: entry.value
        for entry in entry_points(group=GROUP)
        if entry.name not in BUILT_IN
    }
    return BUILT_IN | others

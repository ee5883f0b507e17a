"""Translation of a profile's settings for another trainer. Pure."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from autotune.corpus.values import SequenceMeans
from autotune.evidence.profile import Profile
from autotune.profiles.decide.export import accelerate, hf_trainer, lightning
from autotune.profiles.decide.export.batch import batch_warnings, exported_batch
from autotune.profiles.decide.export.program import (
    CALLS_AFTER_MODEL,
    CALLS_BEFORE_MODEL,
    model_calls,
)
from autotune.profiles.decide.export.table import (
    Equivalent,
    Export,
    ExportedBatch,
    Target,
    Value,
    row,
)
from autotune.profiles.decide.export.written_arguments import (
    file_arguments,
    written_calls,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _TargetTables:
    """Names and code of a target, and the function that translates settings."""

    written_for: str
    """Libraries and versions whose names the export has."""
    calls: Mapping[str, str]
    """Code by function, with ``{}`` in place of its arguments."""
    names: Mapping[str, str]
    """Name in the target of each setting that all targets take."""
    settings: Callable[[Profile, ExportedBatch, int], tuple[Equivalent, ...]]
    """Function that returns the equivalent of every setting of a profile, for an
    optimizer step and a number of nodes."""


_TARGETS: Mapping[Target, _TargetTables] = {
    "hf-trainer": _TargetTables(
        written_for=hf_trainer.WRITTEN_FOR,
        calls=hf_trainer.CALLS,
        names=hf_trainer.NAMES,
        settings=hf_trainer.settings,
    ),
    "accelerate": _TargetTables(
        written_for=accelerate.WRITTEN_FOR,
        calls=accelerate.CALLS,
        names=accelerate.NAMES,
        settings=accelerate.settings,
    ),
    "lightning": _TargetTables(
        written_for=lightning.WRITTEN_FOR,
        calls=lightning.CALLS,
        names=lightning.NAMES,
        settings=lightning.settings,
    ),
}
_SETTING_OF_OWN_VALUE = {
    "micro_batch_size": "micro_batch_size",
    "num_workers": "data.num_workers",
    "gradient_accumulation_steps": "global_batch_size",
}
"""Setting of this trainer with the same meaning, by the name of each value of your own
code: the value is exported under the name of the setting in the target."""
_OWN_CALLS = {
    "DataLoader": "DataLoader(dataset, {})",
    "Accelerator": "Accelerator({})",
    "build_step": "build_step({})",
}
"""Code that takes values of your own code, by function; ``{}`` stands for its
arguments."""


def export_profile(
    profile: Profile,
    means: SequenceMeans,
    target: Target,
    *,
    nodes: int,
    ranks_per_node: int,
) -> Export:
    """Translate every setting of a profile.

    Args:
        profile: Profile to export.
        means: Tokens and samples of a sequence, on average; an unknown number of
            samples counts as one.
        target: Trainer to export to.
        nodes: Nodes that train.
        ranks_per_node: Ranks on each node.
    """
    train = profile.train
    tables = _TARGETS[target]
    batch = exported_batch(profile, means, nodes * ranks_per_node)
    settings = tables.settings(profile, batch, nodes)
    return Export(
        written_for=tables.written_for,
        model=train.model.name,
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        batch=batch,
        arguments=file_arguments(settings),
        settings=settings,
        warnings=tuple(batch_warnings(train, batch, means)),
        calls=(
            *written_calls(settings, CALLS_BEFORE_MODEL),
            *model_calls(train),
            *written_calls(settings, {**CALLS_AFTER_MODEL, **tables.calls}),
        ),
    )


def export_own_values(
    target: Target, tuned: Mapping[str, int]
) -> tuple[dict[str, Value], tuple[str, ...]]:
    """Translate values that were tuned for your own training code.

    Args:
        target: Trainer to export to.
        tuned: Values by name; a name without an equivalent in the target stays an
            argument of your ``build_step``.

    Returns:
        Arguments for the target's file of settings, and the code that takes the rest.
    """
    names = _TARGETS[target].names
    settings = []
    for name, value in tuned.items():
        argument = f"build_step({name})"
        if name in _SETTING_OF_OWN_VALUE:
            argument = names[_SETTING_OF_OWN_VALUE[name]]
        settings.append(row(name, argument, value))
    return file_arguments(settings), tuple(written_calls(settings, _OWN_CALLS))

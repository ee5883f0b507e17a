"""Translation of a profile's settings for another trainer. Pure."""

from collections.abc import Mapping

from autotune.corpus.values import SequenceMeans
from autotune.profiles.decide.export import accelerate, hf_trainer, lightning
from autotune.profiles.decide.export.batch import batch_warnings, exported_batch
from autotune.profiles.decide.export.program import (
    CALLS_AFTER_MODEL,
    CALLS_BEFORE_MODEL,
    model_calls,
)
from autotune.profiles.decide.export.table import (
    Export,
    Target,
    Value,
    file_arguments,
    row,
    written_calls,
)
from autotune.profiles.values import Profile

_TARGETS = {"hf-trainer": hf_trainer, "accelerate": accelerate, "lightning": lightning}
"""Module of each target, with its WRITTEN_FOR, CALLS, NAMES and ``settings``."""
_OWN_SETTINGS = {
    "micro_batch_size": "micro_batch_size",
    "num_workers": "data.num_workers",
    "gradient_accumulation_steps": "global_batch_size",
}
"""Setting of the trainer that each value tuned for your own code is exported as."""
_OWN_CALLS = {
    "DataLoader": "DataLoader(dataset, {})",
    "Accelerator": "Accelerator({})",
    "build_step": "build_step({})",
}
"""Code that takes such values, by function; ``{}`` stands for its arguments."""


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
        means: Tokens and samples of a sequence, on average; one sample is assumed if it
            is not known.
        target: Trainer to export to.
        nodes: Nodes that train.
        ranks_per_node: Ranks on each node.
    """
    train = profile.train
    module = _TARGETS[target]
    batch = exported_batch(profile, means, nodes * ranks_per_node)
    settings = module.settings(profile, batch, nodes)
    return Export(
        written_for=module.WRITTEN_FOR,
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
            *written_calls(settings, CALLS_AFTER_MODEL | module.CALLS),
        ),
    )


def export_own_values(
    target: Target, tuned: Mapping[str, int]
) -> tuple[dict[str, Value], tuple[str, ...]]:
    """Translate values that were tuned for your own training code.

    Args:
        target: Trainer to export to.
        tuned: Values by name; a name without an equivalent stays a value that your
            ``build_step`` takes.

    Returns:
        Arguments for the target's file of settings, and the code that takes the rest.
    """
    names = _TARGETS[target].NAMES
    settings = []
    for name, value in tuned.items():
        argument = f"build_step({name})"
        if name in _OWN_SETTINGS:
            argument = names[_OWN_SETTINGS[name]]
        settings.append(row(name, argument, value))
    return file_arguments(settings), tuple(written_calls(settings, _OWN_CALLS))

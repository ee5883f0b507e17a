"""Exports of a profile to other trainers: of every ``[train]`` setting, or of values found for your own code. Pure."""

from collections.abc import Mapping

from autotune.corpus.values import SequenceMeans
from autotune.profiles.decide.export import accelerate, hf_trainer, lightning
from autotune.profiles.decide.export.program import (
    FIRST,
    PROGRAM,
    batch_warnings,
    exported_batch,
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
_OWN = {
    "micro_batch_size": "micro_batch_size",
    "num_workers": "data.num_workers",
    "gradient_accumulation_steps": "global_batch_size",
}
"""Setting that each value found for your own code is exported as."""
_OWN_CALLS = {
    "DataLoader": "DataLoader(dataset, {})",
    "Accelerator": "Accelerator({})",
    "build_step": "build_step({})",
}


def export_profile(
    profile: Profile,
    means: SequenceMeans,
    target: Target,
    *,
    nodes: int,
    ranks_per_node: int,
) -> Export:
    """Translate every setting of a profile.

    If the samples per sequence are not known, one is assumed.
    """
    train, batch, module = (
        profile.train,
        exported_batch(profile, means, nodes * ranks_per_node),
        _TARGETS[target],
    )
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
            *written_calls(settings, FIRST),
            *model_calls(train),
            *written_calls(settings, PROGRAM | module.CALLS),
        ),
    )


def own_export(
    target: Target, tuned: Mapping[str, int]
) -> tuple[dict[str, Value], tuple[str, ...]]:
    """Return the target's arguments for values found for your own code, and the code that takes the others."""
    names = {name: _TARGETS[target].NAMES[setting] for name, setting in _OWN.items()}
    rows = [
        row(name, names.get(name, f"build_step({name})"), value)
        for name, value in tuned.items()
    ]
    return file_arguments(rows), tuple(written_calls(rows, _OWN_CALLS))

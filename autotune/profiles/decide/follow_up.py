"""Commands to run next, quoted for a shell.

Options at their defaults are left out. Pure.
"""

import shlex
from collections.abc import Mapping

from autotune.base.defaults import (
    HEADROOM_SHARE,
    MAX_MICRO_BATCH_SIZE,
    SEQ_LENGTH_TOKENS,
)
from autotune.base.units import exact_bytes
from autotune.profiles.decide.batch_split import default_layout, default_precision
from autotune.profiles.values import Profile
from trainer.config.presets import PRESETS
from trainer.config.train_config import ModelSettings, TrainConfig

_DEFAULTS: Mapping[str, object] = {
    "seq_length": SEQ_LENGTH_TOKENS,
    "activation_checkpointing": "none",
    "strategy": "ddp",
    "accumulate": True,
    "headroom": HEADROOM_SHARE,
    "max_micro_batch_size": MAX_MICRO_BATCH_SIZE,
    "what_if": False,
}


def command(name: str, *arguments: object, **options: object) -> str:
    """Return a command of this program, such as ``train``, quoted for a shell.

    Options have underscores for hyphens. None and defaults are left out; True becomes
    the flag ``--NAME``, False ``--no-NAME``; a list repeats the option.
    """
    words = ["autotune", *name.split(), *map(str, arguments)]
    for option, value in options.items():
        word = option.replace("_", "-")
        if value is None or value == _DEFAULTS.get(option):
            continue
        if isinstance(value, bool):
            words.append(f"--{word}" if value else f"--no-{word}")
            continue
        words += [
            part
            for one in (value if isinstance(value, list) else [value])
            for part in (f"--{word}", str(one))
        ]
    return shlex.join(words)


def model_word(model: ModelSettings) -> str:
    """Return the preset's name, or a placeholder for the user's own config."""
    return model.name if model.name in PRESETS else "CONFIG.json"


def probe_command(profile: Profile, path: object) -> str:
    """Return the probe command that replaces this profile, with all settings chosen for the machine."""
    return command("probe", model=model_word(profile.train.model), data="DIR", out=path)


def probe_first(profile: Profile, path: object) -> tuple[str, ...]:
    """Return the probe command if the profile was not probed, as all other measurements require it; else nothing."""
    return () if profile.evidence.probe is not None else (probe_command(profile, path),)


def probe_again(train: TrainConfig, profile: Profile | None, **others: object) -> str:
    """Return the probe command for these settings and a profile's limits and ranks.

    ``others`` add or replace any.
    """
    limits = None if profile is None else profile.constraints
    probe = None if profile is None else profile.evidence.probe
    options: dict[str, object] = {
        "model": model_word(train.model),
        "data": "DIR",
        "device": train.device,
        "memory": limits and exact_bytes(limits.memory_budget_bytes),
        "seq_length": train.seq_length_tokens,
        "layout": None if train.layout == default_layout(train.model) else train.layout,
        "precision": (
            None
            if train.precision == default_precision(train.device)
            else train.precision
        ),
        "global_batch_tokens": limits and limits.global_batch_tokens,
        "headroom": limits and limits.headroom_share,
        "attention_dropout": train.attention_dropout,
        "activation_checkpointing": train.activation_checkpointing,
        "compile": (
            None if train.compiled == (train.device == "cuda") else train.compiled
        ),
        "accumulate": probe and probe.gradient_accumulation_steps > 1,
        "strategy": train.parallel.strategy,
        "ranks": probe and probe.local_ranks,
    }
    return command("probe", **(options | others))

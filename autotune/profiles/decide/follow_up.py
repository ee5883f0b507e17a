"""Commands to run next, quoted for a shell, without options at their defaults. Pure."""

import shlex
from collections.abc import Mapping

from autotune.base.defaults import (
    HEADROOM_SHARE,
    MAX_MICRO_BATCH_SIZE,
    SEQ_LENGTH_TOKENS,
)
from autotune.base.units import exact_bytes
from autotune.profiles.decide.default_settings import default_layout, default_precision
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
"""Defaults of options, by their names with underscores."""


def command(name: str, *arguments: object, **options: object) -> str:
    """Return a command of this program, quoted for a shell.

    Args:
        name: Name of the command, such as ``train``.
        arguments: Its arguments.
        options: Its options, with underscores for hyphens. None and defaults are left
            out; True becomes the flag ``--NAME``, False ``--no-NAME``; a list repeats
            the option.
    """
    words = ["autotune", *name.split(), *map(str, arguments)]
    for option, value in options.items():
        if value is None or value == _DEFAULTS.get(option):
            continue
        hyphenated = option.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{hyphenated}" if value else f"--no-{hyphenated}")
        elif isinstance(value, list):
            for part in value:
                words += [f"--{hyphenated}", str(part)]
        else:
            words += [f"--{hyphenated}", str(value)]
    return shlex.join(words)


def _model_argument(model: ModelSettings) -> str:
    """Return the preset's name, or a placeholder for the config of another model.

    The name in a foreign profile may be anything, so it is not repeated.
    """
    return model.name if model.name in PRESETS else "CONFIG.json"


def probe_command(profile: Profile, path: object) -> str:
    """Return the probe command that replaces a profile by one for the machine."""
    model = _model_argument(profile.train.model)
    return command("probe", model=model, data="DIR", out=path)


def probe_first(profile: Profile, path: object) -> tuple[str, ...]:
    """Return the probe command if the profile was not probed, else nothing.

    All other measurements require a probe.
    """
    if profile.evidence.probe is not None:
        return ()
    return (probe_command(profile, path),)


def probe_again(train: TrainConfig, profile: Profile | None, **others: object) -> str:
    """Return the probe command for these settings and a profile's limits and ranks.

    Args:
        train: Trainer settings.
        profile: Profile with the limits and ranks; None for the defaults.
        others: Options of the command to add or replace.
    """
    options: dict[str, object] = {
        "model": _model_argument(train.model),
        "data": "DIR",
        "device": train.device,
        "memory": None,
        "seq_length": train.seq_length_tokens,
        "layout": _unless_default(train.layout, default_layout(train.model)),
        "precision": _unless_default(train.precision, default_precision(train.device)),
        "global_batch_tokens": None,
        "headroom": None,
        "attention_dropout": train.attention_dropout,
        "activation_checkpointing": train.activation_checkpointing,
        "compile": _unless_default(train.compiled, train.device == "cuda"),
        "accumulate": None,
        "strategy": train.parallel.strategy,
        "ranks": None,
    }
    if profile is not None:
        limits = profile.constraints
        options["memory"] = exact_bytes(limits.memory_budget_bytes)
        options["global_batch_tokens"] = limits.global_batch_tokens
        options["headroom"] = limits.headroom_share
        probe = profile.evidence.probe
        if probe is not None:
            options["accumulate"] = probe.gradient_accumulation_steps > 1
            options["ranks"] = probe.local_ranks
    return command("probe", **(options | others))


def _unless_default(value: object, default: object) -> object:
    """Return the value of an option; None, which omits the option, at its default."""
    return None if value == default else value

"""Commands to run next, quoted for a shell. Pure."""

import shlex
from collections.abc import Mapping

from autotune.base.defaults import (
    HEADROOM_SHARE,
    MAX_MICRO_BATCH_SIZE,
    SEQ_LENGTH_TOKENS,
)
from autotune.base.units import exact_bytes
from autotune.base.wording import format_setting
from autotune.evidence.profile import Profile, SubjectTable
from autotune.profiles.decide.default_settings import default_layout, default_precision
from trainer.formats.presets import PRESETS
from trainer.formats.train_config import ModelSettings, TrainConfig

_DEFAULTS: Mapping[str, object] = {
    "seq_length": SEQ_LENGTH_TOKENS,
    "activation_checkpointing": "none",
    "strategy": "ddp",
    "accumulate": True,
    "headroom": HEADROOM_SHARE,
    "max_micro_batch_size": MAX_MICRO_BATCH_SIZE,
    "what_if": False,
    "along": "micro_batch_size",
    "subject": "own",
}
"""Defaults of options, which ``command`` leaves out, by their names with underscores.

They hold for all commands that have the option. Other options have no default here."""


def command(name: str, *arguments: object, **options: object) -> str:
    """Return a command of this program, quoted for a shell.

    Args:
        name: Name of the command, such as ``train`` or ``profile approve``.
        arguments: Positional arguments of the command.
        options: Options of the command, with underscores in place of hyphens. True
            becomes the flag ``--NAME``, False ``--no-NAME``; a list repeats the option;
            an option that is None or at its default is left out.
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
    """Return the name of a preset, or a placeholder for the config of another model.

    Other names are not repeated, as a foreign profile may hold any text there.
    """
    return model.name if model.name in PRESETS else "CONFIG.json"


def probe_command(profile: Profile, path: object) -> str:
    """Return the command that probes a profile's subject, and writes to a path.

    Args:
        profile: Profile of the subject.
        path: Path of the profile that the command writes or replaces.
    """
    if not profile.has_train:
        return _own_probe_command(profile, path)
    model = _model_argument(profile.train.model)
    return command("probe", model=model, data="DIR", out=path)


def _own_probe_command(profile: Profile, path: object) -> str:
    """Return the command that probes code of yours with its fixed arguments.

    Functions and arguments are repeated, as the command runs in your own directory.
    """
    subject = profile.subject
    return command(
        "probe",
        step=subject.function("step") or "MODULE:build_step",
        set=_assignments(subject) or None,
        **_subject_options(subject),
        headroom=profile.constraints.headroom_share,
        **_limits(profile),
        out=path,
    )


def _assignments(subject: SubjectTable) -> list[str]:
    """Return the fixed arguments of your functions, as ``--set`` takes them."""
    return [f"{name}={value}" for name, value in subject.arguments.items()]


def _limits(profile: Profile) -> dict[str, object]:
    """Return the options of the memory budget and the ranks of a probe."""
    probe, budget_bytes = (
        profile.evidence.probe,
        profile.constraints.memory_budget_bytes,
    )
    ranks = None if probe is None else probe.local_ranks
    return {
        "memory": None if budget_bytes is None else exact_bytes(budget_bytes),
        "ranks": _unless_default(ranks, 1),
    }


def _subject_options(subject: SubjectTable) -> dict[str, object]:
    """Return the options that name the kind of your code, its size and its unit."""
    per_size = f"{subject.units_per_size:g}{subject.unit}"
    return {
        "subject": subject.kind,
        "along": subject.size,
        "per_size": _unless_default(per_size, "1samples"),
    }


def workers_command(profile: Profile, path: object, **options: object) -> str:
    """Return the command that sweeps the DataLoader workers of a profile.

    Args:
        profile: Profile that a probe wrote.
        path: Path of the profile.
        options: Options to add, as for ``command``.
    """
    if profile.has_train:
        return command("workers", path, **options)
    subject = profile.subject
    if subject.has_loader and subject.function("step") is not None:
        return command("workers", path, **options)
    step_time = None
    if subject.function("step") is None:
        # The profile names no step, so one is replayed.
        sweep = profile.evidence.workers
        replayed_s = None if sweep is None else sweep.replayed_step_s
        step_time = "TIME" if replayed_s is None else f"{replayed_s:g}s"
    return command(
        "workers",
        path,
        loader=subject.function("loader") or "MODULE:build_loader",
        step_time=step_time,
        **options,
    )


def tune_command(
    model: ModelSettings, data: object, *, explore: bool | None = None
) -> str:
    """Return the command that tunes a model.

    Args:
        model: The model.
        data: Directory of the dataset.
        explore: True to search for faster settings too.
    """
    return command("tune", model=_model_argument(model), data=data, explore=explore)


def exploring_command(profile: Profile) -> str:
    """Return the command that tunes a profile's subject, and searches its settings.

    Of code of yours, a placeholder names the settings.
    """
    if profile.has_train:
        return f"autotune tune --model {profile.train.model.name} --data DIR --explore"
    subject = profile.subject
    varied = subject.table.get("varied")
    probe = profile.evidence.probe
    # A library's settings are known, and reported by its step.
    declares = probe is not None and bool(probe.settings)
    vary = None if declares else ["NAME=V1,V2"]
    if isinstance(varied, dict) and varied:
        vary = [
            f"{name}={','.join(format_setting(value) for value in values)}"
            for name, values in varied.items()
        ]
    return command(
        "tune",
        step=subject.function("step") or "MODULE:build_step",
        loader=subject.function("loader"),
        set=_assignments(subject) or None,
        vary=vary,
        **_subject_options(subject),
        **_limits(profile),
        explore=True,
    )


def missing_probe_commands(profile: Profile, path: object) -> tuple[str, ...]:
    """Return the probe command if the profile was not probed, else no command.

    All other measurements require a probe.

    Args:
        profile: Profile that may lack a probe.
        path: Path of the profile.
    """
    if profile.evidence.probe is not None:
        return ()
    return (probe_command(profile, path),)


def repeated_probe_command(
    train: TrainConfig, profile: Profile | None, **others: object
) -> str:
    """Return the command that probes with given settings, limits and ranks.

    Args:
        train: Settings of the trainer.
        profile: Profile with the limits and ranks; None leaves their options out.
        others: Options to add, or to replace those from the settings and the profile.
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
        if limits.memory_budget_bytes is not None:
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

"""Translation of a profile for any target, from the target's table. Pure."""

import importlib
from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter
from typing import TypeVar

from autotune.corpus.values import SequenceMeans
from autotune.evidence.argument import Argument
from autotune.evidence.profile import Profile
from autotune.subjects.mlm.export.batch import batch_warnings, exported_batch
from autotune.subjects.mlm.export.table import (
    Equivalence,
    Equivalent,
    Export,
    ExportTarget,
    RunToExport,
    SettingRow,
    Value,
)
from autotune.subjects.mlm.export.targets import TargetName

CellT = TypeVar("CellT")
"""Type of a cell of a row."""

_SETTING_OF_OWN_VALUE = {
    "micro_batch_size": "micro_batch_size",
    "num_workers": "data.num_workers",
    "gradient_accumulation_steps": "global_batch_size",
}
"""Setting of this trainer with the same meaning, by the name of each value of your own
code: the value is exported under the name of the setting in the target."""
_OWN_CODE = {
    "DataLoader": "DataLoader(dataset, {})",
    "Accelerator": "Accelerator({})",
    "build_step": "build_step({})",
}
"""Code that takes values of your own code, by function."""


def export_target(name: TargetName) -> ExportTarget:
    """Return the table of a target, which its module declares."""
    module = importlib.import_module(
        f"autotune.subjects.mlm.export.targets.{name.replace('-', '_')}"
    )
    target: ExportTarget = module.TARGET
    return target


def export_profile(
    profile: Profile,
    means: SequenceMeans,
    target_name: TargetName,
    *,
    nodes: int,
    ranks_per_node: int,
) -> Export:
    """Translate every setting of a profile.

    Args:
        profile: Profile to export.
        means: Tokens and samples of a sequence, on average; an unknown number of
            samples counts as one.
        target_name: Trainer to export to.
        nodes: Nodes that train.
        ranks_per_node: Ranks on each node.
    """
    train = profile.train
    target = export_target(target_name)
    batch = exported_batch(profile, means, nodes * ranks_per_node)
    can_shard = train.device == "cuda" or target.fsdp_on_cpus
    run = RunToExport(
        profile=profile,
        batch=batch,
        nodes=nodes,
        fsdp=train.parallel.strategy == "fsdp2" and can_shard,
    )
    settings = tuple(_equivalent(row, run) for row in target.rows)
    return Export(
        written_for=target.written_for,
        model=train.model.name,
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        batch=batch,
        arguments=_file_arguments(settings),
        settings=settings,
        warnings=tuple(batch_warnings(train, batch, means)),
        calls=tuple(_calls(settings, target.code)),
    )


def export_own_values(
    target_name: TargetName, tuned: Mapping[str, Argument]
) -> tuple[dict[str, Value], tuple[str, ...]]:
    """Translate values that were tuned for your own training code.

    Args:
        target_name: Trainer to export to.
        tuned: Values by name; a name without an equivalent in the target stays an
            argument of your ``build_step``.

    Returns:
        Arguments for the target's file of settings, and the code that takes the rest.
    """
    arguments = {row.setting: row.argument for row in export_target(target_name).rows}
    settings = []
    for name, value in tuned.items():
        argument = arguments.get(_SETTING_OF_OWN_VALUE.get(name, ""))
        # An argument that depends on a run of this trainer is none of your program.
        if not isinstance(argument, str):
            argument = f"build_step({name})"
        settings.append(
            Equivalent(
                setting=name,
                argument=argument,
                value=value,
                equivalence="same",
                remark="",
            )
        )
    return _file_arguments(settings), tuple(_calls(settings, _OWN_CODE))


def _equivalent(row: SettingRow, run: RunToExport) -> Equivalent:
    """Return the equivalent of a setting in a run."""
    argument = _in_run(row.argument, run)
    value: Value = None
    if argument is not None and row.value is None:
        value = attrgetter(row.setting)(run.train)
    elif argument is not None:
        value = _in_run(row.value, run)
    near = _in_run(row.near, run)
    lost = _in_run(row.lost, run)
    equivalence: Equivalence = "same"
    if near is not None:
        equivalence = "near"
    if lost is not None:
        equivalence = "none"
    return Equivalent(
        setting=row.setting,
        argument=argument,
        value=value,
        equivalence=equivalence,
        remark=lost or near or "",
    )


def _in_run(cell: CellT | Callable[[RunToExport], CellT], run: RunToExport) -> CellT:
    """Return a cell of a row for a run, which a function of the run may return."""
    return cell(run) if callable(cell) else cell


def _file_arguments(settings: Iterable[Equivalent]) -> dict[str, Value]:
    """Return the arguments that the file of settings holds."""
    arguments: dict[str, Value] = {}
    for setting in settings:
        if setting.argument is None or setting.value is None:
            continue
        if "(" not in setting.argument:
            arguments[setting.argument] = setting.value
    return arguments


def _calls(settings: Iterable[Equivalent], code: Mapping[str, str]) -> list[str]:
    """Return the lines of code that pass the arguments which the file cannot hold.

    Args:
        settings: Settings of the export.
        code: Code by function, with ``{}`` in place of its arguments.
    """
    arguments_by_function: dict[str, list[str]] = {}
    for setting in settings:
        if setting.argument is None or setting.value is None:
            continue
        function, bracket, keyword = setting.argument.removesuffix(")").partition("(")
        if bracket:
            # A Python argument such as ``lr=0.001``; without a keyword, ``1000``.
            argument = f"{keyword}={setting.value!r}".removeprefix("=")
            arguments_by_function.setdefault(function, []).append(argument)
    lines: list[str] = []
    for function, template in code.items():
        if function in arguments_by_function or "{}" not in template:
            arguments = ", ".join(arguments_by_function.get(function, []))
            # Templates hold braces of their own, so that str.format fails on them.
            lines += template.replace("{}", arguments).split("\n")
    return lines

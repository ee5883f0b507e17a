"""Settings of DDP, which targets take by different names. Pure."""

from collections.abc import Mapping

from autotune.profiles.decide.export.remarks import gradient_dtype_remark
from autotune.profiles.decide.export.table import Equivalent, Raw, Scalar, row
from trainer.config.train_config import TrainConfig

_TORCH_BUCKET_CAP_MIB = 25
"""Default of torch: if no size is given, it makes the first bucket smaller, so that it
is sent early."""


def ddp_names(template: str) -> dict[str, str]:
    """Return the names of DDP's settings, each in place of ``{}`` in a template."""
    names = {
        "parallel.bucket_cap_mib": "bucket_cap_mb",
        "parallel.static_graph": "static_graph",
        "every parameter is used": "find_unused_parameters",
        "no synchronisation of buffers": "broadcast_buffers",
    }
    return {setting: template.replace("{}", name) for setting, name in names.items()}


def ddp_rows(
    train: TrainConfig, names: Mapping[str, str], *, fsdp: bool
) -> tuple[Equivalent, ...]:
    """Return the settings of DDP, which leave an FSDP target at its defaults."""
    values: dict[str, Scalar] = {
        "parallel.bucket_cap_mib": None,
        "parallel.static_graph": None,
        "every parameter is used": None,
        "no synchronisation of buffers": None,
    }
    if not fsdp:
        if train.parallel.bucket_cap_mib != _TORCH_BUCKET_CAP_MIB:
            values["parallel.bucket_cap_mib"] = train.parallel.bucket_cap_mib
        if train.parallel.static_graph:
            values["parallel.static_graph"] = True
        # Always written: transformers looks for unused parameters by default, and DDP
        # sends buffers by default.
        values["every parameter is used"] = False
        values["no synchronisation of buffers"] = False
    return tuple(
        row(setting, names.get(setting), value) for setting, value in values.items()
    )


def gradient_rows(
    train: TrainConfig, call: str, hook: str, dtype: str, *, fsdp: bool
) -> tuple[Equivalent, ...]:
    """Return the settings of gradients that DDP takes as arguments of a call.

    Args:
        train: Settings to export.
        call: Function that takes DDP's arguments.
        hook: Its argument for the hook that compresses gradients.
        dtype: Code of the hook.
        fsdp: True if the target trains with FSDP, which has no hook.
    """
    if fsdp:
        lost_dtype = gradient_dtype_remark(train, fsdp=True)
        return (
            row("parallel.gradient_dtype", f"{call}({hook})", lost=lost_dtype),
            row("parallel.gradient_as_bucket_view", f"{call}(gradient_as_bucket_view)"),
        )
    compresses = train.parallel.gradient_dtype != "fp32"
    return (
        row(
            "parallel.gradient_dtype",
            f"{call}({hook})",
            Raw(dtype) if compresses else None,
        ),
        row(
            "parallel.gradient_as_bucket_view",
            f"{call}(gradient_as_bucket_view)",
            train.parallel.gradient_as_bucket_view,
        ),
    )

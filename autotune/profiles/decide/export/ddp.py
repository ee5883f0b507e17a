"""Settings of DDP, with their names and values in a target. Pure."""

from collections.abc import Mapping

from autotune.profiles.decide.export.remarks import gradient_dtype_remark
from autotune.profiles.decide.export.table import Equivalent, Raw, Value, row
from trainer.config.train_config import TrainConfig

_BUCKET_CAP = "parallel.bucket_cap_mib"
_STATIC_GRAPH = "parallel.static_graph"
_PARAMETER_USE = "every parameter is used"
_BUFFERS = "no synchronisation of buffers"
_DDP_ARGUMENTS = {
    _BUCKET_CAP: "bucket_cap_mb",
    _STATIC_GRAPH: "static_graph",
    _PARAMETER_USE: "find_unused_parameters",
    _BUFFERS: "broadcast_buffers",
}
"""Argument of torch's ``DistributedDataParallel`` for each setting of an export."""
_TORCH_BUCKET_CAP_MIB = 25
"""Bucket size of torch if none is given, which an export leaves out: only then does
torch make the first bucket smaller, so that it is sent early."""


def ddp_names(template: str) -> dict[str, str]:
    """Return the target's name of each setting of DDP.

    Args:
        template: Name in the target, with ``{}`` in place of torch's name.
    """
    return {
        setting: template.replace("{}", argument)
        for setting, argument in _DDP_ARGUMENTS.items()
    }


def ddp_rows(
    train: TrainConfig, names: Mapping[str, str], *, fsdp: bool
) -> tuple[Equivalent, ...]:
    """Return the settings of DDP that targets take under their own names.

    Args:
        train: Settings to export.
        names: Name of each setting in the target; a setting may have none.
        fsdp: True if the target trains with FSDP; the settings then have no values.
    """
    bucket_cap_mib: int | None = None
    static_graph: bool | None = None
    find_unused_parameters: bool | None = None
    broadcast_buffers: bool | None = None
    if not fsdp:
        if train.parallel.bucket_cap_mib != _TORCH_BUCKET_CAP_MIB:
            bucket_cap_mib = train.parallel.bucket_cap_mib
        if train.parallel.static_graph:
            static_graph = True
        # Always written: transformers looks for unused parameters by default, and DDP
        # sends buffers by default.
        find_unused_parameters = False
        broadcast_buffers = False
    return (
        row(_BUCKET_CAP, names.get(_BUCKET_CAP), bucket_cap_mib),
        row(_STATIC_GRAPH, names.get(_STATIC_GRAPH), static_graph),
        row(_PARAMETER_USE, names.get(_PARAMETER_USE), find_unused_parameters),
        row(_BUFFERS, names.get(_BUFFERS), broadcast_buffers),
    )


def gradient_rows(
    train: TrainConfig, *, call: str, hook_argument: str, hook_code: str, fsdp: bool
) -> tuple[Equivalent, ...]:
    """Return the settings of gradients that a target takes as arguments of a call.

    Args:
        train: Settings to export.
        call: Function of the target that takes the arguments of DDP or FSDP.
        hook_argument: Argument of ``call`` for a hook that compresses gradients.
        hook_code: Python expression of the hook for the profile's gradient dtype.
        fsdp: True if the target trains with FSDP, which takes no hook.
    """
    hook: Value = None
    lost_dtype: str | None = None
    gradient_as_bucket_view: bool | None = None
    if fsdp:
        lost_dtype = gradient_dtype_remark(train, fsdp=True)
    else:
        if train.parallel.gradient_dtype != "fp32":
            hook = Raw(hook_code)
        gradient_as_bucket_view = train.parallel.gradient_as_bucket_view
    return (
        row(
            "parallel.gradient_dtype",
            f"{call}({hook_argument})",
            hook,
            lost=lost_dtype,
        ),
        row(
            "parallel.gradient_as_bucket_view",
            f"{call}(gradient_as_bucket_view)",
            gradient_as_bucket_view,
        ),
    )

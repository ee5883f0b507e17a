"""Lists of the functions that autocast casts, compared with torch's own lists."""

import re
from pathlib import Path

import pytest
import torch

from autotune.memory.jobs.autocast_functions import (
    CAST_TO_BF16,
    CAST_TO_FP32,
    FP32_RESULT,
)
from autotune.memory.jobs.device_rules import NAMESPACES, DeviceKind

LIST_BY_MACRO = {
    "AT_FORALL_LOWER_PRECISION_FP": CAST_TO_BF16,
    "AT_FORALL_FP32": CAST_TO_FP32,
    "AT_FORALL_FP32_SET_OPT_DTYPE": FP32_RESULT,
}
"""Our lists, one for each device, by torch's macro of the same functions on CUDA."""
HEADER = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"
OWN_NAMES = {
    # Operators of Python.
    "__matmul__",
    "__pow__",
    # It calls ``nll_loss``, which is on torch's list, in C++, where no mode sees it.
    "cross_entropy",
    # Torch has it in another macro, with the signature of each overload.
    "norm",
}
"""Names that only our lists have."""


def is_public_function(name: str) -> bool:
    has_function = any(hasattr(namespace, name) for namespace in NAMESPACES)
    return has_function and not name.startswith("_")


def names_in_header(macro: str) -> set[str]:
    """Return the public functions that a macro of torch's header names."""
    definition = re.search(rf"#define {macro}\(_\)((?:.*\\\n)*.*)", HEADER.read_text())
    assert definition is not None
    names = set()
    for name in re.findall(r"_\((\w+)", definition[1]):
        short_name = name.removeprefix("linalg_")
        public_name = short_name if hasattr(torch.linalg, short_name) else name
        if is_public_function(public_name):
            names.add(public_name)
    return names


def names_with_cpu_kernels() -> set[str]:
    """Return the operators for which autocast on a CPU has a kernel."""
    names = set()
    # Torch has no public list of its operators and their kernels.
    for operator in torch._C._dispatch_get_all_op_names():
        if not operator.startswith("aten::"):
            continue
        if torch._C._dispatch_has_kernel_for_dispatch_key(operator, "AutocastCPU"):
            name, *_overload = operator.removeprefix("aten::").split(".")
            names.add(name.removeprefix("linalg_"))
    return names


def names_on_lists(kind: DeviceKind) -> list[str]:
    """Return the names on all of our lists for a device."""
    names: list[str] = []
    for list_by_device in LIST_BY_MACRO.values():
        names += list_by_device[kind]
    return names


@pytest.mark.parametrize("macro", LIST_BY_MACRO)
def test_cuda_lists_are_those_of_the_header(macro):
    listed = set(LIST_BY_MACRO[macro]["cuda"])
    in_header = names_in_header(macro)
    # Attention has a rule of its own.
    assert in_header - {"scaled_dot_product_attention"} <= listed
    assert listed - in_header <= OWN_NAMES


def test_cpu_lists_have_only_functions_of_autocast():
    assert set(names_on_lists("cpu")) - names_with_cpu_kernels() <= OWN_NAMES


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_no_function_is_on_two_lists(kind):
    names = names_on_lists(kind)
    assert len(names) == len(set(names))


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_torch_has_every_listed_function(kind):
    for name in names_on_lists(kind):
        assert any(hasattr(namespace, name) for namespace in NAMESPACES), name

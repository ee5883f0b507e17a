"""Kernels of profiler traces, with their work and bounds."""

import pytest

from autotune.evidence.kernels import Roofline
from autotune.kernels.decide.trace import kernels_of_trace, matmul_format

ROOFLINE = Roofline(bytes_per_s=1e12, flops_per_s=1e14)
TOKENS, HIDDEN, INNER = 32_768, 768, 3_072


def operator(number, name, dims, types, strides=None):
    """Return the event of an operator with these inputs."""
    arguments = {"External id": number, "Input Dims": dims, "Input type": types}
    if strides is not None:
        arguments["Input Strides"] = strides
    return {
        "ph": "X",
        "cat": "cpu_op",
        "name": name,
        "tid": 1,
        "ts": 100.0 * number,
        "dur": 50.0,
        "args": arguments,
    }


def kernel(number, name, us):
    """Return the event of a kernel that this operator launched."""
    return {
        "ph": "X",
        "cat": "kernel",
        "name": name,
        "ts": 1e6,
        "dur": us,
        "args": {"External id": number},
    }


def only_kernel(*events, steps=1, document_tokens=256.0):
    (found,) = kernels_of_trace(
        events,
        ROOFLINE,
        on_gpu=True,
        steps=steps,
        document_tokens=document_tokens,
    )
    return found


def test_matmul_is_bound_by_its_flops():
    dims = [[TOKENS, HIDDEN], [HIDDEN, INNER], [TOKENS, INNER]]
    found = only_kernel(
        operator(1, "aten::mm", dims, ["c10::BFloat16"] * 3),
        kernel(1, "nvjet_tst", 2000.0),
    )
    assert found.flops == 2 * TOKENS * HIDDEN * INNER
    moved = 2 * (TOKENS * HIDDEN + HIDDEN * INNER + TOKENS * INNER)
    assert found.moved_bytes == moved
    assert found.bound_s == pytest.approx(found.flops / 1e14)
    assert found.seconds == pytest.approx(2e-3)


def test_compiled_kernel_is_bound_by_its_arguments():
    dims = [[TOKENS, HIDDEN], [HIDDEN], [TOKENS, HIDDEN], []]
    types = ["float", "float", "c10::BFloat16", "Scalar"]
    found = only_kernel(
        operator(1, "triton_red_fused_native_layer_norm_0", dims, types),
        kernel(1, "triton_red_fused_native_layer_norm_0", 100.0),
    )
    moved = 4 * TOKENS * HIDDEN + 4 * HIDDEN + 2 * TOKENS * HIDDEN
    assert found.moved_bytes == moved
    assert found.bound_s == pytest.approx(moved / 1e12)


def test_expanded_dimension_is_stored_once():
    found = only_kernel(
        operator(
            1,
            "aten::copy_",
            [[TOKENS, HIDDEN], [TOKENS, HIDDEN]],
            ["float", "float"],
            [[HIDDEN, 1], [0, 1]],
        ),
        kernel(1, "copy_kernel", 100.0),
    )
    assert found.moved_bytes == 4 * (TOKENS * HIDDEN + HIDDEN)


def test_kernels_of_one_operator_share_its_work():
    events = [
        operator(1, "aten::sum", [[1000, 1000]], ["float"]),
        kernel(1, "reduce_first", 3.0),
        kernel(1, "reduce_second", 1.0),
    ]
    first, second = kernels_of_trace(
        events, ROOFLINE, on_gpu=True, steps=1, document_tokens=1.0
    )
    assert first.moved_bytes == pytest.approx(3e6)
    assert second.moved_bytes == pytest.approx(1e6)


def test_attention_sees_its_documents_only():
    shape = [TOKENS, 12, 64]
    found = only_kernel(
        operator(
            1, "aten::_flash_attention_forward", [shape] * 3, ["c10::BFloat16"] * 3
        ),
        kernel(1, "flash_fwd_kernel", 200.0),
        document_tokens=256.0,
    )
    assert found.flops == 4 * TOKENS * 12 * 64 * 256
    assert found.moved_bytes == 4 * 2 * TOKENS * 12 * 64


def test_adam_reads_four_lists_and_writes_three():
    lists = [[[10, 10], [5]]] * 4
    found = only_kernel(
        operator(1, "aten::_fused_adamw_", lists, ["TensorList"] * 4),
        kernel(1, "multi_tensor_apply_kernel", 5.0),
    )
    assert found.moved_bytes == 7 * 4 * 105


def matmul(number, rows, type_name):
    return operator(number, "aten::mm", [[rows, 8], [8, 8]], [type_name] * 2)


EXPANDED = operator(1, "aten::mm", [[64, 8], [8, 8]], ["float"] * 2, [[0, 0], [8, 1]])
"""A matmul in fp32 whose first factor is stored as one number."""


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ([matmul(1, 64, "float"), matmul(2, 65, "c10::BFloat16")], "bf16"),
        ([matmul(1, 64, "float"), matmul(2, 63, "c10::Half")], "fp32"),
        ([operator(1, "aten::add", [[8]], ["c10::BFloat16"])], "fp32"),
        ([matmul(1, 64, "a new type"), matmul(2, 1, "c10::Half")], "bf16"),
        ([EXPANDED, matmul(2, 63, "c10::Half")], "fp32"),
        ([matmul(1, 0, "c10::Half"), matmul(2, 1, "float")], "fp32"),
    ],
    ids=["bf16", "fp32", "no matmul", "unknown type", "expanded", "empty"],
)
def test_format_is_that_of_most_flops(events, expected):
    assert matmul_format(events) == expected


@pytest.mark.parametrize(
    "events",
    [
        [kernel(9, "unknown_kernel", 5.0)],
        [operator(1, "aten::unheard_of", [[8]], ["float"]), kernel(1, "k", 5.0)],
        [operator(1, "aten::add", [[8]], ["a new type"]), kernel(1, "k", 5.0)],
        [
            operator(1, "triton_tem_fused_mm_0", [[8, 8]] * 3, ["float"] * 3),
            kernel(1, "triton_tem_fused_mm_0", 5.0),
        ],
    ],
    ids=["no operator", "unknown operator", "unknown type", "compiled matmul"],
)
def test_unknown_work_has_no_bound(events):
    found = only_kernel(*events)
    assert found.bound_s is None
    assert found.flops is None
    assert found.seconds == pytest.approx(5e-6)


def test_times_are_those_of_one_step():
    events = [
        operator(1, "aten::sum", [[1000]], ["float"]),
        *(kernel(1, "reduce", 4.0) for _ in range(6)),
    ]
    found = only_kernel(*events, steps=2)
    assert found.calls == 3
    assert found.seconds == pytest.approx(12e-6)


def test_operator_has_its_time_without_those_it_calls():
    outer = operator(1, "aten::linear", [[8, 8], [8, 8]], ["float"] * 2)
    inner = operator(2, "aten::addmm", [[8], [8, 8], [8, 8]], ["float"] * 3)
    inner["ts"], inner["dur"] = outer["ts"] + 5, 30.0
    found = kernels_of_trace(
        [outer, inner], ROOFLINE, on_gpu=False, steps=1, document_tokens=1.0
    )
    seconds = {kernel.name: kernel.seconds for kernel in found}
    assert seconds == pytest.approx({"aten::linear": 20e-6, "aten::addmm": 30e-6})


def test_gpu_without_kernels_has_no_operators_instead():
    events = [operator(1, "aten::sum", [[1000]], ["float"])]
    found = kernels_of_trace(
        events, ROOFLINE, on_gpu=True, steps=1, document_tokens=1.0
    )
    assert found == []

"""Kernels of a profiler's trace, with their FLOPs, bytes and bounds. Pure.

A trace has events in Chrome's format, as torch's profiler exports them: operators with
the shapes of their inputs, and the kernels that they launched. A kernel's work follows
from the shapes of its operator. Results have no shapes in a trace, so the work is known
only of the operators whose result follows from their inputs.

Shapes: B batch, M rows, N columns and K inner elements of a matmul; T tokens, H heads,
E dimensions of a head.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from autotune.evidence.kernels import KernelTime, Roofline

MAX_NAME_CHARACTERS = 160
"""Characters of a kernel's name that are kept, from its beginning."""
NO_KERNELS = "the profiler saw no kernels, as without permission for GPU counters"
"""Reason why a profile on a GPU is empty."""
_KERNEL_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
"""Categories of the events on a GPU."""
_ELEMENT_BYTES = {
    "double": 8,
    "long int": 8,
    "long": 8,
    "float": 4,
    "int": 4,
    "TensorList": 4,  # the trace has no type; weights and optimizer state are in fp32
    "c10::BFloat16": 2,
    "c10::Half": 2,
    "short int": 2,
    "short unsigned int": 2,
    "c10::Float8_e4m3fn": 1,
    "c10::Float8_e5m2": 1,
    "bool": 1,
    "unsigned char": 1,
    "signed char": 1,
}
"""Bytes of an element by the type in a trace."""
_NO_TENSOR = ("", "Scalar", "ScalarList")
"""Types of inputs that are no tensors."""
MatmulFormat = Literal["bf16", "fp32"]
"""Number format of matmuls, whose rate bounds the time of kernels."""
_HALF_BYTES = 2
"""Bytes of a number in half precision."""
_MATMULS = {
    "aten::mm": 0,
    "aten::bmm": 0,
    "aten::addmm": 1,
    "aten::baddbmm": 1,
    "aten::_addmm_activation": 1,
}
"""Position of the first factor by operator."""
_SAME_SHAPE = frozenset(
    {
        "aten::add",
        "aten::div",
        "aten::gelu",
        "aten::gelu_backward",
        "aten::mul",
        "aten::native_dropout",
        "aten::native_dropout_backward",
        "aten::native_layer_norm",
        "aten::native_layer_norm_backward",
        "aten::silu",
        "aten::silu_backward",
        "aten::sub",
        "aten::where",
        "aten::_log_softmax",
        "aten::_softmax",
    }
)
"""Operators whose result is as large as their largest input."""
_READS_ONLY = frozenset({"aten::sum", "aten::mean", "aten::norm", "aten::linalg_norm"})
"""Operators whose result is small."""
_WRITES_FIRST = frozenset({"aten::add_", "aten::mul_", "aten::div_", "aten::sub_"})
"""Operators that read all inputs and write the first one."""
_MOVES_INPUTS = frozenset({"aten::copy_", "aten::fill_", "aten::zero_"})
"""Operators that write one of their inputs and read the others."""
_ADAM = "aten::_fused_adamw_"
_ADAM_LISTS = 4
"""Lists of tensors that AdamW reads: weights, gradients and both moments."""
_ATTENTION_MATMULS = {
    "aten::_flash_attention_forward": 2.0,
    "aten::_flash_attention_backward": 5.0,
    "aten::_efficient_attention_forward": 2.0,
    "aten::_efficient_attention_backward": 5.0,
    "aten::_scaled_dot_product_flash_attention_for_cpu": 2.0,
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": 5.0,
}
"""Matmuls of attention by operator: scores and values, and in the backward pass the
scores again and the gradients of all four factors."""
_ATTENTION_RESULTS = {2.0: 1, 5.0: 3}
"""Results as large as the queries, by the number of matmuls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelWork:
    """FLOPs and bytes of a kernel."""

    flops: float
    """FLOPs of matmuls; 0 for kernels that have none."""
    moved_bytes: float
    """Bytes that it must read and write, each tensor once."""

    def bound_s(self, roofline: Roofline) -> float:
        """Return the shortest time at the rates of a device, in seconds."""
        return max(
            self.flops / roofline.flops_per_s, self.moved_bytes / roofline.bytes_per_s
        )


@dataclass(slots=True)
class _Total:
    """Sums over the calls of a kernel."""

    calls: int = 0
    seconds: float = 0.0
    flops: float = 0.0
    moved_bytes: float = 0.0
    bound_s: float = 0.0
    unknown_calls: int = 0


@dataclass(slots=True)
class _Launches:
    """Kernels that one call of an operator launched."""

    operator: Mapping[str, Any] | None
    kernels: list[tuple[str, float]] = field(default_factory=list)
    """Name and seconds of each."""


def kernels_of_trace(
    events: Iterable[Mapping[str, Any]],
    roofline: Roofline,
    *,
    on_gpu: bool,
    steps: int,
    document_tokens: float | None,
) -> list[KernelTime]:
    """Return the kernels of a step, the longest first.

    Args:
        events: Events of the trace.
        roofline: Rates of the device.
        on_gpu: True for the kernels of a GPU, which are none if the profiler could not
            see it; False for operators in their place, with the time that each took
            without those that it called.
        steps: Steps that the trace covers.
        document_tokens: Keys of a query in attention, on average; None if they are
            unknown, and with them the work of attention.
    """
    complete = [event for event in events if event.get("ph") == "X"]
    find_launches = _gpu_launches if on_gpu else _operators_as_launches
    launches = find_launches(complete)
    totals: dict[str, _Total] = defaultdict(_Total)
    for launch in launches:
        work = _work_of(launch.operator, document_tokens)
        operator_s = sum(seconds for _, seconds in launch.kernels)
        for name, seconds in launch.kernels:
            total = totals[name[:MAX_NAME_CHARACTERS]]
            total.calls += 1
            total.seconds += seconds
            if work is None or operator_s == 0:
                total.unknown_calls += 1
                continue
            # Kernels of one operator share its work.
            share = seconds / operator_s
            total.flops += share * work.flops
            total.moved_bytes += share * work.moved_bytes
            total.bound_s += share * work.bound_s(roofline)
    by_time = sorted(totals.items(), key=lambda named: named[1].seconds, reverse=True)
    return [
        _kernel_time(name, total, steps) for name, total in by_time if total.seconds
    ]


def matmul_format(events: Iterable[Mapping[str, Any]]) -> MatmulFormat:
    """Return the number format in which the matmuls of a trace have most FLOPs.

    It is fp32 if the trace has no matmul whose factors are known. Half precision counts
    as bf16, which devices multiply as fast.
    """
    flops: dict[MatmulFormat, float] = {"bf16": 0.0, "fp32": 0.0}
    for event in events:
        name = str(event.get("name"))
        if event.get("cat") != "cpu_op" or name not in _MATMULS:
            continue
        factors = _tensors_of(event.get("args", {}))[_MATMULS[name] :]
        work = _matmul_work(factors)
        if work is None:
            continue
        is_half = factors[0].element_bytes == _HALF_BYTES
        flops["bf16" if is_half else "fp32"] += work.flops
    return "bf16" if flops["bf16"] > flops["fp32"] else "fp32"


def _kernel_time(name: str, total: _Total, steps: int) -> KernelTime:
    """Return the figures of a kernel in one step."""
    is_known = total.unknown_calls == 0
    return KernelTime(
        name=name,
        calls=total.calls / steps,
        seconds=total.seconds / steps,
        flops=total.flops / steps if is_known else None,
        moved_bytes=total.moved_bytes / steps if is_known else None,
        bound_s=total.bound_s / steps if is_known else None,
    )


def _gpu_launches(events: Sequence[Mapping[str, Any]]) -> list[_Launches]:
    """Return the launches on a GPU, by the operator that made them."""
    operators = {
        event["args"]["External id"]: event
        for event in events
        if event.get("cat") == "cpu_op" and "External id" in event.get("args", {})
    }
    by_operator: dict[Any, _Launches] = {}
    for number, event in enumerate(events):
        if event.get("cat") not in _KERNEL_CATEGORIES:
            continue
        external_id = event.get("args", {}).get("External id")
        operator = operators.get(external_id)
        # A kernel without an operator is a separate launch.
        key = ("event", number) if operator is None else ("operator", external_id)
        launch = by_operator.setdefault(key, _Launches(operator))
        launch.kernels.append((str(event["name"]), _seconds(event)))
    return list(by_operator.values())


def _operators_as_launches(events: Sequence[Mapping[str, Any]]) -> list[_Launches]:
    """Return a launch for each operator, with its time without those that it called."""
    launches: list[_Launches] = []
    threads: dict[Any, list[Mapping[str, Any]]] = defaultdict(list)
    for event in events:
        if event.get("cat") == "cpu_op":
            threads[event.get("tid")].append(event)
    for thread in threads.values():
        thread.sort(key=lambda event: (event["ts"], -event["dur"]))
        # Operators that have not ended, each with the time of those that it called.
        open_calls: list[tuple[Mapping[str, Any], list[float]]] = []
        for event in thread:
            while open_calls and _end_us(open_calls[-1][0]) <= event["ts"]:
                launches.append(_closed(*open_calls.pop()))
            if open_calls:
                open_calls[-1][1].append(_seconds(event))
            open_calls.append((event, []))
        launches += [_closed(*call) for call in open_calls]
    return launches


def _closed(event: Mapping[str, Any], called_s: Sequence[float]) -> _Launches:
    """Return an operator that has ended as a launch of itself."""
    own_s = max(0.0, _seconds(event) - sum(called_s))
    return _Launches(event, [(str(event["name"]), own_s)])


def _seconds(event: Mapping[str, Any]) -> float:
    return float(event["dur"]) / 1e6


def _end_us(event: Mapping[str, Any]) -> float:
    return float(event["ts"]) + float(event["dur"])


def _work_of(
    operator: Mapping[str, Any] | None, document_tokens: float | None
) -> KernelWork | None:
    """Return the work of an operator's call; None if it does not follow from shapes."""
    if operator is None:
        return None
    arguments = operator.get("args", {})
    name = str(operator["name"])
    tensors = _tensors_of(arguments)
    if not tensors:
        return None
    if name in _MATMULS:
        return _matmul_work(tensors[_MATMULS[name] :])
    if name in _ATTENTION_MATMULS:
        return _attention_work(name, tensors, document_tokens)
    sizes = [tensor.stored_bytes for tensor in tensors]
    if any(size is None for size in sizes):
        return None
    known_sizes = [size for size in sizes if size is not None]
    read = sum(known_sizes)
    if name == _ADAM:
        lists = known_sizes[:_ADAM_LISTS]
        return KernelWork(flops=0.0, moved_bytes=2 * sum(lists) - lists[1])
    # Compiled kernels take their results as arguments; one that is read and written
    # counts once. A compiled matmul's FLOPs are not in the trace.
    if name in _MOVES_INPUTS or (
        name.startswith("triton_") and not name.startswith("triton_tem")
    ):
        return KernelWork(flops=0.0, moved_bytes=read)
    if name in _WRITES_FIRST:
        return KernelWork(flops=0.0, moved_bytes=read + known_sizes[0])
    if name in _SAME_SHAPE:
        return KernelWork(flops=0.0, moved_bytes=read + max(known_sizes))
    if name in _READS_ONLY:
        return KernelWork(flops=0.0, moved_bytes=read)
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tensor:
    """An input of an operator; a list of tensors counts as one."""

    shape: tuple[int, ...]
    """Shape; of a list, its number of elements."""
    element_bytes: int | None
    """Bytes of a number; None for an unknown type."""
    stored_bytes: int | None
    """Bytes in memory, where an expanded dimension is stored once; None for an unknown
    type."""


def _tensors_of(arguments: Mapping[str, Any]) -> list[_Tensor]:
    """Return the tensors among an operator's inputs, without numbers."""
    tensors = []
    shapes = arguments.get("Input Dims", [])
    strides = arguments.get("Input Strides", [[]] * len(shapes))
    types = arguments.get("Input type", [])
    for shape, stride, type_name in zip(shapes, strides, types, strict=False):
        if type_name in _NO_TENSOR:
            continue
        if shape and isinstance(shape[0], list):
            elements = sum(math.prod(of_tensor) for of_tensor in shape)
            full_shape = (elements,)
        else:
            elements = _stored_elements(shape, stride)
            full_shape = tuple(shape)
        element_bytes = _ELEMENT_BYTES.get(type_name)
        stored_bytes = None if element_bytes is None else elements * element_bytes
        tensors.append(
            _Tensor(
                shape=full_shape,
                element_bytes=element_bytes,
                stored_bytes=stored_bytes,
            )
        )
    return tensors


def _stored_elements(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Return the elements of a tensor in memory."""
    if len(strides) != len(shape):
        return math.prod(shape)
    return math.prod(
        size for size, stride in zip(shape, strides, strict=True) if stride
    )


def _matmul_work(factors: Sequence[_Tensor]) -> KernelWork | None:
    """Return the work of a (batched) matmul of its first two inputs."""
    if len(factors) < 2:
        return None
    left, right = factors[:2]
    if left.stored_bytes is None or right.stored_bytes is None:
        return None
    *batch, rows, inner = left.shape
    columns = right.shape[-1]
    result = math.prod(batch) * rows * columns
    element_bytes = left.stored_bytes / max(1, math.prod(left.shape))
    return KernelWork(
        flops=2.0 * result * inner,
        moved_bytes=left.stored_bytes + right.stored_bytes + result * element_bytes,
    )


def _attention_work(
    name: str, tensors: Sequence[_Tensor], document_tokens: float | None
) -> KernelWork | None:
    """Return the work of an attention kernel.

    Its queries, or in a backward pass its gradient, come first, then all that has their
    shape; each query sees ``document_tokens`` keys.
    """
    queries = tensors[0]
    same = [tensor for tensor in tensors if tensor.shape == queries.shape]
    if queries.stored_bytes is None or document_tokens is None:
        return None
    matmuls = _ATTENTION_MATMULS[name]
    results = _ATTENTION_RESULTS[matmuls]
    return KernelWork(
        flops=2.0 * matmuls * math.prod(queries.shape) * document_tokens,
        moved_bytes=queries.stored_bytes * (len(same) + results),
    )

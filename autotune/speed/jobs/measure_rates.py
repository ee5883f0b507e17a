"""Constants of this machine, measured.

They are measured on operators of an encoder's step. Operators make fresh results, as in
training, so that their time includes what allocation costs.

Shapes: M tokens, K and N sizes of a layer, B sequences, H heads, S positions, E
dimensions of a head, V rows of a table.
"""

import functools
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from autotune.speed.decide import attention_rates, fit_matmul_rates
from autotune.speed.jobs.count_kernels import KernelCounter
from autotune.speed.values import (
    AttentionRates,
    KernelKind,
    MatmulRates,
    PassRate,
)
from trainer.runtime.device import pick_device

REPEATS, FEWEST, LONG_S = 7, 3, 0.5
"""Repeats of a measurement; of one that takes this long in all, the fewest."""
_IN_A_ROW = 10
"""Runs of a GPU's work before the host waits: a launch costs the host more than small
work costs the GPU."""
_MIB = 2**20
_GPU_PASSES_MIB, _CPU_PASSES_MIB = (256,), (1, 8, 64)
_GPU_TOKENS, _CPU_TOKENS = (16_384, 65_536), (512, 4096)
_GPU_LAYERS, _CPU_LAYERS = (
    ((768, 768), (768, 3072), (1024, 4096)),
    ((256, 256), (256, 1024), (512, 2048)),
)
_HEAD, _HIDDEN = 64, 256


class _Counting(TorchDispatchMode):
    """Mode that counts kernels as a trace does."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counter = KernelCounter(0.0)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.counter.add(func, args, kwargs or {}, result)
        return result


AttendDocuments = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int], torch.Tensor
]
"""Attention within documents: a function of queries, keys and values of shape (M, H,
E), the int32 edges of documents, and the longest document."""


def measure(
    kind: Literal["cpu", "cuda"], attend_documents: AttendDocuments
) -> dict[str, Any]:
    """Return the fields of ``MachineRates`` that are measured, and ``spread``.

    Other processes raise the spread.

    Args:
        kind: Device to measure.
        attend_documents: Attention within documents, of which the rate on a GPU is that
            of the kernel ``varlen``.
    """
    # In TF32, as trainers usually do.
    torch.set_float32_matmul_precision("high")
    bench = _Bench(pick_device(kind, 0), attend_documents)
    dtypes = {"fp32": torch.float32}
    # Without instructions for bf16 a CPU takes minutes for a step.
    if (
        kind == "cuda"
        or torch.cpu._is_avx512_bf16_supported()
        or torch.cpu._is_amx_tile_supported()
    ):
        dtypes["bf16"] = torch.bfloat16
    matmul = {name: bench.matmul(dtype).model_dump() for name, dtype in dtypes.items()}
    attention = {
        f"{kernel} {name}": rates.model_dump()
        for name, dtype in dtypes.items()
        for kernel, rates in bench.attention(dtype).items()
    }
    passes = {
        name: [point.model_dump() for point in bench.passes(name)]
        for name in bench.works(1)
    }
    found = {"matmul": matmul, "attention": attention, "passes": passes, **bench.host()}
    return found | {"spread": statistics.median(bench.spreads)}


class _Bench:
    def __init__(self, device: torch.device, attend_documents: AttendDocuments) -> None:
        self._device = device
        self._attend_documents = attend_documents
        self._cuda = device.type == "cuda"
        self.spreads: list[float] = []
        """Ratio of each median to the shortest time, which other processes raise."""

    def seconds(self, work: Callable[[], object], repeats: int = REPEATS) -> float:
        """Return the median time of a piece of work, after one that is not timed."""
        work()
        in_a_row = _IN_A_ROW if self._cuda else 1
        times: list[float] = []
        for _ in range(repeats):
            if len(times) >= FEWEST and sum(times) * in_a_row > LONG_S:
                break
            self._wait()
            began = time.perf_counter()
            for _ in range(in_a_row):
                work()
            self._wait()
            times.append((time.perf_counter() - began) / in_a_row)
        middle = statistics.median(times)
        self.spreads.append(middle / min(times))
        return middle

    def _wait(self) -> None:
        if self._cuda:
            torch.cuda.synchronize()

    def matmul(self, dtype: torch.dtype) -> MatmulRates:
        """Return the rates of matmuls, forward and both of the backward."""
        points = []
        layers, tokens = (
            (_GPU_LAYERS, _GPU_TOKENS) if self._cuda else (_CPU_LAYERS, _CPU_TOKENS)
        )
        for m, (k, n) in itertools.product(
            tokens, [*layers, *((n, k) for k, n in layers if k != n)]
        ):
            value, weight, grad = (
                self._tensor(shape, dtype) for shape in ((m, k), (n, k), (m, n))
            )
            moved = value.element_size() * (m * k + n * k + m * n)
            works = (
                lambda value=value, weight=weight: value @ weight.t(),
                lambda grad=grad, weight=weight: grad @ weight,
                lambda grad=grad, value=value: grad.t() @ value,
            )
            points += [
                (2.0 * m * n * k, float(moved), self.seconds(work)) for work in works
            ]
        return fit_matmul_rates(
            *(np.array(column) for column in zip(*points, strict=True))
        )

    def attention(self, dtype: torch.dtype) -> dict[str, AttentionRates]:
        """Return the rates of this device's attention kernels, by kernel and pass."""
        kernels = (
            ("varlen", "efficient")
            if self._cuda and dtype == torch.bfloat16
            else ("efficient",)
        )
        found, lengths = {}, (128, 512)
        for kernel in kernels if self._cuda else ("cpu",):
            forward, backward = zip(
                *(self._attention_s(kernel, length, dtype) for length in lengths),
                strict=True,
            )
            found[f"{kernel} forward"] = attention_rates(lengths, forward)
            found[f"{kernel} backward"] = attention_rates(lengths, backward)
        return found

    def _attention_s(
        self, kernel: str, length: int, dtype: torch.dtype
    ) -> tuple[float, float]:
        """Return the FLOP/s of attention, forward and backward.

        It is attention within documents of a length.
        """
        tokens, heads = (131_072, 12) if self._cuda else (4096, 4)
        shape = (
            (tokens, heads, _HEAD)
            if kernel == "varlen"
            else (tokens // length, heads, length, _HEAD)
        )
        query, key, value = (
            self._tensor(shape, dtype).requires_grad_() for _ in range(3)
        )
        attend: Callable[[], torch.Tensor]
        if kernel == "varlen":
            edges = torch.arange(
                0, tokens + 1, length, device=self._device, dtype=torch.int32
            )
            attend = functools.partial(
                self._attend_documents, query, key, value, edges, length
            )
        else:
            mask = torch.zeros(
                tokens // length, 1, length, length, device=self._device, dtype=dtype
            )
            attend = functools.partial(
                functional.scaled_dot_product_attention,
                query,
                key,
                value,
                attn_mask=mask,
            )
        torch.backends.cuda.enable_cudnn_sdp(False)
        flops = 4.0 * tokens * heads * length * _HEAD
        with torch.no_grad():
            forward_s = self.seconds(attend)
        gradient = torch.ones_like(attend())
        both_s = self.seconds(lambda: attend().backward(gradient))
        return flops / forward_s, 2.5 * flops / max(both_s - forward_s, 0.1 * forward_s)

    def works(self, mib: int) -> dict[KernelKind, Callable[[], object]]:
        """Return work of each kind on tensors of a size; backward included."""
        count = mib * _MIB // 4
        rows = count // _HIDDEN
        value, other = (self._tensor((rows, _HIDDEN), torch.float32) for _ in range(2))
        wanted = self._tensor((rows, _HIDDEN), torch.float32).requires_grad_()
        norm, table = (
            nn.LayerNorm(_HIDDEN, device=self._device),
            nn.Embedding(8192, _HIDDEN, device=self._device),
        )
        ids = torch.randint(0, 8192, (rows,), device=self._device)

        def both(
            function: Callable[[torch.Tensor], torch.Tensor],
        ) -> Callable[[], object]:
            return lambda: function(wanted).backward(value)

        found: dict[KernelKind, Callable[[], object]] = {
            "copy": lambda: value + other,
            "math": both(functional.gelu),
            "norm": both(norm),
            "softmax": both(lambda one: one.softmax(-1)),
            "embedding": lambda: table(ids).backward(value),
        }
        if not self._cuda:
            found["random"] = lambda: torch.empty_like(value).bernoulli_(0.9)
        weight = nn.Parameter(torch.zeros(rows, _HIDDEN, device=self._device))
        weight.grad = torch.zeros_like(weight)
        found["optimizer"] = torch.optim.AdamW([weight], fused=True).step
        return found

    def passes(self, kind: KernelKind) -> Sequence[PassRate]:
        """Return the bytes per second of a kind of kernel, by bytes that it moves."""
        found = []
        for mib in _GPU_PASSES_MIB if self._cuda else _CPU_PASSES_MIB:
            work = self.works(mib)[kind]
            with _Counting() as counting:
                work()
            counts = counting.counter.counts.items()
            kernels = sum(
                count for kernel, count in counts if kernel.moved_bytes > _MIB // 4
            )
            moved = sum(kernel.moved_bytes * count for kernel, count in counts)
            found.append(
                PassRate(
                    moved_bytes=moved // max(1, kernels),
                    bytes_per_s=moved / self.seconds(work),
                )
            )
        return found

    def host(self) -> dict[str, float]:
        """Return the host's times per kernel and per call of a compiled graph."""
        weight = torch.ones(16, device=self._device, requires_grad=True)
        operations = 50

        def chain(value: torch.Tensor) -> torch.Tensor:
            for _ in range(operations):
                value = value * 1.5
            return value

        eager_s = self.seconds(lambda: chain(weight).sum().backward(), 20) / (
            2 * operations
        )
        compiled = torch.compile(lambda value: (value * 1.5).cos())
        graph_s = self.seconds(lambda: compiled(weight).sum().backward(), 20) / 2
        call_s, kernel_s = max(0.0, graph_s - 2 * eager_s), 3e-6 if self._cuda else 0.0
        return {
            "launch_s": eager_s,
            "compiled_launch_s": eager_s,
            "graph_call_s": call_s,
            "kernel_s": kernel_s,
        }

    def _tensor(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(*shape, device=self._device, dtype=torch.float32).to(dtype)

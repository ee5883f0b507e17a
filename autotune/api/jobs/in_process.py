"""Trials of functions that only this process has, such as closures.

They run one after the other in this process. The allocator is emptied before each
trial, but what an earlier one left behind counts: results are less exact than those of
fresh processes.
"""

import contextlib
import ctypes
import gc
import resource
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from autotune.memory.jobs import step
from autotune.memory.values import StepRequest
from autotune.trials.jobs.budget import Budget, CpuBudget, CudaBudget
from autotune.trials.jobs.cpu_allocators import (
    LARGE_BLOCK_BYTES,
    return_large_blocks,
)
from autotune.trials.jobs.rank_group import RankGroup
from autotune.trials.outcomes import Crashed, Measured, Outcome, OutOfMemory
from autotune.trials.trial_machine import StartedMachine
from autotune.trials.values import Trial
from autotune.workers.jobs import window
from autotune.workers.values import WindowRequest
from trainer.formats.errors import TrainerError
from trainer.formats.process_status import status_bytes
from trainer.runtime.out_of_memory import out_of_memory

_KEPT_BLOCK_BYTES = 2**25
"""Size from which glibc returns blocks at the latest, by its own choice."""


class InThisProcess(StartedMachine):
    """Machine that calls functions of this process. Time limits are not enforced."""

    def __init__(self, functions: Mapping[str, Callable[..., Any]]) -> None:
        super().__init__()
        self._functions = functions
        self.versions = {"torch": torch.__version__, "cuda": torch.version.cuda}

    def close(self) -> None:
        """Leave this process as it is."""

    def _ensure_started(self) -> None:
        pass

    def _run(self, trial: Trial) -> Outcome:
        _collect()
        try:
            figures = self._figures(trial)
        except TrainerError:
            raise
        except Exception as error:  # noqa: BLE001 - your code may raise anything, and the search continues
            refusal = out_of_memory(error)
            stack = "".join(traceback.format_exception(error))[-2000:]
            return (
                Crashed(detail=stack)
                if refusal is None
                else OutOfMemory(detail=refusal)
            )
        finally:
            _collect()
        return Measured(figures=figures)

    def _window_figures(self, request: WindowRequest) -> dict[str, Any]:
        device = torch.device("cpu")
        if request.device == "cuda":
            device = torch.device("cuda", 0)
        build_step = build_loader = None
        if request.loader is not None:
            build_loader = self._functions[request.loader.function]
        if request.step is not None:
            build_step = self._functions[request.step.function]
        return window.measure(
            request,
            RankGroup(rank=0, world_size=1, device=device),
            build_loader,
            build_step,
            {},
        )

    def _figures(self, trial: Trial) -> dict[str, Any]:
        if trial.job == "window":
            return self._window_figures(WindowRequest.of(trial.measured))
        request = StepRequest.of(trial.measured)
        device = torch.device("cpu")
        if request.device == "cuda":
            device = torch.device("cuda", 0)
        group = RankGroup(rank=0, world_size=1, device=device)
        arguments = request.arguments | {"device": request.device}
        with _limited(request.memory_budget_bytes, device) as budget:
            return step.figures_of(
                request, self._functions[request.function], arguments, budget, group
            )


class _CpuHere(CpuBudget):
    """Peak by resident pages.

    The kernel's peak of the address space cannot be reset.
    """

    def __init__(self) -> None:
        super().__init__(None)
        self._start_bytes = status_bytes("VmRSS")
        with contextlib.suppress(OSError):  # otherwise earlier trials count
            Path("/proc/self/clear_refs").write_text("5")

    def peak_bytes(self) -> int:
        """Return the highest growth of resident memory."""
        return max(1, status_bytes("VmHWM") - self._start_bytes)

    take_step_peak = peak_bytes


class _CudaHere(CudaBudget):
    """Peak of the allocator alone, over what it held before."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(None, device, None)
        self._start_bytes = torch.cuda.memory_reserved(device)

    def peak_bytes(self) -> int:
        """Return the highest growth of the allocator's reserve."""
        return max(1, self._peak_reserved_bytes() - self._start_bytes)


@contextlib.contextmanager
def _limited(budget_bytes: int | None, device: torch.device) -> Iterator[Budget]:
    """Limit the memory that this process may take in addition, while the block runs."""
    if device.type == "cuda":
        budget = _CudaHere(device)
        free_bytes, all_bytes = torch.cuda.mem_get_info(device)
        most_bytes = min(
            free_bytes, budget_bytes or all_bytes
        ) + torch.cuda.memory_reserved(device)
        torch.cuda.set_per_process_memory_fraction(
            min(1.0, most_bytes / all_bytes), device
        )
        try:
            yield budget
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0, device)
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    # Or what an earlier trial has freed would be free room beyond the limit.
    return_large_blocks(LARGE_BLOCK_BYTES)
    own = _CpuHere()
    if budget_bytes is not None:
        resource.setrlimit(
            resource.RLIMIT_DATA, (status_bytes("VmData") + budget_bytes, hard)
        )
    try:
        yield own
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
        return_large_blocks(_KEPT_BLOCK_BYTES)


def _collect() -> None:
    """Release what an earlier trial left; twice, as finalisers may make garbage."""
    for _ in range(2):
        gc.collect()
    # Of another C library; what malloc keeps would hide what a trial takes.
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.reset_accumulated_memory_stats()

"""Tracing: training steps on the meta device, and what they allocate on a real one.

A job of a subject builds its model and optimizer within ``tracing``, lets the tracer
watch them, and takes steps on batches of the meta device, whose tensors have no
content. Behaviour that depends on the real device comes from ``DeviceRules``.
"""

import contextlib
import importlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import nn

from autotune.memory.decide.overheads import DeviceKind
from autotune.memory.jobs.allocation_recorder import AllocationRecorder
from autotune.memory.jobs.allocator_requests import RequestRule
from autotune.memory.jobs.device_rules import DeviceRules
from autotune.memory.jobs.kernels import request_rules
from autotune.memory.jobs.module_owners import own_by_module
from autotune.memory.values import Term
from autotune.speed.jobs.count_kernels import KernelCounter, KernelOf

META = torch.device("meta")


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnKernels:
    """Rules of the operators that a trainer adds to torch's."""

    requests: Mapping[Any, RequestRule] = field(default_factory=dict)
    """Memory that each kernel allocates internally on a GPU, by operator."""
    kernels: Mapping[Any, KernelOf] = field(default_factory=dict)
    """FLOPs and bytes of each kernel, by operator."""


NO_OWN_KERNELS = OwnKernels()
"""Rules of a trainer with torch's operators alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tracer:
    """Trace that is being recorded; ``tracing`` makes one."""

    recorder: AllocationRecorder
    """Recorder of the allocations and kernels."""
    rules: DeviceRules
    """Behaviour of the imitated device."""
    hooks: contextlib.ExitStack
    """Stack that removes the hooks when tracing ends."""

    @property
    def autocast(self) -> Any:
        """Context in which functions cast as autocast does on the imitated device."""
        return self.rules.autocast

    def watch(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        head: Sequence[nn.Module] = (),
    ) -> None:
        """Set the terms of all further allocations, by what makes them.

        Args:
            module: Model with its loss, which a step calls as a whole.
            optimizer: Its optimizer.
            head: Parts of the model's head, which own their allocations as the head.
        """
        own_by_module(self.recorder, module, head, self.hooks)
        _label_phases(module, optimizer, self.recorder, self.hooks)


@contextlib.contextmanager
def tracing(
    device: DeviceKind,
    *,
    bf16: bool,
    own_kernels: OwnKernels = NO_OWN_KERNELS,
    document_tokens: float = 0.0,
) -> Iterator[Tracer]:
    """Trace what is built and computed on the meta device within this context.

    Args:
        device: Device to imitate.
        bf16: True to cast as autocast to bf16 does.
        own_kernels: Rules of operators that are not torch's.
        document_tokens: Length of the document that a token is in, on average over
            tokens; the FLOPs of varlen attention depend on it.
    """
    rules = request_rules(device)
    if device == "cuda":
        rules |= own_kernels.requests
    counter = KernelCounter(document_tokens, own_kernels.kernels)
    recorder = AllocationRecorder(rules, counter)
    device_rules = DeviceRules(device, bf16=bf16, recorder=recorder)
    with contextlib.ExitStack() as hooks:
        for context in (recorder, device_rules, _multi_tensor_kernels_on_meta()):
            hooks.enter_context(context)
        yield Tracer(recorder=recorder, rules=device_rules, hooks=hooks)


def _label_phases(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    recorder: AllocationRecorder,
    hooks: contextlib.ExitStack,
) -> None:
    """Set the terms of allocations outside of forward, until the hooks are removed.

    The optimizer owns allocations of its step; later ones are temporaries. Gradients
    get their term once they exist.
    """
    parameters = [
        parameter for parameter in module.parameters() if parameter.requires_grad
    ]

    def optimizer_step_begins(*_: object) -> None:
        gradients = [
            parameter.grad for parameter in parameters if parameter.grad is not None
        ]
        recorder.relabel(gradients, Term.GRADIENTS)
        recorder.owner = Term.OPTIMIZER

    def optimizer_step_ended(*_: object) -> None:
        recorder.owner = Term.TEMPORARIES

    def gradient_accumulated(parameter: torch.Tensor) -> None:
        # With gradient accumulation, gradients exist before the last forward, so each
        # is labelled once it exists.
        if parameter.grad is not None:
            recorder.relabel([parameter.grad], Term.GRADIENTS)

    enter = hooks.enter_context
    enter(optimizer.register_step_pre_hook(optimizer_step_begins))
    enter(optimizer.register_step_post_hook(optimizer_step_ended))
    for parameter in parameters:
        enter(parameter.register_post_accumulate_grad_hook(gradient_accumulated))


@contextlib.contextmanager
def _multi_tensor_kernels_on_meta() -> Iterator[None]:
    """Let functions call kernels of many tensors on the meta device, as on a GPU.

    These are fused AdamW and the norm of all gradients. Torch calls them on the devices
    that two private functions list, which it offers no way to extend. So the functions
    are patched until the block ends.
    """
    with contextlib.ExitStack() as patches:
        for module, name in (
            ("torch.optim.optimizer", "_get_fused_kernels_supported_devices"),
            ("torch.utils._foreach_utils", "_get_foreach_kernels_supported_devices"),
        ):
            supported = getattr(importlib.import_module(module), name)()
            patches.enter_context(
                mock.patch(f"{module}.{name}", return_value=[*supported, META.type])
            )
        yield

"""Owners of allocations: the module that is being called when they are made."""

from collections.abc import Sequence
from contextlib import ExitStack

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from autotune.memory.jobs.allocation_recorder import AllocationRecorder
from autotune.memory.values import Term, activations_of


def own_by_module(
    recorder: AllocationRecorder,
    module: nn.Module,
    head: Sequence[nn.Module],
    hooks: ExitStack,
) -> None:
    """Let the innermost module that is being called own all allocations.

    Allocations that the whole model makes outside of its parts are inputs before its
    encoder, and the loss after it.

    Args:
        recorder: Recorder of the allocations.
        module: The whole model.
        head: Parts of the model's head, which own their allocations as the head.
        hooks: Stack that removes the hooks.
    """
    owners: WeakIdKeyDictionary = WeakIdKeyDictionary(
        {part: activations_of(part) for part in module.modules()}
    )
    for part in head:
        owners.update(dict.fromkeys(part.modules(), Term.HEAD))
    owners[module] = Term.INPUTS
    callers: list[str] = []

    def enter(part: nn.Module, _arguments: object) -> None:
        callers.append(recorder.owner)
        recorder.owner = owners.get(part, recorder.owner)
        if part is module:
            recorder.forward_begins()

    def leave(part: nn.Module, _arguments: object, _result: object) -> None:
        recorder.owner = callers.pop()
        if part is module:
            recorder.forward_ended()
            # Backward follows.
            recorder.owner = Term.TEMPORARIES
        elif recorder.owner == Term.INPUTS:
            # The model's own operations after a call of one of its parts.
            recorder.owner = Term.HEAD

    for part in module.modules():
        hooks.enter_context(part.register_forward_pre_hook(enter))
        hooks.enter_context(part.register_forward_hook(leave))

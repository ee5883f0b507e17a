"""The ``model_trace`` job: steps of a model of yours on the meta device.

The result is the sequence of their allocations. Your optimizer and precision are not
known here: AdamW in fp32 is assumed, and trials correct the prediction.
"""

import contextlib
from typing import Any

import torch
from torch.utils import _pytree

from autotune.memory.jobs.allocation_recorder import AllocationRecorder
from autotune.memory.jobs.device_rules import DeviceRules
from autotune.memory.jobs.kernels import request_rules
from autotune.memory.jobs.module_owners import own_by_module
from autotune.memory.jobs.trace import META, multi_tensor_kernels_on_meta
from autotune.memory.values import ModelTraceRequest, Term
from autotune.speed.values import StepWork
from autotune.subjects.jobs import load
from trainer.formats.errors import BadConfig


def run(measured: dict[str, Any], _: dict[str, Any]) -> dict[str, Any]:
    """Trace two steps of each size.

    Args:
        measured: An ``ModelTraceRequest``.

    Returns:
        ``traces``, as ``Trace.to_json`` gives them, and ``parameters``.

    Raises:
        BadConfig: If the function does not return a module and a batch.
    """
    asked = ModelTraceRequest.of(measured)
    load.enter(asked.directory)
    build = load.resolve(asked.model, asked.directory)
    traces = []
    for size in asked.sizes:
        recorder = AllocationRecorder(request_rules(asked.device))
        with contextlib.ExitStack() as inside:
            rules = DeviceRules(asked.device, bf16=False, recorder=recorder)
            for context in (recorder, rules, multi_tensor_kernels_on_meta(), META):
                inside.enter_context(context)
            made = build(
                **load.accepted(
                    build, asked.arguments | {asked.along: size, "device": META.type}
                )
            )
            if not (
                isinstance(made, tuple)
                and len(made) == 2
                and isinstance(made[0], torch.nn.Module)
            ):
                what = f"{asked.model} returned {type(made).__name__}"
                raise BadConfig(
                    what, next_step="Return a module and its batch: return model, batch"
                )
            module = made[0].to(META)
            recorder.owner = Term.INPUTS
            batch = _pytree.tree_map_only(
                torch.Tensor, lambda one: one.to(META), made[1]
            )
            _take_steps(recorder, module, batch, inside)
        work = StepWork(
            micro_batch_size=size, padded_tokens=size, model_flops=0.0, kernels=()
        )
        traces.append(recorder.trace(work, 0).to_json())
    parameters = sum(one.numel() for one in module.parameters())
    return {
        "traces": traces,
        "parameters": parameters,
        "attention": "",
        "attention_reason": "",
    }


def _take_steps(
    recorder: AllocationRecorder,
    module: torch.nn.Module,
    batch: Any,
    inside: contextlib.ExitStack,
) -> None:
    optimizer = torch.optim.AdamW(
        one for one in module.parameters() if one.requires_grad
    )
    own_by_module(recorder, module, [], inside)
    for number in range(2):
        if number:
            recorder.mark_repetition()
        inputs = batch if isinstance(batch, tuple) else (batch,)
        output = module(**batch) if isinstance(batch, dict) else module(*inputs)
        loss = getattr(output, "loss", None)
        if loss is None:
            loss = sum(
                one.sum()
                for one in _pytree.tree_leaves(output)
                if one.is_floating_point()
            )
        del output
        loss.backward()
        del loss
        recorder.owner = Term.OPTIMIZER
        optimizer.step()
        optimizer.zero_grad()

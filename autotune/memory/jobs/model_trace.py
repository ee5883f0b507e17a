"""The ``model_trace`` job: steps of a model of yours on the meta device.

The result is the sequence of their allocations. Your optimizer and precision are not
known here: AdamW in fp32 is assumed, and trials correct the prediction.
"""

from typing import Any

import torch
from torch import nn
from torch.utils import _pytree

from autotune.memory.jobs.tracer import META, Tracer, tracing
from autotune.memory.values import ModelTraceRequest, Term
from autotune.speed.values import StepWork
from autotune.subjects.jobs import load
from trainer.formats.errors import BadConfig


def run(measured: dict[str, Any], _: dict[str, Any]) -> dict[str, Any]:
    """Trace two steps of each size.

    Args:
        measured: A ``ModelTraceRequest``.

    Returns:
        ``traces``, as ``Trace.to_json`` gives them, and ``parameters``.

    Raises:
        BadConfig: If the function does not return a module and a batch.
    """
    request = ModelTraceRequest.of(measured)
    load.enter(request.directory)
    build = load.resolve(request.model, request.directory)
    traces = []
    parameters = 0
    for size in request.sizes:
        arguments = request.arguments | {request.along: size, "device": META.type}
        with tracing(request.device, bf16=False) as tracer:
            tracer.hooks.enter_context(META)
            module, batch = _checked(
                build(**load.accepted(build, arguments)), request.model
            )
            module = module.to(META)
            tracer.recorder.owner = Term.INPUTS
            batch = _pytree.tree_map_only(
                torch.Tensor, lambda tensor: tensor.to(META), batch
            )
            _take_steps(tracer, module, batch)
        work = StepWork(
            micro_batch_size=size, padded_tokens=size, model_flops=0.0, kernels=()
        )
        traces.append(tracer.recorder.trace(work, 0).to_json())
        parameters = sum(parameter.numel() for parameter in module.parameters())
    return {
        "traces": traces,
        "parameters": parameters,
        "attention": "",
        "attention_reason": "",
    }


def _checked(made: object, function: str) -> tuple[nn.Module, Any]:
    """Return the module and the batch that a function made.

    Raises:
        BadConfig: If it made something else.
    """
    if isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module):
        return made
    raise BadConfig(
        f"{function} returned {type(made).__name__}",
        next_step="Return a module and its batch: return model, batch",
    )


def _take_steps(tracer: Tracer, module: nn.Module, batch: Any) -> None:
    """Take two steps, of which the second repeats in every further one."""
    recorder = tracer.recorder
    optimizer = torch.optim.AdamW(
        parameter for parameter in module.parameters() if parameter.requires_grad
    )
    tracer.watch(module, optimizer)
    for number in range(2):
        if number:
            recorder.mark_repetition()
        inputs = batch if isinstance(batch, tuple) else (batch,)
        output = module(**batch) if isinstance(batch, dict) else module(*inputs)
        loss = getattr(output, "loss", None)
        if loss is None:
            loss = sum(
                result.sum()
                for result in _pytree.tree_leaves(output)
                if result.is_floating_point()
            )
        del output
        loss.backward()
        del loss
        optimizer.step()
        optimizer.zero_grad()

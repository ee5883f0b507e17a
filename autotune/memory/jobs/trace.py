"""The ``trace`` job: one rank's training steps on the meta device, as the sequence of their allocations.

Model, loss and step are the trainer's; only the tensors are without content. Behaviour
that depends on the device comes from ``DeviceRules``. Shapes: K positions that the head
computes, V tokens of the vocabulary.
"""

import contextlib
import importlib
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import torch

from autotune.memory.jobs.allocation_recorder import AllocationRecorder, own_by_module
from autotune.memory.jobs.compiled import Compiled
from autotune.memory.jobs.device_rules import DeviceRules
from autotune.memory.jobs.kernels import within_kernels
from autotune.memory.jobs.shards import GradientBuckets, Shards, keep_largest_part
from autotune.memory.jobs.worst_case import fullest_batch
from autotune.memory.values import Term, Trace, TraceRequest
from autotune.speed.values import StepWork
from trainer.build import Training, build_training
from trainer.checkpoint.tensors import make_optimizer_state
from trainer.config.train_config import TrainConfig, gradient_accumulation_steps
from trainer.data.dataset import SpecialIds
from trainer.data.loader import MicroBatch
from trainer.distributed.parallel import DTYPES
from trainer.distributed.ranks import Ranks
from trainer.model.encoder import model_head
from trainer.model.flops import attended_pairs
from trainer.model.loss import cross_entropy_in_place

META = torch.device("meta")


def run(measured: dict[str, Any], _: dict[str, Any]) -> dict[str, Any]:
    """Return ``traces`` of all sizes of a ``TraceRequest``, ``parameters``, ``attention``, ``attention_reason``."""
    found: dict[str, Any] = {"traces": []}
    for rows in measured["sizes"]:
        global_batch_size = rows * measured["micro_batches"] * measured["ranks"]
        config = measured["config"] | {
            "micro_batch_size": rows,
            "global_batch_size": global_batch_size,
        }
        asked = TraceRequest.of(measured | {"config": config})
        trace, model = trace_steps(
            asked.config,
            asked.vocab_size,
            asked.special_ids,
            documents_per_sequence=asked.documents_per_sequence,
            ranks=asked.ranks,
        )
        found["traces"].append(trace.to_json())
        found |= model
    return found


def trace_steps(
    config: TrainConfig,
    vocab_size: int,
    special_ids: SpecialIds,
    *,
    documents_per_sequence: float = 1.0,
    ranks: int = 1,
) -> tuple[Trace, dict[str, Any]]:
    """Trace the building of a model and its first optimizer steps, on one of ``ranks`` ranks.

    An evaluation before the last step leaves other blocks of a GPU's memory free, which
    then serve that step. Return the trace; ``parameters``, ``attention`` and
    ``attention_reason`` of the model.
    """
    fullest = fullest_batch(
        config, vocab_size, special_ids, documents_per_sequence=documents_per_sequence
    )
    lengths_N = fullest.tokens_N.numpy()
    keys_of_a_query = float(attended_pairs(lengths_N, None) / lengths_N.sum())
    tape = AllocationRecorder(
        within_kernels(config.device, config.attention), keys_of_a_query
    )
    rules = DeviceRules(config.device, bf16=config.precision == "bf16", tape=tape)
    alone = Ranks(rank=0, local_rank=0, local_world_size=1, world_size=1, device=META)
    batches_per_step = gradient_accumulation_steps(config, ranks)
    with contextlib.ExitStack() as inside:
        for context in (tape, rules, multi_tensor_kernels_on_meta()):
            inside.enter_context(context)
        own = config.model_copy(
            update={"global_batch_size": batches_per_step * config.micro_batch_size}
        )
        training = build_training(own, vocab_size, special_ids, alone)
        _without_kernels(training, config, tape)
        training.module.autocast = rules.autocast
        parameters = [one for one in training.module.parameters() if one.requires_grad]
        own_by_module(tape, training.module, model_head(training.module.model), inside)
        _tell_phases(training, parameters, tape, inside)
        shared = _shared(training, config, ranks, tape, inside, bf16=rules.bf16)
        tape.owner = Term.OPTIMIZER
        make_optimizer_state(training)

        def batches(count: int) -> list[MicroBatch]:
            tape.owner = Term.INPUTS
            for each in shared:
                each.step_begins(count)
            return [fullest.to(META) for _ in range(count)]

        training.step.rehearse(batches(1)[0])
        if config.device == "cuda":
            taken = batches(batches_per_step)
            training.step.run(taken, config.learning_rate)
            _evaluate(
                training, taken[0], [one for one in shared if isinstance(one, Shards)]
            )
            del taken
        tape.marks_repetition()
        training.step.run(batches(batches_per_step), config.learning_rate)
    attention = training.module.attention
    model = {
        "parameters": training.work.parameters,
        "attention": attention.kind,
        "attention_reason": attention.reason,
    }
    work = StepWork(
        micro_batch_size=config.micro_batch_size,
        padded_tokens=batches_per_step * fullest.ids_BS.numel(),
        model_flops=batches_per_step
        * training.work.step_flops(lengths_N, fullest.predicted_tokens),
        kernels=tuple(tape.kernels.counts.items()),
    )
    return tape.trace(work, fullest.predicted_tokens), model


def _shared(
    training: Training,
    config: TrainConfig,
    ranks: int,
    tape: AllocationRecorder,
    inside: contextlib.ExitStack,
    *,
    bf16: bool,
) -> list[GradientBuckets | Shards]:
    """Share the work between ranks as the strategy does, until the stack is closed."""
    buckets = GradientBuckets(training.module, config, tape)
    if ranks == 1:
        return [buckets]
    training.optimizer.zero_grad(set_to_none=True)  # DDP keeps them in its buckets
    if config.parallel.strategy == "fsdp2":
        shards = Shards(
            training,
            training.module.layers,
            config.parallel.shard_ranks or ranks,
            tape,
            bf16=bf16,
            sent=DTYPES[config.parallel.gradient_dtype],
        )
        shards.keep(inside)
        return [buckets, shards]
    buckets.keep(inside)
    if config.parallel.strategy == "zero1":
        keep_largest_part(
            training.optimizer, ranks, keeps_gradients=training.step.keeps_gradients
        )
    return [buckets]


def _evaluate(training: Training, batch: MicroBatch, shards: Sequence[Shards]) -> None:
    for one in shards:
        one.forward_begins()
    training.module.eval()
    with torch.no_grad():
        training.module.evaluate(batch)
    training.module.train()
    for one in shards:
        one.evaluation_ended()


def _without_kernels(
    training: Training, config: TrainConfig, tape: AllocationRecorder
) -> None:
    """Replace compiled layers, compiled loss and fused loss by others without kernels."""
    graphs: dict[Any, Any] = {}
    if config.fused_cross_entropy:
        training.module.fused_loss = _fused_loss
    if not config.compiled:
        return
    for layer in training.module.layers:
        layer._compiled_call_impl = Compiled(layer, layer, tape, graphs)
    training.module.loss = cross_entropy_in_place(
        lambda function: Compiled(function, None, tape, graphs)
    )


def _fused_loss(*tensors: torch.Tensor) -> torch.Tensor:
    with torch._C.DisableTorchFunction():  # it is outside autocast
        loss: torch.Tensor = _FusedLoss.apply(*tensors)  # type: ignore[no-untyped-call]
    return loss


class _FusedLoss(torch.autograd.Function):
    """Liger's fused linear cross-entropy: its blocks and matmuls, in chunks of logits as large as the hidden states.

    After ``ops/fused_linear_cross_entropy.py`` of liger-kernel 0.8; another operator is
    in the place of its kernel.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden_KD: Any, weight_VD: Any, labels_K: Any, bias_V: Any
    ) -> torch.Tensor:
        rows = -(-len(hidden_KD) // -(-weight_VD.shape[0] // weight_VD.shape[1]))
        rows = min(1 << (rows - 1).bit_length(), len(hidden_KD))
        gradient_KD = torch.zeros_like(hidden_KD)
        gradients = [
            torch.zeros_like(one, dtype=torch.float32)
            for one in (weight_VD, bias_V)
            if one is not None
        ]
        losses_K = torch.zeros_like(labels_K, dtype=torch.float32)
        # One block each, so that their number does not depend on the chunks.
        logits = hidden_KD.new_empty((rows, len(weight_VD)))
        sums_V = hidden_KD.new_empty(len(weight_VD))
        for hidden, gradient in zip(
            hidden_KD.split(rows), gradient_KD.split(rows), strict=True
        ):
            chunk = torch.mm(hidden, weight_VD.t(), out=logits[: len(hidden)])
            if bias_V is not None:
                chunk.add_(bias_V)
                gradients[1].add_(torch.sum(chunk, 0, out=sums_V))
            chunk.tanh_()
            torch.mm(chunk, weight_VD, out=gradient)
            torch.addmm(
                gradients[0],
                chunk.t(),
                hidden,
                out_dtype=torch.float32,
                out=gradients[0],
            )
        del logits, chunk, sums_V
        ctx.gradients = [gradient_KD, *(one.to(weight_VD.dtype) for one in gradients)]
        return losses_K.sum()

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden_KD, weight_VD, *bias_V = ctx.gradients
        return hidden_KD, weight_VD, None, *(bias_V or [None])


def _tell_phases(
    training: Training,
    parameters: Sequence[torch.nn.Parameter],
    tape: AllocationRecorder,
    hooks: contextlib.ExitStack,
) -> None:
    """Set the terms of weights in bf16, gradients, optimizer state and temporaries, until the hooks are removed."""

    def update_begins(*_: object) -> None:
        tape.relabel(
            [one.grad for one in parameters if one.grad is not None], Term.GRADIENTS
        )
        tape.owner = Term.OPTIMIZER

    def update_ends(*_: object) -> None:
        tape.owner = Term.TEMPORARIES

    def accumulated(parameter: torch.Tensor) -> None:
        # With accumulation, gradients exist before the last forward, so each is
        # labelled once it exists.
        if parameter.grad is not None:
            tape.relabel([parameter.grad], Term.GRADIENTS)

    if training.module.working_copies is not None:
        tape.relabel(training.module.working_copies.memory, Term.COPIES)
    hooks.enter_context(training.optimizer.register_step_pre_hook(update_begins))
    hooks.enter_context(training.optimizer.register_step_post_hook(update_ends))
    for one in parameters:
        hooks.enter_context(one.register_post_accumulate_grad_hook(accumulated))


@contextlib.contextmanager
def multi_tensor_kernels_on_meta() -> Iterator[None]:
    """Let fused AdamW and the norm of all gradients call kernels of many tensors without content, as on a GPU."""
    with contextlib.ExitStack() as inside:
        for module, name in (
            ("torch.optim.optimizer", "_get_fused_kernels_supported_devices"),
            ("torch.utils._foreach_utils", "_get_foreach_kernels_supported_devices"),
        ):
            supported = getattr(importlib.import_module(module), name)()
            inside.enter_context(
                mock.patch(f"{module}.{name}", return_value=[*supported, META.type])
            )
        yield

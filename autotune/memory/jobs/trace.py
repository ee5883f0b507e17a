"""The ``trace`` job: the allocations of one rank's training steps.

Model, loss and step are the trainer's; only the tensors are without content, on the
meta device. Behaviour that depends on the device comes from ``DeviceRules``. Shapes: K
positions that the head computes, V tokens of the vocabulary.
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
from trainer.data.manifest import SpecialIds
from trainer.data.micro_batch import MicroBatch
from trainer.distributed.parallel import DTYPES
from trainer.distributed.ranks import Ranks
from trainer.model.encoder import model_head
from trainer.model.flops import attended_pairs
from trainer.model.loss import cross_entropy_in_place

META = torch.device("meta")


def run(measured: dict[str, Any], _: dict[str, Any]) -> dict[str, Any]:
    """Trace every micro-batch size of a ``TraceRequest``.

    Returns:
        ``traces``, one for each size; ``parameters``, ``attention`` and
        ``attention_reason`` of the model.
    """
    figures: dict[str, Any] = {"traces": []}
    for size in measured["sizes"]:
        config = measured["config"] | {
            "micro_batch_size": size,
            "global_batch_size": size * measured["micro_batches"] * measured["ranks"],
        }
        request = TraceRequest.of(measured | {"config": config})
        trace, model = trace_steps(
            request.config,
            request.vocab_size,
            request.special_ids,
            documents_per_sequence=request.documents_per_sequence,
            ranks=request.ranks,
        )
        figures["traces"].append(trace.to_json())
        figures |= model
    return figures


def trace_steps(
    config: TrainConfig,
    vocab_size: int,
    special_ids: SpecialIds,
    *,
    documents_per_sequence: float = 1.0,
    ranks: int = 1,
) -> tuple[Trace, dict[str, Any]]:
    """Trace the building of a model and its first optimizer steps.

    They are those of one of ``ranks`` ranks. An evaluation before the last step leaves
    other blocks of a GPU's memory free, which then serve that step.

    Returns:
        The trace; ``parameters``, ``attention`` and ``attention_reason`` of the model.
    """
    fullest = fullest_batch(
        config, vocab_size, special_ids, documents_per_sequence=documents_per_sequence
    )
    lengths_N = fullest.tokens_N.numpy()
    mean_document_tokens = float(attended_pairs(lengths_N, None) / lengths_N.sum())
    recorder = AllocationRecorder(
        within_kernels(config.device, config.attention), mean_document_tokens
    )
    rules = DeviceRules(
        config.device, bf16=config.precision == "bf16", recorder=recorder
    )
    this_rank = Ranks(
        rank=0, local_rank=0, local_world_size=1, world_size=1, device=META
    )
    micro_batches = gradient_accumulation_steps(config, ranks)
    with contextlib.ExitStack() as inside:
        for context in (recorder, rules, multi_tensor_kernels_on_meta()):
            inside.enter_context(context)
        # The share of one rank, whose training knows of no others.
        own_config = config.model_copy(
            update={"global_batch_size": micro_batches * config.micro_batch_size}
        )
        training = build_training(own_config, vocab_size, special_ids, this_rank)
        _replace_kernels(training, config, recorder)
        training.module.autocast = rules.autocast
        parameters = [
            parameter
            for parameter in training.module.parameters()
            if parameter.requires_grad
        ]
        own_by_module(
            recorder, training.module, model_head(training.module.model), inside
        )
        _label_phases(training, parameters, recorder, inside)
        sharing = _share_with_ranks(
            training, config, ranks, recorder, inside, bf16=rules.bf16
        )
        recorder.owner = Term.OPTIMIZER
        make_optimizer_state(training)

        def batches(count: int) -> list[MicroBatch]:
            recorder.owner = Term.INPUTS
            for part in sharing:
                part.step_begins(count)
            return [fullest.to(META) for _ in range(count)]

        training.step.rehearse(batches(1)[0])
        if config.device == "cuda":
            first_batches = batches(micro_batches)
            training.step.run(first_batches, config.learning_rate)
            shards = [part for part in sharing if isinstance(part, Shards)]
            _evaluate(training, first_batches[0], shards)
            # Or they would take memory in the last step.
            del first_batches
        recorder.marks_repetition()
        training.step.run(batches(micro_batches), config.learning_rate)
    attention = training.module.attention
    model = {
        "parameters": training.work.parameters,
        "attention": attention.kind,
        "attention_reason": attention.reason,
    }
    flops = training.work.step_flops(lengths_N, fullest.predicted_tokens)
    work = StepWork(
        micro_batch_size=config.micro_batch_size,
        padded_tokens=micro_batches * fullest.ids_BS.numel(),
        model_flops=micro_batches * flops,
        kernels=tuple(recorder.kernels.counts.items()),
    )
    return recorder.trace(work, fullest.predicted_tokens), model


def _share_with_ranks(
    training: Training,
    config: TrainConfig,
    ranks: int,
    recorder: AllocationRecorder,
    inside: contextlib.ExitStack,
    *,
    bf16: bool,
) -> list[GradientBuckets | Shards]:
    """Share the work between ranks as the strategy does, until the stack is closed."""
    buckets = GradientBuckets(training.module, config, recorder)
    if ranks == 1:
        return [buckets]
    training.optimizer.zero_grad(set_to_none=True)  # DDP keeps them in its buckets
    if config.parallel.strategy == "fsdp2":
        shards = Shards(
            training,
            training.module.layers,
            config.parallel.shard_ranks or ranks,
            recorder,
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
    for part in shards:
        part.forward_begins()
    training.module.eval()
    with torch.no_grad():
        training.module.evaluate(batch)
    training.module.train()
    for part in shards:
        part.evaluation_ended()


def _replace_kernels(
    training: Training, config: TrainConfig, recorder: AllocationRecorder
) -> None:
    """Replace compiled layers and losses by others that need no kernels."""
    graphs: dict[Any, Any] = {}
    if config.fused_cross_entropy:
        training.module.fused_loss = _fused_loss
    if not config.compiled:
        return
    for layer in training.module.layers:
        layer._compiled_call_impl = Compiled(layer, layer, recorder, graphs)
    training.module.loss = cross_entropy_in_place(
        lambda function: Compiled(function, None, recorder, graphs)
    )


def _fused_loss(*tensors: torch.Tensor) -> torch.Tensor:
    with torch._C.DisableTorchFunction():  # it is outside autocast
        loss: torch.Tensor = _FusedLoss.apply(*tensors)  # type: ignore[no-untyped-call]
    return loss


class _FusedLoss(torch.autograd.Function):
    """Liger's fused linear cross-entropy: its blocks and matmuls.

    They are in chunks of logits as large as the hidden states, after
    ``ops/fused_linear_cross_entropy.py`` of liger-kernel 0.8. Another operator is in
    the place of its kernel.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden_KD: Any, weight_VD: Any, labels_K: Any, bias_V: Any
    ) -> torch.Tensor:
        chunks = -(-weight_VD.shape[0] // weight_VD.shape[1])
        chunk_size = -(-len(hidden_KD) // chunks)
        # The next power of two.
        chunk_size = min(1 << (chunk_size - 1).bit_length(), len(hidden_KD))
        gradient_KD = torch.zeros_like(hidden_KD)
        gradient_VD = torch.zeros_like(weight_VD, dtype=torch.float32)
        gradients = [gradient_VD]
        if bias_V is not None:
            gradients.append(torch.zeros_like(bias_V, dtype=torch.float32))
        losses_K = torch.zeros_like(labels_K, dtype=torch.float32)
        # One block each, so that their number does not depend on the chunks.
        logits = hidden_KD.new_empty((chunk_size, len(weight_VD)))
        sums_V = hidden_KD.new_empty(len(weight_VD))
        for hidden, gradient in zip(
            hidden_KD.split(chunk_size), gradient_KD.split(chunk_size), strict=True
        ):
            chunk = torch.mm(hidden, weight_VD.t(), out=logits[: len(hidden)])
            if bias_V is not None:
                chunk.add_(bias_V)
                gradients[1].add_(torch.sum(chunk, 0, out=sums_V))
            chunk.tanh_()
            torch.mm(chunk, weight_VD, out=gradient)
            torch.addmm(
                gradient_VD,
                chunk.t(),
                hidden,
                out_dtype=torch.float32,
                out=gradient_VD,
            )
        del logits, chunk, sums_V
        narrow = [gradient.to(weight_VD.dtype) for gradient in gradients]
        ctx.gradients = [gradient_KD, *narrow]
        return losses_K.sum()

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden_KD, weight_VD, *bias_V = ctx.gradients
        return hidden_KD, weight_VD, None, *(bias_V or [None])


def _label_phases(
    training: Training,
    parameters: Sequence[torch.nn.Parameter],
    recorder: AllocationRecorder,
    hooks: contextlib.ExitStack,
) -> None:
    """Set the terms of what each phase of a step allocates.

    These are weights in bf16, gradients, optimizer state and temporaries. They are set
    until the hooks are removed.
    """

    def update_begins(*_: object) -> None:
        gradients = [
            parameter.grad for parameter in parameters if parameter.grad is not None
        ]
        recorder.relabel(gradients, Term.GRADIENTS)
        recorder.owner = Term.OPTIMIZER

    def update_ends(*_: object) -> None:
        recorder.owner = Term.TEMPORARIES

    def accumulated(parameter: torch.Tensor) -> None:
        # With accumulation, gradients exist before the last forward, so each is
        # labelled once it exists.
        if parameter.grad is not None:
            recorder.relabel([parameter.grad], Term.GRADIENTS)

    if training.module.working_copies is not None:
        recorder.relabel(training.module.working_copies.memory, Term.COPIES)
    hooks.enter_context(training.optimizer.register_step_pre_hook(update_begins))
    hooks.enter_context(training.optimizer.register_step_post_hook(update_ends))
    for parameter in parameters:
        hooks.enter_context(parameter.register_post_accumulate_grad_hook(accumulated))


@contextlib.contextmanager
def multi_tensor_kernels_on_meta() -> Iterator[None]:
    """Let functions call kernels of many tensors on the meta device, as on a GPU.

    These are fused AdamW and the norm of all gradients.
    """
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

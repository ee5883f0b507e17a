"""The ``trace`` job: the allocations of one rank's training steps.

Model, loss and step are the trainer's; only the tensors are without content, on the
meta device. ``autotune.memory.jobs.tracer`` records what they allocate. Shapes: N
documents of a micro-batch.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from autotune.base.units import MIB
from autotune.memory.jobs.allocation_recorder import AllocationRecorder
from autotune.memory.jobs.compiled import TracedCompiler
from autotune.memory.jobs.fused_loss import fused_loss
from autotune.memory.jobs.gradient_buckets import FIRST_BUCKET_BYTES, GradientBuckets
from autotune.memory.jobs.shards import Shards
from autotune.memory.jobs.tracer import META, Tracer, tracing
from autotune.memory.jobs.zero1 import keep_largest_part
from autotune.memory.values import Term, Trace
from autotune.speed.values import StepWork
from autotune.subjects.mlm.jobs.own_kernels import own_kernels
from autotune.subjects.mlm.jobs.worst_case import fullest_batch
from autotune.subjects.mlm.memory.trace_request import TraceRequest
from trainer.build import Training, build_training
from trainer.checkpoint.tensors import make_optimizer_state
from trainer.data.micro_batch import MicroBatch
from trainer.distributed.gradient_traffic import DTYPES
from trainer.distributed.parallel import DEFAULT_BUCKET_CAP_MIB
from trainer.formats.manifest import SpecialIds
from trainer.formats.train_config import TrainConfig, gradient_accumulation_steps
from trainer.model.encoder import model_head
from trainer.model.flops import attended_pairs
from trainer.model.layer_norms import COMPILER_SAVES_COMPACT
from trainer.model.loss import cross_entropy_in_place
from trainer.runtime.ranks import Ranks


def run(measured: dict[str, Any], _local: dict[str, Any]) -> dict[str, Any]:
    """Trace every micro-batch size of a request.

    Args:
        measured: A ``TraceRequest``.

    Returns:
        ``traces``, one for each size; ``parameters``, ``attention`` and
        ``attention_reason`` of the model.
    """
    request = TraceRequest.of(measured)
    model_figures: dict[str, Any] = {}
    traces = []
    for size in request.sizes:
        steps = _trace_size(request, size)
        traces.append(steps.trace.to_json())
        # The facts of the model are the same at any size.
        model_figures = asdict(steps.model)
    return {"traces": traces} | model_figures


def _trace_size(request: TraceRequest, size: int) -> "TracedSteps":
    """Trace one micro-batch size of a request."""
    config = request.config.model_copy(
        update={
            "micro_batch_size": size,
            "global_batch_size": size * request.micro_batches * request.ranks,
        }
    )
    return trace_steps(
        config,
        request.vocab_size,
        request.special_ids,
        documents_per_sequence=request.documents_per_sequence,
        ranks=request.ranks,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedModel:
    """Facts of a model that was built for a trace."""

    parameters: int
    """Number of parameters."""
    attention: str
    """Attention of the model: ``varlen``, ``sdpa`` and so on."""
    attention_reason: str
    """Reason for this attention, in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedSteps:
    """Trace of a model's first steps, with facts of the model."""

    trace: Trace
    model: TracedModel


def trace_steps(
    config: TrainConfig,
    vocab_size: int,
    special_ids: SpecialIds,
    *,
    documents_per_sequence: float = 1.0,
    ranks: int = 1,
) -> TracedSteps:
    """Trace how one rank builds a model and takes its first optimizer steps.

    Args:
        config: Trainer settings.
        vocab_size: Tokens of the vocabulary.
        special_ids: Tokens that are not words.
        documents_per_sequence: Mean number of documents in a sequence.
        ranks: Number of ranks, of which this is one.
    """
    fullest = fullest_batch(
        config, vocab_size, special_ids, documents_per_sequence=documents_per_sequence
    )
    micro_batches = gradient_accumulation_steps(config, ranks)
    with tracing(
        config.device,
        bf16=config.precision == "bf16",
        own_kernels=own_kernels(),
        document_tokens=_document_tokens(fullest),
    ) as tracer:
        training = _build_alone(config, vocab_size, special_ids, micro_batches)
        module = training.module
        _replace_kernels(training, config, tracer)
        module.autocast = tracer.autocast
        if module.working_copies is not None:
            tracer.recorder.relabel(module.working_copies.memory, Term.COPIES)
        tracer.watch(module, training.optimizer, model_head(module.model))
        gradient_syncs: Sequence[GradientBuckets | Shards] = ()
        if ranks > 1:
            gradient_syncs = _share_with_ranks(training, config, ranks, tracer)
        steps = _Steps(
            training=training,
            config=config,
            micro_batches=micro_batches,
            batch=fullest,
            gradient_syncs=gradient_syncs,
            recorder=tracer.recorder,
        )
        steps.take_first()
    attention = training.module.attention
    return TracedSteps(
        trace=tracer.recorder.trace(steps.work(), fullest.predicted_tokens),
        model=TracedModel(
            parameters=training.work.parameters,
            attention=attention.kind,
            attention_reason=attention.reason,
        ),
    )


def _document_tokens(batch: MicroBatch) -> float:
    """Return the mean over tokens of the length of the token's document.

    It is sum(n^2) / sum(n) of the lengths n of documents. Attention costs each token
    its document's length, so a mean over documents would count long ones too little.
    """
    lengths_N = batch.tokens_N.numpy()
    return float(attended_pairs(lengths_N, None) / lengths_N.sum())


def _build_alone(
    config: TrainConfig, vocab_size: int, special_ids: SpecialIds, micro_batches: int
) -> Training:
    """Build the training of one rank on the meta device, as if there were no others."""
    rank = Ranks(rank=0, local_rank=0, local_world_size=1, world_size=1, device=META)
    # The rank's share of the global batch.
    rank_config = config.model_copy(
        update={"global_batch_size": micro_batches * config.micro_batch_size}
    )
    return build_training(rank_config, vocab_size, special_ids, rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Steps:
    """Steps of one rank, each on copies of the same micro-batch.

    No variable may keep a copy beyond its step, or the copy would take memory in the
    next one.
    """

    training: Training
    config: TrainConfig
    micro_batches: int
    """Micro-batches of a step."""
    batch: MicroBatch
    """Micro-batch in memory, of which a step takes copies on the meta device."""
    gradient_syncs: Sequence[GradientBuckets | Shards]
    """Gradient buckets or shards of the parallel strategy; empty for a single rank."""
    recorder: AllocationRecorder

    def take_first(self) -> None:
        """Take the steps with which a training begins.

        The last one repeats in every further step.
        """
        self.recorder.owner = Term.OPTIMIZER
        make_optimizer_state(self.training)
        self.training.step.rehearse(self._begin(1)[0])
        if self.config.device == "cuda":
            # An evaluation leaves other blocks of a GPU's memory free, which then serve
            # the next step.
            self._take_one_and_evaluate()
        self.recorder.mark_repetition()
        self._take_one()

    def work(self) -> StepWork:
        """Return the kernels and FLOPs of the last step."""
        flops = self.training.work.step_flops(
            self.batch.tokens_N.numpy(), self.batch.predicted_tokens
        )
        return StepWork(
            micro_batch_size=self.config.micro_batch_size,
            padded_tokens=self.micro_batches * self.batch.ids_BS.numel(),
            model_flops=self.micro_batches * flops,
            kernels=tuple(self.recorder.kernels.counts.items()),
        )

    def _take_one(self) -> None:
        """Take a step of training."""
        # No name for the micro-batches: they are released before the step's result.
        self.training.step.run(
            self._begin(self.micro_batches), self.config.learning_rate
        )

    def _take_one_and_evaluate(self) -> None:
        """Take a step of training, and evaluate one of its micro-batches."""
        # The micro-batches stay until the evaluation, which reads one of them, ends.
        batches = self._begin(self.micro_batches)
        self.training.step.run(batches, self.config.learning_rate)
        self._evaluate(batches[0])

    def _begin(self, micro_batches: int) -> list[MicroBatch]:
        """Begin a step, and return its micro-batches on the meta device."""
        self.recorder.owner = Term.INPUTS
        for gradient_sync in self.gradient_syncs:
            gradient_sync.step_begins(micro_batches)
        return [self.batch.to(META) for _ in range(micro_batches)]

    def _evaluate(self, batch: MicroBatch) -> None:
        """Evaluate a micro-batch, which may gather weights but fills no buckets."""
        all_shards = [
            gradient_sync
            for gradient_sync in self.gradient_syncs
            if isinstance(gradient_sync, Shards)
        ]
        for shards in all_shards:
            shards.forward_begins()
        module = self.training.module
        module.eval()
        with torch.no_grad():
            module.evaluate(batch)
        module.train()
        for shards in all_shards:
            shards.evaluation_ended()


def _share_with_ranks(
    training: Training, config: TrainConfig, ranks: int, tracer: Tracer
) -> list[GradientBuckets | Shards]:
    """Let the training hold only the part of one of several ranks.

    Args:
        training: Training of a rank alone.
        config: Trainer settings, for the parallel strategy.
        ranks: Number of ranks on all nodes.
        tracer: Trace that is being recorded.

    Returns:
        Shards under FSDP2; gradient buckets under DDP and ZeRO-1.
    """
    parallel = config.parallel
    sent_dtype = DTYPES[parallel.gradient_dtype]
    if parallel.strategy == "fsdp2":
        shards = Shards(
            training.module,
            training.optimizer,
            training.module.layers,
            parallel.shard_ranks or ranks,
            tracer.recorder,
            bf16=config.precision == "bf16",
            sent_dtype=sent_dtype,
        )
        training.step.parameters = shards.parameters
        shards.register_hooks(tracer.hooks)
        return [shards]
    # The training was built as that of a single rank, whose step allocates gradients in
    # advance. With several ranks, DDP's buckets hold them.
    training.optimizer.zero_grad(set_to_none=True)
    limits_bytes = [parallel.bucket_cap_mib * MIB]
    # DDP has a small first bucket only if no other cap was set.
    if parallel.bucket_cap_mib == DEFAULT_BUCKET_CAP_MIB:
        limits_bytes.insert(0, FIRST_BUCKET_BYTES)
    buckets = GradientBuckets(
        training.module,
        tracer.recorder,
        limits_bytes=limits_bytes,
        as_views=parallel.gradient_as_bucket_view,
        sent_dtype=sent_dtype,
    )
    buckets.register_hooks(tracer.hooks)
    if parallel.strategy == "zero1":
        keep_largest_part(
            training.optimizer, ranks, keeps_gradients=training.step.keeps_gradients
        )
    return [buckets]


def _replace_kernels(training: Training, config: TrainConfig, tracer: Tracer) -> None:
    """Replace compiled layers and the loss by others that need no compiler."""
    if config.fused_cross_entropy:
        training.module.fused_loss = fused_loss
    if not config.compiled:
        return
    compiler = TracedCompiler(
        recorder=tracer.recorder,
        redraws_dropout=COMPILER_SAVES_COMPACT,
        checkpoint="trainer.compilation.checkpoint",
    )
    compiler.compile_layers(training.module.layers)
    training.module.loss = cross_entropy_in_place(compiler.compile)

"""Memory of one GPU when several share a model's state, layers or matrices.

It is computed by formulas of the literature, not measured.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from autotune.base.units import format_bytes
from autotune.memory.decide.rounding import ceil_divide
from autotune.memory.values import ACTIVATIONS, MemoryParts, Share, Term
from trainer.formats.train_config import Strategy

_SPLIT_PARTS = 24
"""Parts of a layer's activations that tensor ranks split, of 34 (Korthikanti et al.
2022, table 2)."""
_WHOLE_PARTS = 10
"""Parts of a layer's activations that every tensor rank holds, of the same 34."""
_RANKS_TO_TRY = (2, 4, 8, 16, 32, 64)
"""Numbers of ranks that are considered; an encoder need not be sharded over more than a
few nodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroWay:
    """A stage of ZeRO as a way of sharing a model among data-parallel ranks."""

    name: str
    """Name of the way, as in ``Share.name``."""
    zero_stage: int
    """0 shards nothing, 1 the optimizer's state, 2 also gradients, 3 also
    parameters."""
    strategy: Strategy | None
    """The trainer's parallel strategy; None if the trainer does not support it."""


ZERO_WAYS = (
    ZeroWay(name="DDP", zero_stage=0, strategy="ddp"),
    ZeroWay(name="ZeRO-1", zero_stage=1, strategy="zero1"),
    ZeroWay(name="ZeRO-2", zero_stage=2, strategy=None),
    ZeroWay(name="ZeRO-3 (FSDP2)", zero_stage=3, strategy="fsdp2"),
)
"""Ways of sharing a model among data-parallel ranks. Later ones need less memory."""
_ONE_RANK_ALONE = ZeroWay(name="one rank alone", zero_stage=0, strategy="ddp")


def parts_of_terms(terms_bytes: Mapping[str, int]) -> MemoryParts:
    """Sort the terms of a memory breakdown by how strategies share them.

    Terms that no strategy shares count as temporaries.
    """
    terms = dict(terms_bytes)
    parameters_bytes = terms.pop(Term.PARAMETERS, 0)
    gradients_bytes = terms.pop(Term.GRADIENTS, 0)
    optimizer_bytes = terms.pop(Term.OPTIMIZER, 0)
    head_and_loss_bytes = terms.pop(Term.HEAD, 0)
    non_pytorch_bytes = terms.pop(Term.NON_PYTORCH, 0)
    activations_bytes = sum(
        size for term, size in terms.items() if term.startswith(ACTIVATIONS)
    )
    return MemoryParts(
        parameters_bytes=parameters_bytes,
        gradients_bytes=gradients_bytes,
        optimizer_bytes=optimizer_bytes,
        head_and_loss_bytes=head_and_loss_bytes,
        non_pytorch_bytes=non_pytorch_bytes,
        activations_bytes=activations_bytes,
        temporaries_bytes=sum(terms.values()) - activations_bytes,
    )


def zero_share(
    whole: MemoryParts, zero_stage: int, ranks: int, *, largest_layer_bytes: int
) -> MemoryParts:
    """Return the memory of each of several data-parallel ranks under a ZeRO stage.

    ZeRO-1 shards the optimizer's state, ZeRO-2 also the gradients. ZeRO-3 (FSDP) also
    shards the parameters, and gathers one layer at a time (Rajbhandari et al. 2020,
    figure 1). Stage 0 is DDP, which shards nothing. Divisions round up.

    Left out: a layer that FSDP prefetches, and the gradient of a layer before it is
    reduced.

    Args:
        whole: Memory of a rank that shards nothing.
        zero_stage: Stage of ZeRO, from 0 to 3.
        ranks: Data-parallel ranks.
        largest_layer_bytes: Size of the largest layer that ZeRO-3 gathers.
    """
    share = replace(whole, gathered_bytes=0)
    if zero_stage >= 1:
        share = replace(
            share, optimizer_bytes=ceil_divide(whole.optimizer_bytes, ranks)
        )
    if zero_stage >= 2:
        share = replace(
            share, gradients_bytes=ceil_divide(whole.gradients_bytes, ranks)
        )
    if zero_stage >= 3:
        share = replace(
            share,
            parameters_bytes=ceil_divide(whole.parameters_bytes, ranks),
            # A single rank has all layers already.
            gathered_bytes=largest_layer_bytes if ranks > 1 else 0,
        )
    return share


def model_share(
    whole: MemoryParts, tensor_ranks: int, pipeline_stages: int
) -> MemoryParts:
    """Return the memory of the fullest rank of t tensor ranks and p pipeline stages.

    Divisions round up.

    - State: divided by the t·p ranks.
    - Activations under tensor parallelism: 10 of a layer's 34 parts are not split
      without sequence parallelism (Korthikanti et al. 2022, table 2).
    - Pipeline: under 1F1B the first stage holds p micro-batches, each with 1/p of the
      layers, the last stage one (Narayanan et al. 2021, section 2.2). So the first
      stage saves no activations.
    - Head and loss: on the last stage, split by t along the vocabulary (Korthikanti et
      al. 2022, section 4.3).

    Left out: uneven stages; an embedding table that is tied to the head and kept on
    both ends; norms and biases that tensor parallelism replicates; other schedules.
    Temporaries and non-PyTorch memory count in full.
    """
    ranks = tensor_ranks * pipeline_stages
    layer_parts = _SPLIT_PARTS + _WHOLE_PARTS
    # All tensor ranks together hold a split part once, and a whole part once per rank.
    held_parts = _SPLIT_PARTS + _WHOLE_PARTS * tensor_ranks

    def on_stage(micro_batches: int, head_and_loss_bytes: int) -> MemoryParts:
        return replace(
            whole,
            parameters_bytes=ceil_divide(whole.parameters_bytes, ranks),
            gradients_bytes=ceil_divide(whole.gradients_bytes, ranks),
            optimizer_bytes=ceil_divide(whole.optimizer_bytes, ranks),
            activations_bytes=ceil_divide(
                whole.activations_bytes * micro_batches * held_parts,
                ranks * layer_parts,
            ),
            head_and_loss_bytes=ceil_divide(head_and_loss_bytes, tensor_ranks),
        )

    last = on_stage(1, whole.head_and_loss_bytes)
    if pipeline_stages == 1:
        return last
    first = on_stage(pipeline_stages, 0)
    return max(first, last, key=lambda parts: parts.total_bytes)


def shares(
    whole: MemoryParts,
    ranks: int,
    *,
    largest_layer_bytes: int,
    budget_bytes: int,
    tensor_ranks: int = 1,
    pipeline_stages: int = 1,
) -> tuple[Share, ...]:
    """Return the memory of one GPU under each way of sharing a model.

    The ways are the ZeRO stages over all ranks, then tensor parallelism and pipeline
    parallelism, each alone.

    Args:
        whole: Memory of a rank that shares nothing.
        ranks: Data-parallel ranks.
        largest_layer_bytes: Size of the largest layer that ZeRO-3 gathers.
        budget_bytes: Memory that one GPU may use.
        tensor_ranks: Tensor-parallel ranks; 1 leaves this way out.
        pipeline_stages: Pipeline stages; 1 leaves this way out.
    """

    def share_of(name: str, held: MemoryParts, *, trains_here: bool) -> Share:
        total_bytes = held.total_bytes
        return Share(
            name=name,
            trains_here=trains_here,
            total_bytes=total_bytes,
            fits=total_bytes <= budget_bytes,
            held=held,
        )

    zero_ways = ZERO_WAYS if ranks > 1 else (_ONE_RANK_ALONE,)
    all_shares = []
    for way in zero_ways:
        held = zero_share(
            whole, way.zero_stage, ranks, largest_layer_bytes=largest_layer_bytes
        )
        trains_here = way.strategy is not None
        all_shares.append(share_of(way.name, held, trains_here=trains_here))
    if tensor_ranks > 1:
        held = model_share(whole, tensor_ranks, 1)
        all_shares.append(share_of(f"TP {tensor_ranks}", held, trains_here=False))
    if pipeline_stages > 1:
        held = model_share(whole, 1, pipeline_stages)
        all_shares.append(share_of(f"PP {pipeline_stages}", held, trains_here=False))
    return tuple(all_shares)


def smallest_sharding(
    terms_bytes: Mapping[str, int], budget_bytes: int, *, largest_layer_bytes: int
) -> str | None:
    """Return the sharding, in words, that fits a budget on the fewest ranks.

    Returns:
        None if no number of ranks suffices.
    """
    whole = parts_of_terms(terms_bytes)
    # ZeRO-1 comes before ZeRO-3, as it communicates less.
    sharding_ways = [
        way for way in ZERO_WAYS if way.strategy is not None and way.zero_stage > 0
    ]
    for ranks in _RANKS_TO_TRY:
        for way in sharding_ways:
            share = zero_share(
                whole, way.zero_stage, ranks, largest_layer_bytes=largest_layer_bytes
            )
            if share.total_bytes <= budget_bytes:
                return (
                    f"parallel.strategy = '{way.strategy}' over {ranks} ranks"
                    f" (predicted: {format_bytes(share.total_bytes)} per rank)"
                )
    return None

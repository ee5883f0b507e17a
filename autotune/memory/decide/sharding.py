"""Memory of one GPU when several share a model's state, layers or matrices.

It is computed by formulas of the literature, not measured.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from autotune.base.units import format_bytes
from autotune.memory.values import ACTIVATIONS, Share, StateBytes, Term

_STATE_FIELDS = ("optimizer_bytes", "gradients_bytes", "parameters_bytes")
"""Fields of ``StateBytes`` that ZeRO shards: the first from stage 1 on, the second from
stage 2 on, the third in stage 3."""
_SPLIT_PARTS = 24
"""Parts of a layer's activations that tensor ranks split, of 34 (Korthikanti et al.
2022, table 2)."""
_WHOLE_PARTS = 10
"""Parts of a layer's activations that every tensor rank holds, of the same 34."""
_RANKS_TO_TRY = (2, 4, 8, 16, 32, 64)
"""Numbers of ranks that are considered; an encoder need not be sharded over more than a
few nodes."""


def state_of_terms(terms_bytes: Mapping[str, int]) -> StateBytes:
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
    return StateBytes(
        parameters_bytes=parameters_bytes,
        gradients_bytes=gradients_bytes,
        optimizer_bytes=optimizer_bytes,
        head_and_loss_bytes=head_and_loss_bytes,
        non_pytorch_bytes=non_pytorch_bytes,
        activations_bytes=activations_bytes,
        temporaries_bytes=sum(terms.values()) - activations_bytes,
    )


def zero_share(
    state: StateBytes, stage: int, ranks: int, *, largest_layer_bytes: int
) -> StateBytes:
    """Return the memory of each of ``ranks`` data-parallel ranks under a ZeRO stage.

    ZeRO-1 shards the optimizer's state, ZeRO-2 also the gradients. ZeRO-3 (FSDP) also
    shards the parameters, and gathers one layer at a time (Rajbhandari et al. 2020,
    figure 1). Stage 0 is DDP, which shards nothing. Divisions round up.

    Left out: a layer that FSDP prefetches, and the gradient of a layer before it is
    reduced.
    """
    sharded_fields = _STATE_FIELDS[:stage]
    gathered_bytes = 0
    if "parameters_bytes" in sharded_fields and ranks > 1:
        gathered_bytes = largest_layer_bytes
    return replace(
        _with_sharded(state, sharded_fields, ranks), gathered_bytes=gathered_bytes
    )


def model_share(
    state: StateBytes, tensor_ranks: int, pipeline_stages: int
) -> StateBytes:
    """Return the memory of the fullest rank of t tensor ranks and p pipeline stages.

    Divisions round up.

    - State: 1/(t·p) of it.
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

    def on_stage(micro_batches: int, head_and_loss_bytes: int) -> StateBytes:
        return replace(
            _with_sharded(state, _STATE_FIELDS, ranks),
            activations_bytes=_shard_bytes(
                state.activations_bytes * micro_batches * held_parts,
                ranks * layer_parts,
            ),
            head_and_loss_bytes=_shard_bytes(head_and_loss_bytes, tensor_ranks),
        )

    last = on_stage(1, state.head_and_loss_bytes)
    if pipeline_stages == 1:
        return last
    first = on_stage(pipeline_stages, 0)
    return max(first, last, key=lambda stage: stage.total_bytes)


def shares(
    state: StateBytes,
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
        state: Memory of a rank that shares nothing.
        ranks: Data-parallel ranks.
        largest_layer_bytes: Largest unit that FSDP gathers.
        budget_bytes: Memory of one GPU.
        tensor_ranks: Tensor-parallel ranks; 1 leaves this way out.
        pipeline_stages: Pipeline stages; 1 leaves this way out.
    """

    def way(name: str, held: StateBytes, *, trains_here: bool) -> Share:
        total_bytes = held.total_bytes
        return Share(
            name=name,
            trains_here=trains_here,
            total_bytes=total_bytes,
            fits=total_bytes <= budget_bytes,
            held=held,
        )

    names: tuple[str, ...] = ("one rank alone",)
    if ranks > 1:
        names = ("DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3 (FSDP2)")
    ways = []
    for stage, name in enumerate(names):
        zero = zero_share(state, stage, ranks, largest_layer_bytes=largest_layer_bytes)
        # The trainer has every stage but the second.
        ways.append(way(name, zero, trains_here=stage != 2))
    if tensor_ranks > 1:
        tensor = model_share(state, tensor_ranks, 1)
        ways.append(way(f"TP {tensor_ranks}", tensor, trains_here=False))
    if pipeline_stages > 1:
        pipeline = model_share(state, 1, pipeline_stages)
        ways.append(way(f"PP {pipeline_stages}", pipeline, trains_here=False))
    return tuple(ways)


def smallest_sharding(
    terms_bytes: Mapping[str, int], budget_bytes: int, *, largest_layer_bytes: int
) -> str | None:
    """Return the sharding, in words, that fits a budget on the fewest ranks.

    Returns:
        None if no number of ranks suffices.
    """
    state = state_of_terms(terms_bytes)
    for ranks in _RANKS_TO_TRY:
        # ZeRO-1 first, as it communicates less.
        for strategy, stage in (("zero1", 1), ("fsdp2", 3)):
            share = zero_share(
                state, stage, ranks, largest_layer_bytes=largest_layer_bytes
            )
            if share.total_bytes <= budget_bytes:
                return (
                    f"parallel.strategy = '{strategy}' over {ranks} ranks (predicted:"
                    f" {format_bytes(share.total_bytes)} per rank)"
                )
    return None


def _with_sharded(
    state: StateBytes, field_names: Sequence[str], ranks: int
) -> StateBytes:
    """Return the memory of a rank that holds only its shard of some fields."""
    shards_bytes = {
        name: _shard_bytes(getattr(state, name), ranks) for name in field_names
    }
    return replace(state, **shards_bytes)


def _shard_bytes(size_bytes: int, ranks: int) -> int:
    """Return the size of one of several shards, which are padded to the same size."""
    # Two negations round the division up instead of down.
    return -(-size_bytes // ranks)

"""Memory of one GPU when several share a model's state, layers or matrices.

These are formulas, not measurements.
"""

from collections.abc import Mapping
from dataclasses import replace

from autotune.base.units import format_bytes
from autotune.memory.values import ACTIVATIONS, Share, StateBytes, Term

_SHARDED = ("optimizer_bytes", "gradients_bytes", "parameters_bytes")
"""Parts that ZeRO shards from stage 1, 2 and 3 on."""
_SPLIT_PARTS = 24
"""Parts of a layer's activations that tensor ranks split, of 34 (Korthikanti et al.
2022, table 2)."""
_WHOLE_PARTS = 10
"""Parts of them that every tensor rank holds."""


def state_of_terms(terms_bytes: Mapping[str, int]) -> StateBytes:
    """Sort a memory breakdown's terms by how they are shared.

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

    ZeRO-1 shards the optimizer's state, ZeRO-2 also the gradients, ZeRO-3 (FSDP) also
    the parameters and gathers one layer at a time (Rajbhandari et al. 2020, figure 1).
    Divisions round up.

    Left out: a layer that FSDP prefetches, its unreduced gradient.
    """
    ranks_by_part = {}
    for first_stage, part in enumerate(_SHARDED, start=1):
        ranks_by_part[part] = ranks if stage >= first_stage else 1
    gathers = ranks_by_part["parameters_bytes"] > 1
    return replace(
        _shared(state, ranks_by_part),
        gathered_bytes=largest_layer_bytes if gathers else 0,
    )


def model_share(
    state: StateBytes, tensor_ranks: int, pipeline_stages: int
) -> StateBytes:
    """Return the memory of the fullest of t tensor ranks and p pipeline stages.

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
    # Parts that all tensor ranks hold together.
    held_parts = _SPLIT_PARTS + _WHOLE_PARTS * tensor_ranks

    def on_stage(micro_batches: int, head_and_loss_bytes: int) -> StateBytes:
        return replace(
            _shared(state, dict.fromkeys(_SHARDED, ranks)),
            activations_bytes=_share(
                state.activations_bytes * micro_batches * held_parts,
                ranks * layer_parts,
            ),
            head_and_loss_bytes=_share(head_and_loss_bytes, tensor_ranks),
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
    """Return the memory under each way of sharing a model.

    These are the ZeRO stages over all ranks, then tensor parallelism and pipeline
    parallelism, each alone.
    """

    def share(name: str, state_share: StateBytes, *, trains_here: bool) -> Share:
        total_bytes = state_share.total_bytes
        return Share(
            name=name,
            trains_here=trains_here,
            total_bytes=total_bytes,
            fits=total_bytes <= budget_bytes,
            held=state_share,
        )

    names: tuple[str, ...] = ("one rank alone",)
    if ranks > 1:
        names = ("DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3 (FSDP2)")
    ways = []
    for stage, name in enumerate(names):
        zero = zero_share(state, stage, ranks, largest_layer_bytes=largest_layer_bytes)
        # The trainer has every stage but the second.
        ways.append(share(name, zero, trains_here=stage != 2))
    if tensor_ranks > 1:
        tensor = model_share(state, tensor_ranks, 1)
        ways.append(share(f"TP {tensor_ranks}", tensor, trains_here=False))
    if pipeline_stages > 1:
        pipeline = model_share(state, 1, pipeline_stages)
        ways.append(share(f"PP {pipeline_stages}", pipeline, trains_here=False))
    return tuple(ways)


def smallest_sharding(
    terms_bytes: Mapping[str, int], budget_bytes: int, *, largest_layer_bytes: int
) -> str | None:
    """Return the setting that fits a model, too large for one rank, on fewest ranks.

    Returns:
        None if no number of ranks suffices.
    """
    state = state_of_terms(terms_bytes)
    # An encoder need not be sharded over more than a few nodes.
    for ranks in (2, 4, 8, 16, 32, 64):
        # ZeRO-1 first, as it sends less.
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


def _shared(state: StateBytes, ranks_by_part: Mapping[str, int]) -> StateBytes:
    """Return the state with each part divided among its number of ranks."""
    divided = {
        part: _share(getattr(state, part), ranks)
        for part, ranks in ranks_by_part.items()
    }
    return replace(state, **divided)


def _share(size_bytes: int, ranks: int) -> int:
    """Return the size of one of several shards, which are padded to the same size."""
    # Two negations round the division up instead of down.
    return -(-size_bytes // ranks)

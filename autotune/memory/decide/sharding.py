"""Memory of one GPU when several share a model's state, layers or matrices: formulas, not measurements."""

from collections.abc import Mapping
from dataclasses import replace

from autotune.base.units import format_bytes
from autotune.memory.values import ACTIVATIONS, Share, StateBytes, Term

_SHARDED = ("optimizer_bytes", "gradients_bytes", "parameters_bytes")
"""Parts that ZeRO shards from stage 1, 2 and 3 on."""


def state_of_terms(terms_bytes: Mapping[str, int]) -> StateBytes:
    """Sort a memory breakdown's terms by how they are shared.

    The rest are temporaries.
    """
    terms = dict(terms_bytes)
    return StateBytes(
        parameters_bytes=terms.pop(Term.PARAMETERS, 0),
        gradients_bytes=terms.pop(Term.GRADIENTS, 0),
        optimizer_bytes=terms.pop(Term.OPTIMIZER, 0),
        head_and_loss_bytes=terms.pop(Term.HEAD, 0),
        non_pytorch_bytes=terms.pop(Term.NON_PYTORCH, 0),
        activations_bytes=sum(
            size for term, size in terms.items() if term.startswith(ACTIVATIONS)
        ),
        temporaries_bytes=sum(
            size for term, size in terms.items() if not term.startswith(ACTIVATIONS)
        ),
    )


def zero_share(
    state: StateBytes, stage: int, ranks: int, *, largest_layer_bytes: int
) -> StateBytes:
    """Return the memory of each of ``ranks`` data-parallel ranks under a ZeRO stage.

    Divisions round up.

    ZeRO-1 shards the optimizer's state, ZeRO-2 also the gradients, ZeRO-3 (FSDP) also
    the parameters and gathers one layer at a time (Rajbhandari et al. 2020, figure 1).
    Left out: a layer that FSDP prefetches, its unreduced gradient.
    """
    among = {
        name: 1 if stage < first else ranks
        for first, name in enumerate(_SHARDED, start=1)
    }
    return replace(
        _shared(state, among),
        gathered_bytes=largest_layer_bytes if among["parameters_bytes"] > 1 else 0,
    )


def model_share(
    state: StateBytes, tensor_ranks: int, pipeline_stages: int
) -> StateBytes:
    """Return the memory of the fullest of t tensor-parallel ranks and p pipeline stages; divisions round up.

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
    parts, ranks = 24 + 10 * tensor_ranks, tensor_ranks * pipeline_stages

    def on_stage(micro_batches: int, head_and_loss_bytes: int) -> StateBytes:
        return replace(
            _shared(state, dict.fromkeys(_SHARDED, ranks)),
            activations_bytes=_share(
                state.activations_bytes * micro_batches * parts, ranks * 34
            ),
            head_and_loss_bytes=_share(head_and_loss_bytes, tensor_ranks),
        )

    last = on_stage(1, state.head_and_loss_bytes)
    if pipeline_stages == 1:
        return last
    return max(on_stage(pipeline_stages, 0), last, key=lambda held: held.total_bytes)


def shares(
    state: StateBytes,
    ranks: int,
    *,
    largest_layer_bytes: int,
    budget_bytes: int,
    tensor_ranks: int = 1,
    pipeline_stages: int = 1,
) -> tuple[Share, ...]:
    """Return the memory per way of sharing: ZeRO over all ranks, then tensor and pipeline parallelism, each alone."""
    names = (
        ("DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3 (FSDP2)")
        if ranks > 1
        else ("one rank alone",)
    )
    found = [
        (
            name,
            stage != 2,
            zero_share(state, stage, ranks, largest_layer_bytes=largest_layer_bytes),
        )
        for stage, name in enumerate(names)
    ]
    if tensor_ranks > 1:
        found.append((f"TP {tensor_ranks}", False, model_share(state, tensor_ranks, 1)))
    if pipeline_stages > 1:
        found.append(
            (f"PP {pipeline_stages}", False, model_share(state, 1, pipeline_stages))
        )
    return tuple(
        Share(
            name=name,
            trains_here=here,
            total_bytes=one.total_bytes,
            fits=one.total_bytes <= budget_bytes,
            held=one,
        )
        for name, here, one in found
    )


def fewest_that_share(
    terms_bytes: Mapping[str, int], budget_bytes: int, *, largest_layer_bytes: int
) -> str | None:
    """Return the setting that fits a model, too large for one rank, on the fewest ranks; None if none does."""
    state = state_of_terms(terms_bytes)
    # An encoder need not be sharded over more than a few nodes.
    for ranks in (2, 4, 8, 16, 32, 64):
        for strategy, stage in (("zero1", 1), ("fsdp2", 3)):  # the first sends less
            size = zero_share(
                state, stage, ranks, largest_layer_bytes=largest_layer_bytes
            ).total_bytes
            if size <= budget_bytes:
                return (
                    f"parallel.strategy = '{strategy}' over {ranks} ranks (predicted:"
                    f" {format_bytes(size)} per rank)"
                )
    return None


def _shared(state: StateBytes, ranks: Mapping[str, int]) -> StateBytes:
    return replace(
        state,
        **{name: _share(getattr(state, name), count) for name, count in ranks.items()},
    )


def _share(size_bytes: int, ranks: int) -> int:
    return -(-size_bytes // ranks)  # shards are padded to the same size

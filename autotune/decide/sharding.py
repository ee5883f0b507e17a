"""What one GPU holds of a model whose state, layers and matrices several share: formulas, not measurements."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from autotune.core.allocations import Term, is_activations
from autotune.core.units import format_bytes
from autotune.errors import BadInput


@dataclass(frozen=True, slots=True, kw_only=True)
class StateBytes:
    """What one GPU would hold alone, at its peak, for one micro-batch.

    ``temporaries_bytes`` come and go in a step, ``outside_bytes`` are not the framework's: context, NCCL, handles.
    """

    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    head_and_loss_bytes: int
    temporaries_bytes: int
    outside_bytes: int


def state_of_terms(terms_bytes: Mapping[str, int]) -> StateBytes:
    """A ledger's terms as they are shared out; what is neither state, activations nor head comes and goes."""
    terms = dict(terms_bytes)
    return StateBytes(
        parameters_bytes=terms.pop(Term.PARAMETERS, 0),
        gradients_bytes=terms.pop(Term.GRADIENTS, 0),
        optimizer_bytes=terms.pop(Term.OPTIMIZER, 0),
        head_and_loss_bytes=terms.pop(Term.HEAD, 0),
        outside_bytes=terms.pop(Term.OUTSIDE, 0),
        activations_bytes=sum(size for term, size in terms.items() if is_activations(term)),
        temporaries_bytes=sum(size for term, size in terms.items() if not is_activations(term)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How GPUs share one model.

    ``zero_stage`` is 0 for plain data parallelism; FSDP's full sharding is 3, its gradients-and-optimizer sharding 2.
    ``microbatches_per_step`` go through a pipeline between two updates; None: no fewer than it has stages.

    Raises:
        BadInput: If a count is below 1, or there is no such stage of ZeRO.
    """

    zero_stage: int
    data_ranks: int
    tensor_ranks: int
    pipeline_stages: int
    microbatches_per_step: int | None = None
    sequence_parallel: bool = False

    def __post_init__(self) -> None:
        if self.zero_stage not in range(4):
            raise BadInput(
                f"zero_stage = {self.zero_stage}: there is no such stage",
                next_step="Use 0 (plain data parallelism), 1 (optimizer), 2 (gradients too) or 3 (parameters too).",
            )
        for name in ("data_ranks", "tensor_ranks", "pipeline_stages", "microbatches_per_step"):
            count = getattr(self, name)
            if count is not None and count < 1:
                raise BadInput(f"{name} = {count}: at least one is needed", next_step=f"Use 1 for {name}, or more.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedBytes:
    """What one GPU holds of a model that several share, on the stage of the pipeline that holds most.

    ``stage`` counts from 1. ``gathered_bytes`` is the layer that ZeRO-3 has put together at the moment.
    """

    stage: int
    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    head_and_loss_bytes: int
    temporaries_bytes: int
    outside_bytes: int
    gathered_bytes: int

    @property
    def state_bytes(self) -> int:
        """Parameters, gradients and optimizer: what ZeRO spreads."""
        return self.parameters_bytes + self.gradients_bytes + self.optimizer_bytes

    @property
    def total_bytes(self) -> int:
        """Everything."""
        work_bytes = self.activations_bytes + self.head_and_loss_bytes + self.temporaries_bytes
        return self.state_bytes + work_bytes + self.outside_bytes + self.gathered_bytes


def shard(state: StateBytes, layout: Layout, *, largest_layer_bytes: int) -> ShardedBytes:
    """What one GPU holds of a state under a layout, with d data ranks, t tensor ranks and p stages; divisions round up.

    - State: 1/(t·p) of it; of that, ZeRO-1 divides the optimizer's by d, ZeRO-2 the gradients too, ZeRO-3 the
      parameters too (Rajbhandari et al. 2020, figure 1) and puts one layer together at a time.
    - Activations of a transformer layer: all by t with sequence parallelism, else 10 of its 34 parts stay whole
      (Korthikanti et al. 2022, table 2). Attention scores, where they are kept, divide too, so that 10 of 34
      is the most that stays.
    - Pipeline: under 1F1B the first stage holds min(m, p) of m micro-batches, each with 1/p of the layers, the last
      stage one (Narayanan et al. 2021, section 2.2). So the first stage saves nothing once m reaches p.
    - Head and loss: on the last stage, by t along the vocabulary (Korthikanti et al. 2022, section 4.3).

    Left out: uneven stages, such as the one with the embedding table, or a table tied to the head and kept on both
    ends; norms and biases that tensor parallelism keeps whole; a layer that FSDP gathers ahead, and its whole gradient
    before it is reduced; frameworks that keep whole gradients from micro-batch to micro-batch whatever the stage;
    interleaved and other schedules; parts moved to the CPU. Temporaries and what lies outside count in full, though
    some shrink with the shard; communicators of more groups take more. With ``largest_layer_bytes`` above half of the
    parameters, ZeRO-3 on two ranks can need more than none: see ``gathered_bytes``.

    Args:
        state: The whole model's, as on one GPU.
        layout: Who shares it.
        largest_layer_bytes: Parameters of the largest unit that is gathered at once, such as a layer or the embedding.
    """
    model_ranks = layout.tensor_ranks * layout.pipeline_stages
    by_stage_of_zero = [1 if layout.zero_stage < first else layout.data_ranks for first in (1, 2, 3)]
    optimizer_ranks, gradient_ranks, parameter_ranks = by_stage_of_zero

    def on_stage(stage: int, microbatches: int, head_and_loss_bytes: int) -> ShardedBytes:
        return ShardedBytes(
            stage=stage,
            parameters_bytes=_share(state.parameters_bytes, model_ranks * parameter_ranks),
            gradients_bytes=_share(state.gradients_bytes, model_ranks * gradient_ranks),
            optimizer_bytes=_share(state.optimizer_bytes, model_ranks * optimizer_ranks),
            activations_bytes=_activations_bytes(state.activations_bytes, layout, microbatches),
            head_and_loss_bytes=_share(head_and_loss_bytes, layout.tensor_ranks),
            temporaries_bytes=state.temporaries_bytes,
            outside_bytes=state.outside_bytes,
            gathered_bytes=_share(largest_layer_bytes, layout.tensor_ranks) if parameter_ranks > 1 else 0,
        )

    stages = layout.pipeline_stages
    last = on_stage(stages, 1, state.head_and_loss_bytes)
    if stages == 1:
        return last
    in_flight = stages if layout.microbatches_per_step is None else min(layout.microbatches_per_step, stages)
    return max(on_stage(1, in_flight, 0), last, key=lambda sharded: sharded.total_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """A way in which several ranks hold a model that one cannot."""

    strategy: Literal["zero1", "fsdp2"]
    ranks: int
    bytes_of_a_rank: int

    @property
    def words(self) -> str:
        """For people, with the setting that does it."""
        size = format_bytes(self.bytes_of_a_rank)
        return f"parallel.strategy = '{self.strategy}' over {self.ranks} ranks (predicted: {size} on each)"


SHARED_AMONG = (2, 4, 8, 16, 32, 64)
"""Ranks; more than a few nodes to hold one copy of an encoder is another kind of training."""


def fewest_that_share(terms_bytes: Mapping[str, int], budget_bytes: int, *, largest_layer_bytes: int) -> Sharing | None:
    """The fewest ranks that hold a model which does not fit one of them; None where none of these numbers does.

    Args:
        terms_bytes: The ledger of a rank alone.
        budget_bytes: Of each rank.
        largest_layer_bytes: As for ``shard``.
    """
    state = state_of_terms(terms_bytes)
    for ranks in SHARED_AMONG:
        strategies: tuple[tuple[Literal["zero1", "fsdp2"], int], ...] = (("zero1", 1), ("fsdp2", 3))
        for strategy, stage in strategies:  # the first sends less
            layout = Layout(zero_stage=stage, data_ranks=ranks, tensor_ranks=1, pipeline_stages=1)
            size = shard(state, layout, largest_layer_bytes=largest_layer_bytes).total_bytes
            if size <= budget_bytes:
                return Sharing(strategy=strategy, ranks=ranks, bytes_of_a_rank=size)
    return None


def _activations_bytes(whole_bytes: int, layout: Layout, microbatches: int) -> int:
    # The 34 bytes per token and channel of a layer in 16 bits: 24 lie inside attention and MLP, 10 between them.
    divided, whole = (34, 0) if layout.sequence_parallel else (24, 10)
    parts = divided + whole * layout.tensor_ranks
    return _share(whole_bytes * microbatches * parts, layout.pipeline_stages * layout.tensor_ranks * 34)


def _share(size_bytes: int, ranks: int) -> int:
    """A rank's share, rounded up: shards are padded to the same size."""
    return -(-size_bytes // ranks)

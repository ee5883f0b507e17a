"""Division of a compiled graph into forward and backward, as Inductor divides it."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from autotune.memory.jobs.graph_nodes import SEEDED

aten = torch.ops.aten


def partition(
    joint: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    checkpointed: bool,
    redraws_dropout: bool,
    **options: Any,
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Divide a graph into forward and backward.

    Args:
        joint: Graph of forward and backward.
        inputs: Inputs of the graph.
        checkpointed: True to recompute everything that forward computes.
        redraws_dropout: True to keep the seed of dropout for backward, not its mask.
        options: Options with which AOTAutograd calls a partitioner.
    """
    # Imported late, as it is slow to import and only traces of compiled layers need it.
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    for node in joint.graph.nodes:
        is_redrawn = node.target is aten.rand.default and (
            checkpointed or redraws_dropout
        )
        if node.target is aten.randint.low and checkpointed:
            # The seed of a kernel's dropout, which recomputation draws again.
            is_redrawn = True
        is_forward = (
            node.op == "call_function"
            and node.meta.get("partitioner_tag") != "is_backward"
        )
        reads_redrawn = any(SEEDED in source.meta for source in node.all_input_nodes)
        if is_forward and (checkpointed or is_redrawn or reads_redrawn):
            # The marks that the partitioner expects of checkpointed operators.
            node.meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE
            node.meta["ac_graph_id"] = 0
        if is_redrawn:
            # A kernel draws the numbers from a seed and keeps none, so a constant
            # stands for them.
            node.target = aten.full.default
            node.args = (node.args[-1], 0.0)
            node.meta[SEEDED] = True
    return min_cut_rematerialization_partition(
        joint, inputs, compiler="inductor", **options
    )

"""How far nodes are useful, as text."""

from collections.abc import Sequence

from autotune.core.evidence import Scaling
from autotune.core.units import format_count, format_share
from autotune.show.network import SCALING_ALIGN, SCALING_HEADERS, scaling_cells
from autotune.show.tables import inert, text_table


def scaling_text(every: Sequence[Scaling]) -> str:
    """Return the answer as text."""
    return "\n\n".join(_one(scaled) for scaled in every)


def _one(scaled: Scaling) -> str:
    cells = [scaling_cells(row) for row in sorted(scaled.rows, key=lambda row: (row.nodes, row.measured))]
    nodes, bound = scaled.bound[-1] if scaled.bound else (1, 1.0)
    epoch = "n/a" if scaled.steps_per_epoch is None else format_count(scaled.steps_per_epoch)
    return "\n".join(
        [
            f"{inert(scaled.name)}: {scaled.global_batch_tokens:,} real tokens a step on any number of nodes, "
            f"steps per epoch: {epoch}",
            text_table(SCALING_HEADERS, cells, align=SCALING_ALIGN),
            *scaled.sources,
            f"if all of backward could hide the exchange, {nodes} nodes would be {format_share(bound)} efficient "
            "(a bound, out of DDP's reach under accumulation)",
            f"T_min, the least for that over many nodes with fp32 gradients: {scaled.least_tokens_per_rank:,.0f} real "
            "tokens of each rank and step",
            f"useful nodes at this global batch (at least 90 % efficient, predicted): {scaled.useful_nodes}",
            *(f"would lift it (predicted): {lever}" for lever in scaled.levers),
        ]
    )

"""Table of one GPU's memory under each way of sharing a model."""

from collections.abc import Sequence

from autotune.base import document as doc
from autotune.base.document import table_of
from autotune.base.units import format_bytes
from autotune.memory.values import Share


def shares_table(shares: Sequence[Share], caption: str = "") -> doc.Table:
    """Return a table with a line for each way of sharing the model.

    Ways that the trainer does not support are marked as formulas.
    """

    def name(share: Share) -> str:
        return share.name if share.trains_here else f"{share.name} *"

    def state(share: Share) -> str | None:
        return format_bytes(share.held.state_bytes + share.held.gathered_bytes)

    def activations(share: Share) -> str | None:
        return format_bytes(
            share.held.activations_bytes + share.held.head_and_loss_bytes
        )

    def other(share: Share) -> str | None:
        return format_bytes(share.held.temporaries_bytes + share.held.non_pytorch_bytes)

    name_header = "per rank"
    if not all(share.trains_here for share in shares):
        name_header += " (* formula)"
    return table_of(
        caption,
        shares,
        (name_header, "l", name),
        ("state", "r", state),
        ("activations", "r", activations),
        ("other", "r", other),
        ("total", "r", lambda share: format_bytes(share.total_bytes)),
        ("fits", "l", lambda share: "yes" if share.fits else "no"),
    )

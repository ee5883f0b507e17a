"""What a network tuning found, as text."""

from collections.abc import Iterator
from pathlib import Path

from autotune.core.evidence import ExchangeRow, LinkEvidence, NetworkEvidence, ScalingRow
from autotune.core.units import format_bytes, format_count, format_seconds, format_share
from autotune.show.tables import text_table

LINK_HEADERS = ("link", "members", "latency of a hop", "bandwidth each way", "98 % interval", "fit off by at most")
LINK_ALIGN = "lrrrrr"
EXCHANGE_HEADERS = (
    "exchange", "micro-batches", "rows", "step predicted", "step measured", "real tokens/s", "computes", "waits",
    "peak memory", "outcome",
)  # fmt: skip
EXCHANGE_ALIGN = "lrrrrrrrrl"
SCALING_HEADERS = (
    "nodes", "exchange", "micro-batches", "rows", "step", "real tokens/s", "efficiency", "by the links, 98 %",
    "limited by", "source",
)  # fmt: skip
SCALING_ALIGN = "rlrrrrrrll"


def network_text(found: NetworkEvidence, profile: Path) -> str:
    """The answer for people, and what to run next."""
    tables = [text_table(LINK_HEADERS, [link_cells(link) for link in found.links], align=LINK_ALIGN)]
    if found.exchanges:
        cells = [exchange_cells(row) for row in found.exchanges]
        tables += ["", text_table(EXCHANGE_HEADERS, cells, align=EXCHANGE_ALIGN)]
    if found.scaling:
        cells = [scaling_cells(row) for row in found.scaling]
        tables += ["", text_table(SCALING_HEADERS, cells, align=SCALING_ALIGN)]
    return "\n".join([*tables, "", *network_lines(found), f"profile: {profile}", _next(found, profile)])


def network_lines(found: NetworkEvidence) -> Iterator[str]:
    """What belongs under the tables, a line each."""
    nodes = (
        f"{found.nodes} node{'s' * (found.nodes > 1)} of {found.ranks_per_node} rank{'s' * (found.ranks_per_node > 1)}"
    )
    speed = found.interface_bytes_per_s
    says = "" if speed is None else f", which says {8 * speed / 1e9:g} Gbit/s"
    yield f"measured on {nodes}: {found.backend}, {found.transport}, interface {found.interface or 'n/a'}{says}"
    if found.all_reduce_factor != 1.0:
        yield f"all-reduces of all ranks took {found.all_reduce_factor:.2f} times what the links alone make of them"
    yield from (f"warn: {warning}" for warning in found.warnings)
    if found.equal_loss is not None:
        yield f"equal loss: {found.equal_loss}"
    if found.useful_nodes is not None:
        yield f"useful nodes at this global batch (at least 90 % efficient, predicted): {found.useful_nodes}"
        yield from (f"would lift it (predicted): {lever}" for lever in found.levers)
    elif found.exchanges:
        yield "useful nodes: not measured (one node tells nothing of the network between nodes)"
    yield f"exchange: {found.choice}"


def link_cells(link: LinkEvidence) -> list[str | None]:
    """One kind of link."""
    low, high = link.bytes_per_s_low, link.bytes_per_s_high
    return [
        link.scope,
        str(link.members),
        f"{1e6 * link.latency_s:.3g} µs",
        f"{format_bytes(link.bytes_per_s)}/s",
        None if low is None or high is None else f"{format_bytes(low)}/s to {format_bytes(high)}/s",
        format_share(link.worst_error_share),
    ]


def exchange_cells(row: ExchangeRow) -> list[str | None]:
    """One way to exchange gradients."""
    return [
        _exchange(row.strategy, row.gradient_dtype, row.bucket_cap_mib, sharded=row.shard_ranks is not None),
        str(row.micro_batches),
        str(row.rows),
        format_seconds(row.predicted_step_s),
        None if row.step_s is None else f"{format_seconds(row.step_s)}{_added(row.added_micro_batches)}",
        format_count(row.real_tokens_per_s),
        format_share(row.compute_share),
        format_share(row.communication_share),
        format_bytes(row.peak_bytes),
        row.outcome,
    ]


def scaling_cells(row: ScalingRow) -> list[str | None]:
    """One number of nodes."""
    low, high = row.efficiency_low, row.efficiency_high
    return [
        str(row.nodes),
        _exchange(row.strategy, row.gradient_dtype, row.bucket_cap_mib, sharded=False),
        str(row.micro_batches),
        str(row.rows),
        format_seconds(row.step_s),
        format_count(row.real_tokens_per_s),
        format_share(row.efficiency),
        None if low is None or high is None else f"{format_share(low)} to {format_share(high)}",
        row.limit if row.limit_share is None else f"{row.limit}: {format_share(row.limit_share)}",
        "predicted" if not row.measured else f"measured{_added(row.added_micro_batches)}",
    ]


def _added(micro_batches: int) -> str:
    """Says that some micro-batches of a measured step were added as predicted."""
    return f" (+{micro_batches} predicted)" if micro_batches else ""


def _exchange(strategy: str, dtype: str, cap_mib: int, *, sharded: bool) -> str:
    kind = "hsdp" if sharded else strategy
    return f"{kind}, {dtype}" if strategy == "fsdp2" else f"{kind}, {dtype}, {cap_mib} MiB buckets"


def _next(found: NetworkEvidence, profile: Path) -> str:
    if not found.exchanges:
        return f"next: autotune network --profile {profile} (with training steps, which decide)"
    return f"next: autotune scale --profile {profile}, or autotune launch slurm --profile {profile}"

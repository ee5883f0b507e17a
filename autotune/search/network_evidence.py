"""What a network tuning found, as the profile keeps it."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from autotune.core.evidence import ComputeEvidence, ExchangeRow, LinkEvidence, NetworkEvidence
from autotune.core.network import MIB, Link, Network, RankCompute
from autotune.decide.links import LinkFit, link_warnings
from autotune.decide.scaling import exchanges
from autotune.search.network import NetworkTuning, Tried
from autotune.search.scaling import Known, predict_scaling

MOST_NODES = 128
"""Of the table in a profile."""


def evidence(tuning: NetworkTuning, counts: Sequence[int] = ()) -> NetworkEvidence:
    """Of links and, where steps were measured, of exchanges and of how far nodes are useful.

    Args:
        tuning: Its links are measured.
        counts: Numbers of nodes to predict; powers of two when there are none.

    Raises:
        ValueError: If no links were measured.
    """
    links = tuning.links
    if links is None:
        raise ValueError("no links were measured")
    fits = tuning.fits
    between = fits.get("between")
    found = NetworkEvidence(
        nodes=links.nodes,
        ranks_per_node=links.ranks_per_node,
        backend=links.backend,
        interface=links.interface,
        interface_bytes_per_s=links.interface_bytes_per_s,
        transport=links.transport,
        links=[_link(name, fit) for name, fit in fits.items()],
        warnings=link_warnings(
            links.neighbours_bytes_per_s,
            links.products_flops_per_s,
            links.ranks_per_node,
            bytes_per_s=None if between is None else between.bytes_per_s.value,
            interface=links.interface,
            interface_bytes_per_s=links.interface_bytes_per_s,
        ),
        products_flops_per_s=list(links.products_flops_per_s),
        choice="only the links were measured",
        windows=len(tuning.runner.finished),
        seconds=round(tuning.runner.seconds, 3),
    )
    if tuning.compute is None or not tuning.tried:
        return found
    return found.model_copy(update=_of_steps(tuning, fits, counts))


def _of_steps(tuning: NetworkTuning, fits: dict[str, LinkFit], counts: Sequence[int]) -> dict[str, object]:
    chosen, gain = tuning.fastest()
    load, network = tuning.load(), tuning.network()
    of: dict[str, object] = {
        "default_rows": tuning.request.config.micro_batch_rows,
        "compute": compute_evidence(load.compute, tuning.request.config.micro_batch_rows),
        "exchanges": [_row(one, tuning.request.ranks_per_node) for one in tuning.tried],
        "choice": _choice(chosen, None if gain is None else (gain.value, gain.low, gain.high)),
        "equal_loss": tuning.equal_loss,
    }
    if "between" in fits:
        known = Known(
            load=load,
            network=network,
            worse=network_at(network, fits["between"], best_case=False),
            better=network_at(network, fits["between"], best_case=True),
            exchanges=exchanges(sixteen_bit=chosen.candidate.exchange.gradient_dtype != "fp32"),
            sources=(),
        )
        found = predict_scaling(tuning.request.config.model.name, known, counts or powers(known), None)
        of |= {"scaling": list(found.rows), "useful_nodes": found.useful_nodes, "levers": list(found.levers)}
    return of


def powers(known: Known) -> list[int]:
    """Powers of two for which there are rows, up to ``MOST_NODES``."""
    most = known.load.global_batch_rows // known.network.ranks_per_node
    return [2**exponent for exponent in range(12) if 2**exponent <= min(MOST_NODES, max(1, most))]


def compute_evidence(compute: RankCompute, rows: int) -> ComputeEvidence:
    """What a rank computes, as tables hold it."""
    return ComputeEvidence(
        rows=rows,
        micro_batch_s=compute.forward_backward_s(rows),
        fixed_s=compute.micro_batch_s,
        update_s=compute.update_s,
        forward_share=compute.forward_share,
        jitter_share=compute.jitter_share,
        slowdown_share=compute.slowdown_share,
        gradient_elements=[part.elements for part in compute.gradients],
        gradient_ready_shares=[part.ready_share for part in compute.gradients],
    )


def network_at(network: Network, fit: LinkFit, *, best_case: bool) -> Network:
    """The network at one end of what is known of the link between nodes."""
    latency, speed = fit.latency_s, fit.bytes_per_s
    bounds = (latency.low, speed.high) if best_case else (latency.high, speed.low)
    return replace(
        network,
        between=Link(latency_s=bounds[0] or latency.value, bytes_per_s=bounds[1] or speed.value),
    )


def _link(name: str, fit: LinkFit) -> LinkEvidence:
    return LinkEvidence(
        scope="within nodes" if name == "within" else "between nodes",
        members=fit.members,
        latency_s=fit.latency_s.value,
        latency_s_low=fit.latency_s.low,
        latency_s_high=fit.latency_s.high,
        bytes_per_s=fit.bytes_per_s.value,
        bytes_per_s_low=fit.bytes_per_s.low,
        bytes_per_s_high=fit.bytes_per_s.high,
        worst_error_share=fit.worst_error_share,
    )


def _row(one: Tried, ranks_per_node: int) -> ExchangeRow:
    exchange, step_s = one.candidate.exchange, one.step_s
    waits = [figures.communication_s for figures in one.figures if figures.communication_s is not None]
    rates = [rate for rates in one.rates() for rate in rates]
    waiting = None if step_s is None or not waits else min(1.0, sorted(waits)[len(waits) // 2] / step_s)
    return ExchangeRow(
        strategy=exchange.strategy,
        shard_ranks=ranks_per_node if exchange.shard_within_nodes else None,
        gradient_dtype=exchange.gradient_dtype,
        bucket_cap_mib=exchange.bucket_cap_bytes // MIB,
        micro_batches=one.candidate.dealt.micro_batches,
        rows=one.candidate.dealt.rows,
        predicted_step_s=one.candidate.predicted_step_s,
        step_s=step_s,
        steps=sum(len(figures.step_s) for figures in one.figures),
        real_tokens_per_s=sorted(rates)[len(rates) // 2] if rates else None,
        compute_share=None if waiting is None else 1 - waiting,
        communication_share=waiting,
        peak_bytes=_most(figures.peak_bytes for figures in one.figures),
        outcome=one.outcome,
    )


def _most(values: Iterable[int | None]) -> int | None:
    return max((value for value in values if value), default=None)


def _choice(chosen: Tried, gain: tuple[float, float | None, float | None] | None) -> str:
    if gain is None:
        return "the default: nothing that was measured is proven to be faster"
    ratio, low, high = gain
    interval = "" if low is None or high is None else f" ({low:.2f} to {high:.2f})"
    name = chosen.candidate.exchange.name
    return f"{name}: {ratio:.2f} times the default's real tokens/s{interval} at this global batch"

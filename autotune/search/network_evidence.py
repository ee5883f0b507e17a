"""What a network tuning found, as the profile keeps it."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from autotune.core.evidence import ComputeEvidence, ExchangeRow, LinkEvidence, NetworkEvidence
from autotune.core.interval import Interval
from autotune.core.network import MIB, Link, Network, RankCompute
from autotune.decide.links import LinkFit, link_warnings
from autotune.decide.scaling import exchanges
from autotune.search.network import ROUNDS, NetworkTuning, Tried
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
        all_reduce_factor=tuning.all_reduce_factor,
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


_OF_LINKS = (
    "nodes", "ranks_per_node", "backend", "interface", "interface_bytes_per_s", "transport", "links",
    "all_reduce_factor", "warnings", "products_flops_per_s",
)  # fmt: skip


def links_in_place_of(before: NetworkEvidence | None, links: NetworkEvidence) -> NetworkEvidence:
    """What is known once links alone were measured again: steps stay as they were, unless others ranks ran them."""
    if before is None or (before.nodes, before.ranks_per_node) != (links.nodes, links.ranks_per_node):
        return links
    return before.model_copy(update={name: getattr(links, name) for name in _OF_LINKS})


def _of_steps(tuning: NetworkTuning, fits: dict[str, LinkFit], counts: Sequence[int]) -> dict[str, object]:
    chosen, gain = tuning.fastest()
    load, network = tuning.load(), tuning.network()
    of: dict[str, object] = {
        "default_rows": tuning.request.config.micro_batch_rows,
        "compute": compute_evidence(load.compute, tuning.request.config.micro_batch_rows),
        "exchanges": [
            _row(one, tuning.request.ranks_per_node, tuning.against(tuning.tried[0], one) if number else None)
            for number, one in enumerate(tuning.tried)
        ],
        "choice": _choice(tuning.tried, chosen, gain),
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


def network_at(network: Network, fit: LinkFit, *, best_case: bool) -> Network | None:
    """The network at one end of what is known of the link between nodes; None where nothing was repeated."""
    latency, speed = fit.latency_s, fit.bytes_per_s
    latency_s, bytes_per_s = (latency.low, speed.high) if best_case else (latency.high, speed.low)
    if latency_s is None or bytes_per_s is None:
        return None
    return replace(network, between=Link(latency_s=latency_s, bytes_per_s=bytes_per_s))


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


def _row(one: Tried, ranks_per_node: int, ratio: Interval | None) -> ExchangeRow:
    exchange, step_s = one.candidate.exchange, one.step_s
    waits = [figures.communication_s for figures in one.figures if figures.communication_s is not None]
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
        real_tokens_per_s=None if step_s is None else one.real_tokens / step_s,
        compute_share=None if waiting is None else 1 - waiting,
        communication_share=waiting,
        peak_bytes=_most(figures.peak_bytes for figures in one.figures),
        added_micro_batches=one.added_micro_batches if one.figures else 0,
        ratio_to_default=None if ratio is None else ratio.value,
        ratio_low=None if ratio is None else ratio.low,
        ratio_high=None if ratio is None else ratio.high,
        outcome=one.outcome,
    )


def _most(values: Iterable[int | None]) -> int | None:
    return max((value for value in values if value), default=None)


def _choice(tried: Sequence[Tried], chosen: Tried, gain: Interval | None) -> str:
    rounds = len(tried[0].figures)
    if rounds < ROUNDS:
        return f"the default: there was time for {rounds} of {ROUNDS} rounds, which prove nothing; --minutes gives more"
    if gain is None:
        return "the default: nothing that was measured is proven to be faster"
    interval = "" if gain.low is None or gain.high is None else f" ({gain.low:.2f} to {gain.high:.2f})"
    name = chosen.candidate.exchange.name
    return f"{name}: {gain.value:.2f} times the default's real tokens/s{interval} at this global batch"

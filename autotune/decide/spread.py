"""How fast many ranks train, from how fast one does and what links cost. Pure; formulas of ``decide.scaling``.

Bounds are those of three cases: a slow rank over slow links, the likely one over likely links, a fast one over fast
links. A faster rank waits longer for the same exchange, so efficiency is also looked at crosswise.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from autotune.core.network import Exchange, Network
from autotune.core.plan import Basis, Figure, Remedy
from autotune.decide.figures import computed, derived_basis
from autotune.decide.scaling import (
    USEFUL_EFFICIENCY,
    Load,
    Predicted,
    best,
    efficiency_by_nodes,
    one_node_rate,
    useful_nodes,
)

MOST_DOUBLINGS = 14
_WORTH_SHARE = 0.01
"""A remedy that gains less is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """The network at the worse end of what is known of it, as it probably is, and at the better end."""

    worse: Network
    likely: Network
    better: Network
    basis: Basis
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """What many ranks do."""

    tokens_per_s: Figure
    efficiency: Figure | None
    """Against as many times one node; None on one."""
    micro_batches: int
    rows: int
    """Of a micro-batch of the fullest rank."""
    useful_nodes: int | None = None
    """At this batch, looked for up to the number that is meant; None where that is efficient enough."""
    remedies: tuple[Remedy, ...] = ()
    """The strongest first; none where nothing is wrong."""
    enough_times: int | None = None
    """A global batch so many times as large would be efficient enough; None where none of those looked at is."""


def spread(rate: Figure, load: Load, links: Links, among: Sequence[Exchange], nodes: int) -> Spread | None:
    """All ranks together; None where the batch has fewer rows than there are ranks.

    Args:
        rate: Real tokens/s of one rank, on one node.
        load: What a rank computes; how long it takes is set to the rate.
        links: Their number of nodes does not matter.
        among: Exchanges to choose from.
        nodes: That are meant.
    """
    ranks = nodes * links.likely.ranks_per_node
    dealings = load.dealings(ranks)
    if not dealings:
        return None
    if nodes == 1:
        total = computed(rate, ranks, f"{ranks} ranks of one node, as fast as that each")
        return Spread(
            tokens_per_s=total, efficiency=None, micro_batches=dealings[0].micro_batches, rows=dealings[0].rows
        )
    slow, fast = rate.low or rate.value, rate.high or rate.value
    likely = _at(rate.value, load, links.likely, among, nodes)
    low, high = _at(slow, load, links.worse, among, nodes), _at(fast, load, links.better, among, nodes)
    crosswise = (_at(fast, load, links.worse, among, nodes), _at(slow, load, links.better, among, nodes))
    efficiencies = [_efficiency(one) for one in (likely, low, high, *crosswise)]
    basis = derived_basis(rate, Figure(value=1.0, basis=links.basis, source=links.source))
    bounded = len(set(efficiencies)) > 1 or rate.low is not None
    efficiency = Figure(
        value=_efficiency(likely),
        low=min(efficiencies) if bounded else None,
        high=max(efficiencies) if bounded else None,
        basis=basis,
        source=links.source,
    )
    # Of exchanges that are as fast the simplest is taken, so better links may come out a little slower.
    value = rate.value * ranks * _efficiency(likely)
    total = Figure(
        value=value,
        low=min(value, slow * ranks * _efficiency(low)) if bounded else None,
        high=max(value, fast * ranks * _efficiency(high)) if bounded else None,
        basis=basis,
        source=f"{ranks} ranks at that rate and efficiency",
    )
    found = Spread(
        tokens_per_s=total, efficiency=efficiency, micro_batches=likely.dealt.micro_batches, rows=likely.dealt.rows
    )
    if efficiency.value >= USEFUL_EFFICIENCY:
        return found
    paced = _paced(rate.value, load, links.likely, among)
    by_nodes = efficiency_by_nodes(paced, links.likely, among)
    return replace(
        found,
        useful_nodes=useful_nodes(by_nodes, nodes),
        remedies=_remedies(paced, links.likely, among, nodes, efficiency.value),
        enough_times=_enough_times(paced, links.likely, among, nodes),
    )


def _paced(rate: float, load: Load, network: Network, among: Sequence[Exchange]) -> Load:
    """The load, computing as fast as is said of one rank on one node."""
    # Of a batch that one node can be dealt: the smallest there is has a row for each rank.
    now = one_node_rate(load, network, among)
    assert now is not None  # more nodes were dealt it
    factor = now / (rate * network.ranks_per_node)
    compute = load.compute
    return replace(
        load,
        compute=replace(
            compute,
            row_s=factor * compute.row_s,
            micro_batch_s=factor * compute.micro_batch_s,
            update_s=factor * compute.update_s,
        ),
    )


def _at(rate: float, load: Load, network: Network, among: Sequence[Exchange], nodes: int) -> Predicted:
    found = best(_paced(rate, load, network, among), replace(network, nodes=nodes), among)
    assert found is not None  # there are rows for all ranks
    return found


def _efficiency(one: Predicted) -> float:
    return min(1.0, one.efficiency or 1.0)


def _remedies(load: Load, network: Network, among: Sequence[Exchange], nodes: int, now: float) -> tuple[Remedy, ...]:
    """Each alone, at the same number of nodes."""
    twice = replace(network, between=replace(network.between, bytes_per_s=2 * network.between.bytes_per_s))
    cases: list[tuple[str, Load, Network, Sequence[Exchange]]] = [
        ("twice the global batch", _with_rows(load, 2), network, among),
        ("four times the global batch", _with_rows(load, 4), network, among),
        ("twice the bandwidth between nodes", load, twice, among),
    ]
    if all(one.gradient_dtype == "fp32" for one in among):
        halved = [*among, *(replace(one, gradient_dtype="bf16") for one in among)]
        cases.append(("16-bit gradients", load, network, halved))
    found = []
    for change, changed, over, exchanges in cases:
        efficient = efficiency_by_nodes(changed, over, exchanges)(nodes)
        if efficient is not None and efficient > now + _WORTH_SHARE:
            found.append(Remedy(change=change, efficiency=min(1.0, efficient)))
    return tuple(sorted(found, key=lambda one: -one.efficiency))


def _enough_times(load: Load, network: Network, among: Sequence[Exchange], nodes: int) -> int | None:
    for factor in (1 << doubling for doubling in range(1, MOST_DOUBLINGS + 1)):
        efficient = efficiency_by_nodes(_with_rows(load, factor), network, among)(nodes)
        if efficient is not None and efficient >= USEFUL_EFFICIENCY:
            return factor
    return None


def _with_rows(load: Load, factor: int) -> Load:
    return replace(load, global_batch_rows=factor * load.global_batch_rows)

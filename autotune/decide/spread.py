"""How fast many ranks train, from how fast one does and what links cost. Pure; formulas of ``decide.scaling``."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from autotune.core.network import Exchange, Network
from autotune.core.plan import Basis, PlanFigure, derived, derived_basis
from autotune.decide.scaling import USEFUL_EFFICIENCY, Load, best, efficiency_by_nodes, one_node_rate, useful_nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class AllRanks:
    """What many ranks do; nothing of it if no rate is known, or the batch has fewer rows than there are ranks."""

    tokens_per_s: PlanFigure | None = None
    """Real ones, of all ranks."""
    efficiency: PlanFigure | None = None
    """Of all nodes, against as many times one; None on one."""
    micro_batches: int = 1
    """Of a step on each rank."""
    rows: int = 0
    """Of a micro-batch of the fullest rank."""
    efficiency_by_nodes: Mapping[int, float] = field(default_factory=dict)
    """On one node, on as many as are useful or half of those that are meant, and on these; empty on one."""
    useful_nodes: int | None = None
    """At this batch, looked for up to the number that is meant; None if that is efficient enough."""


def spread(
    rate: PlanFigure, load: Load, network: Network, *, among: Sequence[Exchange], nodes: int, links: tuple[Basis, str]
) -> AllRanks:
    """Return all ranks together.

    ``rate`` is of one rank on one node, and the load is set to it; ``links`` say what the network rests on, and its
    source. The network's number of nodes does not matter.
    """
    ranks = nodes * network.ranks_per_node
    dealings = load.dealings(ranks)
    if not dealings:
        return AllRanks()
    if nodes == 1:
        total = derived(lambda one: one * ranks, rate, source=f"{ranks} ranks of one node, as fast as that each")
        return AllRanks(tokens_per_s=total, micro_batches=dealings[0].micro_batches, rows=dealings[0].rows)
    paced = _paced(rate.value, load, network, among)
    efficient = efficiency_by_nodes(paced, network, among)
    found = best(paced, replace(network, nodes=nodes), among)
    assert found is not None  # there are rows for all ranks
    known = PlanFigure(value=min(1.0, found.efficiency or 1.0), basis=links[0], source=links[1])
    useful = None if known.value >= USEFUL_EFFICIENCY else useful_nodes(efficient, nodes)
    counts = sorted({1, useful or nodes // 2, nodes})
    told = f"{ranks} ranks at that rate and efficiency"
    return AllRanks(
        tokens_per_s=derived(lambda one, share: one * ranks * share, rate, known, source=told),
        efficiency=replace(known, basis=derived_basis(rate, known)),
        micro_batches=found.dealt.micro_batches,
        rows=found.dealt.rows,
        efficiency_by_nodes={count: min(1.0, share) for count in counts if (share := efficient(count)) is not None},
        useful_nodes=useful,
    )


def _paced(rate: float, load: Load, network: Network, among: Sequence[Exchange]) -> Load:
    """Return the load, computing as fast as is said of one rank on one node."""
    # Of a batch that one node can be dealt: the smallest there is has a row for each rank.
    now = one_node_rate(load, network, among)
    assert now is not None  # more nodes were dealt it
    factor, one = now / (rate * network.ranks_per_node), load.compute
    seconds = {name: factor * getattr(one, name) for name in ("row_s", "micro_batch_s", "update_s")}
    return replace(load, compute=replace(one, **seconds))

"""What is known of training a profile on more nodes: from what was measured, or from assumptions that are said."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from autotune.core.evidence import ComputeEvidence, CurvePoint, LinkEvidence, NetworkEvidence, Scaling, ScalingRow
from autotune.core.network import ELEMENT_BYTES, MIB, Exchange, GradientPart, Link, Network, RankCompute
from autotune.core.profile import Profile
from autotune.decide.choose import rows_with_headroom
from autotune.decide.network import least_tokens_per_rank
from autotune.decide.probe_command import probe_command
from autotune.decide.scaling import (
    Dealt,
    Load,
    Predicted,
    best,
    efficiency_by_nodes,
    exchanges,
    levers,
    limit_of,
    scale,
    useful_nodes,
)
from autotune.decide.shape import gradients_of_shape
from autotune.errors import BadInput, ProfileRefused
from autotune.search.network import MOST_MICRO_BATCHES, NetworkTuning, further_s

ASSUMED_LATENCY_S = 25e-6
ASSUMED_LINE_SHARE = 0.8
"""Of the line's rate that all-reduces reach, where only the rate is known."""
MOST_NODES = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumed:
    """What the user says of links that were not measured."""

    bits_per_s: float
    """The line rate of a node's network card."""
    latency_s: float = ASSUMED_LATENCY_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """A profile's load and network, and where they come from."""

    load: Load
    network: Network
    worse: Network | None
    """At the worse end of the links' intervals; None where there is none, as of what is assumed."""
    better: Network | None
    exchanges: tuple[Exchange, ...]
    sources: tuple[str, ...]
    """A sentence for each."""


def known_of(
    profile: Profile,
    *,
    assumed: Assumed | None,
    ranks_per_node: int | None,
    global_batch_tokens: int | None,
    sixteen_bit: bool,
) -> Known:
    """Put together what is known.

    Args:
        profile: Probed, and better with its network measured.
        assumed: Instead of measured links between nodes.
        ranks_per_node: None takes what was measured.
        global_batch_tokens: In real tokens; None takes the profile's.
        sixteen_bit: Whether gradients may travel in 16 bits, as if the loss had been found equal.

    Raises:
        ProfileRefused: If the profile was not probed.
        BadInput: If nothing is known of the links between nodes.
    """
    probe, evidence = profile.evidence.probe, profile.evidence.network
    if probe is None:
        raise ProfileRefused(
            "the profile has no probed micro-batch",
            next_step=f"Probe first: {probe_command(profile, 'PROFILE.toml')}",
        )
    compute, compute_source = _compute(profile, evidence)
    networks, link_source = _networks(profile, assumed, ranks_per_node or ranks_of(profile))
    tokens = global_batch_tokens or _global_batch_tokens(profile, probe.mean_real_tokens_per_row)
    halved = sixteen_bit or profile.train.parallel.gradient_dtype != "fp32"
    load = Load(
        compute=compute,
        global_batch_rows=max(1, round(tokens / probe.mean_real_tokens_per_row)),
        real_tokens_per_row=probe.mean_real_tokens_per_row,
        most_rows=max(
            profile.train.micro_batch_rows, rows_with_headroom(probe.feasible_max, profile.constraints.headroom_share)
        ),
    )
    worse, middle, better = networks
    return Known(
        load=load,
        network=middle,
        worse=worse,
        better=better,
        exchanges=exchanges(sixteen_bit=halved),
        sources=(compute_source, link_source),
    )


def predict_scaling(name: str, known: Known, counts: Sequence[int], samples_per_epoch: float | None) -> Scaling:
    """Efficiency at these numbers of nodes, and how many are useful.

    Args:
        name: Of the model, for tables and charts.
        known: Of ``known_of``.
        counts: Numbers of nodes; those with more ranks than rows are left out.
        samples_per_epoch: Rows of one pass over the dataset; None where that is not known.

    Raises:
        BadInput: If every one of them has more ranks than the global batch has rows.
    """
    load = known.load

    predicted = scale(load, known.network, known.exchanges, counts)
    if not predicted:
        raise BadInput(
            f"a global batch of {load.global_batch_rows} rows is fewer than the ranks of {min(counts)} nodes",
            next_step="Ask for fewer nodes, or a larger batch: --global-batch-tokens.",
        )
    most = max(1, min(MOST_NODES, load.global_batch_rows // known.network.ranks_per_node))
    rows = []
    for one in predicted:
        ends = [
            None if end is None else best(load, replace(end, nodes=one.nodes), known.exchanges)
            for end in (known.worse, known.better)
        ]
        rows.append(scaling_row(one, [None if end is None else end.efficiency for end in ends]))
    useful = useful_nodes(efficiency_by_nodes(load, known.network, known.exchanges), most)
    lifted = levers(load, known.network, known.exchanges, most, useful)
    return Scaling(
        name=name,
        global_batch_tokens=round(load.real_tokens),
        rows=tuple(rows),
        useful_nodes=useful,
        levers=tuple(f"{one.change}: {one.useful_nodes} nodes" for one in lifted),
        steps_per_epoch=None if samples_per_epoch is None else samples_per_epoch / load.global_batch_rows,
        bound=tuple((one.nodes, one.bound_efficiency) for one in predicted if one.bound_efficiency is not None),
        least_tokens_per_rank=least_tokens(load, known.network),
        sources=known.sources,
    )


def least_tokens(load: Load, network: Network) -> float:
    """T_min of what is to be trained, in real tokens, with 32-bit gradients."""
    compute = load.compute
    backward_s = (1 - compute.forward_share) * compute.forward_backward_s(load.most_rows)
    # A backward pass has 4 FLOPs for each parameter and token.
    flops_per_s = 4 * compute.elements * load.most_rows * load.real_tokens_per_row / backward_s
    return least_tokens_per_rank(flops_per_s, ELEMENT_BYTES["fp32"], network.between.bytes_per_s)


def _global_batch_tokens(profile: Profile, mean_real_tokens_per_row: float) -> float:
    """As the profile would train now, which may be by another's hand."""
    train = profile.train
    if train.global_batch_samples is not None:
        return profile.constraints.global_batch_tokens  # how long they are, only the dataset knows
    return train.global_batch_tokens or train.global_batch_rows * mean_real_tokens_per_row


def ranks_of(profile: Profile) -> int:
    """Ranks of each node: as the network was measured, else as the profile was probed."""
    evidence, probe = profile.evidence.network, profile.evidence.probe
    return evidence.ranks_per_node if evidence is not None else probe.local_ranks if probe is not None else 1


def _compute(profile: Profile, evidence: NetworkEvidence | None) -> tuple[RankCompute, str]:
    if evidence is not None and evidence.compute is not None:
        return compute_from(evidence.compute), "computing: measured, steps of all ranks in which nothing travelled"
    probe = profile.evidence.probe
    assert probe is not None
    if not probe.curve:
        raise ProfileRefused(
            "the profile has no throughput: it was probed on a pretended GPU",
            next_step=f"Probe on a real one: {probe_command(profile, 'PROFILE.toml')}",
        )
    return _of_curve(profile, probe.curve), (
        "computing: from the probe's throughput curve; gradients: assumed from the model's shape, ready layer by layer"
    )


def _of_curve(profile: Profile, curve: Sequence[CurvePoint]) -> RankCompute:
    """A line through the curve's ends; the update is in what does not grow with the rows."""
    first, last = min(curve, key=lambda point: point.rows), max(curve, key=lambda point: point.rows)
    row_s = last.step_s / last.rows
    if last.rows > first.rows:
        row_s = max(0.0, (last.step_s - first.step_s) / (last.rows - first.rows))
    return RankCompute(
        row_s=row_s,
        micro_batch_s=max(0.0, last.step_s - last.rows * row_s),
        update_s=0.0,
        gradients=assumed_gradients(profile),
    )


def assumed_gradients(profile: Profile) -> tuple[GradientPart, ...]:
    """Gradients by the model's shape.

    Raises:
        BadInput: If the number of parameters is not known.
    """
    probe = profile.evidence.probe
    parameters = None if probe is None else probe.parameters
    if parameters is None:
        raise BadInput(
            "the profile does not say how many parameters the model has",
            next_step=f"Measure it: autotune network --profile PROFILE; or probe {profile.train.model.name} again.",
        )
    return gradients_of_shape(profile.train, parameters)


def _networks(
    profile: Profile, assumed: Assumed | None, ranks_per_node: int
) -> tuple[tuple[Network | None, Network, Network | None], str]:
    """The worse, the likely and the better one."""
    evidence = profile.evidence.network
    within = _link(evidence, "within nodes")
    measured = _link(evidence, "between nodes")
    # Of all-reduces over as many ranks in each node as were measured, and of nothing else.
    same = assumed is None and evidence is not None and evidence.ranks_per_node == ranks_per_node
    factor = evidence.all_reduce_factor if evidence is not None and same else 1.0

    def of(between: Link) -> Network:
        return Network(
            nodes=2,
            ranks_per_node=ranks_per_node,
            between=between,
            within=None if within is None else _middle(within),
            trees=profile.train.device == "cuda",
            all_reduce_factor=factor,
        )

    if assumed is not None:
        link = Link(latency_s=assumed.latency_s, bytes_per_s=ASSUMED_LINE_SHARE * assumed.bits_per_s / 8)
        told = (
            f"links between nodes: assumed, {ASSUMED_LINE_SHARE:.0%} of {assumed.bits_per_s / 1e9:g} Gbit/s and "
            f"{1e6 * assumed.latency_s:g} µs a hop"
        )
        return (None, of(link), None), told
    if measured is None:
        raise BadInput(
            "nothing is known of the network between nodes",
            next_step="Measure it: autotune network --slurm (two nodes); or assume a card: --bandwidth 25Gbit.",
        )
    worse = _at(measured.latency_s_high, measured.bytes_per_s_low)
    better = _at(measured.latency_s_low, measured.bytes_per_s_high)
    told = f"links between nodes: measured on {measured.members} nodes"
    if factor != 1.0:
        told += f"; all-reduces of all ranks took {factor:.2f} times what links alone predict, which counts"
    return (
        None if worse is None else of(worse),
        of(_middle(measured)),
        None if better is None else of(better),
    ), told


def _at(latency_s: float | None, bytes_per_s: float | None) -> Link | None:
    return None if latency_s is None or bytes_per_s is None else Link(latency_s=latency_s, bytes_per_s=bytes_per_s)


def _link(evidence: NetworkEvidence | None, scope: str) -> LinkEvidence | None:
    return next((one for one in evidence.links if one.scope == scope), None) if evidence is not None else None


def _middle(link: LinkEvidence) -> Link:
    return Link(latency_s=link.latency_s, bytes_per_s=link.bytes_per_s)


def scaling_row(one: Predicted, ends: Sequence[float | None]) -> ScalingRow:
    """One predicted number of nodes."""
    low, high = ends
    limit, limit_share = limit_of(one.time)
    return ScalingRow(
        nodes=one.nodes,
        strategy=one.exchange.strategy,
        gradient_dtype=one.exchange.gradient_dtype,
        bucket_cap_mib=one.exchange.bucket_cap_bytes // MIB,
        micro_batches=one.dealt.micro_batches,
        rows=one.dealt.rows,
        step_s=one.time.step_s,
        real_tokens_per_s=one.real_tokens_per_s,
        efficiency=one.efficiency or 1.0,
        efficiency_low=low,
        efficiency_high=high,
        limit=limit,
        limit_share=limit_share,
        exposed_share=min(1.0, one.time.exposed_s / one.time.step_s),
        measured=False,
    )


def compute_from(kept: ComputeEvidence) -> RankCompute:
    """The same, read back."""
    parts = zip(kept.gradient_elements, kept.gradient_ready_shares, strict=True)
    return RankCompute(
        row_s=(kept.micro_batch_s - kept.fixed_s) / kept.rows,
        micro_batch_s=kept.fixed_s,
        update_s=kept.update_s,
        gradients=tuple(GradientPart(elements=elements, ready_share=ready) for elements, ready in parts),
        forward_share=kept.forward_share,
        jitter_share=kept.jitter_share,
        slowdown_share=kept.slowdown_share,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStep:
    """A step of the whole global batch on so many nodes."""

    step_s: float
    real_tokens: float
    """Of the user's global batch."""
    added_micro_batches: int
    """Which were not measured but added as predicted."""


def exchange_of(row: ScalingRow) -> Exchange:
    """The exchange that a row is of."""
    return Exchange(strategy=row.strategy, gradient_dtype=row.gradient_dtype, bucket_cap_bytes=row.bucket_cap_mib * MIB)


def measured_step(tuning: NetworkTuning, known: Known, row: ScalingRow, steps: int) -> MeasuredStep:
    """Measure some micro-batches of a row's step, and add what further ones take.

    Raises:
        Undecided: If it could not be measured.
    """
    few = min(row.micro_batches, MOST_MICRO_BATCHES)
    exchange = exchange_of(row)
    if exchange.gradient_dtype != "fp32":
        exchange = replace(exchange, gradient_dtype=tuning.request.half)
    figures = tuning.steps_with(row.rows, few, exchange, steps)
    dealt = Dealt(micro_batches=row.micro_batches, rows=row.rows)
    added_s = further_s(known.load.compute, dealt, exchange, replace(known.network, nodes=row.nodes))
    return MeasuredStep(
        step_s=statistics.median(figures.step_s) + added_s,
        real_tokens=known.load.real_tokens,
        added_micro_batches=row.micro_batches - few,
    )


def with_measured(predicted: Scaling, measured: Mapping[int, MeasuredStep]) -> Scaling:
    """Predicted rows, and measured ones behind them; what one node does is predicted where it was not measured."""
    alone, first = measured.get(1), predicted.rows[0]
    one_node = first.real_tokens_per_s / (first.nodes * first.efficiency)
    if alone is not None:
        one_node = alone.real_tokens / alone.step_s
    rows = []
    for row in predicted.rows:
        step = measured.get(row.nodes)
        if step is None:
            continue
        rate = step.real_tokens / step.step_s
        update = {
            "step_s": step.step_s,
            "real_tokens_per_s": rate,
            "efficiency": rate / (row.nodes * one_node),
            "efficiency_low": None,
            "efficiency_high": None,
            "limit_share": None,
            "measured": True,
            "added_micro_batches": step.added_micro_batches,
        }
        rows.append(row.model_copy(update=update))
    told = () if alone is not None else ("efficiency of what was measured: against one node as predicted",)
    return replace(predicted, rows=(*predicted.rows, *rows), sources=(*predicted.sources, *told))

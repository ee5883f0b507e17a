"""Links and training on more nodes, from measurements or from stated assumptions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from autotune.base.units import format_percent
from autotune.base.wording import plural
from autotune.errors import BadInput, ProfileRejected
from autotune.evidence.network import (
    Link,
    Network,
    NetworkEvidence,
    RankCompute,
    ScalingRow,
)
from autotune.evidence.probe import ProbeEvidence
from autotune.evidence.profile import Profile
from autotune.network.decide.scaling_model import (
    Load,
    Scaling,
    ScalingModel,
    SkippedNodes,
    gradient_syncs,
    limit_of,
    useful_nodes,
)
from autotune.network.gradient_parts import gradient_parts
from autotune.profiles.decide.follow_up import probe_command
from autotune.profiles.decide.micro_batch import with_headroom

ASSUMED_LATENCY_S = 25e-6
ASSUMED_LINE_SHARE = 0.8
"""Assumed share of the line rate that all-reduces reach."""
MOST_NODES = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumed:
    """The user's assumptions about links that were not measured."""

    bits_per_s: float
    """Line rate of a node's NIC."""
    latency_s: float = ASSUMED_LATENCY_S

    @property
    def words(self) -> str:
        """The assumption in words."""
        return (
            f"assumed, {format_percent(ASSUMED_LINE_SHARE)} of"
            f" {self.bits_per_s / 1e9:g} Gbit/s and {1e6 * self.latency_s:g} µs per hop"
        )

    @property
    def link(self) -> Link:
        """Assumed link between nodes."""
        return Link(
            latency_s=self.latency_s,
            bytes_per_s=ASSUMED_LINE_SHARE * self.bits_per_s / 8,
        )


def known_of(
    profile: Profile,
    *,
    assumed: Assumed | None = None,
    ranks_per_node: int | None = None,
    global_batch_tokens: float | None = None,
) -> ScalingModel:
    """Return the scaling model of a probed profile.

    Arguments override the profile, and ``assumed`` its measured links.

    Raises:
        ProfileRejected: If the profile was not probed, or was probed on a simulated
            GPU.
        BadInput: If the links between nodes or the number of parameters are unknown.
    """
    probe, train = profile.evidence.probe, profile.train
    if probe is None:
        next_step = f"Probe first: {probe_command(profile, 'PROFILE.toml')}"
        raise ProfileRejected(
            "the profile has no probed micro-batch", next_step=next_step
        )
    compute, compute_source = _compute(profile, probe)
    network, ends, link_source = links_of(
        profile, assumed, ranks_per_node or ranks_of(profile)
    )
    tokens = global_batch_tokens
    if tokens is None and train.global_batch_samples is not None:
        # The length of samples is in the dataset only.
        tokens = profile.constraints.global_batch_tokens
    tokens = (
        tokens
        or train.global_batch_tokens
        or train.global_batch_size * probe.tokens_per_sequence
    )
    most = with_headroom(probe.feasible_max, profile.constraints.headroom_share)
    return ScalingModel(
        load=Load(
            compute=compute,
            global_batch_size=max(1, round(tokens / probe.tokens_per_sequence)),
            tokens_per_sequence=probe.tokens_per_sequence,
            max_micro_batch_size=max(train.micro_batch_size, most),
        ),
        network=network,
        ends=ends,
        gradient_syncs=gradient_syncs(
            sixteen_bit=train.parallel.gradient_dtype != "fp32"
        ),
        sources=(compute_source, link_source),
    )


def predict_scaling(
    name: str,
    known: ScalingModel,
    counts: Sequence[int],
    rows_per_epoch: float | None = None,
) -> Scaling:
    """Return the efficiency at each number of nodes, and the number of useful nodes.

    Raises:
        BadInput: If the global batch is too small for all of ``counts``.
    """
    load, network = known.load, known.network
    predicted = [one for one in map(known.at, counts) if one is not None]
    if not predicted:
        what = (
            f"a global batch of {plural(load.global_batch_size, 'sequence')} is too"
            f" small for the ranks of {plural(min(counts), 'node')}"
        )
        raise BadInput(
            what, next_step="Use fewer --nodes, or a larger --global-batch-tokens."
        )
    rows = []
    for one in predicted:
        limit, share = limit_of(one.time)
        low, high = (
            (known.efficiency(one.nodes, link) for link in known.ends)
            if known.ends
            else (None, None)
        )
        rows.append(
            ScalingRow(
                nodes=one.nodes,
                **one.settings(network.ranks_per_node),
                step_s=one.time.step_s,
                tokens_per_s=one.tokens_per_s,
                efficiency=one.efficiency or 1.0,
                efficiency_low=low,
                efficiency_high=high,
                limit=limit,
                limit_share=share,
                measured=False,
            )
        )
    predicted_nodes = {step.nodes for step in predicted}
    skipped = tuple(
        SkippedNodes(
            nodes=nodes,
            reason=(
                f"the global batch has {plural(load.global_batch_size, 'sequence')},"
                f" fewer than the {nodes * network.ranks_per_node:,} ranks"
            ),
        )
        for nodes in counts
        if nodes not in predicted_nodes
    )
    most = max(1, min(MOST_NODES, load.global_batch_size // network.ranks_per_node))
    useful = useful_nodes(known.efficiency, most)
    return Scaling(
        name=name,
        global_batch_tokens=round(load.non_padding_tokens),
        rows=tuple(rows),
        useful_nodes=useful,
        levers=tuple(
            f"{change}: {plural(nodes, 'node')}"
            for change, nodes in known.levers(most, useful)
        ),
        steps_per_epoch=(
            None if rows_per_epoch is None else rows_per_epoch / load.global_batch_size
        ),
        bound=tuple(
            (one.nodes, one.bound_efficiency)
            for one in predicted
            if one.bound_efficiency is not None
        ),
        least_tokens_per_rank=known.least_tokens_per_rank,
        sources=known.sources,
        skipped=skipped,
    )


def ranks_of(profile: Profile) -> int:
    """Return the ranks per node of the network measurement.

    If there is none, they are those of the probe.
    """
    evidence = profile.evidence.network
    return profile.local_ranks if evidence is None else evidence.ranks_per_node


def _compute(profile: Profile, probe: ProbeEvidence) -> tuple[RankCompute, str]:
    evidence = profile.evidence.network
    if evidence is not None and evidence.compute is not None:
        return (
            evidence.compute.of_rank,
            "compute: measured in steps without gradient synchronisation",
        )
    if not probe.curve:
        what = "the profile has no throughput, because it was probed on a simulated GPU"
        raise ProfileRejected(
            what,
            next_step=f"Probe on a real GPU: {probe_command(profile, 'PROFILE.toml')}",
        )
    if probe.parameters is None:
        next_step = (
            f"Probe {profile.train.model.name} again:"
            f" {probe_command(profile, 'PROFILE.toml')}"
        )
        raise BadInput(
            "the profile has no number of parameters of the model", next_step=next_step
        )
    # A line through the curve's ends: the constant part includes the optimizer step.
    first, last = (
        pick(probe.curve, key=lambda point: point.size) for pick in (min, max)
    )
    sequence_s = last.step_s / last.size
    if last.size > first.size:
        sequence_s = max(
            0.0,
            (last.step_s - first.step_s) / (last.size - first.size),
        )
    fixed_s = max(0.0, last.step_s - last.size * sequence_s)
    gradients = gradient_parts(profile.train, probe.parameters)
    return (
        RankCompute(
            sequence_s=sequence_s,
            micro_batch_s=fixed_s,
            optimizer_step_s=0.0,
            gradients=gradients,
        ),
        (
            "compute: from the probe's throughput curve; gradients: assumed from the"
            " model's shape, ready layer by layer"
        ),
    )


def links_of(
    profile: Profile, assumed: Assumed | None, ranks_per_node: int
) -> tuple[Network, tuple[Link, Link] | None, str]:
    """Return the likely network with its uncertainty and source.

    Returns:
        The network, the link between nodes at both ends of its bounds, and the source.

    Raises:
        BadInput: If the links between nodes are unknown.
    """
    evidence = profile.evidence.network
    links = {} if evidence is None else {one.scope: one for one in evidence.links}
    within, measured = links.get("within nodes"), links.get("between nodes")
    factor, ends = 1.0, None
    if assumed is not None:
        between = assumed.link
        source = f"links between nodes: {assumed.words}"
    elif measured is not None and evidence is not None:
        between, ends = measured.link, measured.ends
        source = f"links between nodes: measured on {measured.members} nodes"
        # The factor holds for the measured number of ranks per node only.
        factor = (
            evidence.all_reduce_factor
            if evidence.ranks_per_node == ranks_per_node
            else 1.0
        )
        if factor != 1.0:
            source += (
                f"; corrected by {factor:.2f}, the measured over the predicted time of"
                " all-reduces"
            )
    else:
        next_step = (
            "Measure two nodes: autotune network PROFILE --slurm; or assume a NIC:"
            " --bandwidth 25Gbit"
        )
        raise BadInput(
            "the profile has no measurement of the network between nodes",
            next_step=next_step,
        )
    network = Network(
        nodes=2,
        ranks_per_node=ranks_per_node,
        between=between,
        within=None if within is None else within.link,
        trees=profile.fingerprint.device == "cuda",
        all_reduce_factor=factor,
    )
    return network, ends, source


def joins_nodes(evidence: NetworkEvidence | None) -> bool:
    """Return whether links between nodes were measured."""
    return evidence is not None and any(
        link.scope == "between nodes" for link in evidence.links
    )


def with_measured(predicted: Scaling, measured: Mapping[int, ScalingRow]) -> Scaling:
    """Return predicted rows, then measured ones with their efficiency.

    Efficiency is relative to one node, which is measured if possible.
    """
    first, alone = predicted.rows[0], measured.get(1)
    one_node = (
        alone.tokens_per_s
        if alone
        else first.tokens_per_s / (first.nodes * first.efficiency)
    )
    source = (
        () if alone else ("measured efficiency: relative to one node as predicted",)
    )
    rows = [
        row.model_copy(update={"efficiency": row.tokens_per_s / (nodes * one_node)})
        for nodes, row in sorted(measured.items())
    ]
    return replace(
        predicted, rows=(*predicted.rows, *rows), sources=(*predicted.sources, *source)
    )

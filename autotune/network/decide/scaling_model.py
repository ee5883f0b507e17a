"""Predicted scaling: the fastest gradient synchronisation at each number of nodes.

The user's global batch is fixed, so more nodes mean fewer sequences per rank, which
limits scaling. Efficiency is always relative to one node with the same global batch.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from autotune.base.wording import plural
from autotune.evidence.network import (
    ELEMENT_BYTES,
    MIB,
    GradientSync,
    Link,
    Network,
    RankCompute,
    ScalingRow,
)
from autotune.evidence.plan import Basis, PlanFigure, derived, derived_basis
from autotune.network.decide.step_model import StepTime, hidden_bound_s, step_time
from autotune.profiles.decide.batch_split import GlobalBatchSplit, split_global_batch
from trainer.formats.train_config import GradientDtype, Strategy

USEFUL_EFFICIENCY = 0.9
BUCKET_CAPS_BYTES = (5 * MIB, 10 * MIB, 25 * MIB, 50 * MIB, 100 * MIB)
MORE_MICRO_BATCHES = 2
AS_FAST_SHARE = 0.005
"""Least gain for which a gradient synchronisation is preferred to a simpler one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SkippedNodes:
    """Number of nodes without a prediction."""

    nodes: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """Scaling of one profile to more nodes.

    Rows are predicted, except for those marked as measured.
    """

    name: str
    global_batch_tokens: int
    rows: tuple[ScalingRow, ...]
    useful_nodes: int
    """Largest number of nodes that is at least 90 % efficient; predicted."""
    levers: tuple[str, ...]
    steps_per_epoch: float | None
    """Optimizer steps per epoch; None if the dataset's size is not known."""
    bound: tuple[tuple[int, float], ...]
    """Numbers of nodes, each with its efficiency if synchronisation overlapped every
    micro-batch's backward."""
    least_tokens_per_rank: float
    """T_min: non-padding tokens per rank and step that backward needs to overlap
    synchronisation in fp32."""
    sources: tuple[str, ...]
    skipped: tuple[SkippedNodes, ...] = ()
    """Numbers of nodes that were asked for and cannot be predicted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Workload of a training, independent of the number of nodes."""

    compute: RankCompute
    global_batch_size: int
    tokens_per_sequence: float
    max_micro_batch_size: int
    """Largest micro-batch size of a rank, as probed."""

    @property
    def non_padding_tokens(self) -> float:
        """Non-padding tokens of an optimizer step."""
        return self.global_batch_size * self.tokens_per_sequence

    def micro_batch_options(self, ranks: int) -> tuple[GlobalBatchSplit, ...]:
        """Return the batch splits that may be fastest.

        They have the fewest micro-batches that fit, or up to two more, because another
        split may balance ranks better. There are none if some ranks would have no
        sequence.
        """
        batch = self.global_batch_size
        least = math.ceil(batch / (self.max_micro_batch_size * ranks))
        counts = range(least, least + MORE_MICRO_BATCHES + 1) if batch >= ranks else ()
        found = (
            split_global_batch(batch, math.ceil(batch / (count * ranks)), ranks)
            for count in counts
        )
        # Some sizes need fewer micro-batches, so that none is empty.
        return tuple(dict.fromkeys(found))


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedStep:
    """Predicted step on a number of nodes with one gradient synchronisation."""

    nodes: int
    split: GlobalBatchSplit
    sync: GradientSync
    time: StepTime
    tokens_per_s: float
    efficiency: float | None = None
    """Throughput relative to perfect scaling from one node; None until one node is
    known."""
    bound_efficiency: float | None = None
    """Upper bound: efficiency if synchronisation overlapped every micro-batch."""

    def settings(self, ranks_per_node: int) -> dict[str, Any]:
        """Return the settings of the step, named as in rows of evidence."""
        names = ("gradient_accumulation_steps", "micro_batch_size")
        return self.sync.settings(ranks_per_node) | {
            name: getattr(self.split, name) for name in names
        }


def limit_of(time: StepTime) -> tuple[str, float | None]:
    """Return the largest cost beside compute, and its share of the step.

    It is compute, with None, if no other cost exceeds 1 %.
    """
    losses = {
        "network": time.exposed_s + time.slowdown_s,
        "stragglers": time.straggling_s,
        "optimizer step": time.optimizer_step_s,
    }
    worst = max(losses, key=lambda name: losses[name])
    share = losses[worst] / time.step_s
    return (worst, min(1.0, share)) if share > 0.01 else ("compute", None)


def gradient_syncs(
    *,
    sixteen_bit: bool,
    strategies: Sequence[str] = ("ddp",),
    half: GradientDtype = "bf16",
) -> tuple[GradientSync, ...]:
    """Return the candidates, the simplest first.

    With ``sixteen_bit``, those with gradients of ``half`` follow. 16-bit gradients
    change the recipe and require an equal-loss check. Saving memory makes no strategy
    faster.
    """
    caps = sorted(
        BUCKET_CAPS_BYTES, key=lambda cap: abs(cap - GradientSync().bucket_cap_bytes)
    )
    bucketed: tuple[Strategy, ...] = ("ddp", "zero1")
    kinds = [one for one in bucketed if one in strategies]
    found = [
        GradientSync(strategy=kind, bucket_cap_bytes=cap)
        for kind in kinds
        for cap in caps
    ]
    sharded = (one for one in ("hsdp", "fsdp2") if one in strategies)
    found += [
        GradientSync(strategy="fsdp2", shard_within_nodes=kind == "hsdp")
        for kind in sharded
    ]
    if sixteen_bit:
        found += [replace(one, gradient_dtype=half) for one in found]
    return tuple(found)


def predict(
    load: Load,
    network: Network,
    sync: GradientSync,
    micro_batch_options: Sequence[GlobalBatchSplit] | None = None,
) -> PredictedStep | None:
    """Return the step with the fastest batch split.

    FSDP2 accumulates gradients in the dtype that it sends, so 16-bit gradients exclude
    accumulation.

    Returns:
        The step, or None if there is no split, as with fewer sequences than ranks.
    """
    found = [
        (
            step_time(
                load.compute,
                split.micro_batch_size,
                split.gradient_accumulation_steps,
                sync,
                network,
            ),
            split,
        )
        for split in (
            load.micro_batch_options(network.ranks)
            if micro_batch_options is None
            else micro_batch_options
        )
        if split.gradient_accumulation_steps == 1
        or sync.strategy != "fsdp2"
        or sync.gradient_dtype == "fp32"
    ]
    if not found:
        return None
    time, split = min(found, key=lambda one: one[0].step_s)
    rate = load.non_padding_tokens / time.step_s
    return PredictedStep(
        nodes=network.nodes, split=split, sync=sync, time=time, tokens_per_s=rate
    )


def useful_nodes(
    efficient: Callable[[int], float | None], most_nodes: int, known: int = 1
) -> int:
    """Return the largest number of nodes that is efficient enough.

    Efficiency is not monotone, so every number is tried, up to 64 and to 30 % beyond
    the last useful one. ``known`` is a number that is efficient enough.
    """
    useful = nodes = known
    while nodes <= min(most_nodes, max(64, 1.3 * useful)):
        if (efficient(nodes) or 0.0) >= USEFUL_EFFICIENCY:
            useful = nodes
        nodes += 1
    return useful


@dataclass(frozen=True, kw_only=True)
class ScalingModel:
    """Model of scaling.

    It has a workload, a network, and the gradient synchronisations to choose from.
    """

    load: Load
    network: Network
    """Network between ranks; its number of nodes does not matter."""
    gradient_syncs: tuple[GradientSync, ...]
    """Candidates, the simplest first."""
    ends: tuple[Link, Link] | None = None
    """Links between nodes at the worse and the better end of their bounds; None for
    assumed links."""
    sources: tuple[str, ...] = ()
    """Sources of workload and network, a sentence for each."""

    @functools.cached_property
    def one_node_rate(self) -> float | None:
        """Non-padding tokens/s of the fastest candidate on one node.

        Efficiency is relative to it.
        """
        alone = [
            predict(self.load, replace(self.network, nodes=1), sync)
            for sync in self.gradient_syncs
        ]
        return max((one.tokens_per_s for one in alone if one is not None), default=None)

    def at(self, nodes: int, between: Link | None = None) -> PredictedStep | None:
        """Return the simplest of the fastest steps on ``nodes`` over ``between``.

        Returns:
            The step, or None if ranks outnumber sequences.
        """
        load, network = (
            self.load,
            replace(self.network, nodes=nodes, between=between or self.network.between),
        )
        found = [
            one
            for one in (predict(load, network, sync) for sync in self.gradient_syncs)
            if one is not None
        ]
        if not found:
            return None
        fastest = max(one.tokens_per_s for one in found)
        chosen = next(
            one for one in found if one.tokens_per_s >= (1 - AS_FAST_SHARE) * fastest
        )
        if self.one_node_rate is None:
            return chosen
        split, sync, ideal = chosen.split, chosen.sync, nodes * self.one_node_rate
        bound_s = hidden_bound_s(
            load.compute,
            split.micro_batch_size,
            split.gradient_accumulation_steps,
            sync,
            network,
        )
        return replace(
            chosen,
            efficiency=chosen.tokens_per_s / ideal,
            bound_efficiency=load.non_padding_tokens / bound_s / ideal,
        )

    def efficiency(self, nodes: int, between: Link | None = None) -> float | None:
        """Return the efficiency of a number of nodes.

        Returns:
            The efficiency, or None if the batch cannot be split over their ranks.
        """
        return (
            found.efficiency if (found := self.at(nodes, between)) is not None else None
        )

    @property
    def least_tokens_per_rank(self) -> float:
        """T_min: tokens per rank and step at which synchronisation can be hidden.

        It is the number of non-padding tokens whose backward takes as long as a ring
        all-reduce in fp32. Over many nodes 4NT/F = 2bN/B, so T = F·b/(2B), for any
        model size N. F are FLOP/s of one rank, b bytes of a gradient element, B bytes/s
        of a node's NIC; latency and (k - 1)/k are neglected. DDP does not reach this
        bound, as only the last micro-batch overlaps.
        """
        load, compute = self.load, self.load.compute
        backward_s = (1 - compute.forward_share) * compute.forward_backward_s(
            load.max_micro_batch_size
        )
        flops_per_s = (
            4
            * compute.elements
            * load.max_micro_batch_size
            * load.tokens_per_sequence
            / backward_s
        )
        return (
            flops_per_s * ELEMENT_BYTES["fp32"] / (2 * self.network.between.bytes_per_s)
        )

    def levers(self, most_nodes: int, now: int) -> list[tuple[str, int]]:
        """Return changes that raise the number of useful nodes, the strongest first.

        Each has the number of nodes that it makes useful.
        """
        between = self.network.between
        wider = replace(
            self.network, between=replace(between, bytes_per_s=2 * between.bytes_per_s)
        )
        changes = {"twice the bandwidth": replace(self, network=wider)}
        for factor, change in (
            (2, "twice the global batch"),
            (4, "four times the global batch"),
        ):
            larger = replace(
                self.load, global_batch_size=factor * self.load.global_batch_size
            )
            changes[change] = replace(self, load=larger)
        if all(one.gradient_dtype == "fp32" for one in self.gradient_syncs):
            halved = (
                replace(one, gradient_dtype="bf16") for one in self.gradient_syncs
            )
            changes["16-bit gradients"] = replace(
                self, gradient_syncs=(*self.gradient_syncs, *halved)
            )
        found = [
            (change, useful_nodes(model.efficiency, most_nodes, now))
            for change, model in changes.items()
        ]
        return sorted(
            ((change, nodes) for change, nodes in found if nodes > now),
            key=lambda one: -one[1],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AllRanks:
    """Throughput of all ranks.

    It is empty if no rate is known, or the batch has fewer sequences than there are
    ranks.
    """

    units_per_s: PlanFigure | None = None
    efficiency: PlanFigure | None = None
    """Throughput of all nodes relative to perfect scaling from one node; None on one
    node."""
    rows: int = 0
    """Sequences in a micro-batch of the fullest rank."""
    efficiency_by_nodes: Mapping[int, float] = field(default_factory=dict)
    """Efficiency on one node, on the useful number or half the planned one, and on the
    planned one; empty on one."""
    useful_nodes: int | None = None
    """Useful nodes at this batch, up to the planned number; None if that is efficient
    enough."""


def spread(
    rate: PlanFigure, known: ScalingModel, *, nodes: int, links: tuple[Basis, str]
) -> AllRanks:
    """Return the throughput of all ranks from the ``rate`` of one on one node.

    ``links`` is the basis and source of the links.
    """
    ranks = nodes * known.network.ranks_per_node
    micro_batch_options = known.load.micro_batch_options(ranks)
    if not micro_batch_options:
        return AllRanks()
    if nodes == 1:
        total = derived(
            lambda one: one * ranks,
            rate,
            source=f"{plural(ranks, 'rank')} of one node at this rate",
        )
        return AllRanks(units_per_s=total, rows=micro_batch_options[0].micro_batch_size)
    assert known.one_node_rate is not None  # the batch was split over more nodes
    factor, compute = (
        known.one_node_rate / (rate.value * known.network.ranks_per_node),
        known.load.compute,
    )
    paced_s = {
        name: factor * getattr(compute, name)
        for name in ("sequence_s", "micro_batch_s", "optimizer_step_s")
    }
    paced = replace(
        known, load=replace(known.load, compute=replace(compute, **paced_s))
    )
    found = paced.at(nodes)
    assert found is not None  # the batch has a sequence for every rank
    share = PlanFigure(
        value=min(1.0, found.efficiency or 1.0), basis=links[0], source=links[1]
    )
    useful = (
        None
        if share.value >= USEFUL_EFFICIENCY
        else useful_nodes(paced.efficiency, nodes)
    )
    by_nodes = {
        count: paced.efficiency(count)
        for count in sorted({1, useful or nodes // 2, nodes})
    }
    told = f"{plural(ranks, 'rank')} at this rate and efficiency"
    return AllRanks(
        units_per_s=derived(
            lambda one, part: one * ranks * part, rate, share, source=told
        ),
        useful_nodes=useful,
        efficiency=replace(share, basis=derived_basis(rate, share)),
        rows=found.split.micro_batch_size,
        efficiency_by_nodes={
            count: min(1.0, one) for count, one in by_nodes.items() if one is not None
        },
    )

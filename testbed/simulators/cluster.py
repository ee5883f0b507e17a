"""A simulated cluster that trains by DDP.

Predictions of how many nodes are useful are compared with it. It was settled before the
rules that it judges.

Each rank computes in its own time, a little different in every step; gradients become
ready matrix by matrix, gather in buckets as DDP lays them out, and leave in order, each
when the slowest rank has it. A bucket is cut within its node, travels round a ring of
nodes in as many pieces as there are nodes, hop by hop, and is put together again; small
ones take a tree if that is faster, as NCCL does. While something travels, kernels that
move it slow the computation down. Sequences cost in proportion, and every micro-batch a
bit extra.
"""

import math
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from trainer.formats.train_config import GradientDtype

MIB = 2**20
FIRST_BUCKET_BYTES, DEFAULT_CAP_BYTES = MIB, 25 * MIB
"""DDP's first bucket is small, so that something travels early; where a size is asked
for, it has that."""
FP32_BYTES = 4
BACKWARD_SHARE = 2 / 3
"""Of forward and backward: twice the products."""
Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedModel:
    """An encoder with a tied output embedding.

    It describes its gradients, and the cost of a sequence.
    """

    name: str
    layers: int
    hidden: int
    intermediate: int
    vocab_size: int = 30_522
    positions: int = 512

    @property
    def layer_elements(self) -> int:
        """Weights of one layer."""
        return (
            4 * self.hidden**2 + 2 * self.hidden * self.intermediate + 13 * self.hidden
        )

    @property
    def embedding_elements(self) -> int:
        """Weights that are looked up.

        Their gradient is ready last, and takes hardly any time.
        """
        return (self.vocab_size + self.positions) * self.hidden

    @property
    def elements(self) -> int:
        """All of them."""
        return (
            self.layers * self.layer_elements + self.hidden**2 + self.embedding_elements
        )

    def gradients(self) -> list[tuple[int, float]]:
        """Elements of each gradient, and the part of backward after which it is ready.

        They are in the order in which they are ready.
        """
        work = (
            self.layers * self.layer_elements
            + self.hidden * (self.hidden + self.vocab_size) * 0.15
        )
        done_share = self.hidden * (self.hidden + self.vocab_size) * 0.15 / work
        ready = [(self.hidden**2, done_share)]
        small = (
            (self.hidden**2,) * 4
            + (self.hidden * self.intermediate,) * 2
            + (13 * self.hidden,)
        )
        for _ in range(self.layers):
            for elements in small:
                done_share += elements / work
                ready.append((elements, min(done_share, 1.0)))
        return [*ready, (self.embedding_elements, 1.0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedCluster:
    """Nodes, and the links between them."""

    name: str
    ranks_per_node: int
    flops_per_s: float
    """Achieved by one rank."""
    most_micro_batch_tokens: int
    """That fit, per rank, for a model of 120 million parameters; larger ones fit fewer,
    in proportion."""
    inter_bytes_per_s: float
    """Of a node's network card, each way."""
    inter_latency_s: float
    """Of one hop between nodes."""
    intra_bytes_per_s: float
    intra_latency_s: float
    micro_batch_extra_s: float
    """Time of every micro-batch in addition to its sequences."""
    update_elements_per_s: float
    """Weights that clipping and the optimizer go through."""
    jitter_share: float
    """Standard deviation of a rank's time for a micro-batch."""
    slowdown_share: float
    """Share by which communication slows computation down."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How a global batch is trained."""

    nodes: int
    global_tokens: int
    micro_batches: int
    gradient_dtype: GradientDtype = "fp32"
    bucket_cap_bytes: int = 25 * MIB


class Simulator:
    """One model on one cluster.

    Args:
        model: The model that trains.
        cluster: The cluster that it trains on.
        seed: Seed of everything that is drawn.
    """

    def __init__(
        self, model: SimulatedModel, cluster: SimulatedCluster, seed: int = 0
    ) -> None:
        self.model, self.cluster = model, cluster
        self._draw = np.random.default_rng(seed)

    @property
    def most_micro_batch_tokens(self) -> int:
        """That fit on a rank."""
        return int(self.cluster.most_micro_batch_tokens * 120e6 / self.model.elements)

    def micro_batch_s(self, tokens: float) -> float:
        """Forward and backward of so many tokens on a rank that nothing disturbs."""
        return (
            6 * self.model.elements * tokens / self.cluster.flops_per_s
            + self.cluster.micro_batch_extra_s
        )

    def all_reduce_s(self, size_bytes: float, nodes: int) -> float:
        """Return the time of an all-reduce over the ranks of all nodes, hop by hop."""
        cluster, ranks = self.cluster, self.cluster.ranks_per_node
        within = 0.0
        if ranks > 1:
            piece = size_bytes / ranks / cluster.intra_bytes_per_s
            within = 2 * (ranks - 1) * (cluster.intra_latency_s + piece)
        if nodes == 1:
            return within
        hop = cluster.inter_latency_s + size_bytes / nodes / cluster.inter_bytes_per_s
        ring = 2 * (nodes - 1) * hop
        depth = math.ceil(math.log2(nodes))
        tree = (
            2 * depth * cluster.inter_latency_s
            + 2 * size_bytes / cluster.inter_bytes_per_s
        )
        return within + min(ring, tree)

    def step_s(self, recipe: Recipe, *, steps: int = 4, sync: bool = True) -> float:
        """Return the mean seconds of an optimizer step over some steps.

        Without synchronisation, it is as if no gradient had to travel.
        """
        return float(np.mean([self._one_step(recipe, sync=sync) for _ in range(steps)]))

    def tokens_per_s(self, recipe: Recipe) -> float:
        """Return the tokens/s of a recipe."""
        return recipe.global_tokens / self.step_s(recipe)

    def buckets(self, recipe: Recipe) -> list[tuple[float, float]]:
        """Return bytes and earliest time of each bucket in its order.

        The time is the part of backward after which the bucket may travel.
        """
        width = FP32_BYTES if recipe.gradient_dtype == "fp32" else 2
        filled: list[tuple[float, float]] = []
        elements = 0
        limit = (
            FIRST_BUCKET_BYTES
            if recipe.bucket_cap_bytes == DEFAULT_CAP_BYTES
            else recipe.bucket_cap_bytes
        )
        gradients = self.model.gradients()
        for number, (count, ready) in enumerate(gradients):
            elements += count
            if elements * FP32_BYTES >= limit or number == len(gradients) - 1:
                filled.append((elements * float(width), ready))
                elements, limit = 0, recipe.bucket_cap_bytes
        return filled

    def _one_step(self, recipe: Recipe, *, sync: bool) -> float:
        ranks = recipe.nodes * self.cluster.ranks_per_node
        tokens = recipe.global_tokens / (ranks * recipe.micro_batches)
        quiet = self.micro_batch_s(tokens)
        times = quiet * np.clip(
            1
            + self.cluster.jitter_share
            * self._draw.standard_normal((recipe.micro_batches, ranks)),
            0.5,
            None,
        )
        before = times[:-1].sum(axis=0)
        forward, backward = times[-1] * (1 - BACKWARD_SHARE), times[-1] * BACKWARD_SHARE
        began = before + forward
        update = self.model.elements / self.cluster.update_elements_per_s
        if not sync or ranks == 1:
            return float((began + backward).max()) + update
        return self._exchanged(recipe, began, backward) + update

    def _exchanged(self, recipe: Recipe, began: Array, backward: Array) -> float:
        """Return when the last gradient has arrived on all ranks."""
        free = 0.0
        delayed = 0.0
        for size_bytes, ready in self.buckets(recipe):
            # Ranks lose time to what has travelled so far while they computed.
            leaves = max(free, float((began + ready * backward).max()) + delayed)
            took = self.all_reduce_s(size_bytes, recipe.nodes)
            end_of_compute = float((began + backward).max()) + delayed
            delayed += self.cluster.slowdown_share * max(
                0.0, min(leaves + took, end_of_compute) - leaves
            )
            free = leaves + took
        return max(free, float((began + backward).max()) + delayed)


MODELS = (
    SimulatedModel(name="bert-120m", layers=12, hidden=768, intermediate=3072),
    SimulatedModel(name="bert-350m", layers=24, hidden=1024, intermediate=4096),
    SimulatedModel(name="modernbert-large", layers=28, hidden=1024, intermediate=3936),
    SimulatedModel(
        name="bert-small-64k",
        layers=6,
        hidden=512,
        intermediate=2048,
        vocab_size=65_536,
    ),
)
_GIGABIT = 125e6
_H100_FP32 = SimulatedCluster(
    name="2x H100 fp32, 25 GbE",
    ranks_per_node=2,
    flops_per_s=36e12,
    most_micro_batch_tokens=94_208,
    inter_bytes_per_s=0.8 * 25 * _GIGABIT,
    inter_latency_s=25e-6,
    intra_bytes_per_s=150e9,
    intra_latency_s=5e-6,
    micro_batch_extra_s=2e-3,
    update_elements_per_s=40e9,
    jitter_share=0.01,
    slowdown_share=0.02,
)
CLUSTERS = (
    _H100_FP32,
    replace(
        _H100_FP32, name="2x H100 bf16, 25 GbE", flops_per_s=292e12, slowdown_share=0.04
    ),
    replace(
        _H100_FP32,
        name="4x H100 bf16, 100 GbE",
        ranks_per_node=4,
        flops_per_s=292e12,
        inter_bytes_per_s=0.8 * 100 * _GIGABIT,
        inter_latency_s=15e-6,
        slowdown_share=0.05,
        jitter_share=0.015,
    ),
)

"""Cases of the paper's cluster whose efficiency follows from arithmetic.

The cluster has 128 nodes of two GPUs at 25 GbE. Assumed, not measured: 2.5 GB/s per NIC
(80 % of the line), 36 TFLOP/s in fp32 and 292 in bf16 (60 % and 35 % of the peak of an
H100), no latency, no update. Efficiency is against one node with the same sequences on
every GPU.
"""

from dataclasses import dataclass, replace

from autotune.evidence.network import (
    GradientPart,
    GradientSync,
    Link,
    Network,
    RankCompute,
)
from autotune.network.decide.scaling_model import (
    Load,
    PredictedStep,
    ScalingModel,
    gradient_syncs,
)
from autotune.network.decide.step_model import hidden_bound_s, step_time
from benchmarks.bars import Bar

ROW_TOKENS = 512
FP32_FLOPS_PER_S, BF16_FLOPS_PER_S = 36e12, 292e12
CARD = Link(latency_s=0.0, bytes_per_s=2.5e9)
PARTS_PER_LAYER = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoder:
    """Sizes that matter here."""

    elements: int
    embedding_elements: int
    layers: int


BERT_120M = Encoder(elements=120_000_000, embedding_elements=30_522 * 768, layers=12)
BERT_350M = Encoder(elements=350_000_000, embedding_elements=30_522 * 1024, layers=24)


def network(nodes: int) -> Network:
    """Return the paper's cluster; links within a node count as infinitely fast."""
    return Network(nodes=nodes, ranks_per_node=2, between=CARD)


def compute(encoder: Encoder, flops_per_s: float) -> RankCompute:
    """Return the compute of a rank: 6 N T operations.

    Gradients of layers are ready evenly over backward, the embedding's last.
    """
    parts = encoder.layers * PARTS_PER_LAYER
    each = (encoder.elements - encoder.embedding_elements) // parts
    gradients = [
        GradientPart(elements=each, ready_share=(number + 1) / parts)
        for number in range(parts)
    ]
    embedding = GradientPart(elements=encoder.embedding_elements, ready_share=1.0)
    return RankCompute(
        sequence_s=6 * encoder.elements * ROW_TOKENS / flops_per_s,
        micro_batch_s=0.0,
        optimizer_step_s=0.0,
        gradients=(*gradients, embedding),
    )


def efficiency(
    rank_compute: RankCompute,
    rows: int,
    micro_batches: int,
    sync: GradientSync,
    nodes: int,
) -> float:
    """Return the step of ``nodes`` nodes with the same work per rank as on one."""
    alone = step_time(rank_compute, rows, micro_batches, sync, network(1))
    together = step_time(rank_compute, rows, micro_batches, sync, network(nodes))
    return alone.step_s / together.step_s


def bound(
    rank_compute: RankCompute, rows: int, micro_batches: int, nodes: int
) -> float:
    """Return the efficiency if every micro-batch's backward could hide the exchange."""
    alone = micro_batches * rank_compute.forward_backward_s(rows)
    return alone / hidden_bound_s(
        rank_compute, rows, micro_batches, GradientSync(), network(nodes)
    )


def tuned(sequences: int, nodes: int = 128) -> PredictedStep:
    """Return the best gradient synchronisation at this global batch, in sequences.

    The model has 120 M parameters and trains in bf16.

    Raises:
        ValueError: If there are fewer sequences than ranks.
    """
    load = Load(
        compute=compute(BERT_120M, BF16_FLOPS_PER_S),
        global_batch_size=sequences,
        tokens_per_sequence=ROW_TOKENS,
        max_micro_batch_size=184,
    )
    step = ScalingModel(
        load=load,
        network=network(nodes),
        gradient_syncs=gradient_syncs(sixteen_bit=True),
    ).at(nodes)
    if step is None or step.efficiency is None:
        raise ValueError(f"{sequences} sequences leave ranks without a row")
    return step


def bars() -> list[Bar]:
    """Return the bars of all golden cases; figures are predictions."""
    fp32, bf16 = (
        compute(BERT_120M, FP32_FLOPS_PER_S),
        compute(BERT_120M, BF16_FLOPS_PER_S),
    )
    large = compute(BERT_350M, FP32_FLOPS_PER_S)
    plain = GradientSync()
    twice, once = tuned(94_208), tuned(47_104)
    assert once.efficiency is not None and once.bound_efficiency is not None
    cases: list[tuple[str, float | None, float, str]] = [
        (
            "120m_fp32_b184_at_128_nodes",
            efficiency(fp32, 184, 1, plain, 128),
            0.95,
            ">=",
        ),
        (
            "120m_bf16_fp32_gradients_off_half",
            abs(efficiency(bf16, 184, 1, plain, 128) - 0.5),
            0.03,
            "<=",
        ),
        ("120m_bf16_94208_sequences_tuned", twice.efficiency, 0.90, ">="),
        ("120m_bf16_47104_sequences_tuned_out_of_reach", once.efficiency, 0.90, "<="),
        (
            "350m_fp32_b20_at_2_nodes_off_0.79",
            abs(efficiency(large, 20, 1, plain, 2) - 0.79),
            0.02,
            "<=",
        ),
        (
            "350m_fp32_b20_at_128_nodes_off_0.46",
            abs(efficiency(large, 20, 1, plain, 128) - 0.46),
            0.02,
            "<=",
        ),
        ("350m_fp32_b20_accumulation_3_bound", bound(large, 20, 3, 128), 0.99, ">="),
    ]
    return [
        Bar(
            name=f"network_golden_{name}_share",
            figure=figure,
            unit="share",
            bar=limit,
            direction=direction,  # type: ignore[arg-type]
        )
        for name, figure, limit, direction in cases
    ]


def ddp_with_accumulation_3() -> dict[str, float]:
    """Return the efficiency of DDP in the last case.

    Only the last micro-batch hides anything, so the bound is out of its reach.
    """
    large = compute(BERT_350M, FP32_FLOPS_PER_S)
    half = replace(GradientSync(), gradient_dtype="bf16")
    return {
        "fp32 gradients": efficiency(large, 20, 3, GradientSync(), 128),
        "bf16 gradients": efficiency(large, 20, 3, half, 128),
    }

"""Predicted memory and speed, and the counted launches of a step."""

from autotune.base.units import format_count, format_percent, format_share
from benchmarks.page_figures.formats import (
    Figures,
    Rows,
    difference,
    percent,
    row,
    worst_error,
)
from benchmarks.page_figures.recorded import Json, RecordedFigures

ALL_KERNELS = "with FlashAttention 4, fused norms, GELU epilogues"
EAGER_ACTIVATION_BYTES_PER_TOKEN = 426_948
"""bert-120m with eager layers that cast weights in every micro-batch; counted once,
before layers were compiled."""
H100_FLOPS_PER_S = 989.4e12
"""Dense bf16 peak of an H100 SXM: NVIDIA H100 white paper, 2022."""


def figures(recorded: RecordedFigures) -> Figures:
    """Return the figures of predictions."""
    return {
        **_memory(recorded),
        **_counted_step(recorded.benchmarks["cuda_step"]),
        **_speed(recorded.benchmarks["speed"]),
    }


def _memory(recorded: RecordedFigures) -> Figures:
    configurations = recorded.benchmarks["cuda_memory"]["configurations"].values()
    compiled = sum(configuration["compiled"] for configuration in configurations)
    cpu_steps = recorded.benchmarks["estimate"]["parts"]["accuracy"].values()
    cpu_error = worst_error(cpu_steps, "predicted_bytes", "real_bytes")
    return {
        "allocator.configurations": str(len(configurations)),
        "allocator.eager_configurations": str(len(configurations) - compiled),
        "allocator.compiled_configurations": str(compiled),
        "estimate.worst_error": percent(cpu_error, 3),
    }


def _counted_step(cuda_step: Json) -> Figures:
    ablation = cuda_step["ablation"]
    combined = ablation[ALL_KERNELS]
    bf16 = ablation[f"{ALL_KERNELS}, a residual stream in bf16"]
    bars = {bar["name"]: bar["figure"] for bar in cuda_step["bars"]}
    activations = bars["bert-120m_activation_bytes_per_token"]
    saved = 1 - activations / EAGER_ACTIVATION_BYTES_PER_TOKEN

    def gain(variant: str) -> str:
        default_s = ablation["as tuned by default"]["step_s"]
        return difference(default_s / ablation[variant]["step_s"])

    return {
        "step.ablation": [
            row(
                name,
                format_count(step["launches"]),
                f"{step['elementwise_GB']:.1f}",
                f"{step['step_s'] * 1e3:.1f}",
                f"{step['mfu_%']:.1f} %",
            )
            for name, step in ablation.items()
        ],
        "step.all_kernels.launches": format_count(combined["launches"]),
        "step.all_kernels.traffic": f"{combined['elementwise_GB']:.1f}",
        "step.all_kernels_bf16.launches": format_count(bf16["launches"]),
        "step.all_kernels_bf16.traffic": f"{bf16['elementwise_GB']:.1f}",
        "step.activation_saving": format_percent(saved),
        "step.fa4_gain": gain("with FlashAttention 4"),
        "step.bf16_residual_gain": gain("with a residual stream in bf16"),
    }


def _speed(speed: Json) -> Figures:
    return {
        "speed.published": _published_rows(speed["published"]),
        "speed.h100": _h100_rows(speed["gpu"]),
    }


def _published_rows(published: list[Json]) -> Rows:
    return [
        row(
            f"{step['name']}, {step['seq_length']} tokens",
            step["gpu"].removeprefix("NVIDIA "),
            format_count(step["published_tokens_per_s"]),
            format_count(step["predicted_tokens_per_s"]),
            f"{step['error_%']:+.0f} %",
        )
        for step in published
    ]


def _h100_rows(steps: list[Json]) -> Rows:
    rows = []
    for step in steps:
        mfu = step["model_flops"] / step["kernels_s"] / H100_FLOPS_PER_S
        cells = row(
            step["name"],
            f"{step['measured_s'] * 1e3:.1f}",
            f"{step['predicted_s'] * 1e3:.1f}",
            f"{step['error_%']:+.0f} %",
            f"{step['kernels_s'] * 1e3:.1f}",
            f"{step['predicted_kernels_s'] * 1e3:.1f}",
            f"{step['kernels_error_%']:+.0f} %",
            format_share(mfu),
        )
        rows.append(cells)
    return rows

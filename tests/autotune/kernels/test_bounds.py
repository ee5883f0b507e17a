"""Distance of a step from its kernels' bounds, and its words, table and roofline."""

import pytest

from autotune.base.document import Chart, Table
from autotune.kernels.decide.bounds import (
    SLOWEST_KERNELS,
    farthest_kernel,
    is_near_bound,
    step_kernels,
)
from autotune.kernels.decide.words import bound_words, kernel_words
from autotune.kernels.sections import kernel_table, kernels_blocks
from autotune.trials.job_figures import KernelFigures
from testbed.examples.kernels import (
    GEMM,
    H100,
    LAYER_NORM_BACKWARD,
    kernel_of,
    near_bounds,
    slow_layer_norms,
    step_kernels_of,
)


def test_farthest_kernel_is_not_the_slowest():
    kernel = farthest_kernel(slow_layer_norms().kernels)
    assert kernel.name == LAYER_NORM_BACKWARD


def test_step_near_its_bounds_is_recognised():
    assert is_near_bound(near_bounds())
    assert not is_near_bound(slow_layer_norms())


def test_time_without_kernels_is_far_from_bounds():
    gappy = step_kernels_of(kernel_of(GEMM, 0.09, 0.085), gaps_s=0.05)
    assert not is_near_bound(gappy)


def test_unknown_bound_never_counts_as_near():
    assert not is_near_bound(step_kernels_of(kernel_of("fill", 0.1, None)))


def test_evidence_keeps_slowest_and_sums_of_all():
    kernels = tuple(kernel_of(f"kernel {n}", 0.02, 0.01) for n in range(15))
    figures = KernelFigures(
        kernels=(*kernels, kernel_of("unknown", 0.01, None)),
        units_per_step=10.0,
        step_s=0.4,
        roofline=H100,
    )
    step = step_kernels(figures, micro_batch_size=8, micro_batches=2)
    assert len(step.kernels) == SLOWEST_KERNELS
    assert step.kernels_s == pytest.approx(0.31)
    assert step.bound_s == pytest.approx(0.15)
    assert step.unbounded_s == pytest.approx(0.01)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (LAYER_NORM_BACKWARD, "layer-norm backward"),
        ("triton_per_fused_add_native_layer_norm_1", "layer norm"),
        ("triton_poi_fused__to_copy_gelu_backward_4", "GELU backward"),
        (GEMM, "matmul"),
        ("aten::mm", "matmul"),
        ("pytorch_flash::flash_bwd_dq_dk_dv_loop_kernel", "attention backward"),
        ("pytorch_flash::flash_fwd_kernel", "attention"),
        ("multi_tensor_apply_kernel<FusedAdamMathFunctor>", "AdamW"),
        ("aten::scatter_add_", "aten::scatter_add_"),
    ],
)
def test_kernels_have_names_for_people(name, words):
    assert kernel_words(name) == words


def test_table_has_time_share_and_distance():
    table = kernel_table(slow_layer_norms())
    row = dict(zip(table.headers, table.rows[1], strict=True))
    assert row["computes"] == "layer-norm backward"
    assert row["time / bound"] == "4.65x"
    assert row["distance"] == "46 ms"


def test_roofline_shows_kernels_below_the_roof():
    (_, chart) = kernels_blocks(slow_layer_norms())
    assert isinstance(chart, Chart)
    roof, *groups = chart.drawing.lines
    assert {group.name for group in groups} == {
        "matmul",
        "attention",
        "memory-bound kernels",
    }
    top = max(point.y for point in roof.points)
    assert top == pytest.approx(H100.flops_per_s / 1e12)
    for group in groups:
        for point in group.points:
            reached = min(point.x * H100.bytes_per_s / 1e12, top)
            assert point.y <= reached * 1.001


def test_table_alone_without_known_bounds():
    blocks = kernels_blocks(step_kernels_of(kernel_of("fill", 0.1, None)))
    assert isinstance(blocks[-1], Table)


def test_words_name_time_without_bound():
    step = step_kernels_of(kernel_of(GEMM, 0.1, 0.08), kernel_of("fill", 0.02, None))
    assert "1.50x" in bound_words(step)
    assert "20 ms in kernels without a known bound" in bound_words(step)

"""Kernels of a step, as an H100 named them, are grouped by what they compute."""

import json

import pytest

from benchmarks.gpu.results import KEPT
from benchmarks.step_timing import GROUPS, group_of, grouped

STEPS = json.loads((KEPT / "h100-80gb-hbm3/2026-11-26/steps.json").read_text())


@pytest.mark.parametrize(
    ("kernel", "group"),
    [
        ("nvjet_sm90_tst_192x192_64x4_2x1_v_bz_coopB_bias_TNN", "matmul"),
        ("triton_tem_fused_addmm_gelu_3", "matmul"),
        ("void pytorch_flash::flash_fwd_kernel<..., cutlass::bfloat16_t>", "attention"),
        ("triton_per_fused__to_copy_native_layer_norm_backward_0", "layer_norm"),
        ("triton_poi_fused_gelu_view_2", "gelu"),
        ("triton_poi_fused__to_copy_0", "copies_and_casts"),
        ("triton_poi_fused_cat_transpose_8", "copies_and_casts"),
        ("Memset (Device)", "copies_and_casts"),
        ("triton_red_fused__log_softmax__to_copy_0", "rest"),
        ("multi_tensor_apply_kernel<FusedOptimizerTensorListMetadata>", "rest"),
    ],
)
def test_kernel_belongs_to_its_group(kernel, group):
    assert group_of(kernel) == group


@pytest.mark.parametrize("name", ["bert-120m", "bert-350m", "bert-120m, eager"])
def test_groups_hold_all_kernels_of_an_h100(name):
    kernels = STEPS["steps"][name]["kernels"]
    seconds = {
        f"{kernel['name']} ({number})": kernel["seconds"]
        for number, kernel in enumerate(kernels)
    }
    groups = grouped(seconds)
    assert set(groups) == set(GROUPS)
    assert sum(groups.values()) == pytest.approx(sum(seconds.values()))
    assert max(groups, key=groups.__getitem__) == "matmul"
    assert groups["attention"] > 0.1 * sum(seconds.values())

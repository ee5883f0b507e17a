import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.errors import BadInput
from autotune.machine.gpu_models import GPU_MODELS, find_gpu_model, gpu_model_of

gpu_models = st.sampled_from(GPU_MODELS)


@given(
    gpu_models,
    st.sampled_from(["{}", "NVIDIA {}", "nvidia-{}", " {} "]),
    st.sampled_from("-_ "),
    st.booleans(),
)
def test_finds_gpu_by_any_spelling(gpu, frame, separator, shout):
    spelled = frame.format(gpu.key.replace("-", separator))
    assert find_gpu_model(spelled.upper() if shout else spelled) is gpu
    assert gpu.name == gpu.names[0]
    for name in gpu.names:
        assert (
            find_gpu_model(name)
            is find_gpu_model(name.removeprefix("NVIDIA "))
            is gpu_model_of(name, gpu.total_bytes)
            is gpu
        )


def test_unambiguous_beginning_is_enough():
    shorts = {
        "h200": "h200-141gb",
        "B200": "b200-180gb",
        "RTX 4090": "rtx-4090-24gb",
        "H100 NVL": "h100-nvl-94gb",
    }
    assert {short: find_gpu_model(short).key for short in shorts} == shorts


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("l40", "mean l40s-48gb?"),
        ("h200-144gb", "h200-141gb"),
        ("rtx", "rtx-4090-24gb"),
        ("RTX 4090 D", "rtx-4090"),
        ("quantum", ""),
        ("", ""),
        ("NVIDIA", ""),
    ],
)
def test_unknown_gpu_suggests_the_nearest(name, near):
    with pytest.raises(BadInput, match=f"unknown GPU model {name!r}") as caught:
        find_gpu_model(name)
    offered, _, known = caught.value.next_step.rpartition("Known models: ")
    assert (near in offered) if near else offered == ""
    assert all(gpu.key in known for gpu in GPU_MODELS)


@pytest.mark.parametrize("name", ["h100", "A100", "GH200"])
def test_ambiguous_beginning_lists_the_matches(name):
    with pytest.raises(
        BadInput, match=rf"{name!r} is ambiguous: \d GPU models match"
    ) as caught:
        find_gpu_model(name)
    offered = caught.value.next_step.split("?")[0]
    assert all(
        (gpu.key in offered) == gpu.key.startswith(name.lower() + "-")
        for gpu in GPU_MODELS
    )


@pytest.mark.parametrize(
    ("name", "total_mib", "key"),
    [
        ("NVIDIA H200 NVL", 143_771, "h200-141gb"),
        ("NVIDIA H20", 97_871, "h20-96gb"),
        ("NVIDIA H100 96GB HBM3", 97_871, "h100-96gb"),
        ("NVIDIA GH200 480GB", 97_871, "gh200-96gb"),
        ("GH200 120GB", 97_871, "gh200-96gb"),
        ("NVIDIA GH200 144G HBM3e", 146_831, "gh200-144gb"),
        ("NVIDIA L40S", 49_140, "l40s"),  # ECC off
        ("A100-SXM4-80GB", 81_251, "a100-80gb"),  # an older driver
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", 4_864, None),
        ("NVIDIA A100-SXM4-80GB", 40_960, None),
        ("NVIDIA H100 80GB HBM3", 0, None),
        ("NVIDIA H200 NVL", 40_960, None),
        ("NVIDIA Graphics Device", 95_830, None),
    ],
)
def test_recognises_boards_by_nvml_names(name, total_mib, key):
    assert gpu_model_of(name, total_mib * 2**20) is (key and find_gpu_model(key))


def test_names_are_unique():
    names = [name for gpu in GPU_MODELS for name in (gpu.key, *gpu.names)]
    assert len(set(names)) == len(names)


def test_sizes_have_sources():
    for gpu in GPU_MODELS:
        assert 0.95 * gpu.total_bytes < gpu.usable_bytes < gpu.total_bytes
        assert gpu.usable_bytes < int(re.search(r"(\d+)gb$", gpu.key)[1]) * 2**30
        for source in (gpu.total_source, gpu.usable_source):
            assert re.search(r"\S; 20\d\d-\d\d-\d\d$", source)

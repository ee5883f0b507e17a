import os

import pytest

from trainer.distributed.device import set_cuda_defaults

OLD_VARIABLE = "PYTORCH_CUDA_ALLOC_CONF"
VARIABLE = "PYTORCH_ALLOC_CONF"
EXPANDABLE = "expandable_segments:True"
NOT_EXPANDABLE = "expandable_segments:False"
SPLIT_SIZE = "max_split_size_mb:64"
"""A setting that does not say whether segments expand."""


@pytest.mark.parametrize(
    ("given", "added"),
    [
        pytest.param({}, {VARIABLE: EXPANDABLE}, id="nothing set"),
        pytest.param(
            {VARIABLE: SPLIT_SIZE},
            {VARIABLE: f"{SPLIT_SIZE},{EXPANDABLE}"},
            id="another setting",
        ),
        pytest.param({VARIABLE: NOT_EXPANDABLE}, {}, id="not expandable"),
        pytest.param(
            {"CUDA_DEVICE_ORDER": "FASTEST_FIRST", VARIABLE: EXPANDABLE},
            {},
            id="expandable, and another order",
        ),
        pytest.param(
            {OLD_VARIABLE: SPLIT_SIZE},
            {OLD_VARIABLE: f"{SPLIT_SIZE},{EXPANDABLE}"},
            id="older variable",
        ),
        # If both are set, torch reads only the older variable.
        pytest.param(
            {OLD_VARIABLE: SPLIT_SIZE, VARIABLE: EXPANDABLE},
            {OLD_VARIABLE: f"{SPLIT_SIZE},{EXPANDABLE}"},
            id="both",
        ),
        pytest.param(
            {OLD_VARIABLE: "", VARIABLE: EXPANDABLE},
            {OLD_VARIABLE: EXPANDABLE},
            id="both, older one empty",
        ),
        pytest.param(
            {OLD_VARIABLE: NOT_EXPANDABLE, VARIABLE: SPLIT_SIZE},
            {},
            id="both, older one not expandable",
        ),
        pytest.param(
            {VARIABLE: "backend:cudaMallocAsync"}, {}, id="allocator without segments"
        ),
    ],
)
def test_segments_expand_unless_you_set_them(given, added):
    environment = dict(given)
    set_cuda_defaults(environment)
    del environment["TORCHINDUCTOR_COMPILE_THREADS"]
    assert environment == {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"} | given | added


def test_compile_threads_are_at_most_eight():
    environment = {}
    set_cuda_defaults(environment)
    cpus = len(os.sched_getaffinity(0))
    assert environment["TORCHINDUCTOR_COMPILE_THREADS"] == str(min(8, cpus))

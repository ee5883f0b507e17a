import os

import pytest

from trainer.runtime.device import set_cuda_defaults

OLD_VARIABLE = "PYTORCH_CUDA_ALLOC_CONF"
"""If set, torch reads this variable and ignores the newer one, even if it is empty."""
VARIABLE = "PYTORCH_ALLOC_CONF"
EXPANDABLE = "expandable_segments:True"
NOT_EXPANDABLE = "expandable_segments:False"
SPLIT_SIZE = "max_split_size_mb:64"
"""A setting that does not say whether segments expand."""


def with_defaults(environment: dict[str, str]) -> dict[str, str]:
    """Return the environment after the defaults are set."""
    changed = dict(environment)
    set_cuda_defaults(changed)
    return changed


def allocator_settings(environment: dict[str, str]) -> dict[str, str]:
    """Return the variables of an environment that torch's allocator reads."""
    return {
        name: value
        for name, value in environment.items()
        if name in (OLD_VARIABLE, VARIABLE)
    }


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        pytest.param({}, {VARIABLE: EXPANDABLE}, id="nothing set"),
        pytest.param(
            {VARIABLE: SPLIT_SIZE},
            {VARIABLE: f"{SPLIT_SIZE},{EXPANDABLE}"},
            id="another setting",
        ),
        pytest.param(
            {OLD_VARIABLE: SPLIT_SIZE},
            {OLD_VARIABLE: f"{SPLIT_SIZE},{EXPANDABLE}"},
            id="older variable",
        ),
        pytest.param(
            {OLD_VARIABLE: SPLIT_SIZE, VARIABLE: EXPANDABLE},
            {OLD_VARIABLE: f"{SPLIT_SIZE},{EXPANDABLE}", VARIABLE: EXPANDABLE},
            id="both variables",
        ),
        pytest.param(
            {OLD_VARIABLE: "", VARIABLE: EXPANDABLE},
            {OLD_VARIABLE: EXPANDABLE, VARIABLE: EXPANDABLE},
            id="both variables, older one empty",
        ),
    ],
)
def test_segments_expand_by_default(given, expected):
    assert allocator_settings(with_defaults(given)) == expected


@pytest.mark.parametrize(
    "given",
    [
        pytest.param({VARIABLE: EXPANDABLE}, id="expandable"),
        pytest.param({VARIABLE: NOT_EXPANDABLE}, id="not expandable"),
        pytest.param(
            {OLD_VARIABLE: NOT_EXPANDABLE, VARIABLE: SPLIT_SIZE},
            id="older variable not expandable",
        ),
        pytest.param(
            {VARIABLE: "backend:cudaMallocAsync"}, id="allocator without segments"
        ),
    ],
)
def test_your_choice_of_segments_stays(given):
    assert allocator_settings(with_defaults(given)) == given


def test_sets_no_other_variables():
    assert with_defaults({}).keys() == {
        VARIABLE,
        "CUDA_DEVICE_ORDER",
        "TORCHINDUCTOR_COMPILE_THREADS",
    }


def test_gpus_are_numbered_by_bus_position():
    assert with_defaults({})["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


def test_your_order_of_gpus_stays():
    given = {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}
    assert with_defaults(given)["CUDA_DEVICE_ORDER"] == "FASTEST_FIRST"


@pytest.mark.parametrize(
    ("cpus", "environment", "threads"),
    [
        pytest.param(6, {}, "6", id="all CPUs of the only rank"),
        pytest.param(64, {}, "8", id="at most eight"),
        pytest.param(12, {"LOCAL_WORLD_SIZE": "4"}, "3", id="a rank's share of CPUs"),
        pytest.param(2, {"LOCAL_WORLD_SIZE": "4"}, "1", id="more ranks than CPUs"),
        pytest.param(
            6, {"TORCHINDUCTOR_COMPILE_THREADS": "20"}, "20", id="your number"
        ),
    ],
)
def test_ranks_share_cpus_to_compile(monkeypatch, cpus, environment, threads):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cpus)))
    assert with_defaults(environment)["TORCHINDUCTOR_COMPILE_THREADS"] == threads

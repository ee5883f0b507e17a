import pytest

from autotune.profiles.decide.fingerprint_check import compare_fingerprints
from testbed.examples.profiles import FINGERPRINT

ON_GPU = FINGERPRINT.model_copy(update={"gpu_total_bytes": 100})


def severities(checks):
    return [check.found for check in checks]


@pytest.mark.parametrize(
    ("change", "severity"),
    [
        pytest.param({"dataset_hash": "other"}, "error", id="dataset"),
        pytest.param({"model_sha256": "other"}, "error", id="model"),
        pytest.param({"torch": "2.14.0"}, "warning", id="torch"),
        pytest.param({"python": "3.12.0"}, "info", id="python"),
        pytest.param({"gpu_total_bytes": 99}, "error", id="less GPU memory"),
        pytest.param({"gpu_total_bytes": 101}, "info", id="more GPU memory"),
        pytest.param({"device": "cuda"}, "error", id="device"),
        pytest.param({"cpu_model": "Another CPU"}, "warning", id="CPU"),
        pytest.param({"data_filesystem": "lustre"}, "warning", id="file system"),
    ],
)
def test_severity_of_a_difference(change, severity):
    other = ON_GPU.model_copy(update=change)
    assert severities(compare_fingerprints(ON_GPU, other)) == [severity]


@pytest.mark.parametrize(
    ("change", "severity"),
    [
        pytest.param({"dataset_hash": "other"}, "error", id="dataset"),
        pytest.param({"model_sha256": "other"}, "error", id="model"),
        pytest.param({"torch": "2.14.0"}, "warning", id="torch"),
        pytest.param({"python": "3.12.0"}, "info", id="python"),
        pytest.param({"cpu_model": "Another CPU"}, "error", id="CPU"),
        pytest.param({"data_filesystem": "lustre"}, "error", id="file system"),
    ],
)
def test_severity_of_a_difference_to_a_replay(change, severity):
    other = ON_GPU.model_copy(update=change)
    assert severities(compare_fingerprints(ON_GPU, other, replayed=True)) == [severity]


@pytest.mark.parametrize(
    "change",
    [{"gpu_total_bytes": 99}, {"gpu_total_bytes": 101}, {"device": "cuda"}],
    ids=["less GPU memory", "more GPU memory", "device"],
)
def test_replay_ignores_differences_of_the_gpu(change):
    other = ON_GPU.model_copy(update=change)
    assert compare_fingerprints(ON_GPU, other, replayed=True) == ()


@pytest.mark.parametrize("replayed", [False, True])
def test_equal_fingerprints_have_no_differences(replayed):
    assert compare_fingerprints(ON_GPU, ON_GPU.model_copy(), replayed=replayed) == ()


def test_gpu_does_not_matter_to_a_replayed_step():
    gpu_fields = {
        "gpu_name": "NVIDIA H200",
        "gpu_count": 8,
        "gpu_total_bytes": 2**37,
        "gpu_mig": False,
        "gpu_power_cap_w": 700.0,
        "driver": "580.1",
        "cuda": "13.0",
        "device": "cuda",
    }
    profile = FINGERPRINT.model_copy(update=gpu_fields)
    assert compare_fingerprints(profile, FINGERPRINT, replayed=True) == ()


@pytest.mark.parametrize(
    ("replayed", "worst"), [(False, "dataset_hash"), (True, "cpu_model")]
)
def test_most_severe_difference_comes_first(replayed, worst):
    other = FINGERPRINT.model_copy(update={"python": "3.12", "torch": "9", worst: "x"})
    checks = compare_fingerprints(FINGERPRINT, other, replayed=replayed)
    assert [check.field for check in checks] == [worst, "torch", "python"]

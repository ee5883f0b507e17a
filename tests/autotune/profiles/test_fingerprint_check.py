import pytest

from autotune.profiles.decide.fingerprint_check import compare_fingerprints
from testbed.examples.profiles import FINGERPRINT

RECORDED = FINGERPRINT.model_copy(update={"gpu_total_bytes": 100})
"""Fingerprint of a profile, with 100 bytes of GPU memory."""
H200_FIELDS = {
    "device": "cuda",
    "gpu_name": "NVIDIA H200",
    "gpu_count": 8,
    "gpu_total_bytes": 2**37,
    "gpu_mig": False,
    "gpu_power_cap_w": 700.0,
    "driver": "580.1",
    "cuda": "13.0",
}
"""Fields of a fingerprint with GPUs; each differs from ``RECORDED``."""


def severities_of(change, *, replayed=False):
    """Return the severity of each difference, if this machine has a changed field."""
    here = RECORDED.model_copy(update=change)
    checks = compare_fingerprints(RECORDED, here, replayed=replayed)
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
    assert severities_of(change) == [severity]


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
    assert severities_of(change, replayed=True) == [severity]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *H200_FIELDS.items(),
        pytest.param("gpu_total_bytes", 99, id="less GPU memory"),
        pytest.param("gpu_total_bytes", 101, id="more GPU memory"),
    ],
)
def test_replay_ignores_each_field_of_the_gpu(field, value):
    assert severities_of({field: value}, replayed=True) == []


def test_replay_ignores_a_whole_gpu():
    recorded = FINGERPRINT.model_copy(update=H200_FIELDS)
    assert compare_fingerprints(recorded, FINGERPRINT, replayed=True) == ()


@pytest.mark.parametrize("replayed", [False, True])
def test_equal_fingerprints_have_no_differences(replayed):
    assert severities_of({}, replayed=replayed) == []


@pytest.mark.parametrize(
    ("replayed", "error_field"),
    [
        pytest.param(False, "dataset_hash", id="measured"),
        pytest.param(True, "cpu_model", id="replayed"),
    ],
)
def test_most_severe_difference_comes_first(replayed, error_field):
    changes = {"python": "3.12", "torch": "9", error_field: "x"}
    here = FINGERPRINT.model_copy(update=changes)
    checks = compare_fingerprints(FINGERPRINT, here, replayed=replayed)
    assert [check.field for check in checks] == [error_field, "torch", "python"]

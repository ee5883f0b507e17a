import pytest

from autotune.decide.fingerprint import compare
from tests.autotune.profiles import FINGERPRINT


def test_the_same_machine_has_no_mismatch():
    assert compare(FINGERPRINT, FINGERPRINT) == ()


@pytest.mark.parametrize(
    ("change", "severity"),
    [
        ({"dataset_hash": "other"}, "refuse"),
        ({"model_sha256": "other"}, "refuse"),
        ({"device": "cuda"}, "refuse"),
        ({"torch": "2.14.0"}, "warn"),
        ({"python": "3.12.0"}, "inform"),
    ],
)
def test_a_difference_weighs_what_it_does_to_the_figures(change, severity):
    found = compare(FINGERPRINT, FINGERPRINT.model_copy(update=change))
    assert [check.found for check in found] == [severity]


def test_less_gpu_memory_is_refused_and_more_is_not():
    card = FINGERPRINT.model_copy(update={"gpu_total_bytes": 100})
    assert compare(card, card.model_copy(update={"gpu_total_bytes": 99}))[0].found == "refuse"
    assert compare(card, card.model_copy(update={"gpu_total_bytes": 101}))[0].found == "inform"


@pytest.mark.parametrize(("replayed", "worst"), [(False, "dataset_hash"), (True, "cpu_model")])
def test_the_worst_comes_first(replayed, worst):
    other = FINGERPRINT.model_copy(update={"python": "3.12", "torch": "9", worst: "x"})
    found = compare(FINGERPRINT, other, replayed=replayed)
    assert [check.field for check in found] == [worst, "torch", "python"]


@pytest.mark.parametrize(
    "change",
    [
        {"device": "cuda"},
        {"gpu_name": "NVIDIA H200", "gpu_count": 8, "gpu_total_bytes": 2**37, "gpu_mig": False},
        {"gpu_power_cap_w": 700.0, "driver": "580.1", "cuda": "13.0"},
    ],
)
def test_where_a_step_is_replayed_the_gpu_does_not_matter(change):
    assert compare(FINGERPRINT.model_copy(update=change), FINGERPRINT, replayed=True) == ()


@pytest.mark.parametrize("change", [{"cpu_model": "Another CPU"}, {"data_filesystem": "lustre"}])
def test_where_a_step_is_replayed_cpu_and_disk_must_be_the_same(change):
    other = FINGERPRINT.model_copy(update=change)
    assert [check.found for check in compare(FINGERPRINT, other)] == ["warn"]
    assert [check.found for check in compare(FINGERPRINT, other, replayed=True)] == ["refuse"]

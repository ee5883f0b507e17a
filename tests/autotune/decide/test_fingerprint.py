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
    assert [mismatch.severity for mismatch in found] == [severity]


def test_less_gpu_memory_is_refused_and_more_is_not():
    card = FINGERPRINT.model_copy(update={"gpu_total_bytes": 100})
    assert compare(card, card.model_copy(update={"gpu_total_bytes": 99}))[0].severity == "refuse"
    assert compare(card, card.model_copy(update={"gpu_total_bytes": 101}))[0].severity == "inform"


def test_the_worst_comes_first():
    other = FINGERPRINT.model_copy(update={"python": "3.12", "dataset_hash": "x", "torch": "9"})
    assert [mismatch.severity for mismatch in compare(FINGERPRINT, other)] == ["refuse", "warn", "inform"]

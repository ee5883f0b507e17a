import pytest

from benchmarks.reference.units import unit_of


@pytest.mark.parametrize(
    ("name", "unit"),
    [
        ("peak_bytes", "bytes"),
        ("slot_tokens_per_s_low", "tokens/s"),
        ("global_batch_tokens", "tokens"),
        ("bytes_per_s_high", "bytes/s"),
        ("headroom_share", "share of 1"),
        ("ratio_to_workers_alone", "ratio"),
        ("step_s", "s"),
        ("minutes", "minutes"),
        ("loader-workers", "workers"),
    ],
)
def test_a_name_carries_its_unit(name, unit):
    assert unit_of(name) == unit


@pytest.mark.parametrize("name", ["choice", "precision", "pays", "bypass"])
def test_a_name_without_a_unit_has_none(name):
    assert unit_of(name) is None

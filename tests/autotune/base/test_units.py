import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.base import units
from autotune.base.units import NO_UNIT


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("94GB", 94 * 10**9),
        ("2GiB", 2**31),
        ("94GiB", 94 * 2**30),
        ("1.5 kb", 1500),
        ("512B", 512),
        (" 3 MiB ", 3 * 2**20),
        ("94G", 94 * 10**9),
    ],
)
def test_sizes_are_decimal_or_binary_as_written(text, size_bytes):
    assert units.parse_bytes(text) == size_bytes


@pytest.mark.parametrize(
    "text", ["94", "1e9", "5XB", "0GB", "much", "", "GB", "-1GB", "nan", "1 2GB"]
)
def test_a_size_without_a_unit_is_rejected(text):
    with pytest.raises(
        ValueError, match=NO_UNIT if text[-1:].isdigit() else "is not a size"
    ):
        units.parse_bytes(text)


@given(st.floats(1e-6, 1e6))
def test_a_duration_is_read_back_as_it_is_shown(duration_s):
    assert units.parse_seconds(units.exact_seconds(duration_s)) == pytest.approx(
        duration_s, rel=1e-5
    )
    shown = [units.exact_seconds(one) for one in (600, 5400, 90, 0.5, 25e-6)]
    assert shown == ["10min", "90min", "90s", "500ms", "25us"]


@given(st.integers(1, 2**45), st.floats(0.01, 1e17))
def test_what_is_shown_reads_back_within_a_per_cent_and_an_exact_size_to_the_byte(
    size_bytes, amount
):
    assert units.parse_bytes(units.exact_bytes(size_bytes)) == size_bytes
    assert units.parse_bytes(
        units.format_bytes(size_bytes).replace(" ", "")
    ) == pytest.approx(size_bytes, rel=0.01)
    assert units.parse_amount(units.format_amount(amount)) == pytest.approx(
        amount, rel=0.01
    )


def test_sizes_and_durations_are_shown_in_the_largest_unit_that_suits():
    sizes = (94 * 10**9, 93 * 2**30, 300 * 10**6, 7)
    assert [units.exact_bytes(size) for size in sizes] == [
        "94GB",
        "93GiB",
        "300MB",
        "7B",
    ]
    assert [units.format_seconds(s) for s in (0.012, 3.4, 125, 4200)] == [
        "12 ms",
        "3.4 s",
        "2 min 05 s",
        "1 h 10 min",
    ]
    assert {
        units.format_bytes(None),
        units.format_seconds(None),
        units.format_share(None),
    } == {"n/a"}


@pytest.mark.parametrize(
    ("text", "amount"),
    [
        ("45.2B", 45.2e9),
        ("2T", 2e12),
        ("1e22", 1e22),
        ("202,000,000", 202e6),
        ("1_000", 1000),
        ("10 m", 1e7),
        ("3k", 3000),
        ("5g", 5e9),
    ],
)
def test_amounts_are_read_as_people_write_them(text, amount):
    assert units.parse_amount(text) == pytest.approx(amount)


@pytest.mark.parametrize(
    "text", ["", "B", "-1", "0", "2X", "1e999", "nan", "1 2", "inf"]
)
def test_what_is_no_positive_amount_is_refused(text):
    with pytest.raises(ValueError, match="amount"):
        units.parse_amount(text)

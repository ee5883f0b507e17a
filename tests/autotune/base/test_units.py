import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.base import units
from autotune.errors import BadInput


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [("94GB", 94 * 10**9), ("2GiB", 2**31), ("94GiB", 94 * 2**30), ("1.5 kb", 1500), ("512B", 512),
     (" 3 MiB ", 3 * 2**20)],
)  # fmt: skip
def test_sizes_are_decimal_or_binary_as_written(text, size_bytes):
    assert units.parse_bytes(text) == size_bytes


@pytest.mark.parametrize(
    ("text", "unitless"),
    [("94", "94G"), ("94G", "94G"), ("94g", "94G"), ("1.5 T", "1.5T"), ("300m", "300M"), ("5XB", "5G"), ("1e9", "2G"),
     *((text, "2G") for text in ("0", "much", "", "GB", "-1GB", "nan", "1 2GB"))],
)  # fmt: skip
def test_a_size_without_a_whole_unit_is_rejected_and_both_units_are_named(text, unitless):
    with pytest.raises(BadInput) as caught:
        units.parse_bytes(text)
    assert repr(text) in caught.value.message
    assert f"{unitless}B (decimal)" in caught.value.next_step
    assert f"{unitless}iB (binary)" in caught.value.next_step
    assert units.parse_bytes(f"{unitless}B") < units.parse_bytes(f"{unitless}iB")


@given(st.integers(1, 2**45), st.floats(0.01, 1e17))
def test_what_is_shown_reads_back_within_a_per_cent_and_an_exact_size_to_the_byte(size_bytes, amount):
    assert units.parse_bytes(units.exact_bytes(size_bytes)) == size_bytes
    assert units.parse_bytes(units.format_bytes(size_bytes).replace(" ", "")) == pytest.approx(size_bytes, rel=0.01)
    assert units.parse_amount(units.format_amount(amount)) == pytest.approx(amount, rel=0.01)


def test_sizes_and_durations_are_shown_in_the_largest_unit_that_suits():
    sizes = (94 * 10**9, 93 * 2**30, 300 * 10**6, 7)
    assert [units.exact_bytes(size) for size in sizes] == ["94GB", "93GiB", "300MB", "7B"]
    assert [units.format_seconds(s) for s in (0.012, 3.4, 125, 4200)] == ["12 ms", "3.4 s", "2 min 05 s", "1 h 10 min"]
    assert {units.format_bytes(None), units.format_seconds(None), units.format_share(None)} == {"n/a"}


@pytest.mark.parametrize(
    ("text", "amount"),
    [("45.2B", 45.2e9), ("2T", 2e12), ("1e22", 1e22), ("202,000,000", 202e6), ("1_000", 1000), ("10 m", 1e7),
     ("3k", 3000), ("5g", 5e9)],
)  # fmt: skip
def test_amounts_are_read_as_people_write_them(text, amount):
    assert units.parse_amount(text) == pytest.approx(amount)


@pytest.mark.parametrize("text", ["", "B", "-1", "0", "2X", "1e999", "nan", "1 2", "inf"])
def test_what_is_no_positive_amount_is_refused(text):
    with pytest.raises(ValueError, match="amount"):
        units.parse_amount(text)

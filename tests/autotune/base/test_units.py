"""Sizes, durations and amounts are read and shown in units that fit."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.base import units
from autotune.base.units import NO_UNIT


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        pytest.param("94GB", 94 * 10**9, id="decimal"),
        pytest.param("94G", 94 * 10**9, id="decimal, without B"),
        pytest.param("2GiB", 2**31, id="binary"),
        pytest.param("94GiB", 94 * 2**30, id="binary, larger"),
        pytest.param("1.5 kb", 1500, id="fraction, small letters"),
        pytest.param("512B", 512, id="bytes"),
        pytest.param(" 3 MiB ", 3 * 2**20, id="spaces"),
    ],
)
def test_reads_decimal_and_binary_sizes(text, size_bytes):
    assert units.parse_bytes(text) == size_bytes


@pytest.mark.parametrize(
    "text", [pytest.param("94", id="whole"), pytest.param("1e9", id="exponent")]
)
def test_rejects_size_without_unit(text):
    with pytest.raises(ValueError, match=NO_UNIT):
        units.parse_bytes(text)


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("", id="empty"),
        pytest.param("much", id="word"),
        pytest.param("GB", id="no number"),
        pytest.param("5XB", id="unknown unit"),
        pytest.param("0GB", id="zero"),
        pytest.param("-1GB", id="negative"),
        pytest.param("nan", id="not a number"),
        pytest.param("1 2GB", id="two numbers"),
    ],
)
def test_rejects_text_that_is_no_size(text):
    with pytest.raises(ValueError, match="is not a size"):
        units.parse_bytes(text)


@given(st.integers(1, 2**45))
def test_exact_size_reads_back(size_bytes):
    assert units.parse_bytes(units.exact_bytes(size_bytes)) == size_bytes


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        pytest.param(94 * 10**9, "94GB", id="decimal"),
        pytest.param(93 * 2**30, "93GiB", id="binary"),
        pytest.param(300 * 10**6, "300MB", id="no whole GB"),
        pytest.param(7, "7B", id="bytes"),
    ],
)
def test_exact_size_has_largest_whole_unit(size_bytes, text):
    assert units.exact_bytes(size_bytes) == text


@given(st.floats(1e-6, 1e6))
def test_exact_duration_reads_back(duration_s):
    text = units.exact_seconds(duration_s)
    # The text has six significant digits, so it is half of the sixth off at most.
    assert units.parse_seconds(text) == pytest.approx(duration_s, rel=5.1e-6)


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        pytest.param(1000, "1000 B", id="bytes are exact"),
        pytest.param(999.4 * 2**10, "999 KiB", id="three digits"),
        pytest.param(999.6 * 2**10, "1000 KiB", id="rounds to four digits"),
        pytest.param(1023 * 2**20, "1023 MiB", id="four digits"),
    ],
)
def test_shows_sizes_without_exponents(size_bytes, text):
    assert units.format_bytes(size_bytes) == text


@pytest.mark.parametrize(
    ("duration_s", "text"),
    [
        pytest.param(7200, "2h", id="whole hours"),
        pytest.param(600, "10min", id="whole minutes"),
        pytest.param(5400, "90min", id="no whole hours"),
        pytest.param(90, "90s", id="no whole minutes"),
        pytest.param(0.5, "500ms", id="milliseconds"),
        pytest.param(25e-6, "25us", id="microseconds"),
    ],
)
def test_exact_duration_has_largest_whole_unit(duration_s, text):
    assert units.exact_seconds(duration_s) == text


@given(st.integers(1, 2**45))
def test_shown_size_reads_back_within_half_a_percent(size_bytes):
    text = units.format_bytes(size_bytes).replace(" ", "")
    # Three significant digits are half of the third off at most: 0.5 % of 1.00. Reading
    # then cuts off a part of a byte.
    tolerance_bytes = 0.005 * size_bytes + 1
    read_bytes = units.parse_bytes(text)
    assert read_bytes == pytest.approx(size_bytes, rel=0, abs=tolerance_bytes)


@given(st.floats(0.01, 1e17))
def test_shown_amount_reads_back_within_half_a_percent(amount):
    text = units.format_amount(amount)
    # Amounts below 100 have three significant digits, and those up to a million are
    # whole: both are 0.5 % off at most.
    assert units.parse_amount(text) == pytest.approx(amount, rel=0.005)


@pytest.mark.parametrize(
    ("duration_s", "text"),
    [
        pytest.param(0.012, "12 ms", id="milliseconds"),
        pytest.param(0.9996, "1 s", id="nearly a second"),
        pytest.param(3.4, "3.4 s", id="seconds"),
        pytest.param(125, "2 min 05 s", id="minutes"),
        pytest.param(4200, "1 h 10 min", id="hours"),
    ],
)
def test_shows_duration_in_units_that_fit(duration_s, text):
    assert units.format_seconds(duration_s) == text


@pytest.mark.parametrize(
    "form",
    [
        pytest.param(units.format_bytes, id="bytes"),
        pytest.param(units.format_seconds, id="seconds"),
        pytest.param(units.format_share, id="share"),
    ],
)
def test_shows_missing_value_as_na(form):
    assert form(None) == "n/a"


@pytest.mark.parametrize(
    ("text", "amount"),
    [
        pytest.param("45.2B", 45.2e9, id="billions"),
        pytest.param("2T", 2e12, id="trillions"),
        pytest.param("1e22", 1e22, id="exponent"),
        pytest.param("202,000,000", 202e6, id="commas"),
        pytest.param("1_000", 1000, id="underscore"),
        pytest.param("10 m", 1e7, id="space, small letter"),
        pytest.param("3k", 3000, id="thousands"),
        pytest.param("5g", 5e9, id="giga"),
    ],
)
def test_reads_amounts(text, amount):
    assert units.parse_amount(text) == pytest.approx(amount)


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("", id="empty"),
        pytest.param("B", id="no number"),
        pytest.param("-1", id="negative"),
        pytest.param("0", id="zero"),
        pytest.param("2X", id="unknown unit"),
        pytest.param("1e999", id="beyond the range of floats"),
        pytest.param("nan", id="not a number"),
        pytest.param("inf", id="infinite"),
        pytest.param("1 2", id="two numbers"),
    ],
)
def test_rejects_text_that_is_no_positive_amount(text):
    with pytest.raises(ValueError, match="amount"):
        units.parse_amount(text)

"""Sizes, durations and amounts are read and shown in units that fit."""

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
def test_reads_decimal_and_binary_sizes(text, size_bytes):
    assert units.parse_bytes(text) == size_bytes


@pytest.mark.parametrize("text", ["94", "1e9"])
def test_rejects_size_without_unit(text):
    with pytest.raises(ValueError, match=NO_UNIT):
        units.parse_bytes(text)


@pytest.mark.parametrize(
    "text", ["5XB", "0GB", "much", "", "GB", "-1GB", "nan", "1 2GB"]
)
def test_rejects_text_that_is_no_size(text):
    with pytest.raises(ValueError, match="is not a size"):
        units.parse_bytes(text)


@given(st.floats(1e-6, 1e6))
def test_exact_duration_reads_back(duration_s):
    text = units.exact_seconds(duration_s)
    assert units.parse_seconds(text) == pytest.approx(duration_s, rel=1e-5)


@pytest.mark.parametrize(
    ("duration_s", "text"),
    [(600, "10min"), (5400, "90min"), (90, "90s"), (0.5, "500ms"), (25e-6, "25us")],
)
def test_exact_duration_has_largest_whole_unit(duration_s, text):
    assert units.exact_seconds(duration_s) == text


@given(st.integers(1, 2**45))
def test_exact_size_reads_back(size_bytes):
    assert units.parse_bytes(units.exact_bytes(size_bytes)) == size_bytes


@given(st.integers(1, 2**45))
def test_shown_size_reads_back_within_one_percent(size_bytes):
    text = units.format_bytes(size_bytes).replace(" ", "")
    assert units.parse_bytes(text) == pytest.approx(size_bytes, rel=0.01)


@given(st.floats(0.01, 1e17))
def test_shown_amount_reads_back_within_one_percent(amount):
    text = units.format_amount(amount)
    assert units.parse_amount(text) == pytest.approx(amount, rel=0.01)


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [(94 * 10**9, "94GB"), (93 * 2**30, "93GiB"), (300 * 10**6, "300MB"), (7, "7B")],
)
def test_exact_size_has_largest_whole_unit(size_bytes, text):
    assert units.exact_bytes(size_bytes) == text


@pytest.mark.parametrize(
    ("duration_s", "text"),
    [(0.012, "12 ms"), (3.4, "3.4 s"), (125, "2 min 05 s"), (4200, "1 h 10 min")],
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
def test_reads_amounts(text, amount):
    assert units.parse_amount(text) == pytest.approx(amount)


@pytest.mark.parametrize(
    "text", ["", "B", "-1", "0", "2X", "1e999", "nan", "1 2", "inf"]
)
def test_rejects_text_that_is_no_positive_amount(text):
    with pytest.raises(ValueError, match="amount"):
        units.parse_amount(text)

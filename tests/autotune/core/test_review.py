import pytest

from autotune.core.profile import present_sha256
from autotune.core.verification import Review, standing_of
from autotune.errors import BadInput

A, B = "a" * 64, "b" * 64


@pytest.mark.parametrize(
    ("given", "state"),
    [
        (None, "not reviewed"),
        ((A, "approved"), "approved"),
        ((A, "rejected"), "rejected"),
        ((B, "approved"), "voided"),
        ((B, "rejected"), "not reviewed"),
    ],
)
def test_a_verdict_counts_for_just_the_content_it_was_given_on(given, state):
    review = given and Review(profile_sha256=given[0], verdict=given[1], by="reviewer", time_utc="2026-01-01T00:00:00Z")
    assert standing_of(review, A).state == state


def test_the_recorded_hash_is_no_part_of_what_is_hashed():
    assert present_sha256({"a": 1, "content_sha256": "x"}, where="p") == present_sha256({"a": 1}, where="p")
    assert present_sha256({"a": 2}, where="p") != present_sha256({"a": 1}, where="p")


@pytest.mark.parametrize("value", [float("nan"), object()])
def test_a_value_without_a_canonical_form_is_bad_input(value):
    with pytest.raises(BadInput, match=r"p\.toml holds a value"):
        present_sha256({"a": value}, where="p.toml")

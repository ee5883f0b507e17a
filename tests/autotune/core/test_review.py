import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.core.review import Review, present_sha256, reviews_from_json, standing_of
from autotune.errors import BadInput

A, B = "a" * 64, "b" * 64


def _review(sha256, verdict, by="reviewer", profile=None):
    return Review(
        profile_sha256=sha256, verdict=verdict, by=by, time_utc="2026-01-01T00:00:00Z", tool_version="0.1.0",
        profile=profile,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("reviews", "state"),
    [
        ([], "not reviewed"),
        ([_review(A, "approved")], "approved"),
        ([_review(A, "rejected")], "rejected"),
        ([_review(A, "approved"), _review(A, "rejected")], "rejected"),
        ([_review(A, "rejected"), _review(A, "approved")], "approved"),
        ([_review(B, "approved")], "voided"),
        ([_review(B, "rejected")], "not reviewed"),
        ([_review(B, "approved"), _review(B, "rejected")], "not reviewed"),
        ([_review(A, "approved"), _review(B, "rejected")], "approved"),
    ],
)
def test_the_newest_verdict_on_the_present_content_counts(reviews, state):
    assert standing_of(reviews, A).state == state


@pytest.mark.parametrize(
    ("reviews", "state"),
    [
        ([_review(B, "approved", profile="b/p.toml")], "not reviewed"),
        ([_review(B, "approved", profile="a/p.toml")], "voided"),
        ([_review(B, "approved")], "voided"),  # nobody knows where that lay
        ([_review(B, "approved", profile="a/p.toml"), _review("c" * 64, "rejected", profile="b/p.toml")], "voided"),
        ([_review(A, "approved", profile="b/p.toml")], "approved"),  # the same content, wherever it lies
        ([_review(A, "approved", profile="b/p.toml"), _review(A, "rejected", profile="a/p.toml")], "rejected"),
    ],
)
def test_verdicts_on_a_profile_of_the_same_name_elsewhere_void_nothing(reviews, state):
    assert standing_of(reviews, A, "a/p.toml").state == state


@given(st.lists(st.builds(_review, st.sampled_from([A, B]), st.sampled_from(["approved", "rejected"]))))
def test_a_profile_is_approved_only_by_a_verdict_on_just_that_content(reviews):
    standing = standing_of(reviews, A)
    if standing.state == "approved":
        assert standing.review.profile_sha256 == A
        assert standing.review.verdict == "approved"
    assert standing_of(reviews, "c" * 64).state in ("voided", "not reviewed")


def test_the_recorded_hash_is_no_part_of_what_is_hashed():
    assert present_sha256({"a": 1, "content_sha256": "x"}, where="p") == present_sha256({"a": 1}, where="p")
    assert present_sha256({"a": 2}, where="p") != present_sha256({"a": 1}, where="p")


@pytest.mark.parametrize("value", [float("nan"), object()])
def test_a_value_without_a_canonical_form_is_bad_input(value):
    with pytest.raises(BadInput, match=r"p\.toml holds a value"):
        present_sha256({"a": value}, where="p.toml")


@pytest.mark.parametrize(
    "value",
    [
        None, [], {}, {"schema_version": 0, "reviews": []}, {"schema_version": 2, "reviews": []},
        {"schema_version": 1, "reviews": [{}]}, {"schema_version": 1, "verdicts": []},
        {"schema_version": 1, "reviews": [_review(A, "approved").model_dump() | {"verdict": "approve"}]},
        {"schema_version": 1, "reviews": [_review(A, "approved").model_dump() | {"profile_sha256": "a"}]},
    ],
)  # fmt: skip
def test_a_damaged_or_other_review_file_is_never_taken_for_an_empty_one(value):
    with pytest.raises(BadInput, match=r"review\.json"):
        reviews_from_json(value, where="review.json")

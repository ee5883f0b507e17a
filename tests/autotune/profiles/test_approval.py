import pytest

from autotune.errors import BadInput
from autotune.profiles.approval import (
    read_with_approval,
    require_approved,
    review,
    review_path,
)
from autotune.profiles.approval_record import ApprovalRecord, approval_of
from trainer.formats.errors import UnreadableFile

PRESENT_SHA256 = "a" * 64
EARLIER_SHA256 = "b" * 64


def review_of(sha256, decision):
    """Return a review of the content with this hash."""
    return ApprovalRecord(
        profile_sha256=sha256,
        decision=decision,
        by="reviewer",
        time_utc="2026-01-01T00:00:00Z",
    )


@pytest.mark.parametrize(
    ("record", "state"),
    [
        pytest.param(None, "not reviewed", id="no review"),
        pytest.param(review_of(PRESENT_SHA256, "approved"), "approved", id="approved"),
        pytest.param(review_of(PRESENT_SHA256, "rejected"), "rejected", id="rejected"),
        pytest.param(
            review_of(EARLIER_SHA256, "approved"), "voided", id="approved, then edited"
        ),
        pytest.param(
            review_of(EARLIER_SHA256, "rejected"),
            "not reviewed",
            id="rejected, then edited",
        ),
    ],
)
def test_review_counts_for_its_content_only(record, state):
    assert approval_of(record, PRESENT_SHA256).state == state


@pytest.fixture
def profile_path(workdir):
    """Return the path of a profile that is not reviewed."""
    return workdir / "p.toml"


def test_approval_belongs_to_the_content(profile_path):
    review(profile_path, profile_path.parent, "approved", by="reviewer", note=None)
    copy = profile_path.parent / "other" / "p.toml"
    copy.parent.mkdir()
    copy.write_text(profile_path.read_text())
    assert require_approved(copy, profile_path.parent).approval.state == "approved"


def test_review_without_permission_is_not_corrupt(profile_path, deny_reading):
    review_file = review_path(profile_path, profile_path.parent)
    review_file.parent.mkdir()
    review_file.write_text("{}")
    deny_reading("review.json")
    with pytest.raises(UnreadableFile, match="Permission denied") as raised:
        read_with_approval(profile_path, profile_path.parent)
    assert "backup" not in raised.value.next_step


def test_rejects_unreadable_review(profile_path):
    review_file = review_path(profile_path, profile_path.parent)
    review_file.parent.mkdir()
    # A link to itself: opening it fails for every user, root included.
    review_file.symlink_to(review_file)
    with pytest.raises(BadInput, match="cannot read"):
        read_with_approval(profile_path, profile_path.parent)

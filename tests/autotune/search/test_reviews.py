import pytest

from autotune.errors import BadInput, ProfileRefused
from autotune.search.reviews import read_reviewed, require_approved, review, review_path


@pytest.fixture
def profile(here):
    return here / "p.toml"


def test_the_same_content_is_approved_wherever_it_lies(profile, tmp_path):
    review(profile, tmp_path, "approved", by="reviewer", note=None)
    other = tmp_path / "other" / "p.toml"
    other.parent.mkdir()
    other.write_text(profile.read_text())
    assert require_approved(other, tmp_path).standing.state == "approved"
    other.write_text(profile.read_text().replace("micro_batch_rows = 2", "micro_batch_rows = 1"))
    with pytest.raises(ProfileRefused, match="not approved any more"):
        require_approved(other, tmp_path)
    assert read_reviewed(profile, tmp_path).standing.state == "approved"


def test_a_review_that_cannot_be_read_is_no_absent_one(profile, tmp_path):
    path = review_path(profile, tmp_path)
    path.parent.mkdir()
    path.symlink_to(path)
    with pytest.raises(BadInput, match="cannot read"):
        read_reviewed(profile, tmp_path)

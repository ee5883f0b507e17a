import pytest

from autotune.core.profile import profile_to_toml
from autotune.errors import BadInput, MachineLacks, ProfileRefused
from autotune.search.reviews import read_reviewed, require_approved, review, review_path
from tests.autotune.profiles import example_profile


@pytest.fixture
def profile(tmp_path):
    path = tmp_path / "p.toml"
    path.write_text(profile_to_toml(example_profile()))
    return path


def _edit(profile):
    profile.write_text(profile.read_text().replace("micro_batch_rows = 2", "micro_batch_rows = 1"))


def test_only_an_approval_of_the_present_content_lets_pass(profile, tmp_path):
    with pytest.raises(ProfileRefused, match="nobody has reviewed"):
        require_approved(profile, tmp_path)
    review(profile, tmp_path, "approved", by="reviewer", note=None)
    assert require_approved(profile, tmp_path).standing.state == "approved"
    _edit(profile)
    with pytest.raises(ProfileRefused, match="not approved any more") as refused:
        require_approved(profile, tmp_path)
    assert "--approve" in refused.value.next_step


def test_a_profile_with_rates_of_a_pretended_gpu_is_not_reviewed(profile, tmp_path):
    text = profile.read_text()
    profile.write_text(text.replace("[fingerprint]", '[fingerprint]\ndriver = "0.0 (nullgpu)"'))
    with pytest.raises(MachineLacks, match="pretended"):
        review(profile, tmp_path, "approved", by="reviewer", note=None)


def test_the_same_content_is_approved_wherever_it_lies(profile, tmp_path):
    review(profile, tmp_path, "approved", by="reviewer", note=None)
    other = tmp_path / "other" / "p.toml"
    other.parent.mkdir()
    other.write_text(profile.read_text())
    assert require_approved(other, tmp_path).standing.state == "approved"
    _edit(other)
    with pytest.raises(ProfileRefused, match="not approved any more"):
        require_approved(other, tmp_path)
    assert read_reviewed(profile, tmp_path).standing.state == "approved"


def test_a_review_that_cannot_be_read_is_no_absent_one(profile, tmp_path):
    path = review_path(profile, tmp_path)
    path.parent.mkdir()
    path.symlink_to(path)
    with pytest.raises(BadInput, match="cannot read"):
        read_reviewed(profile, tmp_path)


def test_where_nothing_can_be_written_the_verdict_is_refused(profile, tmp_path):
    (tmp_path / "p").write_text("a file in the way")
    with pytest.raises(BadInput, match="cannot write"):
        review(profile, tmp_path, "approved", by="reviewer", note=None)

import pytest

from autotune.cluster.site import SiteFile
from autotune.core.profile import Constraints, Fingerprint, Profile, Provenance
from benchmarks.reference.fields import profile_page, site_page, unexplained
from trainer.config import TrainConfig


def test_a_key_has_its_kind_bounds_unit_default_and_meaning():
    text = profile_page()
    assert "| `micro_batch_rows` | integer > 0 | rows | `8` | Rows that one rank computes at once. |" in text
    assert "| `max_epochs` | integer > 0 | epochs | absent |" in text
    assert "| `layout` | `bucketed`, `packed`, `padded` |  | `padded` | What a row holds. `padded`: one" in text


def test_tables_are_named_as_a_profile_names_them():
    text = profile_page()
    assert "\n## `[train.data]`\n" in text
    assert "\n## `[[evidence.probe.curve]]`, `[evidence.probe.sustained]`\n" in text


def test_an_upper_bound_without_words_is_explained_by_what_it_bounds():
    assert "| `slot_tokens_per_s_high` | number > 0 | tokens/s | absent | Upper bound of it. |" in profile_page()


def test_a_site_file_has_its_keys():
    assert "| `time` | text |  | `04:00:00` | Longest time of a job. |" in site_page()


@pytest.mark.parametrize("kind", [TrainConfig, Constraints, Fingerprint, Provenance, SiteFile])
def test_whatever_people_may_edit_or_must_match_says_what_it_means(kind):
    assert unexplained(kind) == []


def test_a_key_that_says_nothing_is_found():
    assert "Profile.schema_version" in unexplained(Profile)

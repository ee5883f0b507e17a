"""The result of a confirmation on the console, and its sections of a report."""

from pathlib import Path

import pytest

from autotune.base.document import Missing
from autotune.confirm.sections import confirm_section, confirm_text, kernels_section
from autotune.profiles.store import StoredProfile
from testbed.examples.kernels import near_bounds, with_kernels
from testbed.examples.profiles import but
from testbed.examples.tuning import example_profile
from tests.autotune.report.examples import of_kind, reported

PROFILE = with_kernels(example_profile("d"), near_bounds())


def text_of(confirm, profile=PROFILE):
    stored = StoredProfile(path=Path("p.toml"), profile=profile, intact=True)
    return confirm_text(confirm, stored).splitlines()


def test_text_has_the_promise_and_the_next_command():
    lines = text_of(PROFILE.evidence.confirm)
    assert lines[0] == (
        "Promised and delivered: promised 100 tokens/s (97.50 to 102); not delivered:"
        " a test"
    )
    assert lines[-2:] == ["profile: p.toml", "next: autotune report p.toml"]
    assert not any(line.startswith("changed") for line in lines)


def test_text_says_that_the_split_changed():
    confirm = PROFILE.evidence.confirm
    used = confirm.rows[0].model_copy(update={"micro_batch_size": 7})
    lines = text_of(confirm.model_copy(update={"rows": [used, *confirm.rows]}))
    size = PROFILE.train.micro_batch_size
    (changed,) = [line for line in lines if line.startswith("changed")]
    assert f"micro-batch {size} → 7, which is faster" in changed
    assert "the speedup over untuned settings was that of the earlier one" in changed
    assert lines[-1] == "next: autotune baseline p.toml"


def test_change_without_baseline_needs_no_other():
    confirm = PROFILE.evidence.confirm
    used = confirm.rows[0].model_copy(update={"micro_batch_size": 7})
    profile = but(PROFILE, evidence={"baseline": None})
    lines = text_of(confirm.model_copy(update={"rows": [used]}), profile)
    assert lines[-1] == "next: autotune report p.toml"


@pytest.mark.parametrize("section", [confirm_section, kernels_section])
def test_missing_part_names_the_command(section):
    profile = but(PROFILE, evidence={"confirm": None})
    (missing,) = of_kind(section(reported(profile=profile)), Missing)
    assert missing.commands == ("autotune confirm profiles/m.toml",)

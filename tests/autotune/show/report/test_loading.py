import pytest

from autotune.show.report.build import report_document
from autotune.show.report.markdown import report_markdown
from tests.autotune.profiles import example_profile
from tests.autotune.show.report.examples import reported


def report_of(**changes):
    profile = example_profile()
    found = profile.evidence.workers.model_copy(update=changes)
    profile = profile.model_copy(update={"evidence": profile.evidence.model_copy(update={"workers": found})})
    return report_markdown(report_document((reported(profile=profile),), ()))


def test_the_sweep_has_its_answer_its_refusal_and_its_table():
    text = report_of()
    assert "## 7. Loader workers" in text
    assert "Chosen: **1**. So. 0 is slow." in text
    assert "| too few |" in text


@pytest.mark.parametrize(("seconds", "minutes"), [(14.0, 10), (600.0, 40)])
def test_an_undecided_sweep_names_the_time_that_may_settle_it(seconds, minutes):
    assert f"--minutes {minutes}`" in report_of(undecided_between=[0, 2], seconds=seconds)


def test_a_decided_one_does_not():
    assert "--minutes" not in report_of()


def test_what_strangers_wrote_is_inert():
    assert "<script>" not in report_of(gpu_source="<script>alert(1)</script>")

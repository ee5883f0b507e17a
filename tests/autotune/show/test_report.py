from autotune.show.report import ReportedProfile, ReportedRun, report_markdown
from tests.autotune.profiles import example_profile
from tests.trainer.checkpoints import end_of, header_of
from tests.trainer.rows import row_of
from trainer.events import happened
from trainer.record import Run


def report_of(tmp_path, events):
    run = Run(
        directory=tmp_path / "20260101T000000Z-m",
        header=header_of(),
        steps=(row_of(1), row_of(2)),
        evaluations=(),
        events=tuple(events),
        startup=None,
        end=end_of(),
    )
    profile = ReportedProfile(
        path=tmp_path / "m.toml", profile=example_profile(), intact=True, trials=(), damaged_lines=0
    )
    return report_markdown([profile], [ReportedRun(run=run, profile_path=None)])


def test_what_needs_attention_in_a_run_is_in_the_report_and_what_does_not_is_not(tmp_path):
    events = [
        happened(5, "saved", "saved step-000000005"),
        happened(7, "spike", "the loss is 9 | 3 times what it was", level="warning"),
        happened(8, "save_failed", "could not save step 8: No space left on device", level="error"),
    ]
    lines = [line for line in report_of(tmp_path, events).splitlines() if line.startswith("- 20260101T000000Z")]
    assert [line.partition(", ")[2] for line in lines] == [
        "step 7: the loss is 9 &#124; 3 times what it was",
        "step 8: could not save step 8: No space left on device",
    ]


def test_of_many_events_the_latest_are_shown_and_the_rest_counted(tmp_path):
    events = [happened(step, "spike", f"spike {step}", level="warning") for step in range(1, 26)]
    text = report_of(tmp_path, events)
    assert "20260101T000000Z-m: 15 earlier events" in text
    assert [step for step in range(1, 26) if f": spike {step}\n" in text + "\n"] == list(range(16, 26))


def test_a_run_without_trouble_says_nothing_of_events(tmp_path):
    assert "earlier events" not in report_of(tmp_path, [])
    assert "step 5:" not in report_of(tmp_path, [happened(5, "saved", "saved step-000000005")])

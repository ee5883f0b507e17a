import datetime
import math

from trainer.events import EventRow, happened, utc_now


def test_an_event_of_numbers_that_are_none_is_json_that_is_read_back():
    event = happened(
        3, "spike", "high", level="warning", values={"loss": math.nan, "norm": -math.inf, "n": 1, "s": "x"}
    )
    assert event.values == {"loss": "nan", "norm": "-inf", "n": 1, "s": "x"}
    assert EventRow.model_validate_json(event.model_dump_json()) == event


def test_an_event_is_of_this_moment_and_asks_for_nothing_by_itself():
    event = happened(3, "saved", "saved step-000000003")
    assert (event.level, event.action, event.next_step, event.causes, event.samples) == ("info", "none", "", [], [])
    age = datetime.datetime.now(datetime.UTC) - datetime.datetime.fromisoformat(utc_now())
    assert abs(age.total_seconds()) < 5
    assert utc_now().endswith("Z")

import time

from trainer.record.start_clock import StartClock


def test_every_second_of_startup_belongs_to_a_phase(monkeypatch):
    now_s = 1000.0
    monkeypatch.setattr(time, "time", lambda: now_s)
    monkeypatch.setattr(time, "monotonic", lambda: 500.0)
    clock = StartClock(began_s=990.0)
    phases = [
        ("import", 0),  # began 10 s before
        ("staging", 2),
        ("build", 1),
        ("first_batch", 1),
        ("build", 2),
        ("first_step", 4),
    ]
    for phase, seconds in phases:
        now_s += seconds
        clock.ended(phase)
    now_s += 50  # later steps are no part of the start
    startup = clock.startup().model_dump()
    assert {name: seconds for name, seconds in startup.items() if seconds} == {
        "import_s": 10,
        "staging_s": 2,
        "build_s": 3,
        "first_batch_s": 1,
        "first_step_s": 4,
        "total_s": 20,
    }
    assert clock.total_s() == 70
    assert clock.monotonic_start_s == 490

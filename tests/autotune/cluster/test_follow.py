import pytest

from autotune.cluster import follow as room
from autotune.cluster.follow import follow, last_lines, verdict
from autotune.cluster.submit import JobState
from autotune.errors import DoesNotFit, MachineLacks, StartAgain, StoppedWaiting


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    monkeypatch.setattr(room.time, "sleep", lambda seconds: None)


def asked(*states):
    listed = iter(states)
    return lambda job: next(listed)


PENDING = JobState(state="PENDING", reason="Resources")
RUNNING = JobState(state="RUNNING", exit_code=0, nodes="lab1")
DONE = JobState(state="COMPLETED", exit_code=0, nodes="lab1")


def test_what_is_new_is_told_once(tmp_path):
    (tmp_path / "log").write_text("first\nprobe: 3 % \x1b[1mtrial\n\n")
    told = []
    ended = follow("12", tmp_path / "log", told.append, ask=asked(PENDING, PENDING, None, RUNNING, RUNNING, DONE))
    assert told == ["queued (Resources)", "running on lab1: probe: 3 % [1mtrial", "completed"]
    assert (ended.code, ended.words) == (0, "")


def test_a_log_that_grows_is_no_reason_to_ask_more_often(tmp_path, monkeypatch):
    log, pauses = tmp_path / "log", []

    def write_on(seconds):
        pauses.append(seconds)
        log.write_text(f"{len(pauses)} steps\n")

    monkeypatch.setattr(room.time, "sleep", write_on)
    follow("12", log, [].append, ask=asked(PENDING, *[RUNNING] * 40, DONE))
    assert pauses[:2] == [0.5, 0.5]  # it began to run
    assert pauses[-1] == 10.0


def test_a_job_that_failed_gives_its_code_and_the_end_of_its_log(tmp_path):
    (tmp_path / "log").write_text("error: does not fit\n")
    ended = follow("12", tmp_path / "log", print, ask=asked(JobState(state="FAILED", exit_code=4)))
    assert ended.code == 4
    assert "job 12 failed (exit code 4)" in ended.words
    assert "error: does not fit" in ended.words


@pytest.mark.parametrize(
    ("state", "error", "words"),
    [
        ("TIMEOUT", StartAgain, "time limit"),
        ("NODE_FAIL", StartAgain, "lost lab1: the node died"),
        ("PREEMPTED", StartAgain, "pre-empted"),
        ("OUT_OF_MEMORY", DoesNotFit, "more memory"),
    ],
)
def test_a_job_that_was_ended_is_an_error_that_says_what_to_do(tmp_path, state, error, words):
    with pytest.raises(error, match=words) as ended:
        verdict("12", JobState(state=state, nodes="lab1"), tmp_path / "log", "")
    assert ended.value.next_step


def test_a_cancelled_or_killed_job_is_no_success(tmp_path):
    cancelled = verdict("12", JobState(state="CANCELLED", exit_code=0), tmp_path / "log", "last words")
    assert (cancelled.code, "last words" in cancelled.words) == (143, True)
    assert verdict("12", JobState(state="FAILED", signal=9), tmp_path / "log", "").code == 137


def test_ctrl_c_leaves_the_job_running_and_says_so(tmp_path):
    def interrupted(job):
        raise KeyboardInterrupt

    with pytest.raises(StoppedWaiting, match="job 12 goes on") as stopped:
        follow("12", tmp_path / "log", print, ask=interrupted)
    assert "scancel 12" in stopped.value.next_step


def test_a_silent_slurm_is_given_up_at_last(tmp_path):
    with pytest.raises(MachineLacks, match="does not answer"):
        follow("12", tmp_path / "log", print, ask=lambda job: None)


def test_the_end_of_a_log_may_be_missing_or_long(tmp_path):
    assert last_lines(tmp_path / "none") == ""
    (tmp_path / "log").write_text("\n".join(f"line {n}" for n in range(5000)))
    assert last_lines(tmp_path / "log", count=2) == "line 4998\nline 4999"

import pytest

from autotune.cluster.slurm import Ended
from autotune.launch.run_end import (
    MOST_FRUITLESS_STARTS,
    PATIENCE_S,
    has_work_left,
    run_end_of,
)
from testbed.examples.checkpoints import (
    end_of,
    header_of,
    leave,
    resolved_of,
    write_checkpoint,
)
from tests.trainer.oracles import config_of
from trainer.checkpoint.format import CHECKPOINTS_DIRECTORY
from trainer.checkpoint.resume import AUTO, choose_run
from trainer.record.run_record import read_exit

CONFIG = config_of(max_steps=1000)


def put(directory, code: int) -> str:
    text = end_of(
        code, reason=f"because of {code}", steps=7, checkpoint="step-000000007"
    ).model_dump_json()
    (directory / "exit.json").write_text(text)
    return text


def ended(run, said_before: str = "", job_code: int = 1, **options) -> Ended:
    return run_end_of(
        run,
        said_before,
        job_code,
        **{"patience_s": PATIENCE_S, "sleep": lambda seconds: None} | options,
    )


@pytest.mark.parametrize("code", [0, 3, 70, 75, 76])
def test_the_code_is_the_runs_whatever_torchrun_returns(tmp_path, code):
    put(tmp_path, code)
    ending = ended(tmp_path)
    assert (ending.code, f"because of {code}" in ending.words) == (code, True)


@pytest.mark.parametrize(
    ("job_code", "expected"), [(1, 1), (6, 6), (75, 70), (143, 143)]
)
def test_what_an_earlier_start_said_does_not_count(tmp_path, job_code, expected):
    ending = ended(tmp_path, put(tmp_path, 75) + "\n", job_code)
    assert (ending.code, "was not written" in ending.words) == (expected, True)
    # It was finished, and has nothing new to say.
    assert ended(tmp_path, put(tmp_path, 0), 0).code == 0


def test_a_run_that_left_nothing_is_never_taken_for_one_that_goes_on(tmp_path):
    assert ended(tmp_path / "none", job_code=75).code == 70
    (tmp_path / "exit.json").write_text("{")
    assert ended(tmp_path).code == 70


def test_a_file_that_is_seen_late_is_waited_for_and_one_that_is_there_is_not(tmp_path):
    said = put(tmp_path, 75)
    assert ended(tmp_path, said, sleep=lambda seconds: put(tmp_path, 76)).code == 76
    assert ended(tmp_path, said, sleep=lambda seconds: pytest.fail("waits")).code == 76


@pytest.mark.parametrize(
    ("patience_s", "least_s", "most_s"), [(PATIENCE_S, 60, 75), (5.0, 4, 6)]
)
@pytest.mark.parametrize("there", [True, False])
def test_a_word_that_does_not_come_is_waited_for_with_patience(
    tmp_path, patience_s, least_s, most_s, there
):
    said, waited = put(tmp_path, 75), []
    if not there:
        (tmp_path / "exit.json").unlink()  # this start put it aside, and was killed
    ending = ended(tmp_path, said, patience_s=patience_s, sleep=waited.append)
    assert (ending.code, "was not written" in ending.words) == (1, True)
    assert least_s <= sum(waited) <= most_s


def lose(run, steps: int, checkpoint: str) -> Ended:
    """One more start of a run, which ends with 75; the one before it is put aside as
    the trainer does."""
    writer, _ = choose_run(run, AUTO, resolved_of(CONFIG), {})
    assert read_exit(run) is None
    writer.start(header_of(CONFIG, attempt=writer.attempt))
    writer.finish(end_of(75, steps=steps, checkpoint=checkpoint))
    leave(writer)
    return ended(run)


def test_starts_that_leave_no_newer_checkpoint_are_not_repeated_for_ever_however_many_steps_they_took(
    tmp_path,
):
    root = tmp_path / "r" / CHECKPOINTS_DIRECTORY
    write_checkpoint(root, 400, config=CONFIG.model_dump(mode="json"))
    assert lose(tmp_path / "r", 400, "step-000000400").code == 75
    assert lose(tmp_path / "r", 480, "step-000000400").code == 75
    ending = lose(tmp_path / "r", 487, "step-000000400")
    assert (ending.code, "no newer checkpoint than step-000000400" in ending.words) == (
        76,
        True,
    )
    assert has_work_left(tmp_path / "r", 2).code == 76
    write_checkpoint(root, 480, config=CONFIG.model_dump(mode="json"))
    assert lose(tmp_path / "r", 487, "step-000000480").code == 75
    assert has_work_left(tmp_path / "r", 2).code == 75


def test_starts_that_end_before_they_know_what_they_train_count_as_well(tmp_path):
    codes = []
    for number in range(1, MOST_FRUITLESS_STARTS + 1):
        writer, _ = choose_run(tmp_path / "r", AUTO, resolved_of(CONFIG), {})
        assert (writer.attempt, read_exit(tmp_path / "r")) == (number, None)
        # TERM, or ranks that never met: there is no run.json.
        writer.finish(end_of(75, steps=0))
        leave(writer)
        codes.append(ended(tmp_path / "r").code)
    assert codes == [75] * (MOST_FRUITLESS_STARTS - 1) + [76]
    assert not list((tmp_path / "r").rglob("run.json"))


@pytest.mark.parametrize("code", [75, 0, 76, 3, None])
def test_a_later_job_of_a_chain_goes_on_only_if_there_is_something_left_or_the_one_before_was_killed(
    tmp_path, code
):
    if code is not None:
        put(tmp_path, code)
    assert has_work_left(tmp_path, 2).code == (75 if code is None else code)

import pytest

from autotune.cluster.slurm import Ended
from autotune.launch.run_end import (
    MOST_FRUITLESS_STARTS,
    PATIENCE_S,
    has_work_left,
    run_end_of,
)
from testbed.examples.checkpoints import (
    exit_of,
    header_of,
    release_run,
    resolved_of,
    write_checkpoint,
)
from tests.trainer.tiny_models import config_of
from trainer.checkpoint.format import CHECKPOINTS_DIRECTORY
from trainer.checkpoint.resume import AUTO, choose_run
from trainer.formats.run_record import read_exit

CONFIG = config_of(max_steps=1000)


def write_exit(directory, code: int) -> str:
    text = exit_of(
        code, reason=f"because of {code}", steps=7, checkpoint="step-000000007"
    ).model_dump_json()
    (directory / "exit.json").write_text(text)
    return text


def ended(run, exit_before: str = "", job_code: int = 1, **options) -> Ended:
    return run_end_of(
        run,
        exit_before,
        job_code,
        **{"patience_s": PATIENCE_S, "sleep": lambda seconds: None} | options,
    )


@pytest.mark.parametrize("code", [0, 3, 70, 75, 76])
def test_exit_code_is_the_runs(tmp_path, code):
    write_exit(tmp_path, code)
    ending = ended(tmp_path)
    assert (ending.code, f"because of {code}" in ending.words) == (code, True)


@pytest.mark.parametrize(
    ("job_code", "expected", "words"),
    [
        (1, 1, "was not written"),
        (6, 6, "training did not begin"),
        (75, 70, "was not written"),
        (143, 143, "was not written"),
    ],
)
def test_ignores_exit_of_an_earlier_start(tmp_path, job_code, expected, words):
    ending = ended(tmp_path, write_exit(tmp_path, 75) + "\n", job_code)
    assert (ending.code, words in ending.words) == (expected, True)
    # It was finished, and has nothing new to say.
    assert ended(tmp_path, write_exit(tmp_path, 0), 0).code == 0


def test_missing_exit_is_never_resumed(tmp_path):
    assert ended(tmp_path / "none", job_code=75).code == 70
    (tmp_path / "exit.json").write_text("{")
    assert ended(tmp_path).code == 70


def test_waits_for_late_exit_file(tmp_path):
    exit_before = write_exit(tmp_path, 75)
    assert (
        ended(
            tmp_path, exit_before, sleep=lambda seconds: write_exit(tmp_path, 76)
        ).code
        == 76
    )
    assert (
        ended(tmp_path, exit_before, sleep=lambda seconds: pytest.fail("waits")).code
        == 76
    )


@pytest.mark.parametrize(
    ("patience_s", "least_s", "most_s"), [(PATIENCE_S, 60, 75), (5.0, 4, 6)]
)
@pytest.mark.parametrize("is_present", [True, False], ids=["present", "absent"])
def test_waits_with_patience_for_missing_exit(
    tmp_path, patience_s, least_s, most_s, is_present
):
    exit_before = write_exit(tmp_path, 75)
    waited: list[float] = []
    if not is_present:
        (tmp_path / "exit.json").unlink()  # this start put it aside, and was killed
    ending = ended(tmp_path, exit_before, patience_s=patience_s, sleep=waited.append)
    assert (ending.code, "was not written" in ending.words) == (1, True)
    assert least_s <= sum(waited) <= most_s


def lose(run, steps: int, checkpoint: str) -> Ended:
    """Start a run once more and end it with code 75, as the trainer does."""
    writer, _ = choose_run(run, AUTO, resolved_of(CONFIG), {})
    assert read_exit(run) is None
    writer.start(header_of(CONFIG, attempt=writer.attempt))
    writer.finish(exit_of(75, steps=steps, checkpoint=checkpoint))
    release_run(writer)
    return ended(run)


def test_fruitless_starts_are_given_up(tmp_path):
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


def test_starts_without_a_record_count_as_fruitless(tmp_path):
    codes = []
    for number in range(1, MOST_FRUITLESS_STARTS + 1):
        writer, _ = choose_run(tmp_path / "r", AUTO, resolved_of(CONFIG), {})
        assert (writer.attempt, read_exit(tmp_path / "r")) == (number, None)
        # TERM, or ranks that never met: there is no run.json.
        writer.finish(exit_of(75, steps=0))
        release_run(writer)
        codes.append(ended(tmp_path / "r").code)
    assert codes == [75] * (MOST_FRUITLESS_STARTS - 1) + [76]
    assert not list((tmp_path / "r").rglob("run.json"))


@pytest.mark.parametrize("code", [75, 0, 76, 3, None])
def test_chain_continues_only_unfinished_runs(tmp_path, code):
    if code is not None:
        write_exit(tmp_path, code)
    assert has_work_left(tmp_path, 2).code == (75 if code is None else code)

import pytest

from autotune.cluster import submit as room
from autotune.cluster.submit import JobState, ask_state, parse_state, queued_jobs, submit
from autotune.errors import MachineLacks

RUNNING = (
    "JobId=12 JobName=train NodeList=x UserId=root(0) JobState=RUNNING Reason=None Dependency=(null) ExitCode=0:0 "
    "ReqNodeList=(null) ExcNodeList=(null) NodeList=lab[1-2] Command=/a b/JobState=FAILED"
)


@pytest.fixture
def put(tmp_path, monkeypatch):
    """Puts a scripted SLURM command on PATH."""

    def write(name: str, body: str) -> None:
        place = tmp_path / "bin"
        place.mkdir(exist_ok=True)
        (place / name).write_text(f"#!/bin/sh\n{body}\n")
        (place / name).chmod(0o755)
        monkeypatch.setenv("PATH", f"{place}:/usr/bin:/bin")

    return write


def test_a_submitted_script_gives_the_jobs_id(put, tmp_path):
    put("sbatch", f'echo "$@" > {tmp_path}/said; echo "4711;cluster1"')
    script = tmp_path / "job script.sbatch"
    assert submit(script, ["2"]) == "4711"
    assert (tmp_path / "said").read_text() == f"--parsable {script} 2\n"


@pytest.mark.parametrize(
    ("body", "words"),
    [("echo 'Invalid account' >&2; exit 1", "Invalid account"), ("echo soon", "soon"), ("exit 1", "")],
)
def test_a_refusal_is_told_with_the_script_to_change(put, tmp_path, body, words):
    put("sbatch", body)
    with pytest.raises(MachineLacks, match=f"refused the job: {words}") as refused:
        submit(tmp_path / "job.sbatch")
    assert f"sbatch {tmp_path / 'job.sbatch'}" in refused.value.next_step


def test_without_slurm_the_script_is_named_and_nothing_is_queued(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MachineLacks, match="sbatch is not here") as refused:
        submit(tmp_path / "job.sbatch")
    assert str(tmp_path / "job.sbatch") in refused.value.next_step
    assert queued_jobs() is None


def test_a_jobs_state_is_read_from_its_first_fields():
    assert parse_state(RUNNING.replace("NodeList=x ", "")) == JobState(state="RUNNING", exit_code=0, nodes="lab[1-2]")
    failed = parse_state("JobState=FAILED Reason=NonZeroExitCode ExitCode=4:0")
    assert failed == JobState(state="FAILED", reason="NonZeroExitCode", exit_code=4)
    assert parse_state("JobState=FAILED ExitCode=0:9") == JobState(state="FAILED", exit_code=None, signal=9)
    assert parse_state("slurm_load_jobs error") is None


def test_a_job_that_slurm_has_forgotten_is_told_from_a_slurm_that_is_silent(put):
    put("scontrol", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    with pytest.raises(MachineLacks, match="knows no job 12"):
        ask_state("12")
    put("scontrol", "echo 'Unable to contact slurm controller' >&2; exit 1")
    assert ask_state("12") is None


def test_a_slurm_that_hangs_is_silent_for_who_asks_again_and_an_error_for_who_submits(put, tmp_path, monkeypatch):
    monkeypatch.setattr(room, "ASK_TIMEOUT_S", 0.2)
    for name in ("scontrol", "sbatch", "squeue"):
        put(name, "exec sleep 30")
    assert ask_state("12") is None
    assert queued_jobs() is None
    with pytest.raises(MachineLacks, match=r"sbatch did not answer within 0\.2 s"):
        submit(tmp_path / "job.sbatch")


def test_queued_jobs_are_found_by_name_whatever_is_in_it(put):
    put("squeue", "echo '12|RUNNING|train-a|b'; echo '13|PENDING|probe'; echo nonsense")
    assert queued_jobs() == {"train-a|b": ("12", "RUNNING"), "probe": ("13", "PENDING")}
    put("squeue", "exit 1")
    assert queued_jobs() is None

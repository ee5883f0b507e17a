import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.cluster import slurm
from autotune.cluster.slurm import JobState
from autotune.cluster.slurm_facts import SlurmFacts
from autotune.errors import ExceedsMemory, MachineLacks, StartAgain, StoppedWaiting

JOB = {
    "SLURM_JOB_ID": "4711",
    "SLURM_JOB_END_TIME": "1700003600",
    "SLURM_JOB_NUM_NODES": "4",
    "SLURM_NTASKS": "8",
    "SLURM_GPUS_ON_NODE": "2",
    "SLURMD_NODENAME": "n1",
}


def test_reads_job_from_its_environment():
    facts = slurm.read_slurm(JOB, lambda name: f"/usr/bin/{name}")
    assert facts == SlurmFacts(
        job_id="4711",
        end_time_s=1_700_003_600,
        nodes=4,
        tasks=8,
        gpus_per_node=2,
        node_name="n1",
        commands=("sbatch", "srun", "sinfo"),
    )
    assert (facts.in_job, facts.is_login_node) == (True, False)


def test_nothing_is_known_outside_a_cluster():
    outside = slurm.read_slurm({}, lambda _: None)
    assert outside == SlurmFacts(
        job_id=None,
        end_time_s=None,
        nodes=None,
        tasks=None,
        gpus_per_node=None,
        commands=(),
    )
    assert (outside.in_job, outside.is_login_node) == (False, False)


def test_node_with_only_sbatch_is_login_node():
    assert slurm.read_slurm(
        {}, lambda name: name if name == "sbatch" else None
    ).is_login_node


@pytest.mark.parametrize(
    ("text", "count"),
    [("2", 2), ("h100:2", 2), ("h100:2,a100:1", 3), ("", None), ("h100", None)],
)
def test_adds_up_gpus_over_types(text, count):
    assert (
        slurm.read_slurm({"SLURM_GPUS_PER_NODE": text}, lambda _: None).gpus_per_node
        == count
    )


@given(
    st.dictionaries(
        st.sampled_from([*JOB, "SLURM_GPUS_PER_NODE", "SLURM_NNODES"]), st.text()
    )
)
def test_any_environment_is_readable(environment):
    facts = slurm.read_slurm(environment, lambda _: None)
    assert facts.nodes is None or facts.nodes >= 0


SCONTROL_OUTPUT = (
    "JobId=12 JobName=train NodeList=x UserId=root(0) JobState=RUNNING Reason=None"
    " Dependency=(null) ExitCode=0:0 ReqNodeList=(null) ExcNodeList=(null)"
    " NodeList=lab[1-2] Command=/a b/JobState=FAILED"
)


def test_submit_returns_the_job_id(put, tmp_path):
    put("sbatch", f'echo "$@" > {tmp_path}/said; echo "4711;cluster1"')
    script = tmp_path / "job script.sbatch"
    assert slurm.submit(script, ["2"]) == "4711"
    assert (tmp_path / "said").read_text() == f"--parsable {script} 2\n"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("echo 'Invalid account' >&2; exit 1", "rejected the job: Invalid account"),
        ("echo soon", "rejected the job: soon"),
        ("exit 1", "rejected the job: "),
        (None, "sbatch not found"),
    ],
)
def test_rejected_job_names_its_script(put, tmp_path, monkeypatch, body, words):
    put("sbatch", body) if body else monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MachineLacks, match=words) as refused:
        slurm.submit(tmp_path / "job.sbatch")
    assert str(tmp_path / "job.sbatch") in refused.value.next_step
    assert body or slurm.queued_jobs() is None


def test_reads_state_from_its_first_fields():
    running = slurm.parse_state(SCONTROL_OUTPUT.replace("NodeList=x ", ""))
    assert running == JobState(state="RUNNING", exit_code=0, nodes="lab[1-2]")
    failed = slurm.parse_state("JobState=FAILED Reason=NonZeroExitCode ExitCode=4:0")
    assert failed == JobState(state="FAILED", reason="NonZeroExitCode", exit_code=4)
    assert slurm.parse_state("JobState=FAILED ExitCode=0:9") == JobState(
        state="FAILED", exit_code=None, signal=9
    )
    assert slurm.parse_state("slurm_load_jobs error") is None


def test_forgotten_job_is_an_error(put):
    put(
        "scontrol", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1"
    )
    with pytest.raises(MachineLacks, match="no longer knows job 12"):
        slurm.ask_state("12")


def test_silent_slurm_has_no_state(put):
    put("scontrol", "echo 'Unable to contact slurm controller' >&2; exit 1")
    assert slurm.ask_state("12") is None


def test_slow_slurm_is_not_waited_for(put, tmp_path, monkeypatch):
    monkeypatch.setattr(slurm, "ASK_TIMEOUT_S", 0.2)
    for name in ("scontrol", "sbatch", "squeue"):
        put(name, "exec sleep 30")
    assert slurm.ask_state("12") is slurm.queued_jobs() is None
    with pytest.raises(MachineLacks, match=r"sbatch did not answer within 0\.2 s"):
        slurm.submit(tmp_path / "job.sbatch")


def test_lists_queued_jobs_by_name(put):
    put("squeue", "echo '12|RUNNING|train-a|b'; echo '13|PENDING|probe'; echo nonsense")
    assert slurm.queued_jobs() == {
        "train-a|b": ("12", "RUNNING"),
        "probe": ("13", "PENDING"),
    }


def test_failed_squeue_lists_nothing(put):
    put("squeue", "exit 1")
    assert slurm.queued_jobs() is None


@pytest.fixture
def no_waiting(monkeypatch):
    monkeypatch.setattr(slurm.time, "sleep", lambda seconds: None)


def answers(*states):
    listed = iter(states)
    return lambda job: next(listed)


PENDING = JobState(state="PENDING", reason="Resources")
RUNNING = JobState(state="RUNNING", exit_code=0, nodes="lab1")
DONE = JobState(state="COMPLETED", exit_code=0, nodes="lab1")


def test_follow_prints_each_change_once(tmp_path, no_waiting):
    (tmp_path / "log").write_text("first\nprobe: 3 % \x1b[1mtrial\n\n")
    lines = []
    ended = slurm.follow(
        "12",
        tmp_path / "log",
        lines.append,
        ask=answers(PENDING, PENDING, None, RUNNING, RUNNING, DONE),
    )
    assert lines == [
        "queued (Resources)",
        "running on lab1: probe: 3 % [1mtrial",
        "completed",
    ]
    assert (ended.code, ended.words) == (0, "")


def test_growing_log_does_not_raise_polling_rate(tmp_path, monkeypatch):
    log = tmp_path / "log"
    pauses = []

    def write_on(seconds):
        pauses.append(seconds)
        log.write_text(f"{len(pauses)} steps\n")

    monkeypatch.setattr(slurm.time, "sleep", write_on)
    slurm.follow("12", log, [].append, ask=answers(PENDING, *[RUNNING] * 40, DONE))
    assert pauses[:2] == [0.5, 0.5]  # it began to run
    assert pauses[-1] == 10.0


def test_failed_job_returns_code_with_log_end(tmp_path, no_waiting):
    (tmp_path / "log").write_text("error: does not fit\n")
    ended = slurm.follow(
        "12",
        tmp_path / "log",
        print,
        ask=answers(JobState(state="FAILED", exit_code=4)),
    )
    assert (ended.code, ended.words.splitlines()[1]) == (4, "    error: does not fit")
    assert ended.words.startswith("job 12 failed (exit code 4); the end of")


def test_last_lines_reads_only_the_end(tmp_path):
    (tmp_path / "log").write_text("\n".join(f"line {n}" for n in range(5000)))
    assert slurm.last_lines(tmp_path / "log", count=2) == "line 4998\nline 4999"
    assert slurm.last_lines(tmp_path / "none") == ""


def test_gives_up_on_a_silent_slurm(tmp_path, no_waiting):
    with pytest.raises(MachineLacks, match="stopped answering"):
        slurm.follow("12", tmp_path / "log", print, ask=lambda job: None)


def test_ctrl_c_leaves_the_job_running(tmp_path, no_waiting):
    def interrupted(job):
        raise KeyboardInterrupt

    with pytest.raises(StoppedWaiting, match="job 12 continues") as stopped:
        slurm.follow("12", tmp_path / "log", print, ask=interrupted)
    assert "scancel 12" in stopped.value.next_step


@pytest.mark.parametrize(
    ("state", "error", "words"),
    [
        ("TIMEOUT", StartAgain, "time limit"),
        ("NODE_FAIL", StartAgain, "lost lab1: the node failed"),
        ("PREEMPTED", StartAgain, "pre-empted"),
        ("OUT_OF_MEMORY", ExceedsMemory, "memory limit"),
    ],
)
def test_ended_job_is_an_error(tmp_path, state, error, words):
    with pytest.raises(error, match=words) as ended:
        slurm.verdict("12", JobState(state=state, nodes="lab1"), tmp_path / "log", "")
    assert ended.value.next_step


def test_cancelled_job_is_no_success(tmp_path):
    cancelled = slurm.verdict(
        "12", JobState(state="CANCELLED", exit_code=0), tmp_path / "log", "last words"
    )
    assert (cancelled.code, "last words" in cancelled.words) == (143, True)


def test_killed_job_returns_its_signal(tmp_path):
    assert (
        slurm.verdict(
            "12", JobState(state="FAILED", signal=9), tmp_path / "log", ""
        ).code
        == 137
    )

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from tests.conftest import write_dataset
from tests.system.faults.corpora import content
from trainer.attempt import Attempt, Standing, job_key
from trainer.copying import CopyFigures
from trainer.errors import BadConfig
from trainer.resolve import resolve
from trainer.stage import Staged, local_rank_of, stage, stage_data

SAMPLES = [[5 + number % 90] * (1 + number % 40) for number in range(2000)]
JOB = {"TORCHELASTIC_RUN_ID": "job", "MASTER_PORT": "1"}


@pytest.fixture
def source(tmp_path):
    return write_dataset(tmp_path / "source", SAMPLES, shards=3, validation=[[7, 8]])


@pytest.fixture
def local(tmp_path):
    (tmp_path / "local").mkdir()
    return tmp_path / "local"


def test_the_copy_is_the_source_private_and_measured(source, local):
    (source / "rejects.jsonl").write_text("{}\n")
    (source / "prepared.json").write_text("{}\n")
    notes = []
    staged = stage(source, local, update=lambda done, total, note: notes.append((done, total)))
    assert content(staged.directory) == content(source)
    assert staged.directory.parent.name == f"autotune-{os.getuid()}"
    assert staged.directory.parent.stat().st_mode & 0o777 == 0o700
    assert staged.copied is not None
    assert staged.copied.size_bytes == sum(path.stat().st_size for path in source.iterdir())
    assert notes[-1][0] == notes[-1][1] == staged.copied.size_bytes
    assert staged.source_s_per_sample is not None
    assert staged.local_s_per_sample is not None


def test_what_is_there_is_not_copied_again(source, local):
    first = stage(source, local)
    before = {path: path.stat().st_mtime_ns for path in first.directory.iterdir()}
    again = stage(source, local)
    assert again.copied is None
    assert again.break_even_epochs is None
    assert {path: path.stat().st_mtime_ns for path in again.directory.iterdir()} == before


@pytest.mark.parametrize("damage", ["shorter", "missing", "manifest", "tokenizer", "header"])
def test_a_damaged_copy_is_replaced(source, local, damage):
    directory = stage(source, local).directory
    tokens = directory / "train-tokens-00001.npy"
    if damage == "shorter":
        os.truncate(tokens, tokens.stat().st_size - 2)
    elif damage == "missing":
        tokens.unlink()
    elif damage == "manifest":
        (directory / "manifest.json").write_text("{}")
    elif damage == "tokenizer":
        (directory / "tokenizer.json").write_text("{}")
    else:
        tokens.write_bytes(b"x" * tokens.stat().st_size)
    assert stage(source, local).copied is not None
    assert content(directory) == content(source)
    assert list(directory.parent.glob(".partial*")) == []


def test_a_damaged_source_is_named_and_nothing_is_published(source, local):
    with (source / "train-tokens-00002.npy").open("r+b") as file:
        file.seek(300)
        file.write(b"\x07")
    with pytest.raises(BadConfig, match=r"source/train-tokens-00002\.npy: its SHA-256") as caught:
        stage(source, local)
    assert "autotune data verify" in caught.value.next_step
    assert list(local.rglob("*.npy")) == []


def test_what_is_no_dataset_is_said(tmp_path):
    with pytest.raises(BadConfig, match="is not a dataset"):
        stage(tmp_path, tmp_path)


def _rank(source, local, rank, pipe, environment):
    try:
        staged = stage(source, local, local_rank=rank, timeout_s=30, environment=environment)
        pipe.send(("done", str(staged.directory), staged.copied is not None))
    except BadConfig as error:
        pipe.send(("failed", error.message, error.next_step))


def ranks(source, local, numbers, environment=JOB):
    """Real processes, started in the order given; what each of them says."""
    context = multiprocessing.get_context("spawn")
    started = []
    for number in numbers:
        ours, theirs = context.Pipe()
        process = context.Process(target=_rank, args=(source, local, number, theirs, environment))
        process.start()
        started.append((number, process, ours))
    said = {number: ours.recv() for number, _, ours in started}
    for _, process, _ in started:
        process.join(30)
    return said


def test_one_rank_of_a_node_copies_and_all_get_the_same_place(source, local):
    said = ranks(source, local, [3, 1, 0, 2])
    assert {answer[0] for answer in said.values()} == {"done"}
    assert len({answer[1] for answer in said.values()}) == 1
    assert [number for number, answer in said.items() if answer[2]] == [0]


def test_the_ranks_that_wait_get_the_leaders_error(source, local):
    with (source / "train-tokens-00000.npy").open("r+b") as file:
        file.seek(300)
        file.write(b"\x07")
    said = ranks(source, local, [1, 2, 0])
    assert {answer[0] for answer in said.values()} == {"failed"}
    for number in (1, 2):
        assert said[number][1].startswith("local rank 0 could not stage: ")
        assert "train-tokens-00000.npy" in said[number][1]
        assert said[number][2] == said[0][2]


@pytest.mark.parametrize("named_alike", [False, True])
def test_an_error_of_an_earlier_start_is_not_taken_for_this_ones(source, local, named_alike):
    path = source / "train-tokens-00000.npy"
    good = path.read_bytes()
    path.write_bytes(good[:300] + b"\x07" + good[301:])
    ranks(source, local, [0])
    path.write_bytes(good)
    for report in local.rglob("*.json"):
        os.utime(report, (time.time() - 60,) * 2)
    again = JOB if named_alike else JOB | {"TORCHELASTIC_RESTART_COUNT": "1"}
    # The waiting rank comes first, and finds what the earlier start left.
    said = ranks(source, local, [1, 0], environment=again)
    assert {answer[0] for answer in said.values()} == {"done"}


def _lead_and_stall(source, local, pipe):
    def stall(done, total, note):
        pipe.send("copying")
        threading.Event().wait()

    stage(source, local, update=stall, environment=JOB)


def test_ranks_notice_that_the_leader_was_killed_and_the_next_start_repairs_it(source, local):
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    leader = context.Process(target=_lead_and_stall, args=(source, local, theirs))
    leader.start()
    assert ours.recv() == "copying"
    waiting = []
    for number in (1, 2, 3):
        mine, other = context.Pipe()
        process = context.Process(target=_rank, args=(source, local, number, other, JOB))
        process.start()
        waiting.append((process, mine))
    assert not any(pipe.poll(1.5) for _, pipe in waiting)
    leader.kill()
    leader.join()
    # Long before the 30 s for which they would wait.
    said = [pipe.recv() if pipe.poll(20) else None for _, pipe in waiting]
    for process, _ in waiting:
        process.join(30)
    assert [answer and answer[1] for answer in said] == [
        "local rank 0 ended without a word while it staged the dataset"
    ] * 3
    again = stage(source, local, environment=JOB)
    assert again.copied is not None
    assert content(again.directory) == content(source)
    assert list(local.rglob(".partial*")) == []


@pytest.mark.parametrize("rank", [0, 1])
def test_a_place_that_cannot_be_used_is_said_on_every_rank_at_once(source, local, tmp_path, rank):
    (tmp_path / "trap").mkdir()
    (local / f"autotune-{os.getuid()}").symlink_to(tmp_path / "trap")
    with pytest.raises(BadConfig, match="is not a directory of yours"):
        stage(source, local, local_rank=rank, timeout_s=60, environment=JOB)
    with pytest.raises(BadConfig, match="nowhere is not a directory"):
        stage(source, tmp_path / "nowhere", local_rank=rank, timeout_s=60, environment=JOB)
    assert list((tmp_path / "trap").iterdir()) == []


def test_waiting_for_a_leader_that_never_comes_ends(source, local):
    with pytest.raises(BadConfig, match=r"has not begun .* after 0\.3 s"):
        stage(source, local, local_rank=1, timeout_s=0.3, environment=JOB)


def test_a_rank_that_comes_late_finds_the_copy_without_a_leader(source, local):
    staged = stage(source, local, environment=JOB)
    assert stage(source, local, local_rank=2, timeout_s=5, environment=JOB).directory == staged.directory
    assert stage(source, local, local_rank=2, timeout_s=5, environment={"MASTER_PORT": "2"}).copied is None


def test_a_source_that_cannot_be_read_at_random_is_what_is_damaged(source, local):
    tokens = source / "train-tokens-00001.npy"
    os.truncate(tokens, tokens.stat().st_size - 2)
    with pytest.raises(BadConfig, match=r"source/train-tokens-00001\.npy") as caught:
        stage(source, local)
    assert f"autotune data verify {source}" in caught.value.next_step
    assert list(local.rglob("*.npy")) == []


def test_two_jobs_on_a_node_copy_once(source, local):
    context = multiprocessing.get_context("spawn")
    said = []
    for number in range(3):
        ours, theirs = context.Pipe()
        environment = {"SLURM_JOB_ID": str(number)}
        process = context.Process(target=_rank, args=(source, local, 0, theirs, environment))
        process.start()
        said.append((process, ours))
    answers = [ours.recv() for _, ours in said]
    for process, _ in said:
        process.join(30)
    assert [answer[0] for answer in answers] == ["done"] * 3
    assert sum(answer[2] for answer in answers) == 1


def test_ctrl_c_removes_the_partial_copy(source, local):
    # Sent while a file is being copied: the first bytes have just been told.
    code = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from trainer.stage import stage\n"
        "sent = []\n"
        "def update(done, total, note):\n"
        "    if not sent:\n"
        "        sent.append(os.kill(os.getpid(), signal.SIGINT))\n"
        "stage(Path(sys.argv[1]), Path(sys.argv[2]), update=update)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, source, local], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGINT, done.stderr
    assert list(local.rglob(".partial*")) == []
    assert list(local.rglob("*.npy")) == []


def test_break_even_is_the_time_of_copying_over_the_time_saved_in_an_epoch():
    figures = CopyFigures(size_bytes=10, seconds=20.0, read_s=1.0, write_s=1.0)
    staged = {"directory": None, "dataset_hash": "", "samples": 1000, "copied": figures}
    assert Staged(**staged, source_s_per_sample=0.011, local_s_per_sample=0.001).break_even_epochs == pytest.approx(2.0)
    assert Staged(**staged, source_s_per_sample=0.001, local_s_per_sample=0.001).break_even_epochs is None


def test_the_trainer_stages_what_its_profile_asks_for(source, local, tmp_path, monkeypatch):
    profile = tmp_path / "profile.toml"
    profile.write_text(
        'schema_version = 1\n[train.model]\nname = "m"\n[train.model.config]\nmodel_type = "bert"\n'
        '[train.data]\npath = "source"\nstage_to = "$LOCAL_DISK/below"\n'
    )
    (local / "below").mkdir()
    environment = {"LOCAL_DISK": str(local), "LOCAL_RANK": "0"}
    resolved = resolve(profile, environment=environment)
    staged = stage_data(resolved, environment)
    assert staged.data_dir.parent.parent == local / "below"
    assert content(staged.data_dir) == content(source)
    assert staged.config == resolved.config
    without = resolve(profile, assignments=["train.data.stage_to=/nowhere/$UNSET"], environment=environment)
    with pytest.raises(BadConfig, match=r"\$UNSET"):
        stage_data(without, environment)


def test_nothing_is_staged_where_the_profile_asks_for_nothing(source, tmp_path):
    profile = tmp_path / "profile.toml"
    profile.write_text(
        'schema_version = 1\n[train.model]\nname = "m"\n[train.model.config]\nmodel_type = "bert"\n'
        '[train.data]\npath = "source"\n'
    )
    resolved = resolve(profile, environment={})
    assert stage_data(resolved, {}) is resolved


def test_the_local_rank_is_what_torchrun_or_slurm_say():
    assert local_rank_of({}) == 0
    assert local_rank_of({"SLURM_LOCALID": "3"}) == 3
    assert local_rank_of({"LOCAL_RANK": "2", "SLURM_LOCALID": "0"}) == 2


LEAD = """
import signal, sys
from pathlib import Path
from trainer.attempt import Attempt
with Attempt(Path(sys.argv[1])).leading(5):
    print("leading", flush=True)
    signal.pause()
"""


@pytest.fixture
def path(tmp_path):
    return tmp_path / "report.json"


@pytest.fixture
def leader(path):
    """A real process that leads until it is killed."""
    process = subprocess.Popen([sys.executable, "-c", LEAD, path], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"leading\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_nobody_has_begun_until_somebody_leads(path):
    assert Attempt(path).read().standing is Standing.NOT_BEGUN
    # Having looked is not having begun.
    assert Attempt(path).read().standing is Standing.NOT_BEGUN


def test_a_leader_is_at_work_and_then_done(path):
    with Attempt(path).leading(1):
        assert Attempt(path).read().standing is Standing.AT_WORK
    assert Attempt(path).read().standing is Standing.DONE


def test_an_error_is_told_with_its_next_step_however_long(path):
    message = "the disk “ä” is full " * 500
    with pytest.raises(BadConfig), Attempt(path).leading(1):
        raise BadConfig(message, next_step="Free some.")
    word = Attempt(path).read()
    assert (word.standing, word.message, word.next_step) == (Standing.FAILED, message, "Free some.")
    with Attempt(path).leading(1):
        pass
    assert Attempt(path).read().standing is Standing.DONE


def test_a_killed_leader_is_seen_as_dead_at_once(path, leader):
    assert Attempt(path).read().standing is Standing.AT_WORK
    leader.send_signal(signal.SIGKILL)
    leader.wait()
    assert Attempt(path).read().standing is Standing.DIED


def test_a_leader_that_could_write_nothing_is_seen_as_dead(path):
    path.write_bytes(b"\0" * 4096)
    assert Attempt(path).read().standing is Standing.DIED


def test_a_damaged_report_is_no_word(path):
    path.write_bytes(b'{"message": "hal')
    assert Attempt(path).read().standing is Standing.DIED
    path.write_bytes(b"[1]")
    assert Attempt(path).read().standing is Standing.DIED


def test_what_was_written_before_this_process_began_is_another_starts(path):
    with pytest.raises(BadConfig), Attempt(path).leading(1):
        raise BadConfig("of yesterday", next_step="")
    os.utime(path, (time.time() - 86400,) * 2)
    assert Attempt(path).read().standing is Standing.NOT_BEGUN


def test_a_second_leader_of_the_same_name_waits_and_gives_up(path, leader):
    with pytest.raises(BadConfig, match=r"at the same work for 0\.2 s"), Attempt(path).leading(0.2):
        pass


def test_a_link_is_not_followed(path, tmp_path):
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic links"):
        Attempt(path).read()
    assert not (tmp_path / "elsewhere").exists()


def test_jobs_and_their_restarts_have_different_keys():
    environments = [
        {},
        {"SLURM_JOB_ID": "1"},
        {"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "1"},
        {"SLURM_JOB_ID": "1", "SLURM_RESTART_COUNT": "1"},
        {"TORCHELASTIC_RUN_ID": "1"},
        {"TORCHELASTIC_RUN_ID": "1", "TORCHELASTIC_RESTART_COUNT": "1"},
        {"MASTER_PORT": "1"},
    ]
    assert len({job_key(environment) for environment in environments}) == len(environments)
    assert job_key({"MASTER_PORT": "1", "LOCAL_RANK": "0"}) == job_key({"MASTER_PORT": "1", "LOCAL_RANK": "3"})

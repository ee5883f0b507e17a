import multiprocessing
import os
import signal
import subprocess
import sys
import threading

import pytest

from tests.conftest import write_dataset
from tests.system.faults.corpora import content
from trainer.copying import CopyFigures
from trainer.errors import BadConfig
from trainer.resolve import resolve
from trainer.stage import Staged, stage, stage_data

SAMPLES = [[5 + number % 90] * (1 + number % 40) for number in range(2000)]


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
    staged = stage(source, local)
    assert content(staged.directory) == content(source)
    assert staged.directory.parent.name == f"autotune-{os.getuid()}"
    assert staged.directory.parent.stat().st_mode & 0o777 == 0o700
    assert staged.copied is not None
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


def _rank(source, local, pipe):
    try:
        staged = stage(source, local, timeout_s=30)
        pipe.send(("done", str(staged.directory), staged.copied is not None))
    except BadConfig as error:
        pipe.send(("failed", error.message, error.next_step))


def _copy_and_stall(source, local, pipe):
    def stall(done, total, note):
        pipe.send("copying")
        threading.Event().wait()

    stage(source, local, update=stall)


@pytest.fixture
def start(source, local):
    """Begin a real process of the node; gives it and the pipe by which it tells how it went."""
    context, started = multiprocessing.get_context("spawn"), []

    def begin(work=_rank):
        ours, theirs = context.Pipe()
        started.append(context.Process(target=work, args=(source, local, theirs)))
        started[-1].start()
        return started[-1], ours

    yield begin
    for process in started:
        process.join(30)


def test_one_process_of_a_node_copies_and_all_get_the_same_place(start):
    said = [pipe.recv() for _, pipe in [start() for _ in range(4)]]
    assert {answer[0] for answer in said} == {"done"}
    assert len({answer[1] for answer in said}) == 1
    assert sum(answer[2] for answer in said) == 1


def test_every_process_of_a_node_names_the_damaged_file(source, start):
    with (source / "train-tokens-00000.npy").open("r+b") as file:
        file.seek(300)
        file.write(b"\x07")
    said = [pipe.recv() for _, pipe in [start() for _ in range(3)]]
    assert len(set(said)) == 1
    assert said[0][0] == "failed"
    assert "train-tokens-00000.npy" in said[0][1]


def test_when_the_one_that_copies_is_killed_one_that_waits_removes_the_half_and_copies(source, local, start):
    leader, pipe = start(_copy_and_stall)
    assert pipe.recv() == "copying"
    waiting = [start()[1] for _ in range(3)]
    assert not any(pipe.poll(1.5) for pipe in waiting)
    leader.kill()
    said = [pipe.recv() for pipe in waiting]
    assert [answer[0] for answer in said] == ["done"] * 3
    assert sum(answer[2] for answer in said) == 1
    assert content(stage(source, local).directory) == content(source)
    assert list(local.rglob(".partial*")) == []


def test_a_place_that_cannot_be_used_is_said_at_once(source, local, tmp_path):
    (tmp_path / "trap").mkdir()
    (local / f"autotune-{os.getuid()}").symlink_to(tmp_path / "trap")
    with pytest.raises(BadConfig, match="is not a directory of yours"):
        stage(source, local)
    with pytest.raises(BadConfig, match="nowhere is not a directory"):
        stage(source, tmp_path / "nowhere")
    assert list((tmp_path / "trap").iterdir()) == []


def test_a_source_that_cannot_be_read_at_random_is_what_is_damaged(source, local):
    tokens = source / "train-tokens-00001.npy"
    os.truncate(tokens, tokens.stat().st_size - 2)
    with pytest.raises(BadConfig, match=r"source/train-tokens-00001\.npy") as caught:
        stage(source, local)
    assert f"autotune data verify {source}" in caught.value.next_step
    assert list(local.rglob("*.npy")) == []


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


PROFILE = """\
schema_version = 1
[train.model]
name = "m"
[train.model.config]
model_type = "bert"
[train.data]
path = "source"
"""


def test_the_trainer_stages_what_its_profile_asks_for(source, local, tmp_path):
    profile = tmp_path / "profile.toml"
    profile.write_text(PROFILE)
    environment = {"LOCAL_DISK": str(local)}
    plain, resolved, unset = (
        resolve(profile, assignments=[f"train.data.stage_to={place}"] if place else [], environment=environment)
        for place in ("", "$LOCAL_DISK/below", "/nowhere/$UNSET")
    )
    assert stage_data(plain, environment) is plain
    (local / "below").mkdir()
    staged = stage_data(resolved, environment)
    assert staged.data_dir.parent.parent == local / "below"
    assert content(staged.data_dir) == content(source)
    assert staged.config == resolved.config
    with pytest.raises(BadConfig, match=r"\$UNSET"):
        stage_data(unset, environment)

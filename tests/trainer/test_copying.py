import os
import subprocess
import sys
import threading
import time

import pytest

from tests.conftest import write_dataset
from tests.system.faults.corpora import content
from trainer.copying import copy_files, dataset_files, in_threads, seconds_per_sample
from trainer.dataset import read_manifest
from trainer.errors import BadConfig

INTERRUPTED = """\
import os, signal, sys, threading, time
from trainer.copying import in_threads
stopped = threading.Event()
kill = threading.Timer(float(sys.argv[1]), os.kill, (os.getpid(), signal.SIGINT))
kill.daemon = True
kill.start()
try:
    for _ in range(100_000):
        in_threads(lambda item: stopped.is_set() or item, range(50), 4, stop=stopped.set)
        stopped.clear()
except KeyboardInterrupt:
    sys.exit(7)
"""


def test_results_come_in_the_order_of_the_items_whoever_was_first():
    def slow_first(item: int) -> int:
        time.sleep(0.02 if item == 0 else 0)
        return item * item

    stopped: list[bool] = []
    squares = in_threads(slow_first, range(20), 4, stop=lambda: stopped.append(True))
    assert (squares, stopped) == ([item * item for item in range(20)], [])
    assert in_threads(slow_first, [], 4) == []


def test_several_work_at_once_and_no_more_than_asked_for():
    barrier = threading.Barrier(3, timeout=30)
    names = in_threads(lambda _: (barrier.wait(), threading.current_thread().name)[1], range(9), 3)
    assert len(set(names)) == 3


def test_the_first_error_is_raised_others_are_asked_to_stop_and_nothing_more_is_begun():
    stop = threading.Event()
    begun: list[int] = []

    def work(item: int) -> None:
        begun.append(item)
        if item == 1:
            raise ValueError("one")
        assert stop.wait(30)

    with pytest.raises(ValueError, match="one"):
        in_threads(work, range(100), 2, stop=stop.set)
    assert set(begun) <= {0, 1, 2}
    assert not [one for one in threading.enumerate() if one.name.startswith("ThreadPoolExecutor")]


@pytest.mark.parametrize("moment_s", [0.1, 0.2, 0.3])
def test_ctrl_c_at_any_moment_ends_it(moment_s):
    done = subprocess.run([sys.executable, "-c", INTERRUPTED, str(moment_s)], timeout=60, check=False)
    assert done.returncode == 7


SAMPLES = [[5 + number % 90] * (1 + number % 40) for number in range(2000)]


@pytest.fixture
def source(tmp_path):
    return write_dataset(tmp_path / "source", SAMPLES, shards=3, validation=[[7, 8]])


@pytest.fixture
def target(tmp_path):
    (tmp_path / "target").mkdir()
    return tmp_path / "target"


def copy(source, target, change=lambda: None, update=lambda done, total, note: None):
    """Copy, and change the source once all is listed and the first bytes are copied."""
    manifest = read_manifest(source)
    files = dataset_files(source, manifest)
    change()
    return copy_files(files, source, target, manifest, update)


def test_all_files_of_both_splits_and_the_notes_beside_them_are_copied_and_counted(source, target):
    (source / "rejects.jsonl").write_text("{}\n")
    (source / "prepared.json").write_text("{}\n")
    (source / "of-somebody-else").write_text("no part of the dataset")
    told = []
    figures = copy(source, target, update=lambda done, total, note: told.append((done, total, note)))
    assert [done for done, _, _ in told] == sorted(done for done, _, _ in told)
    assert told[-1][:2] == (figures.size_bytes, figures.size_bytes)
    assert told[-1][2].endswith(" MiB/s")
    (source / "of-somebody-else").unlink()
    assert content(target) == content(source)
    assert figures.size_bytes == sum(len(file) for file in content(source).values())
    assert min(figures.read_s, figures.write_s, figures.seconds) > 0


@pytest.mark.parametrize("name", ["train-tokens-00002.npy", "validation-offsets-00000.npy", "tokenizer.json"])
def test_a_file_that_is_not_what_the_manifest_says_is_named(source, target, name):
    raw = bytearray((source / name).read_bytes())
    raw[-1] ^= 1
    (source / name).write_bytes(raw)
    with pytest.raises(BadConfig, match=rf"source/{name}: its SHA-256 is") as caught:
        copy(source, target)
    assert caught.value.next_step.endswith(f"autotune data verify {source}")


def _lead_away(path):
    path.rename(path.parent.parent / "outside")
    path.symlink_to(path.parent.parent / "outside")


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("rejects.jsonl", lambda path: path.write_text(path.read_text() + "{}\n"), "became longer"),
        ("rejects.jsonl", lambda path: path.write_text(""), "became shorter"),
        ("rejects.jsonl", lambda path: path.unlink(), "No such file"),
        ("manifest.json", lambda path: path.write_text(path.read_text().replace('"rejected": 0', '"rejected": 1')),
         "changed while it was copied"),
        ("tokenizer.json", _lead_away, "Too many levels of symbolic links"),
    ],
)  # fmt: skip
def test_a_source_that_changes_while_it_is_copied_is_noticed(source, target, name, change, said):
    (source / "rejects.jsonl").write_text("{}\n" * 20)
    with pytest.raises(BadConfig, match=rf"source/{name}: {said}"):
        copy(source, target, lambda: change(source / name))


@pytest.mark.parametrize(
    ("put", "said"),
    [
        (lambda path: None, "No such file"),
        (lambda path: path.symlink_to(path.parent.parent / "outside"), "is not a regular file"),
        (os.mkfifo, "is not a regular file"),
    ],
)
def test_what_is_not_a_file_is_not_read(source, target, put, said):
    offsets = source / "train-offsets-00000.npy"
    offsets.rename(source.parent / "outside")
    put(offsets)
    with pytest.raises(BadConfig, match=rf"train-offsets-00000\.npy: {said}"):
        copy(source, target)
    assert list(target.iterdir()) == []


def test_the_time_of_a_sample_is_measured_where_there_is_one_without_changing_anything(source, tmp_path):
    before = content(source)
    assert seconds_per_sample(source) > 0
    assert content(source) == before
    assert seconds_per_sample(write_dataset(tmp_path / "empty", [], shards=0, validation=[[7]])) is None

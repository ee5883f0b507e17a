import stat
import subprocess
import sys

import pytest

from autotune.corpus.workplace import Workplace, open_workplace, other_workplaces, workplace_path
from autotune.errors import BadInput


def test_it_is_private_and_stays_when_the_work_fails(tmp_path):
    with pytest.raises(RuntimeError), open_workplace(tmp_path / "data", "k1") as workplace:
        raise RuntimeError
    assert workplace.path == workplace_path(tmp_path / "data", "k1")
    assert stat.S_IMODE(workplace.path.stat().st_mode) == 0o700


def test_a_task_counts_only_when_it_is_finished(tmp_path):
    workplace = Workplace(path=tmp_path)
    with pytest.raises(RuntimeError), workplace.unfinished("stage", "one") as task:
        (task.directory / "file").write_text("half")
        raise RuntimeError
    assert workplace.receipt("stage", "one") is None
    assert list((tmp_path / "stage").iterdir()) == []
    with workplace.unfinished("stage", "one") as task:
        (task.directory / "file").write_text("whole")
        task.finish({"n": 1})
    assert workplace.receipt("stage", "one") == {"n": 1}
    assert (workplace.directory("stage", "one") / "file").read_text() == "whole"


def test_a_task_that_is_done_twice_leaves_one_result(tmp_path):
    workplace = Workplace(path=tmp_path)
    with workplace.unfinished("stage", "one") as first, workplace.unfinished("stage", "one") as second:
        first.finish({"n": 1})
        second.finish({"n": 1})
    assert [path.name for path in (tmp_path / "stage").iterdir()] == ["one"]


def test_what_killed_processes_left_is_removed_at_the_start(tmp_path):
    with open_workplace(tmp_path / "data", "k") as workplace:
        (workplace.path / "stage" / ".unfinished-one-abc").mkdir(parents=True)
        (workplace.path / "stage" / "two").mkdir()
    with open_workplace(tmp_path / "data", "k"):
        assert [path.name for path in (workplace.path / "stage").iterdir()] == ["two"]


def test_two_processes_cannot_take_it_and_a_killed_one_lets_go(tmp_path):
    code = (
        "import sys, os, signal; from pathlib import Path; from autotune.corpus.workplace import open_workplace\n"
        "with open_workplace(Path(sys.argv[1]), 'k'):\n    print('taken', flush=True); signal.pause()"
    )
    other = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "data")], stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None
    assert other.stdout.readline() == "taken\n"
    with pytest.raises(BadInput, match="another process"), open_workplace(tmp_path / "data", "k"):
        pytest.fail("it was taken twice")
    other.kill()
    other.wait()
    other.stdout.close()
    with open_workplace(tmp_path / "data", "k"):
        pass


def test_other_unfinished_work_of_the_same_place_is_found(tmp_path):
    for name in (".da*ta.k1.partial", ".da*ta.k2.partial", ".daXta.k3.partial"):
        (tmp_path / name).mkdir()
    (tmp_path / ".da*ta.k2.partial" / "file").write_bytes(bytes(10))
    assert other_workplaces(tmp_path / "da*ta", "k1") == [(tmp_path / ".da*ta.k2.partial", 10)]
    assert (tmp_path / ".da*ta.k2.partial" / "file").exists()

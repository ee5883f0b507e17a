"""The script of a job starts what a command inside of a container asks for: bash is real, srun is a few lines."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from autotune.cluster.batch import MeasureJob, Shape, measure_script, read_template
from autotune.cluster.site import SiteFile

SRUN = """#!/bin/sh
for word; do
    case $word in
        --*) echo "$word" ;;
        *) break ;;
    esac
    shift
done
exec "$@"
"""
ASK = "import sys; from autotune.cluster.starter import start_outside as ask; from pathlib import Path; import os; "


@pytest.fixture
def job(tmp_path):
    """Runs a Python line as the measuring command of a job of two nodes."""
    (tmp_path / "jobs").mkdir()
    (tmp_path / "bin").mkdir()
    srun = tmp_path / "bin" / "srun"
    srun.write_text(SRUN)
    srun.chmod(0o755)
    environment = os.environ | {
        "PATH": f"{srun.parent}:{os.environ['PATH']}", "PYTHONUNBUFFERED": "1", "SLURMD_NODENAME": "n4"
    }  # fmt: skip

    def start(line: str) -> subprocess.Popen[str]:
        site = SiteFile(command_prefix="env -u NOTHING")
        asked = MeasureJob(
            name="network", purpose="Tests.", command=[sys.executable, "-c", ASK + line], shape=Shape(nodes=2, cpus=3),
            log=Path("jobs/network-%j.log"), with_srun=False,
        )  # fmt: skip
        (tmp_path / "job.sh").write_text(measure_script(asked, site, read_template("measure", site, None)))
        return subprocess.Popen(
            ["bash", "job.sh"],
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    return start


def started(place: Path) -> int:
    """Wait until what was asked for runs; its process."""
    deadline_s = time.monotonic() + 20
    while not (place / "pid").is_file() or not (place / "pid").read_text():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    return int((place / "pid").read_text())


DIRECTORY = "Path(os.environ['AUTOTUNE_STARTER'])"


def test_what_is_asked_for_runs_under_srun_one_after_the_other_and_its_words_and_codes_come_back(job, tmp_path):
    process = job(
        f"codes = [ask({DIRECTORY}, n, f'echo said {{n}}; exit {{n}}') for n in (1, 2)]; print(codes); sys.exit(9)"
    )
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 9, said
    for nodes in (1, 2):
        assert f"--nodes={nodes}\n--ntasks={nodes}\n--ntasks-per-node=1\n--nodelist=n4\n" in said
    assert "--cpus-per-task=3\n" in said
    assert said.index("said 1") < said.index("said 2")
    assert "[1, 2]" in said
    assert list((tmp_path / "jobs").iterdir()) == []


def test_a_term_to_who_asked_ends_what_was_started(job, tmp_path):
    process = job(f"print('asked', os.getpid()); print('code', ask({DIRECTORY}, 2, 'echo $$ > pid; exec sleep 100'))")
    assert process.stdout is not None
    asker = int(process.stdout.readline().split()[1])
    started(tmp_path)
    os.kill(asker, signal.SIGTERM)
    said, _ = process.communicate(timeout=30)
    assert "code 143" in said
    assert process.returncode == 0


def test_what_was_started_does_not_outlive_who_asked(job, tmp_path):
    process = job(f"print('asked', os.getpid()); ask({DIRECTORY}, 2, 'echo $$ > pid; exec sleep 100')")
    assert process.stdout is not None
    asker = int(process.stdout.readline().split()[1])
    pid = started(tmp_path)
    os.kill(asker, signal.SIGKILL)
    process.communicate(timeout=30)
    assert process.returncode == 137
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)

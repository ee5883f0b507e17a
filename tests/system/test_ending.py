"""Whatever a measurement has started ends with it, also if it is killed: real torchrun, on this host and on several."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from autotune.errors import MachineLacks
from autotune.process import start
from tests.simulators.hosts import check_namespaces, hosts
from tests.system.faults.kills import until

pytestmark = pytest.mark.system
MEASURING = """
import importlib.metadata, pathlib, sys, time
from autotune.cluster.torchrun import on_this_node
from autotune.measure.together import TogetherMachine
from tests.simulators.hosts import hosts, together
scratch = pathlib.Path(sys.argv[1])
if sys.argv[2] == "hosts":
    with hosts(2, 10**9, name="ending") as found, together(found, scratch) as machine:
        machine.start()
        print("started", flush=True)
        time.sleep(600)
with TogetherMachine(on_this_node(2, importlib.metadata.version("torch")), "cpu", scratch) as machine:
    machine.start()
    print("started", flush=True)
    time.sleep(600)
"""
END_S = 60.0


def running(words: str) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if words in line:
                found.append(line)
    return found


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("where", ["here", "here, while ranks start", pytest.param("hosts", marks=pytest.mark.slow)])
def test_nothing_outlives_a_measurement(tmp_path, where, number):
    if where == "hosts":
        try:
            check_namespaces()
        except MachineLacks as error:
            pytest.skip(f"no network namespaces here: {error.message}")
    scratch = str(tmp_path / "scratch")
    command = [sys.executable, "-c", MEASURING, scratch, where]
    process = start(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(Path.cwd())})
    if where.endswith("start"):
        while len(running(scratch)) < 3:
            assert process.poll() is None
    else:
        assert process.stdout.readline() == "started\n"
        assert len(running(scratch)) >= 4  # this one, at least one torchrun, and two ranks
    process.send_signal(number)
    process.wait(timeout=END_S)
    until(lambda: not running(scratch), "ended", END_S, lambda: str(running(scratch)))
    if where == "hosts":  # names of networks are all that SIGKILL leaves: whoever comes next removes them
        with hosts(2, 10**9, name="ending"):
            pass

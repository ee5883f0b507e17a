"""Kill a command at random moments, run it again, and see that it comes to the same end."""

import contextlib
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from autotune.process import start as start_child


def kill_and_repeat(
    command: Sequence[str],
    *,
    points: int,
    seed: int,
    span_s: float,
    signal_number: int = signal.SIGKILL,
) -> list[bool]:
    """Start a command, kill it at a random moment up to ``span_s``, and start it again, so many times; then finish it.

    It must go on from where it was. Returns of each start whether it was killed, or had finished first.
    """
    rng = random.Random(seed)
    rounds = []
    for _ in range(points):
        after_s = rng.uniform(0, span_s)
        process = start(command)
        children: list[psutil.Process] = []
        deadline_s = time.monotonic() + after_s
        while time.monotonic() < deadline_s and process.poll() is None:
            children = children_of(process.pid) or children
            time.sleep(0.01)
        finished = process.poll() is not None
        if not finished:
            process.send_signal(signal_number)
        process.wait(60)
        _, alive = psutil.wait_procs(children, timeout=30)
        assert not alive, f"left behind: {alive}"
        rounds.append(not finished)
        if finished:
            return rounds
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    return rounds


def kill_children_and_repeat(command: Sequence[str], *, points: int, seed: int, longest_pause_s: float) -> int:
    """Kill random processes that a command has started, while it lives on; repeat it until it succeeds.

    It may end with an error that says why, and must go on from where it was. Moments are up to ``longest_pause_s``
    apart. Returns how many processes were killed, at most ``points``.
    """
    rng = random.Random(seed)
    kills = 0
    while True:
        process = start_child(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        assert process.stderr is not None
        while process.poll() is None:
            time.sleep(rng.uniform(0, longest_pause_s))
            with contextlib.suppress(psutil.NoSuchProcess):
                # Python's own resource tracker does no work, and complains of itself when it is killed.
                victims = [c for c in children_of(process.pid) if "resource_tracker" not in " ".join(c.cmdline())]
                if kills < points and victims:
                    rng.choice(victims).kill()
                    kills += 1
        told = process.stderr.read()
        process.stderr.close()
        assert "Traceback" not in told, told
        if process.returncode == 0:
            return kills
        assert "next: " in told, told


def start(command: Sequence[str]) -> "subprocess.Popen[bytes]":
    return start_child(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)


def until(true: Callable[[], object], what: str, timeout_s: float = 60.0, tell: Callable[[], str] = lambda: "") -> None:
    deadline_s = time.monotonic() + timeout_s
    while not true():
        if time.monotonic() > deadline_s:
            raise AssertionError(f"{what}: not within {timeout_s:g} s\n{tell()}")
        time.sleep(0.05)


def children_of(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def kill_tree(process: "subprocess.Popen[bytes]") -> None:
    """Kill a command and all that it has started, whatever sessions those are in, and see that they are gone."""
    try:
        launcher = psutil.Process(process.pid)
        launcher.suspend()  # so that it neither notices nor starts more
        tree = [*children_of(process.pid), launcher]
    except psutil.NoSuchProcess:
        tree = []
    for one in tree:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()
    process.wait(60)
    _, alive = psutil.wait_procs(tree, timeout=30)
    assert not alive, f"left behind: {alive}"


def mount_tmpfs(place: Path, size_bytes: int, *, remount: bool = False) -> None:
    """A file system of its own, of so many bytes."""
    options = f"size={size_bytes}" + (",remount" if remount else "")
    place.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)], check=True)


def unmount(place: Path) -> None:
    subprocess.run(["umount", "-l", str(place)], check=True)


def may_mount() -> bool:
    return os.geteuid() == 0

"""Processes that are started to be killed, and small disks."""

import contextlib
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from autotune.base.process import start_child


def start(command: Sequence[str]) -> "subprocess.Popen[bytes]":
    return start_child(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def until(
    is_true: Callable[[], object],
    event: str,
    timeout_s: float = 60.0,
    tell: Callable[[], str] = lambda: "",
) -> None:
    """Wait for an event; fail after the timeout, with what ``tell`` returns."""
    deadline_s = time.monotonic() + timeout_s
    while not is_true():
        if time.monotonic() > deadline_s:
            raise AssertionError(f"{event}: not within {timeout_s:g} s\n{tell()}")
        time.sleep(0.05)


def children_of(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def kill_tree(process: "subprocess.Popen[bytes]") -> None:
    """Kill a command and all that it has started, in any session; wait for the end."""
    try:
        launcher = psutil.Process(process.pid)
        # Suspended, it neither notices the kills nor starts more processes.
        launcher.suspend()
        tree = [*children_of(process.pid), launcher]
    except psutil.NoSuchProcess:
        tree = []
    for member in tree:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    process.wait(60)
    _, alive = psutil.wait_procs(tree, timeout=30)
    assert not alive, f"left behind: {alive}"


@contextlib.contextmanager
def small_disk(directory: Path, size_bytes: int) -> Iterator[Path]:
    """Mount a file system of this size on a directory."""
    directory.mkdir(parents=True, exist_ok=True)
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(directory)],
        check=True,
    )
    try:
        yield directory
    finally:
        subprocess.run(["umount", "-l", str(directory)], check=True)


def resize(disk: Path, size_bytes: int) -> None:
    subprocess.run(["mount", "-o", f"remount,size={size_bytes}", str(disk)], check=True)


def fill_up(filler: Path) -> None:
    """Write a file until its disk is full."""
    with (
        filler.open("wb", buffering=0) as file,
        pytest.raises(OSError, match="No space left"),
    ):
        while True:
            file.write(bytes(2**16))


def may_mount() -> bool:
    return os.geteuid() == 0

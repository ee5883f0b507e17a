import ctypes
import subprocess
import sys
from unittest.mock import Mock

import pytest

from autotune.machine import torch_gpus


@pytest.fixture
def python(tmp_path, monkeypatch):
    """Return a function that replaces Python by a script, where there is a driver."""
    monkeypatch.setattr(ctypes, "CDLL", lambda name: None)

    def write(script: str) -> None:
        (tmp_path / "python").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "python").chmod(0o700)
        monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))

    return write


@pytest.mark.parametrize(
    ("script", "names"),
    [
        ("echo NVIDIA H200; echo NVIDIA L4", ("NVIDIA H200", "NVIDIA L4")),
        ("echo", ()),
        ("echo half; exit 1", ()),
        ("sleep 9", ()),
    ],
)
def test_gpus_are_those_a_child_names(python, monkeypatch, script, names):
    monkeypatch.setattr(torch_gpus, "TORCH_WITHIN_S", 0.5)
    python(script)
    assert torch_gpus.gpus_of_torch() == names


def test_no_driver_starts_no_child(python, monkeypatch):
    child = subprocess.run(
        [sys.executable, "-c", torch_gpus.PRINT_GPU_NAMES],
        capture_output=True,
        text=True,
        check=True,
    )
    assert child.stdout.strip() == ""
    python("echo NVIDIA H200")
    monkeypatch.setattr(ctypes, "CDLL", Mock(side_effect=OSError))
    assert torch_gpus.gpus_of_torch() == ()

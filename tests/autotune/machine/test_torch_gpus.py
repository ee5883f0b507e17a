import ctypes
import subprocess
import sys
from unittest.mock import Mock

import pytest

from autotune.machine import nvml


@pytest.fixture
def python(tmp_path, monkeypatch):
    """A function that puts a script in Python's place, on a machine that has a
    driver."""
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
def test_the_gpus_are_those_that_a_child_names(python, monkeypatch, script, names):
    monkeypatch.setattr(nvml, "TORCH_WITHIN_S", 0.5)
    python(script)
    assert nvml.gpus_of_torch() == names


def test_without_a_driver_no_child_is_started_and_a_cpu_build_of_torch_names_none_without_an_error(
    python, monkeypatch
):
    child = subprocess.run(
        [sys.executable, "-c", nvml.TORCHS_GPUS],
        capture_output=True,
        text=True,
        check=True,
    )
    assert child.stdout.strip() == ""
    python("echo NVIDIA H200")
    monkeypatch.setattr(ctypes, "CDLL", Mock(side_effect=OSError))
    assert nvml.gpus_of_torch() == ()

"""What the contract suite cannot show: no driver, no package. The translation of errors and units is in contracts/."""

import ctypes
import sys

import pytest

from autotune.core.hardware import Unavailable
from autotune.measure.nvml import NvmlMonitor


def test_without_the_driver_library_the_reason_is_said():
    try:
        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        monitor = NvmlMonitor()
    else:
        pytest.skip("this machine has the driver's library")
    assert monitor.devices() == ()
    assert monitor.unreadable() == ()
    assert "no NVIDIA driver is installed" in monitor.why_absent()
    assert monitor.used_bytes("GPU-x") == Unavailable(reason=monitor.why_absent())
    monitor.close()


def test_without_the_package_the_reason_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monitor = NvmlMonitor()
    assert "nvidia-ml-py" in monitor.why_absent()
    assert "nvidia-ml-py" in monitor.gpm("GPU-x").reason
    monitor.close()

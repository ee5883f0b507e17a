import sys
from types import SimpleNamespace

import pytest
import torch

from trainer.run_header import gpu_driver_version

GPU_RANK = SimpleNamespace(device=torch.device("cuda", 0))
CPU_RANK = SimpleNamespace(device=torch.device("cpu"))


class FakeNvml:
    """The module ``pynvml``; without a version, NVML fails to report it."""

    class NVMLError(Exception):
        """Error of NVML."""

    def __init__(self, version: str | None) -> None:
        self._version = version

    def nvmlInit(self) -> None:
        """Do nothing."""

    def nvmlSystemGetDriverVersion(self) -> str:
        if self._version is None:
            raise self.NVMLError
        return self._version


@pytest.mark.parametrize(
    "version",
    [
        pytest.param("580.95.05", id="known"),
        pytest.param("0.0 (nullgpu)", id="without a GPU"),
        pytest.param(None, id="not reported"),
    ],
)
def test_gpu_driver_version_comes_from_nvml(monkeypatch, version):
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(version))
    assert gpu_driver_version(GPU_RANK) == version


def test_gpu_driver_version_is_unknown_without_nvml(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)  # its import fails
    assert gpu_driver_version(GPU_RANK) is None


def test_cpu_has_no_driver_version():
    assert gpu_driver_version(CPU_RANK) is None

"""The GPUs that PyTorch sees, asked of a child process: this one never imports it, and never starts CUDA."""

import ctypes
import subprocess
import sys

_DRIVER = "libcuda.so.1"
_TIMEOUT_S = 120.0
_CHILD = """
import torch
print(*(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())), sep="\\n")
"""


def gpus_of_torch() -> tuple[str, ...]:
    """Return the names of the GPUs that PyTorch sees here; empty without a driver or without PyTorch."""
    try:
        ctypes.CDLL(_DRIVER)  # without it there is nothing to see, and no need to wait for PyTorch
    except OSError:
        return ()
    try:
        child = subprocess.run(
            [sys.executable, "-c", _CHILD],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return ()
    return tuple(child.stdout.split("\n")[:-1]) if child.returncode == 0 and child.stdout.strip() else ()

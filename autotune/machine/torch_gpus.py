"""The GPUs that PyTorch sees, for a comparison with those of NVML."""

import ctypes
import functools
import os
import subprocess
import sys

from autotune.base.process import end_with_parent

TORCH_WITHIN_S = 120.0
TORCHS_GPUS = """
import torch
for index in range(torch.cuda.device_count()):
    print(torch.cuda.get_device_name(index))
"""


def gpus_of_torch() -> tuple[str, ...]:
    """Return the names of the GPUs that PyTorch sees in a child process.

    It is empty without a driver or PyTorch.
    """
    try:
        ctypes.CDLL("libcuda.so.1")  # without a driver, do not wait for PyTorch
    except OSError:
        return ()
    try:
        child = subprocess.run(
            [sys.executable, "-P", "-c", TORCHS_GPUS],
            capture_output=True,
            text=True,
            timeout=TORCH_WITHIN_S,
            check=False,
            preexec_fn=functools.partial(end_with_parent, os.getpid()),
        )
    except subprocess.TimeoutExpired:
        return ()
    return (
        tuple(child.stdout.split("\n")[:-1])
        if child.returncode == 0 and child.stdout.strip()
        else ()
    )

"""The GPUs that PyTorch sees, for a comparison with those of NVML."""

import ctypes
import functools
import os
import subprocess
import sys

from autotune.base.process import end_with_parent

TORCH_WITHIN_S = 120.0
"""Longest wait for PyTorch, in seconds."""
PRINT_GPU_NAMES = """
import torch
for index in range(torch.cuda.device_count()):
    print(torch.cuda.get_device_name(index))
"""
"""Program that prints the name of each GPU on its own line."""


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
            [sys.executable, "-P", "-c", PRINT_GPU_NAMES],
            capture_output=True,
            text=True,
            timeout=TORCH_WITHIN_S,
            check=False,
            preexec_fn=functools.partial(end_with_parent, os.getpid()),
        )
    except subprocess.TimeoutExpired:
        return ()
    if child.returncode != 0 or not child.stdout.strip():
        return ()
    # Not ``splitlines``: only a newline ends a name.
    return tuple(child.stdout.removesuffix("\n").split("\n"))

"""Kernels on a CPU, in Triton's interpreter; ``make test-kernels`` runs these tests.

A process interprets kernels only if it starts with ``TRITON_INTERPRET=1``. Unlike a
GPU, the interpreter truncates numbers that it stores in bf16, instead of rounding them.
"""

import os
from importlib.util import find_spec

import numpy as np
import pytest


@pytest.fixture(autouse=True, scope="session")
def interpreter() -> None:
    if os.environ.get("TRITON_INTERPRET") != "1" or find_spec("triton") is None:
        pytest.skip("requires Triton's interpreter; next: make test-kernels")
    _multiply_bf16()


def _multiply_bf16() -> None:
    """Let the interpreter multiply matrices in bf16, whose bits it holds as integers.

    Its own function multiplies these bits.
    """
    from triton import language as tl
    from triton.runtime import interpreter

    original = interpreter.InterpreterBuilder.create_dot

    def widened(matrix):
        if matrix.dtype.scalar != tl.bfloat16:
            return matrix
        bits = matrix.data.astype(np.uint32) << 16
        return interpreter.TensorHandle(bits.view(np.float32), tl.float32)

    def create_dot(builder, first, second, *others):
        return original(builder, widened(first), widened(second), *others)

    interpreter.InterpreterBuilder.create_dot = create_dot

"""Kernels on a CPU, in Triton's interpreter; ``make test-kernels`` runs these tests.

A process interprets kernels only if it starts with ``TRITON_INTERPRET=1``. Unlike a
GPU, the interpreter truncates numbers that it stores in bf16, instead of rounding them.
"""

import os
from importlib.util import find_spec

import pytest


@pytest.fixture(autouse=True, scope="session")
def interpreter() -> None:
    if os.environ.get("TRITON_INTERPRET") != "1" or find_spec("triton") is None:
        pytest.skip("requires Triton's interpreter; next: make test-kernels")

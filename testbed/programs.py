"""Programs that a benchmark or a simulator runs to their end."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from autotune.base.process import start_child

TORCHAO = Path(sys.prefix) / "fp8"
"""Folder of torchao, which is not installed otherwise: transformers would import it in
every process."""

FLASH_ATTENTION_4_SOURCE = Path(sys.prefix) / "fa4/flash_attn/cute/interface.py"
"""Source of FlashAttention 4, without the libraries that it needs."""
FLASH_ATTENTION_4 = Path(__file__).parent / "nullgpu/flash_attention_4"
"""Folder of a stand-in for FlashAttention 4 on pretended GPUs."""


class CannotMeasure(Exception):
    """A program that was to be measured did not run to its end."""


def run_program(
    command: Sequence[str], *, timeout_s: float = 600.0, **options: Any
) -> str:
    """Run a program to its end, and return its output.

    The program ends with this process.

    Raises:
        CannotMeasure: If it cannot be started, fails or takes too long.
    """
    shown = " ".join(["python", *command[1:4]])
    pipes: dict[str, Any] = {
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "text": True,
        "encoding": "utf-8",
    }
    try:
        with start_child(command, **pipes | options) as process:
            try:
                out, errors = process.communicate(timeout=timeout_s)
            except BaseException:
                process.kill()
                raise
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotMeasure(f"{shown}: {error}") from error
    if process.returncode:
        raise CannotMeasure(
            f"{shown} ended with code {process.returncode}:\n{(errors or '')[-2000:]}"
        )
    return str(out)

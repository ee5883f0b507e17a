"""Check that FlashAttention 4 computes what this trainer needs, once on a machine.

Micro-batches have empty documents at their end, and in the sparse last layer documents
without queries. The backward pass of FlashAttention 3 hung on those (flash-attention
issue 1254), and a kernel that hangs cannot be interrupted. So another process computes
small examples first.
"""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import torch

from trainer.config.packages import flash_attention_4_version
from trainer.formats.errors import BadConfig

CHECK_TIMEOUT_S = 300.0
"""Time for the check in seconds: imports and compilation took 40 s on two CPU cores."""
_NEXT_STEP = "Use --set train.attention=auto"


def check_flash_attention_4(device: torch.device, head_dimensions: int) -> None:
    """Check FlashAttention 4, unless this machine has passed the check before.

    Args:
        device: GPU of this rank.
        head_dimensions: Dimensions of a head of the model.

    Raises:
        BadConfig: If it hangs, fails or computes other results than expected.
    """
    passed = file_of_passed_check(device, head_dimensions)
    if passed.exists():
        return
    command = [sys.executable, "-m", "trainer.model.flash_attention_examples"]
    try:
        process = subprocess.run(
            [*command, str(device), str(head_dimensions)],
            capture_output=True,
            text=True,
            timeout=CHECK_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise BadConfig(
            "FlashAttention 4 does not finish on this GPU: a small example was still"
            f" running after {CHECK_TIMEOUT_S:.0f} s",
            next_step=_NEXT_STEP,
        ) from error
    if process.returncode != 0:
        last_lines = "\n".join(process.stderr.strip().splitlines()[-5:])
        raise BadConfig(
            f"FlashAttention 4 cannot be used on this GPU: {last_lines}",
            next_step=_NEXT_STEP,
        )
    # Without the file, the next training checks again.
    with contextlib.suppress(OSError):
        passed.parent.mkdir(parents=True, exist_ok=True)
        passed.touch()


def file_of_passed_check(device: torch.device, head_dimensions: int) -> Path:
    """Return the path of the file that exists if the check has passed.

    Its name holds everything that the results depend on.
    """
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    facts = {
        "flash-attn-4": flash_attention_4_version(),
        "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name(device),
        "head_dimensions": head_dimensions,
    }
    name = "-".join(
        "".join(letter if letter.isalnum() else "_" for letter in str(fact))
        for fact in facts.values()
    )
    return root / "encoder-autotune" / f"flash-attention-4-{name}.passed"

"""How much of everything the GPU check does: in full on a GPU, or tiny, to try the check itself anywhere."""

from dataclasses import dataclass, replace
from typing import Literal

from trainer.config import Precision

H100_NVL_TOTAL_BYTES = 95_830 * 2**20
"""What NVML calls the total of an H100 NVL, sold as 94 GB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """One set of sizes."""

    name: Literal["full", "tiny"]
    matmul_size: int
    matmul_dtype: Literal["bfloat16", "float32"]
    copy_bytes: int
    ceiling_s: float
    idle_s: float
    load_s: float
    settle_s: float
    """A driver's reading covers up to a second before it, so readings begin that much after the load."""
    gpm_window_s: float
    model: str
    seq_length_tokens: int
    precision: Precision
    vocab_size: int
    probe_budget_bytes: int | None
    """None: the whole card, and an H100 NVL's memory where the card has more."""
    max_rows: int
    train_rows: int
    train_steps: int


FULL = Sizes(
    name="full",
    matmul_size=8192,
    matmul_dtype="bfloat16",
    copy_bytes=2**30,
    ceiling_s=10.0,
    idle_s=6.0,
    load_s=12.0,
    settle_s=1.5,
    gpm_window_s=0.5,
    model="bert-120m",
    seq_length_tokens=512,
    precision="bf16",
    vocab_size=30_522,
    probe_budget_bytes=None,
    max_rows=16_384,
    train_rows=64,
    train_steps=60,
)

TINY_ON_CPU = Sizes(
    name="tiny",
    matmul_size=256,
    matmul_dtype="float32",
    copy_bytes=2**24,
    ceiling_s=0.5,
    idle_s=0.3,
    load_s=1.0,
    settle_s=0.3,
    gpm_window_s=0.2,
    model="bert-mini",
    seq_length_tokens=64,
    precision="fp32",
    vocab_size=8192,
    probe_budget_bytes=200 * 2**20,
    max_rows=64,
    train_rows=4,
    train_steps=6,
)


def sizes_for(device: Literal["cpu", "cuda"], *, tiny: bool) -> Sizes:
    """The sizes for a device."""
    if not tiny:
        return FULL
    if device == "cpu":
        return TINY_ON_CPU
    # A CUDA context and its workspaces alone take more than a tiny budget on a CPU holds.
    return replace(TINY_ON_CPU, precision="bf16", matmul_dtype="bfloat16", matmul_size=2048, probe_budget_bytes=2**31)

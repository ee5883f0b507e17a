"""How much of everything the GPU check does: in full on a GPU, or tiny, to try the check itself anywhere."""

from dataclasses import dataclass, replace
from typing import Literal

from trainer.config import Precision


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
    """Whose loader is swept, and which several ranks train."""
    seq_length_tokens: int
    precision: Precision
    vocab_size: int
    samples: int
    """Of the dataset that is made where none is given."""
    validation_samples: int
    memory_budget_bytes: int | None
    """None: the whole card, or an H100 NVL's memory where the card has more."""
    paper_budget_bytes: int | None
    """The same, for the paper-style step, whose rows are larger."""
    workers_rows: int
    window_s: float
    """Of a sweep."""
    sweep_most_s: float
    slow_most_workers: int
    """Of the slow dataset, whatever the CPUs: its workers mostly sleep."""
    tuned_models: tuple[str, ...]
    tune_most_minutes: float
    endurance_steps: int
    saved_model: str
    save_repeats: int


FULL = Sizes(
    name="full",
    matmul_size=8192,
    matmul_dtype="bfloat16",
    copy_bytes=2**30,
    ceiling_s=10.0,
    idle_s=6.0,
    load_s=10.0,
    settle_s=1.5,
    gpm_window_s=0.5,
    model="bert-120m",
    seq_length_tokens=512,
    precision="bf16",
    vocab_size=30_522,
    samples=200_000,
    validation_samples=2_000,
    memory_budget_bytes=None,
    paper_budget_bytes=None,
    workers_rows=96,
    window_s=2.0,
    sweep_most_s=240.0,
    slow_most_workers=8,
    tuned_models=("bert-120m", "bert-350m"),
    tune_most_minutes=15.0,
    endurance_steps=2_000,
    saved_model="bert-120m",
    save_repeats=5,
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
    vocab_size=4096,
    samples=2_000,
    validation_samples=256,
    memory_budget_bytes=192 * 2**20,
    paper_budget_bytes=384 * 2**20,
    workers_rows=4,
    window_s=0.4,
    sweep_most_s=6.0,
    slow_most_workers=2,
    tuned_models=("bert-mini",),
    tune_most_minutes=0.3,
    endurance_steps=30,
    saved_model="bert-mini",
    save_repeats=2,
)


def sizes_for(device: Literal["cpu", "cuda"], *, tiny: bool) -> Sizes:
    """The sizes for a device."""
    if not tiny:
        return FULL
    if device == "cpu":
        return TINY_ON_CPU
    # A CUDA context and its workspaces alone take more than a tiny budget on a CPU holds.
    return replace(
        TINY_ON_CPU,
        precision="bf16",
        matmul_dtype="bfloat16",
        matmul_size=2048,
        memory_budget_bytes=2**31,
        paper_budget_bytes=2**31,
    )

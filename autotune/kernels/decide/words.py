"""Kernels and their bounds in words. Pure."""

from autotune.base.units import format_seconds
from autotune.base.wording import format_times
from autotune.evidence.kernels import StepKernels

_WORDS = (
    ("native_layer_norm_backward", "layer-norm backward"),
    ("layer_norm_backward", "layer-norm backward"),
    ("native_layer_norm", "layer norm"),
    ("layer_norm", "layer norm"),
    ("var_mean", "layer norm"),
    ("flash_bwd", "attention backward"),
    ("flashattnbwd", "attention backward"),
    ("flash_attention_backward", "attention backward"),
    ("flash_attention_for_cpu_backward", "attention backward"),
    ("efficient_attention_backward", "attention backward"),
    ("fmha_cutlassb", "attention backward"),
    ("flash_fwd", "attention"),
    ("flashattnfwd", "attention"),
    ("flash_attention", "attention"),
    ("efficient_attention", "attention"),
    ("fmha_cutlassf", "attention"),
    ("gelu_backward", "GELU backward"),
    ("gelu", "GELU"),
    ("erf", "GELU"),
    ("nvjet", "matmul"),
    ("gemm", "matmul"),
    ("cutlass", "matmul"),
    ("aten::mm", "matmul"),
    ("aten::bmm", "matmul"),
    ("aten::addmm", "matmul"),
    ("aten::baddbmm", "matmul"),
    ("triton_tem", "matmul"),
    ("adam", "AdamW"),
    ("log_softmax", "cross-entropy"),
    ("nll_loss", "cross-entropy"),
    ("embedding", "embedding"),
    ("dropout", "dropout"),
    ("memcpy", "copy"),
    ("to_copy", "cast"),
    ("aten::cat", "concatenation"),
    ("_cat_", "concatenation"),
    ("catarray", "concatenation"),
    ("copy", "copy"),
    ("nccl", "gradient synchronisation"),
    ("sum", "sum"),
)
"""Words by a part of a kernel's name in lower case. The first one that occurs counts,
as a compiled kernel has the names of all operators that it computes."""


def kernel_words(name: str) -> str:
    """Return what a kernel computes, in a few words; its name if that is not known."""
    lower = name.lower()
    for part, words in _WORDS:
        if part in lower:
            return words
    return name


def bound_words(step: StepKernels) -> str:
    """Return how far a step is from the sum of its kernels' bounds, in words."""
    words = (
        f"a step of {format_seconds(step.step_s)}; the bounds of its kernels sum up to"
        f" {format_seconds(step.bound_s)}"
    )
    if step.bound_s:
        words += f" ({format_times(step.step_s / step.bound_s)})"
    if step.unbounded_s:
        words += (
            f"; {format_seconds(step.unbounded_s)} in kernels without a known bound"
        )
    return words

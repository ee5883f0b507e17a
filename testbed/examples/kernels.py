"""Profiled kernels for tests: a step of bert-120m at 256 sequences on an H100.

The times of the kernels are those of 2026-11-27 (torch 2.11), rounded.
"""

from autotune.evidence.confirm import ConfirmEvidence, SplitRates
from autotune.evidence.kernels import KernelTime, Roofline, StepKernels
from autotune.evidence.profile import Profile
from testbed.examples.profiles import but

H100 = Roofline(bytes_per_s=3.0e12, flops_per_s=7.2e14)
LAYER_NORM_BACKWARD = "triton_per_fused__to_copy_native_layer_norm_backward_3"
GEMM = "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NNT"


def kernel_of(
    name: str, seconds: float, bound_s: float | None, flops: float = 0.0
) -> KernelTime:
    """Return a kernel with the bytes that its bound stands for."""
    is_known = bound_s is not None
    return KernelTime(
        name=name,
        calls=12.0,
        seconds=seconds,
        bound_s=bound_s,
        flops=flops if is_known else None,
        moved_bytes=bound_s * H100.bytes_per_s if bound_s is not None else None,
    )


def step_kernels_of(*kernels: KernelTime, gaps_s: float = 0.0) -> StepKernels:
    """Return the evidence on a step that has these kernels alone.

    Args:
        kernels: Kernels of the step.
        gaps_s: Time of the step without a kernel.
    """
    kernels_s = sum(kernel.seconds for kernel in kernels)
    return StepKernels(
        micro_batch_size=256,
        micro_batches=1,
        step_s=kernels_s + gaps_s,
        kernels_s=kernels_s,
        bound_s=sum(kernel.bound_s or 0.0 for kernel in kernels),
        unbounded_s=sum(kernel.seconds for kernel in kernels if kernel.bound_s is None),
        roofline=H100,
        kernels=list(kernels),
    )


def slow_layer_norms() -> StepKernels:
    """Return a step in which layer-norm backward is far from its bound."""
    return step_kernels_of(
        kernel_of(GEMM, 0.090, 0.085, flops=6.1e13),
        kernel_of(LAYER_NORM_BACKWARD, 0.0586, 0.0126),
        kernel_of("flash_bwd_kernel", 0.025, 0.020, flops=5e12),
    )


def near_bounds() -> StepKernels:
    """Return a step that takes 6 % longer than its bounds."""
    return step_kernels_of(
        kernel_of(GEMM, 0.090, 0.085, flops=6.1e13),
        kernel_of(LAYER_NORM_BACKWARD, 0.0132, 0.0126),
        kernel_of("flash_bwd_kernel", 0.021, 0.020, flops=5e12),
    )


def with_kernels(profile: Profile, kernels: StepKernels) -> Profile:
    """Return the profile with a confirmation that profiled these kernels."""
    confirm = ConfirmEvidence(
        rows=[
            SplitRates(
                micro_batch_size=profile.train.micro_batch_size,
                gradient_accumulation_steps=1,
                micro_batches_measured=1,
                tokens_per_s=[100.0, 101.0, 99.0],
            )
        ],
        num_workers=profile.train.data.num_workers,
        local_ranks=1,
        promised_tokens_per_s=100.0,
        promised_low=97.5,
        promised_high=102.5,
        not_delivered="a test",
        kernels=kernels,
        window_s=2.0,
        windows=3,
        seconds=9.0,
    )
    return but(profile, evidence={"confirm": confirm})

"""Advice on the kernels of a step: the farthest from its bound, and dips of throughput.

A kernel's bound is the time that its bytes and FLOPs need at the rates that the device
reached.
"""

from autotune.advice.decide.context import MOST_SHARE, TrainingContext
from autotune.advice.decide.rule import rule
from autotune.base.units import format_percent
from autotune.base.wording import format_times
from autotune.evidence.advice import Advice, Gain, SettingChange, figure
from autotune.kernels.decide.bounds import distance_s, farthest_kernel, is_near_bound
from autotune.kernels.decide.words import kernel_words
from autotune.memory.decide.throughput_dip import dip_words

FAR_SHARE = 0.03
"""Least distance of a kernel from its bound, as a share of the step, that counts."""
SAVED_SHARES = (0.0, 0.5, 1.0)
"""Shares of a kernel's distance from its bound that another setting may save: least,
usual, most. Assumed."""
_SOURCE = "profiler, tune"


@rule("compute, memory")
def far_kernel(now: TrainingContext) -> Advice | None:
    """Find the kernel that is farthest from the time that its bytes and FLOPs need."""
    step = now.step_kernels
    train = now.train
    if step is None or now.subject is None or is_near_bound(step):
        return None
    kernel = farthest_kernel(step.kernels)
    distance = None if kernel is None else distance_s(kernel)
    if kernel is None or not distance or not kernel.bound_s:
        return None
    share = distance / step.step_s
    if share < FAR_SHARE:
        return None
    changes: tuple[SettingChange, ...] = ()
    words = kernel_words(kernel.name)
    if (
        train is not None
        and train.mix_order_reduction
        and words.startswith("layer-norm backward")
    ):
        changes = (SettingChange(key="mix_order_reduction", old=True, new=False),)
    # A search may have tried all there is; on a CPU, caches and threads make bounds
    # rough.
    command = now.search_command
    is_worth_a_search = command is not None and now.on_gpu
    return Advice(
        severity="warning" if is_worth_a_search or changes else "info",
        claim=(
            f"{words} takes {format_percent(kernel.seconds / step.step_s)} of the step,"
            f" {format_times(kernel.seconds / kernel.bound_s)} its bound: the largest"
            " distance of all kernels"
        ),
        evidence=(
            figure(f"time of {kernel.name}", kernel.seconds, "s", _SOURCE),
            figure("its bound", kernel.bound_s, "s", _SOURCE, known="predicted"),
            figure("step", step.step_s, "s", _SOURCE),
        ),
        gain=Gain.between(
            *(1 / (1 - min(MOST_SHARE, saved * share)) for saved in SAVED_SHARES)
        ),
        cost=_cost(now),
        changes=changes,
        command=command if is_worth_a_search else None,
        would_change="another size, whose kernels have other times per token",
    )


@rule("compute")
def throughput_dip(now: TrainingContext) -> Advice | None:
    """Find a size at which tokens/s are lower than at a smaller one."""
    probe = now.evidence.probe
    size = now.size
    if probe is None or probe.dip is None or size is None or now.subject is None:
        return None
    dip = probe.dip
    command = now.search_command
    is_used = now.split_micro_batch_size(size) == dip.larger_size
    return Advice(
        severity="warning" if is_used else "info",
        claim=dip_words(dip, now.subject),
        evidence=(
            figure(
                f"{now.rate_unit} at {dip.larger_size}, relative to {dip.smaller_size}",
                dip.ratio,
                "ratio",
                "probe",
            ),
        ),
        cost=_cost(now),
        command=command or now.probe_command(),
        would_change="other settings of the compiler, which has other kernels then",
    )


def _cost(now: TrainingContext) -> str:
    if now.search_command is not None:
        return "a search of minutes to an hour; the recipe stays"
    if now.train is None:
        return "other kernels in your code, such as those of torch.compile"
    return "other settings than those that were searched"

"""Advice on compute.

The rules look at precision, the MLM head, kernel launches, memory traffic and the
optimizer step.
"""

from typing import TypedDict

from autotune.advice.decide.bottleneck import MATTERS_SHARE
from autotune.advice.decide.context import MOST_SHARE, TrainingContext, times, without
from autotune.advice.decide.gpu_counters import IN_WINDOWS
from autotune.advice.decide.rule import rule
from autotune.base.units import format_percent
from autotune.evidence.advice import Advice, Gain, SettingChange, figure
from trainer.formats import model_config
from trainer.formats.encoder_shape import encoder_shape
from trainer.formats.gpu_peaks import matmul_format, peak_flops_per_s

PRODUCTS_SHARE = (0.65, 0.8, 0.9)
"""Share of compute in matmuls: least, usual and most; the rest moves bytes, most of
which 16 bits halve."""
REACHED_SHARE = {"tf32": (0.65, 0.8, 1.0), "fp32": (0.4, 0.55, 0.8)}
"""Share of the ratio of peaks that bf16 matmuls gain over a format: faster units are
harder to keep busy. Assumed."""
# Of the rest's time, in 16 bits: normalisation and the loss stay in 32.
OTHERS_LEFT = 0.65
LOW_MFU = 0.2
"""MFU below which it counts as low: encoders of 100 million parameters reach twice as
much with stock torch."""
LAUNCHES_LEFT, TRAFFIC_LEFT = (0.0, 0.25, 1.0), (0.25, 0.5, 1.0)
"""Shares of the waits for launches and for memory that compiling the layers leaves:
least, usual, most."""
COMPILED_GAIN = (1.0, 1.1, 1.3)
"""Speed ratio of kernel fusion besides fewer launches, from less memory traffic: least,
usual, most."""
LOG_INTERVAL_STEPS = 10
_WITHOUT_PADDING = "compute on non-padding tokens"
_COMPILE = (SettingChange(key="compile", old=False, new=True),)
_COST_OF_COMPILING = (
    "minutes at the start of every run, different rounding, and another probe of the"
    " micro-batch"
)


class _Compilation(TypedDict):
    """Cost of compiling the model, and the setting or command to do so."""

    cost: str
    changes: tuple[SettingChange, ...]
    command: str | None


def _compilation(now: TrainingContext) -> _Compilation:
    if now.train is not None:
        return {"cost": _COST_OF_COMPILING, "changes": _COMPILE, "command": None}
    return {
        "cost": f"torch.compile in your code: {_COST_OF_COMPILING}",
        "changes": (),
        "command": now.probe_command(),
    }


@rule("compute, memory")
def full_precision(now: TrainingContext) -> Advice | None:
    """Find 32-bit matmuls on a GPU with Tensor Cores for 16 bits."""
    train, gpu = now.train, now.gpu_name
    if (
        train is None
        or train.device != "cuda"
        or train.precision != "fp32"
        or gpu is None
    ):
        return None
    now_in = matmul_format(train.precision, tf32=train.tf32)
    fast, slow = peak_flops_per_s(gpu, "bf16"), peak_flops_per_s(gpu, now_in)
    if fast is None or slow is None:
        return None
    share = 0.9 if now.bottleneck is None else now.share("compute", "padding", "memory")
    ratios = [
        1
        / (
            1
            - share
            + share
            * ((1 - matmuls) * OTHERS_LEFT + matmuls / max(1.0, reached * fast / slow))
        )
        for matmuls, reached in zip(PRODUCTS_SHARE, REACHED_SHARE[now_in], strict=True)
    ]
    return Advice(
        claim=(
            f"matmuls run in {now_in}: {gpu} is {fast / slow:.1f} times as fast in bf16"
        ),
        evidence=(
            figure(
                "peak in bf16", fast, "FLOP/s", "NVIDIA's data sheet", known="assumed"
            ),
            figure(
                f"peak in {now_in}",
                slow,
                "FLOP/s",
                "NVIDIA's data sheet",
                known="assumed",
            ),
        ),
        gain=now.predicted_gain("precision") or Gain.between(*ratios),
        cost=(
            "matmul inputs are rounded to 8 bits of mantissa; weights, sums and the"
            " optimizer stay in fp32; activations take less memory, so probe the"
            " micro-batch again"
        ),
        changes=(SettingChange(key="precision", old="fp32", new="bf16"),),
        command=now.probe_command(precision="bf16"),
        would_change=(
            "a step that mostly waits for data or gradients, which faster matmuls"
            " cannot shorten"
        ),
    )


@rule()
def half_precision(now: TrainingContext) -> Advice | None:
    """Find fp16, whose largest number is 65,504, although bf16 is available."""
    if (
        now.train is None
        or now.train.device != "cuda"
        or now.train.parallel.gradient_dtype != "fp16"
    ):
        return None
    return Advice(
        claim=(
            "gradients are synchronised in fp16, which overflows above 65,504 and"
            " underflows below 6e-8; bf16 is as fast and has the range of fp32"
        ),
        evidence=(
            figure(
                "largest number of fp16",
                65504,
                "count",
                "IEEE 754 binary16",
                known="assumed",
            ),
        ),
        cost="a change of recipe: bf16 has 8 bits of mantissa, fp16 has 11",
        changes=(SettingChange(key="parallel.gradient_dtype", old="fp16", new="bf16"),),
        would_change="a GPU before Ampere, which has no bf16",
    )


@rule("compute")
def dense_head(now: TrainingContext) -> Advice | None:
    """Find an MLM head that computes logits at positions that the loss ignores.

    The head costs hidden² + hidden · vocabulary multiply-adds per position. Attention
    matmuls are neglected.
    """
    if now.train is None or now.train.mlm_head != "dense" or not now.knows_the_model:
        return None
    vocabulary = now.data.vocab_size if now.data is not None else None
    masked, gain = now.train.masking_probability, None
    if now.parameters is not None and vocabulary is not None:
        hidden = model_config.config_count(
            now.train, "hidden_size", model_config.HIDDEN_SIZE
        )
        head = hidden * (hidden + vocabulary)
        share = head / (head + max(1, now.parameters - head))
        share *= now.share("compute", "padding") if now.bottleneck is not None else 1.0
        gain = Gain.between(
            *(
                1 / (1 - min(0.9, share * part * (1 - masked)))
                for part in (0.75, 1.0, 1.5)
            )
        )
    return Advice(
        claim=(
            "the MLM head computes logits at all positions, but the loss uses"
            f" {format_percent(masked)} of them"
        ),
        evidence=(
            figure(
                "positions that the loss uses",
                masked,
                "share",
                "masking_probability",
                known="assumed",
            ),
        ),
        gain=gain,
        cost="none: the loss is the same, and the largest block of memory disappears",
        changes=(SettingChange(key="mlm_head", old="dense", new="sparse"),),
        would_change="a loss at every position",
        safe=True,
    )


@rule("compute")
def dense_last_layer(now: TrainingContext) -> Advice | None:
    """Find a last layer that is computed at positions whose result is not used.

    Keys and values are needed at all positions, the layer's other products only where
    the loss looks.
    """
    train = now.train
    if train is None or train.last_layer != "dense" or train.mlm_head != "sparse":
        return None
    shape = encoder_shape(train)
    if not shape.can_have_sparse_last_layer:
        return None
    masked_only_share = shape.masked_only_weights / shape.layer_weights
    saved = (1 - train.masking_probability) * masked_only_share
    saved *= 1.0 if now.bottleneck is None else now.share("compute", "padding")
    return Advice(
        claim=(
            f"the last of {shape.layers} layers computes all positions, but the loss"
            f" uses {format_percent(train.masking_probability)} of them"
        ),
        evidence=(figure("layers", shape.layers, "count", "model config"),),
        gain=Gain.between(*(1 / (1 - part * saved) for part in (0.4, 0.8, 1.1))),
        cost="none: the loss is the same",
        changes=(SettingChange(key="last_layer", old="dense", new="sparse"),),
        would_change="a use for the last layer's other outputs",
        safe=True,
    )


@rule("compute")
def attention_dropout(now: TrainingContext) -> Advice | None:
    """Find attention dropout, which varlen attention kernels do not support."""
    train = now.train
    if (
        train is None
        or train.device != "cuda"
        or train.layout != "packed"
        or train.precision != "bf16"
    ):
        return None
    dropout, row = model_config.attention_dropout(train), train.seq_length_tokens
    if dropout == 0 or train.attention == "sdpa" or not now.knows_the_layers:
        return None
    hidden = model_config.config_count(train, "hidden_size", model_config.HIDDEN_SIZE)
    share = row / (6 * hidden + row)
    name = "share of a layer in attention matmuls over whole sequences"
    return Advice(
        claim=(
            f"attention dropout of {format_percent(dropout)} rules out varlen"
            " attention, the fastest kernel for packed sequences"
        ),
        evidence=(figure(name, share, "share", "model config", known="predicted"),),
        gain=now.predicted_gain("attention_dropout")
        or Gain.between(
            *(1 / (1 - min(MOST_SHARE, part * share)) for part in (0.0, 0.5, 2.0))
        ),
        cost=(
            "a change of recipe: BERT was trained with 10 %, newer encoders such as"
            " ModernBERT with none"
        ),
        changes=(
            SettingChange(
                key="attention_dropout", old=train.attention_dropout, new=0.0
            ),
        ),
        command=now.probe_command(attention_dropout=0),
        would_change=(
            "a small dataset that is repeated many times, for which dropout prevents"
            " overfitting"
        ),
    )


@rule("compute")
def compute_bound(now: TrainingContext) -> Advice | None:
    """Find a step that only compute limits."""
    found = now.bottleneck
    if (
        found is None
        or found.limit != "compute"
        or not found.decided
        or now.subject is None
    ):
        return None
    part, mfu = found.part("compute"), now.mfu_figure()
    assert part is not None
    what = "compute" if found.part("padding") is None else _WITHOUT_PADDING
    reached = "" if mfu is None else f", at {format_percent(mfu.value)} MFU"
    if mfu is not None and mfu.value < LOW_MFU and found.untold:
        reached += (
            ", which is low: measure GPU counters with autotune workers to find out why"
        )
    return Advice(
        severity="info",
        claim=(f"{what} takes {format_percent(part.share)} of the step{reached}"),
        evidence=(
            now.part_figure(part, what),
            *(() if mfu is None else (mfu,)),
        ),
        cost="more GPUs, or a smaller model",
        would_change=(
            "faster kernels or less to compute; data loading and the network cannot"
            " shorten this step"
        ),
    )


@rule("launch-bound")
def launch_bound(now: TrainingContext) -> Advice | None:
    """Find a GPU that waits for the CPU to launch kernels."""
    gaps, train = now.loss("launch-bound", MATTERS_SHARE), now.train
    if now.subject is None or gaps is None:
        return None
    inside = IN_WINDOWS in gaps.source
    if inside and (train is None or not train.compiled):
        return Advice(
            claim=(
                f"the GPU is idle {format_percent(gaps.share)} of the step: kernels are"
                " launched late, or are too small"
            ),
            evidence=(now.part_figure(gaps, "GPU without work"),),
            gain=now.predicted_gain("compile")
            or times(without(gaps, LAUNCHES_LEFT), COMPILED_GAIN),
            **_compilation(now),
            would_change=(
                "larger micro-batches, whose kernels run longer than their launches"
            ),
        )
    events, steps = (
        (now.run.events, len(now.run.steps)) if now.run is not None else ((), 0)
    )
    saves = sum(
        event.kind in ("saved", "save_failed", "record_waits") for event in events
    )
    # Saving may take the time.
    if (
        inside
        or train is None
        or train.logged_steps > 1
        or saves > 0.05 * max(1, steps)
    ):
        return None
    return Advice(
        claim=(
            f"{format_percent(gaps.share)} of the time passes between steps, and every"
            " step is logged"
        ),
        evidence=(now.part_figure(gaps, "time between steps"),),
        gain=without(gaps, (1 / LOG_INTERVAL_STEPS, 1 / LOG_INTERVAL_STEPS, 1.0)),
        cost=f"the run's record has means over {LOG_INTERVAL_STEPS} steps",
        changes=(
            SettingChange(key="log_interval_steps", old=1, new=LOG_INTERVAL_STEPS),
        ),
        would_change="slow checkpoints, which the run's events show",
        safe=True,
    )


@rule("memory")
def memory_bound(now: TrainingContext) -> Advice | None:
    """Find kernels that wait for GPU memory."""
    waits, train = now.loss("memory", MATTERS_SHARE), now.train
    if now.subject is None or waits is None:
        return None
    if train is not None and train.compiled:
        return None
    return Advice(
        claim=(
            f"kernels wait for GPU memory about {format_percent(waits.share)} of"
            " the step; Tensor Cores idle meanwhile"
        ),
        evidence=(now.part_figure(waits, "wait for GPU memory"),),
        gain=now.predicted_gain("compile") or without(waits, TRAFFIC_LEFT),
        **_compilation(now),
        would_change=(
            "fp32 matmuls: then change to bf16 first, which halves the traffic"
        ),
    )


@rule("launch-bound, memory")
def eager_layers(now: TrainingContext) -> Advice | None:
    """Find layers that are not compiled although a prediction expects a gain."""
    gain = now.predicted_gain("compile")
    if (
        gain is None
        or gain.ratio < 1 + MATTERS_SHARE
        or launch_bound(now)
        or memory_bound(now)
    ):
        return None
    return Advice(
        claim=(
            "layers run eagerly: compiled, they move fewer bytes and launch fewer"
            " kernels"
        ),
        gain=gain,
        cost=_COST_OF_COMPILING,
        changes=_COMPILE,
        command=now.probe_command(compile=True),
        would_change="no compiler on the machine, or runs of a few minutes",
    )


@rule("compute")
def recomputation(now: TrainingContext) -> Advice | None:
    """Find activation checkpointing, which recomputes layers in the backward pass."""
    gain = now.predicted_gain("activation_checkpointing")
    if now.train is None or gain is None or gain.ratio < 1 + MATTERS_SHARE:
        return None
    old = now.train.activation_checkpointing
    return Advice(
        claim=(
            f"{old} activation checkpointing recomputes layers in every backward pass"
        ),
        gain=gain,
        cost="more memory: the largest micro-batch shrinks, so probe it again",
        changes=(SettingChange(key="activation_checkpointing", old=old, new="none"),),
        command=now.probe_command(activation_checkpointing="none"),
        would_change="a micro-batch below the knee without checkpointing",
    )


@rule("compute")
def untried_settings(now: TrainingContext) -> Advice | None:
    """Find settings of the library that no search has varied."""
    if not now.untried:
        return None
    names = ", ".join(setting.name for setting in now.untried)
    rounding = [setting.name for setting in now.untried if setting.changes_rounding]
    cost = "a search of about half an hour; the recipe stays"
    if rounding:
        cost += f"; {', '.join(rounding)} rounds differently: the loss is compared"
    return Advice(
        severity="info",
        claim=f"not varied: {names}; each may be faster, or free memory",
        cost=cost,
        command=now.search_command,
        would_change="a search that has tried them",
    )


@rule("optimizer step")
def optimizer_bound(now: TrainingContext) -> Advice | None:
    """Find an optimizer step that takes a large share of a training step."""
    updating = now.loss("optimizer step", MATTERS_SHARE)
    if now.train is None or updating is None:
        return None
    ranks = now.run.header.world_size if now.run is not None else 1
    evidence = (now.part_figure(updating, "gradient clipping and optimizer step"),)
    if ranks > 1 and now.nodes == 1 and now.train.parallel.strategy == "ddp":
        return Advice(
            claim=(
                f"the optimizer step takes {format_percent(updating.share)} of"
                f" the step, repeated on each of {ranks} ranks"
            ),
            evidence=evidence,
            gain=without(updating, (1 / ranks, 2 / ranks, 1.0)),
            cost="an all-gather of the updated weights in every step",
            changes=(SettingChange(key="parallel.strategy", old="ddp", new="zero1"),),
            command=now.command("network"),
            would_change=(
                "a slow network, on which the all-gather may cost more than it saves:"
                " measure both"
            ),
        )
    return Advice(
        severity="info",
        claim=(
            f"the optimizer step takes {format_percent(updating.share)} of the step:"
            " the batch is small for this model"
        ),
        evidence=evidence,
        cost="a change of recipe: a larger global batch with fewer optimizer steps",
        would_change="a larger global batch",
    )

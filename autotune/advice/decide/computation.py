"""Advice on computing and on the waits of a device: precision, MLM head, launches, memory and optimizer step."""

from autotune.advice.decide.bottleneck import MATTERS_SHARE
from autotune.advice.decide.context import MOST_SHARE, TrainingContext, times, without
from autotune.advice.values import Advice, Gain, SettingChange, figure
from autotune.base.model_work import LAYERS
from trainer.model.flops import peak_flops_per_s, product_format

PRODUCTS_SHARE = (0.65, 0.8, 0.9)
"""Share of computing in matmuls: least, usual and most; the rest moves bytes, most of which 16 bits halve."""
REACHED_SHARE = {"tf32": (0.65, 0.8, 1.0), "fp32": (0.4, 0.55, 0.8)}
"""Share of the ratio of peaks that matmuls gain on changing from a format to bf16: faster units are harder to feed, and
14 times as fast ones much harder. Assumed."""
OTHERS_LEFT = 0.65  # of the rest's time, in 16 bits: normalisation and the loss stay in 32
LOW_MFU = 0.2
"""MFU that counts as low: encoders of a hundred million parameters reach twice as much with stock torch."""
LAUNCHES_LEFT, TRAFFIC_LEFT = (0.0, 0.25, 1.0), (0.25, 0.5, 1.0)
"""Shares of the waits for launches and for memory that remain after compiling the layers: least, usual, most."""
COMPILED_GAIN = (1.0, 1.1, 1.3)
"""Speed ratio of kernel fusion besides fewer launches, from less memory traffic: least, usual, most."""
LOG_INTERVAL_STEPS = 10
_COMPILE = (SettingChange(key="compile", old=False, new=True),)
_COST_OF_COMPILING = "minutes at the start of every run, and other rounding; memory is to be probed again"


def full_precision(now: TrainingContext) -> Advice | None:
    """Find 32-bit matmuls on a GPU with Tensor Cores for 16 bits."""
    train, gpu = now.train, now.gpu_name
    if train is None or train.device != "cuda" or train.precision != "fp32" or gpu is None:
        return None
    now_in = product_format(train.precision, tf32=train.tf32)
    fast, slow = peak_flops_per_s(gpu, "bf16"), peak_flops_per_s(gpu, now_in)
    if fast is None or slow is None:
        return None
    share = 0.9 if now.bottleneck is None else now.share("compute", "padding", "memory")
    ratios = [
        1 / (1 - share + share * ((1 - matmuls) * OTHERS_LEFT + matmuls / max(1.0, reached * fast / slow)))
        for matmuls, reached in zip(PRODUCTS_SHARE, REACHED_SHARE[now_in], strict=True)
    ]
    return Advice(
        claim=f"products are computed in {now_in}: {gpu} does {fast / slow:.1f} times as many in bf16",
        evidence=(
            figure("peak in bf16", fast, "FLOP/s", "NVIDIA's data sheet", known="assumed"),
            figure("peak as it is", slow, "FLOP/s", "NVIDIA's data sheet", known="assumed"),
        ),
        gain=Gain.between(*ratios),
        cost="products are rounded to 8 bits of mantissa; weights, sums and the optimizer stay in 32, and activations "
        "take less memory, so probe anew",
        changes=(SettingChange(key="precision", old="fp32", new="bf16"),),
        command=now.probe_command(precision="bf16"),
        would_change="a step that does not compute most of its time: faster products then wait for data or gradients",
    )


def half_precision(now: TrainingContext) -> Advice | None:
    """Find fp16, whose largest number is 65,504, although bf16 is available."""
    if now.train is None or now.train.device != "cuda" or now.train.parallel.gradient_dtype != "fp16":
        return None
    return Advice(
        claim="gradients travel in fp16, which overflows above 65,504 and loses what lies below 6e-8; bf16 is as fast "
        "and has the range of fp32",
        evidence=(figure("largest number of fp16", 65504, "count", "IEEE 754 binary16", known="assumed"),),
        cost="bf16 has 8 bits of mantissa for fp16's 11: a change of recipe, for the better if fp16 skips steps",
        changes=(SettingChange(key="parallel.gradient_dtype", old="fp16", new="bf16"),),
        would_change="a GPU before Ampere, which has no bf16",
    )


def dense_head(now: TrainingContext) -> Advice | None:
    """Find an MLM head that computes logits at all positions, most of which the loss does not use.

    Multiply-adds per token: the encoder's weights and, for each position of the head, hidden² and hidden times
    vocabulary. Attention's own matmuls are left out, so the gain is a little less with long sequences.
    """
    if now.train is None or now.train.mlm_head != "dense" or not now.knows_the_model:
        return None
    vocabulary = now.data.vocab_size if now.data is not None else None
    places, gain = now.train.masking_probability, None
    if now.parameters is not None and vocabulary is not None:
        head = now.hidden_size * (now.hidden_size + vocabulary)
        share = head / (head + max(1, now.parameters - head))
        share *= now.share("compute", "padding") if now.bottleneck is not None else 1.0
        # Something is always left.
        gain = Gain.between(*(1 / (1 - min(0.9, share * part * (1 - places))) for part in (0.75, 1.0, 1.5)))
    return Advice(
        claim=f"the prediction head computes all places, and the loss looks at {places:.0%} of them",
        evidence=(figure("places that are predicted", places, "share", "masking_probability", known="assumed"),),
        gain=gain,
        cost="none: the loss is the same, and the largest block of memory goes",
        changes=(SettingChange(key="mlm_head", old="dense", new="sparse"),),
        would_change="a loss on every place",
        safe=True,
    )


def dense_last_layer(now: TrainingContext) -> Advice | None:
    """Find a last layer that is computed at positions whose result is not used.

    Its queries, its output and its MLP are ten of its twelve parts; keys and values are needed at all positions.
    """
    train = now.train
    if train is None or train.last_layer != "dense" or train.mlm_head != "sparse" or not now.knows_the_model:
        return None
    layers = int(now.of_model("num_hidden_layers", LAYERS)) or LAYERS
    saved = (1 - train.masking_probability) * 10 / 12 / layers
    saved *= 1.0 if now.bottleneck is None else now.share("compute", "padding")
    return Advice(
        claim=f"the last of {layers} layers computes all places, and the loss looks at "
        f"{train.masking_probability:.0%} of them",
        evidence=(figure("layers", layers, "count", "the model's config"),),
        gain=Gain.between(*(1 / (1 - part * saved) for part in (0.4, 0.8, 1.1))),
        cost="none: the loss is the same",
        changes=(SettingChange(key="last_layer", old="dense", new="sparse"),),
        would_change="a use for the last layer's other places",
        safe=True,
    )


def attention_dropout(now: TrainingContext) -> Advice | None:
    """Find attention dropout, which kernels that compute each document separately do not support."""
    train = now.train
    if train is None or train.device != "cuda" or train.layout != "packed" or train.precision != "bf16":
        return None
    if now.attention_dropout == 0 or train.attention == "sdpa" or not now.knows_the_model:
        return None
    share = train.seq_length_tokens / (6 * now.hidden_size + train.seq_length_tokens)
    name = "attention's products over whole rows, of a layer"
    return Advice(
        claim=f"{now.attention_dropout:.0%} dropout of attention weights keeps packed rows from the kernel that "
        "computes each sample on its own",
        evidence=(figure(name, share, "share", "the model's shape", known="predicted"),),
        gain=Gain.between(*(1 / (1 - min(MOST_SHARE, part * share)) for part in (0.0, 0.5, 2.0))),
        cost="a change of recipe: BERT was trained with 10 % (newer encoders, ModernBERT among them, with none)",
        changes=(SettingChange(key="attention_dropout", old=train.attention_dropout, new=0.0),),
        command=now.probe_command(attention_dropout=0),
        would_change="a small dataset, seen many times, where dropout keeps a model from learning it by heart",
    )


def compute_bound(now: TrainingContext) -> Advice | None:
    """Find a step that nothing but computing limits."""
    found = now.bottleneck
    if found is None or found.limit != "compute" or not found.decided or now.train is None:
        return None
    part, mfu = found.part("compute"), now.mfu_figure()
    assert part is not None
    told = "" if mfu is None else f", at {mfu.value:.0%} of the device's peak"
    if mfu is not None and mfu.value < LOW_MFU and found.untold:
        told += ", which is little: the GPU's counters would say why (autotune workers reads them)"
    return Advice(
        severity="info",
        claim=f"computing limits: {part.share:.0%} of the step computes real tokens{told}",
        evidence=(now.part_figure(part, "computing of real tokens"), *(() if mfu is None else (mfu,))),
        cost="more devices, or a smaller model",
        would_change="faster kernels, or fewer things to compute; no loader and no network makes this step shorter",
    )


def launch_bound(now: TrainingContext) -> Advice | None:
    """Find a device that waits for the program."""
    gaps = now.loss("launch-bound", MATTERS_SHARE)
    if now.train is None or gaps is None:
        return None
    inside = "counters" in gaps.source
    if inside and not now.train.compile:
        return Advice(
            claim=f"{gaps.share:.0%} of the step multiprocessors have no work: late launches, or small kernels",
            evidence=(now.part_figure(gaps, "device without work"),),
            gain=times(without(gaps, LAUNCHES_LEFT), COMPILED_GAIN),
            cost=_COST_OF_COMPILING,
            changes=_COMPILE,
            would_change="larger micro-batches, which take longer than their launches",
        )
    events, steps = (now.run.events, len(now.run.steps)) if now.run is not None else ((), 0)
    saves = sum(event.kind in ("saved", "save_failed", "record_waits") for event in events)
    if inside or now.train.log_interval_steps > 1 or saves > 0.05 * max(1, steps):  # it may well be that of saving
        return None
    return Advice(
        claim=f"{gaps.share:.0%} of the time goes by between steps, with every step logged",
        evidence=(now.part_figure(gaps, "between steps"),),
        gain=without(gaps, (1 / LOG_INTERVAL_STEPS, 1 / LOG_INTERVAL_STEPS, 1.0)),
        cost="rows of the record are means over ten steps",
        changes=(SettingChange(key="log_interval_steps", old=1, new=LOG_INTERVAL_STEPS),),
        would_change="saves that hold training up, which the run's events tell",
        safe=True,
    )


def memory_bound(now: TrainingContext) -> Advice | None:
    """Find kernels that wait for the device's memory."""
    waits = now.loss("memory", MATTERS_SHARE)
    if now.train is None or waits is None or now.train.compile:
        return None
    return Advice(
        claim=f"about {waits.share:.0%} of the step kernels wait for memory, and matrix units with them",
        evidence=(now.part_figure(waits, "kernels that wait for memory"),),
        gain=without(waits, TRAFFIC_LEFT),
        cost=_COST_OF_COMPILING,
        changes=_COMPILE,
        would_change="products in 32 bits: bf16 halves the traffic, and comes first",
    )


def optimizer_bound(now: TrainingContext) -> Advice | None:
    """Find an optimizer step that takes a large share of a training step."""
    updating = now.loss("optimizer step", MATTERS_SHARE)
    if now.train is None or updating is None:
        return None
    ranks = now.run.header.world_size if now.run is not None else 1
    evidence = (now.part_figure(updating, "clipping and update"),)
    if ranks > 1 and now.nodes == 1 and now.train.parallel.strategy == "ddp":
        return Advice(
            claim=f"{updating.share:.0%} of the step updates weights, on every one of {ranks} ranks the same ones",
            evidence=evidence,
            gain=without(updating, (1 / ranks, 2 / ranks, 1.0)),
            cost="what others updated travels once a step; each rank holds its share of the optimizer's state only",
            changes=(SettingChange(key="parallel.strategy", old="ddp", new="zero1"),),
            command=now.command("network"),
            would_change="a slow network, which costs more than it saves: measure both",
        )
    return Advice(
        severity="info",
        claim=f"{updating.share:.0%} of the step updates weights: steps are small for a model of this size",
        evidence=evidence,
        cost="a larger global batch has fewer updates, and is another recipe",
        would_change="a larger global batch",
    )

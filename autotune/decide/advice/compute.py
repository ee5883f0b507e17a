"""Advice on what a rank computes: number formats, head, last layer, attention."""

from autotune.core.advice import Advice, Change, Figure, Gain
from autotune.core.interval import SHOWN_CONFIDENCE
from autotune.decide.advice.gains import MOST_SHARE
from autotune.decide.advice.situation import Situation, part_figure
from trainer.peaks import peak_flops_per_s, product_format

PREDICTED_SHARE = 0.15
PRODUCTS_SHARE = (0.65, 0.8, 0.9)
"""Of computing that is matrix products, least, usual and most; the rest moves bytes, and 16 bits halve most of them."""
REACHED_SHARE = {"tf32": (0.65, 0.8, 1.0), "fp32": (0.4, 0.55, 0.8)}
"""Of the peaks' ratio that products gain when they change from a format to bf16: faster units are harder to feed, and
14 times as fast ones much harder. Assumed."""
OTHERS_LEFT = 0.65
"""Of the rest's time that 16 bits leave: normalisation and the loss stay in 32."""
MOST_SAVED = 0.9
"""Of a step, by computing less of the head: something is always left."""
LOW_MFU = 0.2
"""Encoders of a hundred million parameters reach twice as much on stock torch."""


def full_precision(now: Situation) -> Advice | None:
    """32-bit products on a GPU with matrix units for 16."""
    train, gpu = now.train, now.gpu_name
    if train is None or train.device != "cuda" or train.precision != "fp32" or gpu is None:
        return None
    now_in = product_format(train.precision, tf32=train.tf32)
    fast, slow = peak_flops_per_s(gpu, "bf16"), peak_flops_per_s(gpu, now_in)
    if fast is None or slow is None:
        return None
    share = 0.9 if now.bottleneck is None else sum(_share(now, cause) for cause in ("computation", "padding", "memory"))
    ratios = [
        1 / (1 - share + share * ((1 - products) * OTHERS_LEFT + products / max(1.0, reached * fast / slow)))
        for products, reached in zip(PRODUCTS_SHARE, REACHED_SHARE[now_in], strict=True)
    ]
    return Advice(
        rule="full-precision",
        severity="should",
        claim=f"products are computed in {now_in}: {gpu} does {fast / slow:.1f} times as "
        "many in bf16",
        evidence=(
            Figure(name="peak in bf16", value=fast, unit="FLOP/s", known="assumed", source="NVIDIA's data sheet"),
            Figure(name="peak as it is", value=slow, unit="FLOP/s", known="assumed", source="NVIDIA's data sheet"),
        ),
        gain=Gain(of="real tokens/s", ratio=ratios[1], low=ratios[0], high=ratios[2], known="predicted"),
        cost="products are rounded to 8 bits of mantissa; weights, sums and the optimizer stay in 32, and activations "
        "take less memory, so probe anew",
        changes=(Change(key="precision", old="fp32", new="bf16"),),
        command=now.probe_command(precision="bf16"),
        would_change="a step that does not compute most of its time: faster products then wait for data or gradients",
    )  # fmt: skip


def half_precision(now: Situation) -> Advice | None:
    """fp16, whose largest number is 65,504, where bf16 could be had."""
    foreign = now.foreign
    exchanged = now.train is not None and now.train.device == "cuda" and now.train.parallel.gradient_dtype == "fp16"
    if not exchanged and (foreign is None or foreign.precision != "fp16"):
        return None
    where = "gradients travel in" if exchanged else "the other trainer computes in"
    changes = (Change(key="parallel.gradient_dtype", old="fp16", new="bf16"),) if exchanged else ()
    return Advice(
        rule="half-precision",
        severity="should",
        claim=f"{where} fp16, which overflows above 65,504 and loses what lies below 6e-8; bf16 is as fast and has the "
        "range of fp32",
        evidence=(
            Figure(
                name="largest number of fp16", value=65504.0, unit="ratio", known="assumed", source="IEEE 754 binary16"
            ),
        ),
        gain=None,
        cost="bf16 has 8 bits of mantissa for fp16's 11: a change of recipe, for the better where fp16 skips steps; in "
        "transformers it is bf16=True, fp16=False",
        changes=changes,
        command=None,
        would_change="a GPU before Ampere, which has no bf16",
    )  # fmt: skip


def dense_head(now: Situation) -> Advice | None:
    """Logits for all places, most of which the loss never looks at.

    Products per token, in multiply-adds: the encoder's weights, and for each place of the head hidden² and hidden times
    vocabulary. Attention's own products are left out, so the gain is a little less with long rows.
    """
    vocabulary = now.data.vocab_size if now.data is not None else None
    if now.train is None or now.train.head != "dense" or not now.knows_the_model:
        return None
    gain = None
    if now.parameters is not None and vocabulary is not None:
        head = now.hidden_size * (now.hidden_size + vocabulary)
        encoder = now.parameters - now.hidden_size * (now.hidden_size + vocabulary)
        share = head / (head + max(1, encoder))
        compute = now.bottleneck.part("computation") if now.bottleneck is not None else None
        share *= 1.0 if compute is None else compute.share + (_share(now, "padding"))
        places = now.train.masking_probability
        ratios = [1 / (1 - min(MOST_SAVED, share * part * (1 - places))) for part in (0.75, 1.0, 1.5)]
        gain = Gain(of="real tokens/s", ratio=ratios[1], low=ratios[0], high=ratios[2], known="predicted")
    return Advice(
        rule="dense-head",
        severity="should",
        claim="the prediction head computes all places, and the loss looks at "
        f"{now.train.masking_probability:.0%} of them",
        evidence=(
            Figure(
                name="places that are predicted", value=now.train.masking_probability, unit="share", known="assumed",
                source="masking_probability",
            ),
        ),
        gain=gain,
        cost="none: the loss is the same, and the largest block of memory goes",
        changes=(Change(key="head", old="dense", new="masked"),),
        would_change="a loss on every place",
        safe=True,
    )  # fmt: skip


def whole_last_layer(now: Situation) -> Advice | None:
    """The last layer, computed where nobody asks for its result.

    Its queries, its output and its MLP are ten of its twelve parts; keys and values are needed everywhere.
    """
    train = now.train
    if train is None or train.last_layer != "all" or train.head != "masked" or not now.knows_the_model:
        return None
    saved = (1 - train.masking_probability) * 10 / 12 / now.layers
    saved *= 1.0 if now.bottleneck is None else _share(now, "computation") + _share(now, "padding")
    ratios = [1 / (1 - part * saved) for part in (0.4, 0.8, 1.1)]
    return Advice(
        rule="whole-last-layer",
        severity="should",
        claim=f"the last of {now.layers} layers computes all places, and the loss looks at "
        f"{train.masking_probability:.0%} of them",
        evidence=(Figure(name="layers", value=float(now.layers), unit="count", source="the model's config"),),
        gain=Gain(of="real tokens/s", ratio=ratios[1], low=ratios[0], high=ratios[2], known="predicted"),
        cost="none: the loss is the same",
        changes=(Change(key="last_layer", old="all", new="predicted"),),
        would_change="a use for the last layer's other places",
        safe=True,
    )


def attention_dropout(now: Situation) -> Advice | None:
    """Dropout of attention weights, which the kernels that compute each sample on its own do not have."""
    train = now.train
    if train is None or train.device != "cuda" or train.layout != "packed" or train.precision != "bf16":
        return None
    if now.attention_dropout == 0 or train.attention == "sdpa" or not now.knows_the_model:
        return None
    row, width = train.seq_length_tokens, now.hidden_size
    share = row / (6 * width + row)
    ratios = [1 / (1 - min(MOST_SHARE, part * share)) for part in (0.0, 0.5, 2.0)]
    return Advice(
        rule="attention-dropout",
        severity="could",
        claim=f"{now.attention_dropout:.0%} dropout of attention weights keeps packed rows from the kernel that "
        "computes each sample on its own",
        evidence=(
            Figure(
                name="attention's products over whole rows, of a layer", value=share, unit="share", known="predicted",
                source="the model's shape",
            ),
        ),
        gain=Gain(of="real tokens/s", ratio=ratios[1], low=ratios[0], high=ratios[2], known="predicted"),
        cost="a change of recipe: BERT was trained with 10 % (newer encoders, ModernBERT among them, with none)",
        changes=(Change(key="attention_dropout", old=train.attention_dropout, new=0.0),),
        command=now.probe_command(attention_dropout=0),
        would_change="a small dataset, seen many times, where dropout keeps a model from learning it by heart",
    )  # fmt: skip


def computing(now: Situation) -> Advice | None:
    """Nothing but computing limits the step."""
    found = now.bottleneck
    if found is None or found.limit != "computation" or not found.decided or now.train is None:
        return None
    part = found.part("computation")
    assert part is not None
    evidence = [part_figure(part, "computing of real tokens", found.steps)]
    told = ""
    if found.mfu is not None:
        told = f", at {found.mfu:.0%} of the device's peak"
        if found.mfu < LOW_MFU and found.untold:
            told += ", which is little: the GPU's counters would say why (autotune workers reads them)"
        evidence.append(
            Figure(
                name="MFU", value=found.mfu, unit="share", low=found.mfu_low, high=found.mfu_high,
                confidence=None if found.mfu_low is None else SHOWN_CONFIDENCE, n=found.steps, source=found.source,
            )
        )  # fmt: skip
    return Advice(
        rule="computing",
        severity="note",
        claim=f"computing limits: {part.share:.0%} of the step computes real tokens{told}",
        evidence=tuple(evidence),
        gain=None,
        cost="more devices, or a smaller model",
        would_change="faster kernels, or fewer things to compute; no loader and no network makes this step shorter",
    )


def _share(now: Situation, cause: str) -> float:
    part = (
        next((one for one in now.bottleneck.parts if one.cause == cause), None) if now.bottleneck is not None else None
    )
    return 0.0 if part is None else part.share

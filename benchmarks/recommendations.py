"""The page ``docs/paper.md``: the paper's recommendations one by one, with this project's figures beside its own.

Every figure comes from ``reports/benchmarks/``, from a shipped profile, or from arithmetic that is done here.
"""

import json
import re
import statistics
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from autotune.core.network import Exchange
from autotune.core.units import format_bytes
from benchmarks.corpora import LENGTHS_FILE
from benchmarks.golden_network import (
    BERT_120M,
    BERT_350M,
    BF16_FLOPS_PER_S,
    CARD,
    FP32_FLOPS_PER_S,
    ROW_TOKENS,
    compute,
    efficiency,
)
from benchmarks.paper_case import REPORTED_ROWS

ROOT = Path(__file__).parent.parent
SHIPPED = ROOT / "profiles" / "bert-mini-cpu.toml"
ESTIMATED = "{model}-h100-nvl-94gb.toml"
"""Of the paper's card; shipped beside it."""
REPORT = ROOT / "reports" / "bert-mini-cpu" / "report.json"

SAMPLES, NODES = 202_000_000, 128
RAW_BYTES, STORED_BYTES = 2e12, 25e9
"""Of the paper."""
_ID_BYTES, _MASK_BYTES, _OFFSET_BYTES = 2, 1, 8
_SHOWN_NODES = (1, 2, 8, 32, 128)

_PAGE = """\
# The paper, recommendation by recommendation

Written by `make figures` from the files in `reports/benchmarks/`, from a shipped profile, and by arithmetic.

*Scaling Performance of Large Language Model Pretraining* (arXiv 2509.05258) tells how a BERT-like encoder of 120 M,
and one of 350 M parameters, were pretrained on 202 million functions of binary code: masked language modelling with
15 % of tokens masked, on up to 128 nodes of two H100 NVL with 94 GB each, joined by 25-Gigabit Ethernet. It gives
five recommendations. Here each of them stands beside what this project makes of it.

Every figure is one of four: **measured** (on two CPU cores, or on small networks between hosts of one machine),
**simulated**, **predicted** (by arithmetic or by a trace, with what is assumed), or **not measured**. Nothing here
was measured on a GPU; what was, and what stands open, is [in a document of its own](gpu-results.md).

{summary}
## 1. Tokenise ahead, and keep only what training needs

**The paper:** 2 TB of functions became 25 GB of token ids and attention masks: 99 % less.

`autotune data prepare` does this, and stores no masks: lengths imply them ([data](data.md)).

{reduction}
How much is saved depends on what the raw files hold beside the text. The paper's 25 GB are {paper_sample:.0f} bytes
for each of its samples. Functions of the programs of a Debian system have {mean_tokens:.0f} tokens in the mean, which
is {our_sample:.0f} bytes in this project's format (two for an id, eight for an offset), so {our_total} for as many
samples; cut at 512 tokens it is {cut_total} (predicted). What makes the difference is not public: shorter functions,
or compression, which this format does without because rows are read at random.

## 2. Copy the dataset to every node

**The paper:** The copy at the start was worth it, because nodes did not contend for the shared file system any more.

`autotune data stage`, or `train.data.stage_to`, copies once per node, checks every byte, and measures on both sides
how long a random sample takes; from that follows after how many epochs the copy has paid ([data](data.md#stage)).

| | figure | known |
|---|---:|---|
| copying 25 GB to one node at 2.5 GB/s, which a 25-Gigabit card may reach | {copy_s:.0f} s | predicted, at best |
| read from the shared file system for {nodes} copies | {copies_bytes:.1f} TB | predicted |
| read from it in one epoch without copies, by all nodes together | {epoch_bytes:.3f} TB | predicted |
| real tokens/s with copies, eight nodes on one file system | {staging:.2f} times | simulated, {staging_n} worlds |
| after how many epochs the copy pays on a real shared file system | n/a | not measured |

So by bytes alone a copy pays only after as many epochs as there are nodes. What it buys is that samples in random
order come from a disk of one's own, in small reads that no other node delays. Memory that holds the whole dataset
buys the same from the second epoch on.

## 3. As many loader workers as necessary, after the micro-batch

**The paper:** Workers were added until GPU utilisation stayed near 100 %; it was best to do this after the batch size
filled the memory.

`autotune workers` finds the smallest number that is proven not to cost throughput ([loader workers](workers.md)), and
refuses to begin before the micro-batch was probed: the order of the paper's footnote.

| | figure | known |
|---|---:|---|
| workers that the demo's tokenised dataset needs | {workers} | measured, two CPU cores |
| exactly right, or undecided where that was right, over simulated trainings | {workers_right:.1%} | simulated |
| real tokens/s that one process makes of packed rows | {feed_tokens:,.0f} | measured, on a CPU |
| real tokens/s that 120 M take at 292 TFLOP/s (35 % of an H100's peak, assumed) | {step_tokens:,.0f} | predicted |
| GPU utilisation | n/a | not measured |

With token ids on disk one process feeds many GPUs, so few workers are needed, often none. Utilisation is no target
here: a kernel that waits for another rank counts as utilisation too, and 100 % of it says nothing about the speed
that the hardware could reach. Throughput decides.

## 4. Data parallelism scales to 128 nodes

**The paper:** Training scaled roughly linearly up to 128 nodes, so the network was no bottleneck.

`autotune network` measures links and steps, and `autotune scale` predicts from them ([network](network.md)). For the
paper's cluster nothing can be measured here; by arithmetic (a card carries 2.5 GB/s, no latency, each GPU the same
rows as on one node) the efficiency against one node is

{scaling}
All of it is predicted. From 8 nodes on each line hardly falls, so a plot that does not begin at one node looks linear
in all of them. And the paper's observation and this arithmetic agree at 120 M **because its computing was slow**
(fp32, 36 TFLOP/s assumed): a step eight times as fast leaves the network eight times less time to hide in. Then
16-bit gradients, accumulation and buckets matter, and they must be tuned together with the global batch, which is
yours and is not changed.

| | figure | known |
|---|---:|---|
| worst error of a predicted step, 2 hosts | {error_2:.1%} | measured, shaped links between hosts of one machine |
| the same, 4 hosts | {error_4:.1%} | measured |
| chosen exchange over the default, real tokens/s | {chosen_low:.2f} to {chosen_high:.2f} times | measured, 200 Mbit/s |
| 128 nodes | n/a | not measured |

## 5. Larger models leave room for smaller batches

**The paper:** 184 samples per GPU fitted with 120 M parameters, 20 with 350 M; beyond that, model parallelism would
be needed.

`autotune estimate` predicts what fits, `autotune probe` proves it ([memory](memory.md)). Predicted for an H100 NVL
with 94 GB, two ranks, rows of 512 tokens; the paper's shape of 350 M and its vocabulary are not public, so
BERT-large's shape and 30,522 words stand in:

{batches}
A packed row holds {packed_gain:.2f} times the real tokens of a padded one (measured on lengths of real functions), so
{tuned_rows} packed rows are about {tuned_samples} samples. **The 20 stays unexplained**: no shape that was traced
runs out of memory there. If it was chosen for another reason, more accumulation would have given the larger model the
tokens that hide its exchange of gradients: by the arithmetic above {accumulated_1:.0%} of linear scaling at 128 nodes
with 20 rows, {accumulated_3:.0%} with three times 20 (predicted).

State that is shared between ranks (ZeRO-1, FSDP) makes room as well, and the trainer has both; tensor and pipeline
parallelism are advised with formulas, and not trained. On a GPU none of these figures has been confirmed.

## What the paper does not ask

Its public trainer computes in fp32, pads every sample to 512, and predicts at every position. On two CPU cores
(measured, real tokens/s, dropout 0, a vocabulary of 22,016) this project's step is **{against_paper:.2f} times** as
fast as that one written from its description, and {against_hf:.2f} times as fast as transformers' own trainer, whose
loss is {loss_off:.1%} away. On the demo's dataset and shorter rows, by `autotune baseline`: {baseline_paper:.2f}
times the paper's style and {baseline_default:.2f} times this trainer's defaults (measured, one profile that ships).

## Sources

- The paper: arXiv 2509.05258. Its trainer: the public repository `undertale-re/undertale`, commit 1dae6f2, read for
  what it does.
- Ring all-reduce and overlap, packing, masked-only heads, checkpointing: named on the pages that explain them.

## Limits

- The paper's figures are quoted as it reports them; nobody here could repeat them.
- One machine of two CPU cores stands behind everything that is called measured.
- Assumed: 80 % of a card's line rate, 36 and 292 TFLOP/s. `autotune network` measures these where there is a cluster.
"""


def page(figures: Mapping[str, Any]) -> str:
    """The whole page.

    Args:
        figures: What benchmarks wrote, by their names.
    """
    bars = {bar["name"]: bar["figure"] for one in figures.values() for bar in one["bars"]}
    packing = figures["feed"]["packing_efficiency"]
    cases = figures["paper_case"]["cases"]
    gain = packing["all"] / packing["padded"]
    tuned_rows = cases["tuned"]["bert-120m"]["rows"]
    staged = [one["delivered"] for one in figures["advice"]["simulated"]["promises"] if one["rule"] == "staging"]
    chosen = [one["gain"] for one in figures["network"]["chosen"] if one["gain"] is not None]
    lengths, counts = np.load(LENGTHS_FILE)
    mean_tokens = float(np.average(lengths, weights=counts))
    mean_cut = float(np.average(np.minimum(lengths, ROW_TOKENS), weights=counts))
    our_sample = mean_tokens * _ID_BYTES + _OFFSET_BYTES
    profile = tomllib.loads(SHIPPED.read_text())
    worth = {row["name"]: 1 / row["ratio_to_tuned"] for row in profile["evidence"]["baseline"]["rows"]}
    large = compute(BERT_350M, FP32_FLOPS_PER_S)
    text = _PAGE.format(
        summary=_summary(figures, cases),
        reduction=_reduction(figures),
        paper_sample=STORED_BYTES / SAMPLES,
        mean_tokens=mean_tokens,
        our_sample=our_sample,
        our_total=f"{our_sample * SAMPLES / 1e9:.0f} GB",
        cut_total=f"{(mean_cut * _ID_BYTES + _OFFSET_BYTES) * SAMPLES / 1e9:.0f} GB",
        nodes=NODES,
        copy_s=STORED_BYTES / CARD.bytes_per_s,
        copies_bytes=STORED_BYTES * NODES / 1e12,
        epoch_bytes=STORED_BYTES / 1e12,
        staging=statistics.median(staged),
        staging_n=len(staged),
        workers=profile["evidence"]["workers"]["chosen"],
        workers_right=figures["workers"]["simulated"]["ours"]["right_share"],
        feed_tokens=statistics.median(figures["feed"]["rates"]["packed, real rows"]["tokens_per_s"]),
        step_tokens=BF16_FLOPS_PER_S / (6 * BERT_120M.elements),
        scaling=_scaling(),
        error_2=bars["network_worst_step_error_2_hosts_share"],
        error_4=bars["network_worst_step_error_4_hosts_share"],
        chosen_low=min(chosen),
        chosen_high=max(chosen),
        batches=_batches(cases),
        packed_gain=gain,
        tuned_rows=tuned_rows,
        tuned_samples=f"{tuned_rows * gain:,.0f}",
        accumulated_1=efficiency(large, 20, 1, Exchange(), NODES),
        accumulated_3=efficiency(large, 20, 3, Exchange(), NODES),
        against_paper=bars["train_against_paper_ratio"],
        loss_off=bars["train_loss_difference_share"],
        against_hf=bars["train_against_hf_trainer_ratio"],
        baseline_paper=worth["paper-style"],
        baseline_default=worth["default"],
    )
    return re.sub(r"(\d)%", r"\1 %", text)


def _summary(figures: Mapping[str, Any], cases: Mapping[str, Any]) -> str:
    programs, texts = _raw_ratios(figures)
    alike, tuned = cases["as the paper's trainer"], cases["tuned"]
    small, large = compute(BERT_120M, FP32_FLOPS_PER_S), compute(BERT_120M, BF16_FLOPS_PER_S)
    linear, fast = (efficiency(one, 184, 1, Exchange(), NODES) for one in (small, large))
    rows = [
        ("1 tokenise ahead", "2 TB to 25 GB, -99 %", f"-{1 - programs:.0%} of programs, -{1 - texts:.0%} of texts",
         "measured"),
        ("2 copy to every node", "worth it", "by bytes alone after as many epochs as nodes; random reads decide",
         "predicted"),
        ("3 few loader workers", "until utilisation is near 100 %", "often none, once there are token ids", "measured"),
        ("4 data parallelism scales", f"roughly linear to {NODES} nodes",
         f"{linear:.0%} of linear as the paper computes, {fast:.0%} in bf16 untuned", "predicted"),
        ("5 batch per GPU", "184 and 20 rows",
         f"{_range(alike['bert-120m'])} and {_range(alike['bert-350m'])} rows set up alike; "
         f"{_range(tuned['bert-120m'])} and {_range(tuned['bert-350m'])} tuned", "predicted"),
    ]  # fmt: skip
    lines = [f"| {' | '.join(row)} |\n" for row in rows]
    return "| recommendation | the paper | here | known |\n|---|---|---|---|\n" + "".join(lines)


def _reduction(figures: Mapping[str, Any]) -> str:
    programs, texts = _raw_ratios(figures)
    source = _json_of(REPORT)["profiles"][0]["dataset"]["source"]
    demo = source["token_bytes"] / source["raw_bytes"]
    padded = (_ID_BYTES + _MASK_BYTES) * ROW_TOKENS * SAMPLES
    rows = [
        ("the paper: 202 million functions", "2 TB", "25 GB", f"-{1 - STORED_BYTES / RAW_BYTES:.0%}", "as reported"),
        ("60 MiB of programs in `/usr/bin`", "", "", f"-{1 - programs:.0%}", "measured"),
        ("the demo's programs", format_bytes(source["raw_bytes"]), format_bytes(source["token_bytes"]),
         f"-{1 - demo:.0%}", "measured"),
        ("texts of licences", "", "", f"-{1 - texts:.0%}", "measured"),
        ("ids of two bytes and masks of one, padded to 512, for the paper's samples", "2 TB", f"{padded / 1e9:.0f} GB",
         f"-{1 - padded / RAW_BYTES:.0%}", "predicted"),
    ]  # fmt: skip
    lines = [f"| {' | '.join(row)} |\n" for row in rows]
    return "| data | raw | stored | change | known |\n|---|---:|---:|---:|---|\n" + "".join(lines)


def _scaling() -> str:
    fp32, bf16 = compute(BERT_120M, FP32_FLOPS_PER_S), compute(BERT_120M, BF16_FLOPS_PER_S)
    large = compute(BERT_350M, FP32_FLOPS_PER_S)
    plain, half = Exchange(), replace(Exchange(), gradient_dtype="bf16")
    cases = (
        ("120 M, fp32 at 36 TFLOP/s, 184 rows: the paper's", fp32, 184, 1, plain),
        ("120 M, bf16 at 292 TFLOP/s, 184 rows", bf16, 184, 1, plain),
        ("the same, gradients in bf16", bf16, 184, 1, half),
        ("the same, gradients in bf16, accumulation 4", bf16, 184, 4, half),
        ("350 M, fp32, 20 rows: the paper's", large, 20, 1, plain),
        ("the same, accumulation 3", large, 20, 3, plain),
        ("the same, accumulation 3, gradients in bf16", large, 20, 3, half),
    )
    text = f"| nodes | {' | '.join(map(str, _SHOWN_NODES))} |\n|---|{'---:|' * len(_SHOWN_NODES)}\n"
    for name, of, rows, micro_batches, exchange in cases:
        shares = (efficiency(of, rows, micro_batches, exchange, nodes) for nodes in _SHOWN_NODES)
        text += f"| {name} | {' | '.join(f'{share:.0%}' for share in shares)} |\n"
    return text


def _batches(cases: Mapping[str, Any]) -> str:
    text = "| rows on one GPU | 120 M | 350 M | known |\n|---|---:|---:|---|\n"
    text += f"| the paper | {' | '.join(map(str, REPORTED_ROWS.values()))} | as reported |\n"
    for name, models in cases.items():
        shown = " | ".join(f"{models[model]['rows']:,} ({_range(models[model])})" for model in REPORTED_ROWS)
        text += f"| {name} | {shown} | predicted |\n"
    shown = " | ".join(_estimated(model) for model in REPORTED_ROWS)
    return text + f"| as the profiles that ship: bf16, packed, the model's own dropout | {shown} | predicted |\n"


def _estimated(model: str) -> str:
    found = tomllib.loads((SHIPPED.parent / ESTIMATED.format(model=model)).read_text())["evidence"]["estimate"]
    return f"{found['rows_usual']:,} ({found['rows_least']:,} to {found['rows_most']:,})"


def _range(case: Mapping[str, Any]) -> str:
    return f"{case['rows_low']:,} to {case['rows_high']:,}"


def _raw_ratios(figures: Mapping[str, Any]) -> tuple[float, float]:
    """Token bytes over raw bytes, of programs and of texts."""
    programs, texts = (one["delivered"] for one in figures["advice"]["sizes"] if one["rule"] == "raw-data")
    return programs, texts


def _json_of(path: Path) -> Any:  # noqa: ANN401 - JSON may hold anything
    return json.loads(path.read_text())

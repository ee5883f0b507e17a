"""``python -m benchmarks.cuda_step --json FILE``: the work of one steady step.

It counts kernels, matmuls, copies and waits of an optimizer step. The trainer's whole
loop runs on a pretended GPU, on packed sequences of documents of real lengths: torch's
CUDA build, autograd, Inductor and Triton are real, only kernels do nothing. Steps 21 to
30 are counted by name, with the kernels of replayed CUDA graphs; a call of cuBLAS
counts as one launch. ``--set`` counts other settings of the trainer, such as one of
several optimisations alone.

Bytes, memory and MFU are predicted from traces of larger steps, with compiled layers:
512 tokens in 2.1 documents, on an H100 SXM; the largest micro-batch is that of an H100
NVL.
"""

import contextlib
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any
from unittest.mock import patch

from autotune.base.defaults import MAX_MICRO_BATCH_SIZE, VOCAB_SIZE
from autotune.base.tables import text_table
from autotune.machine.gpu_models import find_gpu_model
from autotune.memory.decide.overheads import overheads_on_gpu
from autotune.memory.estimate import estimate_model
from autotune.speed.decide import data_sheet_rates, predict_speed
from autotune.speed.values import KernelKind, SpeedPrediction, StepWork
from autotune.subjects.mlm.jobs.trace import trace_steps
from autotune.subjects.mlm.memory.contents import DEFAULT_SPECIAL_IDS
from autotune.subjects.mlm.memory.prediction import settings_of_step
from autotune.subjects.mlm.memory.trace_request import TraceRequest
from autotune.trials.fork_server import ForkServerMachine
from benchmarks.bars import (
    Bar,
    Direction,
    bars_of,
    finish,
    keep,
    measuring,
    parser,
    run,
)
from testbed.nullgpu.steps import WITHOUT, StepCase, counted
from testbed.programs import TORCHAO
from trainer.formats.presets import model_settings

BARS: dict[str, tuple[str, Direction, float]] = {
    "bert-120m_launches_per_step": ("launches", "<=", 530),
    "bert-120m_launches_per_step_own_kernels": ("launches", "<=", 450),
    "modernbert-base_launches_per_step": ("launches", "<=", 800),
    "event_waits_per_step": ("waits", "<=", 0.2),
    "pageable_copies_per_step": ("copies", "<=", 0),
    "other_waits_per_step": ("waits", "<=", 0),
    "recompilations": ("graphs", "<=", 0),
    "bert-120m_elementwise_GB_per_step": ("GB", "<=", 45),
    "bert-120m_elementwise_GB_per_step_own_kernels": ("GB", "<=", 28),
    "modernbert-base_elementwise_GB_per_step": ("GB", "<=", 70),
    "bert-120m_activation_bytes_per_token": ("bytes", "<=", 0.8 * 426_948),
    "bert-120m_activation_bytes_per_token_bf16_residual": (
        "bytes",
        "<=",
        0.7 * 426_948,
    ),
    "bert-120m_largest_micro_batch": ("sequences", ">=", 520),
    "bert-350m_largest_micro_batch": ("sequences", ">=", 200),
    "bert-120m_predicted_mfu_%": ("%", ">=", 33),
    "bert-350m_predicted_mfu_%": ("%", ">=", 38),
    "bert-120m_predicted_mfu_fa4_%": ("%", ">=", 36),
    "bert-350m_predicted_mfu_fa4_%": ("%", ">=", 41),
    "bert-120m_predicted_mfu_float8_%": ("%", ">=", 45),
    "bert-350m_predicted_mfu_float8_%": ("%", ">=", 50),
}
"""Launches are those of compiled layers; of all other counts, the largest of any case.
Figures of own kernels are those of ``OWN_KERNELS`` in the ablation.
Activations are compared with eager layers and weights cast in every micro-batch."""
ELEMENTWISE: tuple[KernelKind, ...] = ("copy", "math", "norm", "softmax", "random")
FASTER = ("bert-120m", "bert-350m")
"""Models whose MFU is also predicted with FlashAttention 4 and float8."""
TRACED = {"bert-120m": 64, "bert-350m": 48, "modernbert-base": 64}
"""Sequences of the traced steps."""
SEQ_LENGTH, DOCUMENTS = 512, 512 / 240
H100_SXM, H100_NVL = (find_gpu_model(key) for key in ("h100-sxm", "h100-nvl"))
MODELS = ("bert-120m", "modernbert-base")
CASES = tuple(
    StepCase(model=model, compiled=compiled)
    for model in MODELS
    for compiled in (False, True)
)
FA4, NARROW, FLOAT8 = (
    "train.attention=fa4",
    "train.residual_dtype=bf16",
    "train.float8=tensorwise",
)
FUSED_NORMS = "train.fused_norms=true"
GELU = "train.gelu_epilogues=true"
GRAPHS = "train.compile_mode=reduce-overhead"
OWN_KERNELS = "with FlashAttention 4, fused norms, GELU epilogues"
VARIANTS: dict[str, tuple[str, ...]] = {
    "as tuned by default": (),
    "without compiled layers": ("train.compile=false",),
    "without varlen attention": ("train.attention=sdpa",),
    "without the sparse last layer": ("train.last_layer=dense",),
    **{f"without {name}": () for name in WITHOUT},
    "with CUDA graphs": (GRAPHS,),
    "with a residual stream in bf16": (NARROW,),
    "with fused norms": (FUSED_NORMS,),
    "with fused norms, without compiled layers": (FUSED_NORMS, "train.compile=false"),
    "with fused norms, a residual stream in bf16": (FUSED_NORMS, NARROW),
    "with GELU epilogues": (GELU,),
    "with fused norms, GELU epilogues, a residual stream in bf16": (
        FUSED_NORMS,
        GELU,
        NARROW,
    ),
    OWN_KERNELS: (FA4, FUSED_NORMS, GELU),
    "with FlashAttention 4, fused norms, GELU epilogues, a residual stream in bf16": (
        FA4,
        FUSED_NORMS,
        GELU,
        NARROW,
    ),
    "with FlashAttention 4": (FA4,),
    "with float8": (FLOAT8,),
    "with FlashAttention 4, a residual stream in bf16": (FA4, NARROW),
    "with a residual stream in bf16, float8, CUDA graphs": (NARROW, FLOAT8, GRAPHS),
    "with FlashAttention 4, a residual stream in bf16, float8": (FA4, NARROW, FLOAT8),
}
"""Ablation of bert-120m: settings, or what is left out."""
SHOWN_NAMES = 15
FAMILIES = {
    "triton": "triton_|residual_norm|add_partial_sums|gelu_linear|linear_gelu|sum_rows",
    "attention": "flash|fmha|cudnnBackendExecute",
    "cub": r"\bcub::",
    "other": "",
}
"""Families of kernels, by a pattern in their names; the first that matches."""
_NAMESPACES = "at|native|cuda|std|detail|cutlass|c10|at_cuda_detail|cub"
_NOISE = {
    rf"\(anonymous namespace\)::|\b({_NAMESPACES})::|^void ": "",
    r"\(TensorIteratorBase&\)|::operator\(\)\(\) const": "",
    r"::\{lambda\([^()]*\)(#\d+)\}": r"\1",
}


@measuring
def main(arguments: Sequence[str] | None) -> int:
    """Count the steps of the chosen cases, print and return the exit code."""
    options_of = parser("cuda_step", __doc__ or "")
    options_of.add_argument(
        "--only", default="", metavar="TEXT", help="cases whose names hold this text"
    )
    options_of.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="train.KEY=VALUE",
        help="a setting of the trainer, in every case",
    )
    options = options_of.parse_args(arguments)
    sys.path.append(str(TORCHAO))
    cases: dict[str, Any] = {}
    content = {"evidence": "counts", "settings": options.set, "cases": cases}
    content["traced"] = traced = {
        model: traced_figures(model, options.set)
        for model in TRACED
        if options.only in model
    }
    for case in (case for case in CASES if options.only in case.name):
        counts = _readable(counted(case, tuple(options.set)))
        cases[case.name] = counts
        progress = json.dumps(counts.get("error") or figures_of(counts))
        sys.stderr.write(f"{case.name}: {progress}\n")
        # Each case takes minutes.
        keep(options.json, make_bars(cases, traced, {}), content)
    shown = [_table(cases), _traced_table(traced), *_details(cases)]
    ablation: dict[str, Any] = {}
    if options.only in ("", "ablation"):
        content["ablation"] = ablation = {name: _variant(name) for name in VARIANTS}
        rows = [
            [name, *(f"{figure:.4g}" for figure in figures.values())]
            for name, figures in ablation.items()
        ]
        shown.append(text_table(["bert-120m", *next(iter(ablation.values()))], rows))
    bars = make_bars(cases, traced, ablation)
    return finish(options.json, bars, content, "\n\n".join(shown))


def traced_figures(model: str, settings: Sequence[str] = ()) -> dict[str, float]:
    """Return the predicted bytes, memory and speed of a step with compiled layers."""
    speed, work = _traced(model, settings)
    largest, activation_bytes_per_token = _memory(model, settings)
    assert speed.mfu is not None
    figures = {
        "elementwise_GB_per_step": work.bytes_of(*ELEMENTWISE) / 1e9,
        "activation_bytes_per_token": activation_bytes_per_token,
        "largest_micro_batch": largest,
        "predicted_mfu_%": 100 * speed.mfu.value,
        "predicted_step_s": speed.step_s.value,
    }
    if model in FASTER:
        figures["activation_bytes_per_token_bf16_residual"] = _memory(
            model, (*settings, NARROW)
        )[1]
    for name, more in (
        {"fa4": (FA4,), "float8": (FA4, NARROW, FLOAT8)}.items()
        if model in FASTER
        else ()
    ):
        mfu = _traced(model, (*settings, *more))[0].mfu
        assert mfu is not None
        figures[f"predicted_mfu_{name}_%"] = 100 * mfu.value
    return figures


def _memory(model: str, settings: Sequence[str]) -> tuple[int, float]:
    """Return the largest micro-batch on an H100 NVL, and activation bytes per token."""
    request = _request(model, settings)
    overheads = overheads_on_gpu((9, 0), 1, H100_NVL.usable_bytes).usual
    with ForkServerMachine() as machine:
        machine.start()
        memory = estimate_model(
            request,
            machine,
            H100_NVL.usable_bytes,
            overheads,
            max_micro_batch_size=MAX_MICRO_BATCH_SIZE,
        )
    largest = memory.max_micro_batch_size
    peaks = [
        float(memory.memory_model.running_bytes(size).max())
        for size in (largest // 2, largest)
    ]
    return largest, (peaks[1] - peaks[0]) / (largest - largest // 2) / SEQ_LENGTH


def _request(model: str, settings: Sequence[str]) -> TraceRequest:
    config = settings_of_step(
        model_settings(model),
        "cuda",
        layout=None,
        precision=None,
        seq_length_tokens=SEQ_LENGTH,
        micro_batch_size=TRACED[model],
        global_batch_size=TRACED[model],
        **changes_of(settings),
    )
    return TraceRequest(
        config=config,
        vocab_size=VOCAB_SIZE,
        special_ids=DEFAULT_SPECIAL_IDS,
        documents_per_sequence=DOCUMENTS,
        micro_batches=1,
        ranks=1,
    )


def _traced(model: str, settings: Sequence[str]) -> tuple[SpeedPrediction, StepWork]:
    request, rates = _request(model, settings), data_sheet_rates(H100_SXM.name)
    assert rates is not None
    traced = trace_steps(
        request.config,
        VOCAB_SIZE,
        DEFAULT_SPECIAL_IDS,
        documents_per_sequence=DOCUMENTS,
    )
    work = traced.trace.work
    assert work is not None
    return predict_speed(work, rates, request.config), work


def _variant(name: str) -> dict[str, float]:
    """Return the counts and predictions of a step in one variant of the ablation.

    The step is of bert-120m.
    """
    settings, left_out = VARIANTS[name], name.removeprefix("without ")
    with patch(*WITHOUT[left_out]) if left_out in WITHOUT else contextlib.nullcontext():
        speed, work = _traced("bert-120m", settings)
    counts = _readable(counted(CASES[1], settings, without=left_out))
    launches = figures_of(counts)["launches_per_step"]
    assert speed.mfu is not None
    figures = {
        "launches": launches,
        "elementwise_GB": work.bytes_of(*ELEMENTWISE) / 1e9,
        "step_s": speed.step_s.value,
        "mfu_%": 100 * speed.mfu.value,
    }
    sys.stderr.write(f"{name}: {json.dumps(figures)}\n")
    return figures


def changes_of(settings: Sequence[str]) -> dict[str, Any]:
    """Return ``train.KEY=VALUE`` settings as values.

    Nested keys are for the counted steps only.
    """
    split = (setting.removeprefix("train.").split("=", 1) for setting in settings)
    plain = {"true": True, "false": False}
    return {key: plain.get(value, value) for key, value in split if "." not in key}


def figures_of(case: Mapping[str, Any]) -> dict[str, float]:
    """Return the figures of a case, which are the columns of the table.

    The figures that are named in ``BARS`` get a bar.
    """
    total = {kind: sum(names.values()) for kind, names in case["counts"].items()}
    memsets, waits = case["counts"]["copy"].get("memset", 0.0), case["counts"]["wait"]
    others = [
        name
        for name in waits
        if name != "cudaEventSynchronize" and not name.startswith("pageable")
    ]
    return {
        **case["families"],
        "kernels": total["kernel"],
        "matmuls": total["matmul"],
        "launches_per_step": total["kernel"] + total["matmul"],
        "memsets": memsets,
        "copies": total["copy"] - memsets,
        "allocations": total["allocation"],
        "event_waits_per_step": waits.get("cudaEventSynchronize", 0.0),
        "pageable_copies_per_step": sum(
            number for name, number in waits.items() if name.startswith("pageable")
        ),
        "other_waits_per_step": sum(waits[name] for name in others),
        "recompilations": case["recompilations"],
    }


def make_bars(
    cases: Mapping[str, Any],
    traced: Mapping[str, Mapping[str, float]],
    ablation: Mapping[str, Mapping[str, float]],
) -> list[Bar]:
    """Compare figures with their bars."""
    rows = {
        name: figures_of(case) for name, case in cases.items() if "error" not in case
    }
    figures: dict[str, float | None] = {
        f"{model}_launches_per_step": (
            rows.get(f"{model} compiled", {}).get("launches_per_step")
        )
        for model in MODELS
    }
    figures |= {
        f"{model}_{name}": value
        for model, model_figures in traced.items()
        for name, value in model_figures.items()
    }
    own_kernels = ablation.get(OWN_KERNELS, {})
    figures |= {
        f"bert-120m_{name}_per_step_own_kernels": own_kernels.get(name)
        for name in ("launches", "elementwise_GB")
    }
    of_traces = {name for name in BARS if name.startswith(tuple(TRACED))}
    for name in BARS.keys() - figures.keys() - of_traces:
        figures[name] = (
            max(row[name] for row in rows.values())
            if rows and len(rows) == len(cases)
            else None
        )
    return bars_of(BARS, {name: figures.get(name) for name in BARS})


def _readable(case: dict[str, Any]) -> dict[str, Any]:
    """Name kernels as their source does, shortened, and add their numbers by family.

    Library calls are left out.
    """
    if "error" in case:
        return case
    kernels = case["counts"]["kernel"]
    command = subprocess.run(
        ["c++filt"],
        input="\n".join(kernels),
        capture_output=True,
        text=True,
        check=True,
    )
    named: Counter[str] = Counter()
    families: Counter[str] = Counter(dict.fromkeys(FAMILIES, 0.0))
    for name, number in zip(command.stdout.splitlines(), kernels.values(), strict=True):
        families[
            next(
                family
                for family, pattern in FAMILIES.items()
                if re.search(pattern, name)
            )
        ] += number
        named[_short(name)] += number
    kinds = {
        kind: case["counts"].get(kind, {})
        for kind in ("matmul", "copy", "allocation", "wait")
    }
    return case | {
        "families": families,
        "counts": {"kernel": dict(named.most_common()), **kinds},
    }


def _short(name: str) -> str:
    """Return a kernel's name without namespaces and its arguments.

    The name of a general kernel includes what it computes.
    """
    for noise, instead in _NOISE.items():
        name = re.sub(noise, instead, name)
    return name[:110]


def _table(cases: Mapping[str, Any]) -> str:
    rows = {
        name: figures_of(case) for name, case in cases.items() if "error" not in case
    }
    columns = list(next(iter(rows.values()), {}))
    head = [
        "case",
        *(name.removesuffix("_per_step").replace("_", " ") for name in columns),
    ]
    cells = [
        [name, *(f"{row[column]:.4g}" for column in columns)]
        for name, row in rows.items()
    ]
    return text_table(head, cells, align="l" + "r" * len(columns))


def _traced_table(traced: Mapping[str, Mapping[str, float]]) -> str:
    names = list(next(iter(traced.values()), {}))
    rows = [
        [model, *(f"{figures[name]:.4g}" if name in figures else "-" for name in names)]
        for model, figures in traced.items()
    ]
    return text_table(
        ["predicted from traces", *(name.replace("_", " ") for name in names)], rows
    )


def _details(cases: Mapping[str, Any]) -> list[str]:
    """Return the details of each case.

    They are its most frequent kernels, its matmuls, and the code that waits for the
    device.
    """
    texts = []
    for name, case in cases.items():
        if "error" in case:
            texts.append(f"{name}: failed\n{case['error']}")
            continue
        few, most = case["documents"]
        kernels = list(case["counts"]["kernel"].items())
        lines = {
            f"{what}, {line}": number
            for what, counts in case["lines"].items()
            for line, number in counts.items()
        }
        named = [
            *kernels[:SHOWN_NAMES],
            *case["counts"]["matmul"].items(),
            *lines.items(),
        ]
        rows = [[f"{number:.4g}", what] for what, number in named]
        texts.append(
            f"{name}, {few} to {most} documents per"
            f" step\n{text_table(('per step', 'name'), rows, align='r')}"
        )
    return texts


if __name__ == "__main__":
    run(main)

"""``python -m benchmarks.cuda_step --json FILE``: kernels, matmuls, copies and waits of one steady optimizer step.

The trainer's whole loop runs on a pretended GPU, on packed sequences of documents of real lengths: torch's CUDA build,
autograd, Inductor and Triton are real, only kernels do nothing. Steps 21 to 30 are counted by name, with the kernels of
replayed CUDA graphs; a call of cuBLAS counts as one launch. Nothing here is a time. ``--set`` counts other settings of
the trainer, such as one of several optimisations alone.
"""

import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from autotune.base.tables import text_table
from benchmarks.bars import Bar, Direction, bars_of, finish, keep, measuring, parser, run
from tests.nullgpu.steps import StepCase, counted

BARS: dict[str, tuple[str, Direction, float]] = {
    "bert-120m_launches_per_step": ("launches", "<=", 560),
    "modernbert-base_launches_per_step": ("launches", "<=", 800),
    "event_waits_per_step": ("waits", "<=", 0.2),
    "pageable_copies_per_step": ("copies", "<=", 0),
    "other_waits_per_step": ("waits", "<=", 0),
    "recompilations": ("graphs", "<=", 0),
}
"""Launches are those of compiled layers; of all others, the largest of any case counts."""
MODELS = ("bert-120m", "modernbert-base")
CASES = tuple(StepCase(model=model, compiled=compiled) for model in MODELS for compiled in (False, True))
SHOWN_NAMES = 15
FAMILIES = {"triton": "triton_", "attention": "flash|fmha|cudnnBackendExecute", "cub": r"\bcub::", "other": ""}
"""Families of kernels, by a pattern in their names; the first that matches."""
_NOISE = {
    r"\(anonymous namespace\)::|\b(at|native|cuda|std|detail|cutlass|c10|at_cuda_detail|cub)::|^void ": "",
    r"\(TensorIteratorBase&\)|::operator\(\)\(\) const": "",
    r"::\{lambda\([^()]*\)(#\d+)\}": r"\1",
}


@measuring
def main(arguments: Sequence[str] | None) -> int:
    """Count the steps of the chosen cases, print and return the exit code."""
    options_of = parser("cuda_step", __doc__ or "")
    options_of.add_argument("--only", default="", metavar="TEXT", help="cases whose names hold this text")
    options_of.add_argument(
        "--set", action="append", default=[], metavar="train.KEY=VALUE", help="a setting of the trainer, in every case"
    )
    options = options_of.parse_args(arguments)
    found: dict[str, Any] = {}
    content = {"evidence": "counts", "settings": options.set, "cases": found}
    for case in (case for case in CASES if options.only in case.name):
        found[case.name] = _readable(counted(case, tuple(options.set)))
        sys.stderr.write(f"{case.name}: {json.dumps(found[case.name].get('error') or figures_of(found[case.name]))}\n")
        keep(options.json, make_bars(found), content)  # each takes minutes
    return finish(options.json, make_bars(found), content, "\n\n".join([_table(found), *_details(found)]))


def figures_of(one: Mapping[str, Any]) -> dict[str, float]:
    """Return the figures of a case, which are the columns of the table; a bar is taken of those named in ``BARS``.

    Figures from another source, such as bytes and memory by the trace or predicted speed, are joined here.
    """
    total = {kind: sum(names.values()) for kind, names in one["counts"].items()}
    memsets, waits = one["counts"]["copy"].get("memset", 0.0), one["counts"]["wait"]
    others = [name for name in waits if name != "cudaEventSynchronize" and not name.startswith("pageable")]
    return {
        **one["families"],
        "kernels": total["kernel"],
        "matmuls": total["matmul"],
        "launches_per_step": total["kernel"] + total["matmul"],
        "memsets": memsets,
        "copies": total["copy"] - memsets,
        "allocations": total["allocation"],
        "event_waits_per_step": waits.get("cudaEventSynchronize", 0.0),
        "pageable_copies_per_step": sum(number for name, number in waits.items() if name.startswith("pageable")),
        "other_waits_per_step": sum(waits[name] for name in others),
        "recompilations": one["recompilations"],
    }


def make_bars(found: Mapping[str, Any]) -> list[Bar]:
    """Compare figures with their bars."""
    rows = {name: figures_of(one) for name, one in found.items() if "error" not in one}
    figures: dict[str, float | None] = {
        f"{model}_launches_per_step": rows.get(f"{model} compiled", {}).get("launches_per_step") for model in MODELS
    }
    for name in BARS.keys() - figures.keys():
        figures[name] = max(row[name] for row in rows.values()) if rows and len(rows) == len(found) else None
    return bars_of(BARS, {name: figures[name] for name in BARS})


def _readable(one: dict[str, Any]) -> dict[str, Any]:
    """Name kernels as their source does, shortened, and add their numbers by family; library calls are left out."""
    if "error" in one:
        return one
    kernels = one["counts"]["kernel"]
    command = subprocess.run(["c++filt"], input="\n".join(kernels), capture_output=True, text=True, check=True)
    named: Counter[str] = Counter()
    families: Counter[str] = Counter(dict.fromkeys(FAMILIES, 0.0))
    for name, number in zip(command.stdout.splitlines(), kernels.values(), strict=True):
        families[next(family for family, pattern in FAMILIES.items() if re.search(pattern, name))] += number
        named[_short(name)] += number
    kinds = {kind: one["counts"].get(kind, {}) for kind in ("matmul", "copy", "allocation", "wait")}
    return one | {"families": families, "counts": {"kernel": dict(named.most_common()), **kinds}}


def _short(name: str) -> str:
    """Return a kernel's name without namespaces and its arguments; what a general kernel computes is in the name."""
    for noise, instead in _NOISE.items():
        name = re.sub(noise, instead, name)
    return name[:110]


def _table(found: Mapping[str, Any]) -> str:
    rows = {name: figures_of(one) for name, one in found.items() if "error" not in one}
    columns = list(next(iter(rows.values()), {}))
    head = ["case", *(name.removesuffix("_per_step").replace("_", " ") for name in columns)]
    cells = [[name, *(f"{row[column]:.4g}" for column in columns)] for name, row in rows.items()]
    return text_table(head, cells, align="l" + "r" * len(columns))


def _details(found: Mapping[str, Any]) -> list[str]:
    """Return, for each case, its most frequent kernels, its matmuls, and the code that waits for the device."""
    texts = []
    for name, one in found.items():
        if "error" in one:
            texts.append(f"{name}: failed\n{one['error']}")
            continue
        few, most = one["documents"]
        kernels = list(one["counts"]["kernel"].items())
        lines = {f"{what}, {line}": number for what, at in one["lines"].items() for line, number in at.items()}
        named = [*kernels[:SHOWN_NAMES], *one["counts"]["matmul"].items(), *lines.items()]
        rows = [[f"{number:.4g}", what] for what, number in named]
        texts.append(f"{name}, {few} to {most} documents per step\n{text_table(('per step', 'name'), rows, align='r')}")
    return texts


if __name__ == "__main__":
    run(main)

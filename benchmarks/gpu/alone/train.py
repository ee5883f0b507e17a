"""``python -m benchmarks.gpu.alone.train --json FILE``: the training step on one device, against what others take.

The stage ``train`` runs it in a process of its own, as it takes the device for itself. The parts, in this order, some
of which can be chosen with ``--only``:

    mfu       bf16, rows of 512, bert-120m and bert-350m, each at its micro-batch: real tokens/s and MFU
    rivals    bert-120m against the paper-style step (fp32, with and without its loop over positions) and against
              transformers' Trainer (bf16, SDPA, padded to the longest sample); steps in turns, rates of each turn
    ablation  bert-120m with one thing left out at a time

The file is whole after every model, turn and row, so a program that is cut off leaves what it had; with ``--go-on`` it
measures what is missing. Where ``accelerate`` is missing, transformers' Trainer cannot run; the same recipe as a plain
loop is measured in any case, under a name of its own. A row that could not be had says "not measured", and why.
"""

import functools
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.gpu.alone.bench import Bench, clean, options_of, run_parts

MODELS = {"bert-120m": 64, "bert-350m": 48}
"""Rows of a micro-batch; large enough that kernels are, small enough for any 80 GB card."""
RIVAL_ROWS = MODELS["bert-120m"]
"""The same, so that what was compiled for one part is found again by the others."""
WARM_UP_TURNS = 2
"""The first ones compile, and warm caches."""

ABLATIONS: Mapping[str, Mapping[str, Any]] = {
    "everything": {},
    "without compiled layers": {"compile_layers": False},
    "without the narrow last layer": {"last_layer": "all"},
    "without the masked head": {"head": "dense", "last_layer": "all"},
    "without varlen (rows under a mask)": {"attention": "sdpa"},
    "without packing (padded rows)": {"layout": "padded"},
    "without packing (bucketed rows, not compiled)": {"layout": "bucketed", "compile_layers": False},
    "without bf16 (TF32)": {"precision": "fp32", "attention": "sdpa"},
    "with full checkpointing": {"checkpointing": "full"},
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what was asked for; returns 0 unless a whole part failed."""
    return run_parts(options_of("benchmarks.gpu.alone.train", "The step on a GPU.", list(PARTS), arguments), PARTS)


def mfu(bench: Bench) -> None:
    """Our loop alone, each model at its micro-batch."""
    for model, rows in MODELS.items():
        _measure_row(bench, "mfu", model, functools.partial(bench.match, model, rows))


def ablation(bench: Bench) -> None:
    """One thing left out at a time; real tokens/s, and over those of everything."""
    for name, changes in ABLATIONS.items():
        _measure_row(bench, "ablation", name, functools.partial(bench.match, "bert-120m", RIVAL_ROWS, **changes))


def rivals(bench: Bench) -> None:
    """All contenders in turns; rates per turn."""
    from benchmarks.rivals import Contender, HuggingFace, Ours, Paper, PlainHuggingFace

    match = bench.match("bert-120m", RIVAL_ROWS)
    contenders: dict[str, Contender] = {
        "ours": Ours(match),
        "paper-style": Paper(match),
        "paper-style, positions at once": Paper(match, position_loop=False),
        "HF recipe, plain loop": PlainHuggingFace(match),
    }
    try:
        import accelerate  # noqa: F401 - transformers' Trainer asks for it

        contenders["HF Trainer"] = HuggingFace(match)
    except ImportError:
        missing = "accelerate is missing, which transformers' Trainer asks for"
        bench.findings.write("rivals", "HF Trainer: not measured", missing)
        sys.stderr.write(f"{missing}\n")
    known = bench.findings.found.get("rivals", {}).get("real_tokens_per_s", {})
    if all(len(known.get(name, ())) == bench.turns for name in contenders):
        return
    rates: dict[str, list[float]] = {}
    turns = bench.turns + WARM_UP_TURNS
    for turn in range(turns):
        for name, contender in tuple(contenders.items()):
            try:
                done = contender.step()
            except Exception as error:  # noqa: BLE001 - one contender's failure must not cost the others
                sys.stderr.write(f"{name}: {type(error).__name__}: {error}\n")
                bench.findings.write("rivals", f"{name}: not measured", f"{type(error).__name__}: {error}")
                del contenders[name]
                continue
            if turn >= WARM_UP_TURNS:
                rates.setdefault(name, []).append(done.real_tokens / done.seconds)
        sys.stderr.write(f"turn {turn + 1} of {turns}\n")
        bench.findings.write("rivals", "real_tokens_per_s", rates)
    for contender in contenders.values():
        contender.finish()


def _measure_row(bench: Bench, part: str, name: str, make_match: Callable[[], Any]) -> None:
    """One row of a table; out of memory in one of them is a finding, too."""
    if bench.findings.has(part, name):
        return
    try:
        found = _ours(bench, make_match)
    except Exception as error:  # noqa: BLE001 - one row's failure, of whatever kind, must not cost the others
        found = {"not measured": f"{type(error).__name__}: {error}"}
    sys.stderr.write(f"{part}, {name}: {found.get('not measured') or format(found['real_tokens_per_s'], ',.0f')}\n")
    bench.findings.write(part, name, found)


def _ours(bench: Bench, make_match: Callable[[], Any]) -> dict[str, Any]:
    """Medians over the turns after warm-up."""
    from benchmarks.rivals import Ours

    clean()
    match = make_match()
    ours = Ours(match)
    for turn in range(bench.turns + WARM_UP_TURNS):
        if turn == WARM_UP_TURNS:
            start_s = time.monotonic()
        ours.step()
    end_s = time.monotonic()
    ours.finish()
    logged = ours.rows[WARM_UP_TURNS:]
    return {
        "real_tokens_per_s": statistics.median(row.real_tokens_per_s for row in logged),
        "mfu": None if logged[0].mfu is None else statistics.median(row.mfu or 0.0 for row in logged),
        "mfu_6n": None if logged[0].mfu_6n is None else statistics.median(row.mfu_6n or 0.0 for row in logged),
        "step_s": statistics.median(row.step_s for row in logged),
        "data_wait_s": statistics.median(row.data_wait_s for row in logged),
        "compute_s": statistics.median(row.compute_s for row in logged),
        "optimizer_s": statistics.median(row.optimizer_s for row in logged),
        "packing_efficiency": statistics.median(row.packing_efficiency for row in logged),
        "peak_memory_bytes": logged[-1].peak_memory_bytes,
        "head_overflows": logged[-1].head_overflows,
        "recompilations": logged[-1].recompilations,
        "rows_per_microbatch": match.config.micro_batch_rows,
        "window_start_s": start_s,
        "window_end_s": end_s,
    }


PARTS: dict[str, Callable[[Bench], None]] = {"mfu": mfu, "rivals": rivals, "ablation": ablation}

if __name__ == "__main__":
    warnings.filterwarnings("ignore", category=UserWarning)
    sys.exit(main())

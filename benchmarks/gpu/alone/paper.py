"""``python -m benchmarks.gpu.alone.paper --json FILE``: the largest micro-batch of the paper-style step itself.

The stage ``memory`` runs it. The trainer, set up as the paper's is, still has its own attention; the paper's public
trainer keeps a matrix of attention weights for every head. This takes that step (``benchmarks.paper``) in fp32 on full
rows under a limit of memory, and finds by halving how many rows it takes, beside the 184 and 20 that the paper reports.
Each size takes two optimizer steps in one process; what a refused one had is given back before the next.
"""

import argparse
import functools
import gc
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from benchmarks.gpu.alone.bench import Findings, add_file, add_limit

if TYPE_CHECKING:
    from autotune.measure.jobs.budget import Budget

ROW_TOKENS = 512
STEPS = 2
MOST_ROWS = 4096


def main(arguments: Sequence[str] | None = None) -> int:
    """Find it for each model; returns 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.alone.paper", description="The paper's rows.")
    add_file(parser)
    parser.add_argument("--model", action="append", required=True, help="a preset; repeat")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    add_limit(parser)
    parser.add_argument("--vocab-size", type=int, default=30_522)
    options = parser.parse_args(arguments)
    findings = Findings(options.json, go_on=options.go_on)
    budget = limit(options.device, options.budget_bytes, options.used_before_bytes)
    for model in options.model:
        if findings.has(model, "trials"):
            continue
        fit = functools.partial(fits, model, vocab_size=options.vocab_size, device=options.device, budget=budget)
        tried = largest_rows(fit)
        rows = max((rows for rows, fit in tried.items() if fit), default=0)
        findings.write(model, "largest_rows", rows)
        findings.write(model, "trials", sorted(tried.items()))
        sys.stderr.write(f"{model}: {rows} rows\n")
    return 0


def limit(device: str, budget_bytes: int, used_before_bytes: int | None) -> "Budget":
    """Have allocations beyond the budget refused, as in trials of the trainer's own step."""
    from autotune.measure.jobs.budget import enforce, keep_one_arena
    from trainer.config import TrainConfig
    from trainer.parallel import join_ranks
    from trainer.presets import model_settings

    if device == "cpu":
        keep_one_arena()
    config = TrainConfig.model_validate({"model": model_settings("bert-mini"), "device": device})
    return enforce(budget_bytes, join_ranks(config, environment={}), used_before_bytes)


def largest_rows(fit: Callable[[int], bool]) -> dict[int, bool]:
    """Sizes that were tried, by doubling and then by halving what lies between, and whether they fit."""
    tried: dict[int, bool] = {}
    low, high = 0, 1
    while high <= MOST_ROWS:
        tried[high] = fit(high)
        if not tried[high]:
            break
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        tried[middle] = fit(middle)
        low, high = (middle, high) if tried[middle] else (low, middle)
    return tried


def fits(model: str, rows: int, vocab_size: int, device: str, budget: "Budget") -> bool:
    """Whether so many rows go through, by the rules of other trials; everything is given back afterwards."""
    import torch

    from trainer.failure import out_of_memory

    refused = False
    try:
        _step(model, rows, vocab_size, device)
        budget.check()
    except (RuntimeError, MemoryError) as error:
        if out_of_memory(error) is None:
            raise
        refused = True
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.reset_accumulated_memory_stats()  # of it the second tries that a refusal began with
    return not refused


def _step(model: str, rows: int, vocab_size: int, device: str) -> None:
    """Optimizer steps from a new model on."""
    import torch
    from torch.nn import functional
    from transformers import BertConfig

    from benchmarks.paper import PaperModel
    from trainer.presets import model_settings

    shape: dict[str, Any] = {
        name: value for name, value in model_settings(model).config.items() if name != "model_type"
    }
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("highest")
    with torch.device(device):
        module = PaperModel(BertConfig(**shape | {"vocab_size": vocab_size}))
    optimizer = torch.optim.AdamW(module.parameters(), fused=False)
    ids_BS = torch.randint(5, vocab_size, (rows, ROW_TOKENS), device=device)
    allowed_BS = torch.ones_like(ids_BS, dtype=torch.bool)
    for _ in range(STEPS):
        logits_BSV = module(ids_BS, allowed_BS)
        functional.cross_entropy(logits_BSV.flatten(0, 1), ids_BS.flatten()).backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    sys.exit(main())

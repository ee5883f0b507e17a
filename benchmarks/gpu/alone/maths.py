"""``python -m benchmarks.gpu.alone.maths --json FILE``: whether the fast ways compute what the plain ones do.

The stage ``maths`` runs it. The parts, in this order:

    kernels    varlen attention against rows under a mask, gradients of a whole micro-batch; how far each is from fp32
    layouts    the loss of each token in packed rows against the same token in padded ones
    documents  one document's tokens are changed: logits of all others must stay as they are, bit for bit
    compiled   compiled layers against the same ones as they stand
    waits      steps of which none may wait for the device, and none may compile again

In bf16 sums differ by their order, so two right ways are as far apart as each of them is from fp32; a wrong one, such
as attention across documents, is an order of magnitude farther.
"""

import itertools
import statistics
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from benchmarks.gpu.alone.bench import Bench, clean, options_of, run_parts

MODEL, ROWS = "bert-120m", 32
WARM_UP_STEPS, STEPS = 6, 6
LAYOUT_BATCHES = 4

Changes = dict[str, Any]
"""Of a configuration."""
EXACT: Changes = {"precision": "fp32", "attention": "sdpa", "tf32": False}


def main(arguments: Sequence[str] | None = None) -> int:
    """Compute what was asked for; returns 0 unless a whole part failed."""
    return run_parts(options_of("benchmarks.gpu.alone.maths", "The mathematics.", list(PARTS), arguments), PARTS)


def kernels(bench: Bench) -> None:
    """Gradients of the same micro-batch, computed in several ways; distances are of all gradients together."""
    exact = _gradients(bench, EXACT)
    plain = _gradients(bench, {"attention": "sdpa"})
    bench.findings.write("kernels", "masked_to_fp32_distance_share", _distance(exact, plain))
    ways: dict[str, Changes] = {"varlen": {}, "varlen_whole_last_layer": {"last_layer": "all"}}
    for name, changes in ways.items():
        found = _gradients(bench, changes)
        bench.findings.write("kernels", f"{name}_distance_share", _distance(plain, found))
        bench.findings.write("kernels", f"{name}_to_fp32_distance_share", _distance(exact, found))
        clean()


def layouts(bench: Bench) -> None:
    """The loss of every predicted token of some packed rows, and of the same tokens in padded ones."""
    precisions: dict[str, Changes] = {"fp32": EXACT, "bf16": {}}
    for name, changes in precisions.items():
        if name == "bf16" and bench.device == "cpu":
            continue
        packed = _losses(bench, {"layout": "packed"} | changes)
        padded = _losses(bench, {"layout": "padded"} | changes, {sample for sample, _ in packed})
        if packed.keys() != padded.keys():
            raise ValueError("other tokens are predicted in packed rows than in padded ones")
        differences = [abs(packed[token] - padded[token]) for token in packed]
        bench.findings.write("layouts", f"{name}_tokens_count", len(differences))
        bench.findings.write("layouts", f"{name}_largest_loss_difference_nats", max(differences))
        bench.findings.write("layouts", f"{name}_mean_loss_difference_nats", statistics.fmean(differences))
        clean()


def documents(bench: Bench) -> None:
    """Change every token of the document in the middle, and look at the logits of the others."""
    import torch

    from trainer.feed import MicroBatch

    ways: dict[str, Changes] = {"varlen": {}, "masked": {"attention": "sdpa"}}
    for name, changes in ways.items():
        # Without masks, as the document is to differ in all its tokens.
        match, training = _training(bench, {"head": "dense", "last_layer": "all"} | changes)
        training.module.eval()
        batch, _ = next(_batches(match))
        chosen = len(batch.starts_N) // 2
        start, tokens = int(batch.starts_N[chosen]), int(batch.tokens_N[chosen])
        inside = torch.zeros(batch.ids_BS.numel(), dtype=torch.bool)
        inside[start : start + tokens] = True
        wide = batch.wide_ids_BS()
        ordinary = match.dataset.manifest.vocab_size - 5
        changed = torch.where(inside.view_as(wide), (wide + 7) % ordinary + 5, wide).to(batch.ids_BS.dtype)
        fields = {field: getattr(batch, field) for field in MicroBatch.__dataclass_fields__} | {"ids_BS": changed}
        logits = [_logits(training, one, match) for one in (batch, MicroBatch(**fields))]
        difference = (logits[0] - logits[1]).abs().amax(dim=1).cpu()
        bench.findings.write("documents", f"{name}_largest_change_of_others", float(difference[~inside].max()))
        bench.findings.write("documents", f"{name}_least_change_of_itself", float(difference[inside].min()))
        clean()


def compiled(bench: Bench) -> None:
    """Compiled layers beside eager ones."""
    eager = _gradients(bench, {})
    found = _gradients(bench, {"compile_layers": True})
    bench.findings.write("compiled", "distance_share", _distance(eager, found))
    exact = _gradients(bench, EXACT)
    bench.findings.write("compiled", "to_fp32_distance_share", _distance(exact, found))


def waits(bench: Bench) -> None:
    """Steps under a guard that raises where one waits for the device, after those that may."""
    import torch

    from trainer.build import GraphCounter

    match, training = _training(bench, {"compile_layers": not bench.tiny})
    batches = [batch for batch, _ in itertools.islice(_batches(match), WARM_UP_STEPS + STEPS)]
    on_gpu = bench.device == "cuda"
    batches = [batch.pin_memory() for batch in batches] if on_gpu else batches
    counter = GraphCounter()
    try:
        for number, batch in enumerate(batches):
            if number == WARM_UP_STEPS and on_gpu:
                torch.cuda.set_sync_debug_mode("error")
            training.step.run([batch], 1e-4, part_of_it=True)
            counter.stepped()
    finally:
        if on_gpu:
            torch.cuda.set_sync_debug_mode("default")
    bench.findings.write("waits", "steps_without_host_wait_count", len(batches) - WARM_UP_STEPS)
    bench.findings.write("waits", "recompilations_count", counter.recompilations)


def _training(bench: Bench, changes: Changes) -> tuple[Any, Any]:
    """A match, and what trains it."""
    from trainer.build import build_training

    match = bench.match(MODEL, ROWS, **{"compile_layers": False, **changes})
    manifest = match.dataset.manifest
    return match, build_training(match.config, manifest.vocab_size, manifest.special_ids, match.ranks)


def _batches(match: Any, missing: set[int] | None = None) -> Iterator[tuple[Any, Any]]:  # noqa: ANN401 - a Match
    """Micro-batches of the first epoch, each with its plan: all, or those with missing samples until there is none."""
    from trainer.batch import make_plan
    from trainer.feed import MicroBatchSource, micro_batch_plans

    plan = make_plan(match.config, len(match.dataset), 1)
    source = MicroBatchSource(match.dataset, match.config, plan)
    for one in micro_batch_plans(match.dataset, match.config, plan, 0):
        if missing is not None and not missing:
            return
        if missing is None or not missing.isdisjoint(one.segments.samples.tolist()):
            yield source.__getitems__(one), one


def _gradients(bench: Bench, changes: Changes) -> list[Any]:
    """Of the first micro-batch, on the host."""
    match, training = _training(bench, changes)
    batch, _ = next(_batches(match))
    loss = training.module(batch.to(match.ranks.device)) / batch.predicted_tokens
    loss.backward()
    parameters = training.model.parameters()
    return [parameter.grad.float().cpu() for parameter in parameters if parameter.grad is not None]


def _distance(reference: Sequence[Any], other: Sequence[Any]) -> float:
    square = sum(float((one - two).square().sum()) for one, two in zip(reference, other, strict=True))
    norm = sum(float(one.square().sum()) for one in reference)
    return float((square / norm) ** 0.5)


def _losses(bench: Bench, changes: Changes, wanted: set[int] | None = None) -> dict[tuple[int, int], float]:
    """The loss of every predicted token, by its sample and its place in that.

    Args:
        bench: What is computed on.
        changes: Of the configuration.
        wanted: The samples; None takes those of the first micro-batches.
    """
    import torch
    from torch.nn import functional

    from trainer.masking import IGNORED_LABEL

    match, training = _training(bench, {"last_layer": "all"} | changes)
    training.module.eval()
    found: dict[tuple[int, int], float] = {}
    missing = None if wanted is None else set(wanted)
    for batch, plan in itertools.islice(_batches(match, missing), LAYOUT_BATCHES if wanted is None else None):
        logits_KV, labels_K = (one.cpu() for one in _predicted(training, batch, match))
        losses_K = functional.cross_entropy(logits_KV.float(), labels_K, reduction="none")
        # The head's slots come in the order of the row, some of them unused.
        losses = losses_K[labels_K != IGNORED_LABEL].tolist()
        places_P = batch.predicted_P.to(torch.int64).sort().values
        number_P = torch.searchsorted(batch.starts_N, places_P, right=True) - 1
        places = (places_P - batch.starts_N[number_P]).tolist()
        samples = plan.segments.samples[number_P.numpy()].tolist()
        if missing is not None:
            missing -= set(plan.segments.samples.tolist())
        tokens = zip(zip(samples, places, strict=True), losses, strict=True)
        found |= {token: loss for token, loss in tokens if wanted is None or token[0] in wanted}
    return found


def _logits(training: Any, batch: Any, match: Any) -> Any:  # noqa: ANN401 - a tensor of places and words
    return _predicted(training, batch, match)[0].float()


def _predicted(training: Any, batch: Any, match: Any) -> Any:  # noqa: ANN401 - logits and labels
    import torch

    with torch.no_grad():
        return training.module._predict(batch.to(match.ranks.device))


PARTS: dict[str, Callable[[Bench], None]] = {
    "kernels": kernels,
    "layouts": layouts,
    "documents": documents,
    "compiled": compiled,
    "waits": waits,
}

if __name__ == "__main__":
    warnings.filterwarnings("ignore", category=UserWarning)
    sys.exit(main())

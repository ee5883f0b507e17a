"""Optimizer steps of several configurations; ``test_ranks`` runs them under torchrun.

``rank_job.py REQUEST.json``: ``cases`` by name (changes of the configuration, ``wide``
for fp64, ``steps``), ``data``, ``device`` and ``out``, where rank 0 saves the result of
each case.
"""

import functools
import json
import sys
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

import trainer.build
from tests.trainer.tiny_models import config_of
from trainer.build import Training, build_training
from trainer.checkpoint.export import export_model
from trainer.data.batch_plan import make_plan
from trainer.data.dataset import TokenDataset
from trainer.data.loader import make_loader, micro_batch_plans
from trainer.data.micro_batch_source import MicroBatchSource
from trainer.evaluate import evaluate
from trainer.model.encoder import build_model
from trainer.runtime.ranks import Ranks, join_ranks, leave_ranks


def main() -> None:
    request = json.loads(Path(sys.argv[1]).read_text())
    dataset = TokenDataset.open(Path(request["data"]))
    ranks = join_ranks(config_of(device=request.get("device", "cpu")))
    # Graphs and their backward as they are compiled, without machine code, which takes
    # a minute.
    torch.compile = functools.partial(torch.compile, backend="aot_eager")
    for name, case in request["cases"].items():
        print(name, flush=True)
        result = run(case, dataset, ranks, Path(request["out"]))
        if ranks.leads:
            torch.save(result, Path(request["out"]) / f"{name}.pt")
    leave_ranks(together=True)


def run(
    case: dict, dataset: TokenDataset, ranks: Ranks, out: Path
) -> dict[str, object]:
    config = config_of(**case["config"])
    trainer.build.build_model = build_model
    if case.get("wide"):
        trainer.build.build_model = lambda *arguments: build_model(*arguments).double()
    training = build_training(
        config, dataset.manifest.vocab_size, dataset.manifest.special_ids, ranks
    )
    gradients: dict[str, torch.Tensor] = {}
    update = training.step._update

    def keep_gradients_and_update(*arguments):
        gradients.update(_gradients(training))
        return update(*arguments)

    # ZeRO's optimizer has hooks of its own kind, so gradients are taken when they are
    # clipped, in the first step.
    training.step._update = keep_gradients_and_update
    losses = []
    norms = []
    plan = make_plan(config, len(dataset), ranks.world_size)
    plans = micro_batch_plans(dataset, config, plan, ranks.rank)
    loader = make_loader(MicroBatchSource(dataset, config, plan), config, plans)
    for _ in range(case.get("steps", 1)):
        batches = [next(loader) for _ in range(plan.gradient_accumulation_steps)]
        result = training.step.run(batches, case.get("lr", 1e-3))
        losses.append(float(result.loss))
        norms.append(float(result.grad_norm))
        training.step._update = update
    validation = TokenDataset(dataset.directory, dataset.manifest, "validation")
    evaluation = evaluate(training.module, validation, config, ranks, step=1)
    directory = case.get("export")
    if directory:
        export_model(
            training.module,
            dataset_dir=dataset.directory,
            special_ids=dataset.manifest.special_ids,
            seq_length_tokens=config.seq_length_tokens,
            directory=out / directory,
            leads=ranks.leads,
        )
    partial = None
    if result.partial is not None:
        partial = (float(result.partial.squared_norm), result.partial.share)
    return {
        "losses": losses,
        "norms": norms,
        "gradients": gradients,
        "parameters": {
            name: _whole(parameter.detach())
            for name, parameter in training.module.named_parameters()
        },
        "evaluation": (
            evaluation.loss,
            evaluation.masked_accuracy,
            evaluation.predicted_tokens,
            evaluation.rows,
        ),
        "partial": partial,
        "share_of_state": _state_elements(training),
    }


def _gradients(training: Training) -> dict[str, torch.Tensor]:
    return {
        name: _whole(parameter.grad).clone()
        for name, parameter in training.module.named_parameters()
        if parameter.grad is not None
    }


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).cpu()


def _state_elements(training: Training) -> int:
    """Return the number of elements of the optimizer's state on this rank."""
    # ZeRO's optimizer wraps that of this rank's share.
    optimizer = getattr(training.optimizer, "optim", training.optimizer)
    elements = 0
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, DTensor):
                elements += value.to_local().numel()
            elif isinstance(value, torch.Tensor):
                elements += value.numel()
    return elements


if __name__ == "__main__":
    main()

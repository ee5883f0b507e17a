"""What ``test_ranks`` runs under torchrun: optimizer steps of several configurations,
one after the other.

``rank_job.py REQUEST.json``: ``cases`` by name (changes of the configuration, ``wide``
for fp64, ``steps``), ``data``, ``device`` and ``out``, where rank 0 saves of each case
what ``run`` returns.
"""

import functools
import json
import sys
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

import trainer.build
from tests.trainer.oracles import config_of
from trainer.build import Training, build_training
from trainer.checkpoint.tensors import export_model
from trainer.data.dataset import TokenDataset
from trainer.data.global_batch import make_plan
from trainer.data.loader import MicroBatchSource, make_loader, micro_batch_plans
from trainer.distributed.ranks import Ranks, join_ranks, leave_ranks
from trainer.evaluate import evaluate
from trainer.model.encoder import build_model


def main() -> None:
    request = json.loads(Path(sys.argv[1]).read_text())
    dataset = TokenDataset.open(Path(request["data"]))
    ranks = join_ranks(config_of(device=request.get("device", "cpu")))
    # Graphs and their backward as they are compiled, without machine code, which takes
    # a minute.
    torch.compile = functools.partial(torch.compile, backend="aot_eager")
    for name, case in request["cases"].items():
        print(name, flush=True)
        found = run(case, dataset, ranks, Path(request["out"]))
        if ranks.leads:
            torch.save(found, Path(request["out"]) / f"{name}.pt")
    leave_ranks(together=True)


def run(
    case: dict, dataset: TokenDataset, ranks: Ranks, out: Path
) -> dict[str, object]:
    config = config_of(**case["config"])
    trainer.build.build_model = (
        (lambda *known: build_model(*known).double())
        if case.get("wide")
        else build_model
    )
    training = build_training(
        config, dataset.manifest.vocab_size, dataset.manifest.special_ids, ranks
    )
    gradients: dict[str, torch.Tensor] = {}
    # ZeRO's optimizer has hooks of its own kind, so gradients are taken where they are
    # clipped.
    update = training.step._update
    training.step._update = lambda *known: (
        gradients or gradients.update(_gradients(training)) or update(*known)
    )
    losses, norms = [], []
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
    row = evaluate(training.module, validation, config, ranks, step=1)
    if directory := case.get("export"):
        export_model(
            training.module,
            dataset_dir=dataset.directory,
            special_ids=dataset.manifest.special_ids,
            seq_length_tokens=config.seq_length_tokens,
            directory=out / directory,
            leads=ranks.leads,
        )
    return {
        "losses": losses,
        "norms": norms,
        "gradients": gradients,
        "parameters": {
            name: _whole(parameter.detach())
            for name, parameter in training.module.named_parameters()
        },
        "evaluation": (row.loss, row.masked_accuracy, row.predicted_tokens, row.rows),
        "partial": (
            None
            if result.partial is None
            else (float(result.partial.square), result.partial.share)
        ),
        "share_of_state": _state_numbers(training),
    }


def _gradients(training: Training) -> dict[str, torch.Tensor]:
    named = training.module.named_parameters()
    return {
        name: _whole(parameter.grad).clone()
        for name, parameter in named
        if parameter.grad is not None
    }


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).cpu()


def _state_numbers(training: Training) -> int:
    states = getattr(training.optimizer, "optim", training.optimizer).state.values()
    tensors = [
        value
        for state in states
        for value in state.values()
        if isinstance(value, torch.Tensor)
    ]
    return sum(
        (tensor.to_local() if isinstance(tensor, DTensor) else tensor).numel()
        for tensor in tensors
    )


if __name__ == "__main__":
    main()

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load, load_file

from testbed.examples.checkpoints import state_of
from tests.trainer.oracles import (
    SHAPES,
    config_of,
    micro_batches,
    same,
    state_of_training,
    training_of,
)
from trainer.checkpoint.format import CheckpointWriter, checkpoint_name, read_checkpoint
from trainer.checkpoint.tensors import (
    HostCopy,
    TensorShard,
    make_state,
    restore,
    tensor_shards,
)
from trainer.config.train_config import ModelSettings
from trainer.distributed.optimizer import make_optimizer
from trainer.distributed.ranks import join_ranks
from trainer.distributed.step import TrainStep
from trainer.errors import BadConfig

CONFIG = config_of()
RANKS = join_ranks(CONFIG, environment={})
FILE = "rank-00000.safetensors"


@pytest.fixture
def batches(dataset):
    return micro_batches(dataset, CONFIG, steps=5)


def trained(dataset, batches, config=CONFIG):
    training = training_of(config, dataset)
    for batch in batches:
        training.step.run([batch], 1e-3)
    return training


def written(training, root, parts=1):
    """A checkpoint of a training; with more than one part, as so many ranks would share
    it out."""
    held, name = tensor_shards(training, RANKS), checkpoint_name(5, 0)
    for rank in reversed(range(parts)):
        kept = [own for one in held for own in share(one, rank, parts)]
        copy = HostCopy(kept, f"rank-{rank:05d}.safetensors", pinned=False)
        copy.take(kept)
        writer = CheckpointWriter(
            root, name, attempt=1, rank=rank, writers=range(parts), timeout_s=1.0
        )
        writer.write(copy.content, copy.tensors, state_of(5))
    return root / name, read_checkpoint(root / name)


def share(one, rank, parts):
    if parts == 1 or not one.shape:
        return [one] if rank == 0 else []
    rows = -(-one.shape[0] // parts)
    return [
        replace(
            one,
            local=one.local[rank * rows : (rank + 1) * rows],
            begin=min(one.shape[0], rank * rows),
        )
    ]


def test_the_file_is_one_that_safetensors_reads_and_holds_everything(
    dataset, batches, tmp_path
):
    training = trained(dataset, batches[:2])
    path, manifest = written(training, tmp_path)
    read = load_file(path / FILE)
    assert same(read, state_of_training(training))
    assert read.keys() == manifest.tensors.keys()
    names = [name for name, _ in training.module.named_parameters()]
    assert read.keys() >= {
        f"{kind}.{name}"
        for kind in ("weights", "step", "exp_avg", "exp_avg_sq")
        for name in names
    }
    assert float(read[f"step.{names[0]}"]) == 2.0


@pytest.mark.parametrize(
    ("steps", "parts", "precision"), [(2, 1, "bf16"), (2, 3, "fp32"), (0, 1, "fp32")]
)
def test_a_restored_training_goes_on_bit_by_bit_as_the_one_that_was_saved(
    dataset, batches, tmp_path, steps, parts, precision
):
    training, saved = (
        trained(dataset, batches[:steps], config_of(precision=precision))
        for _ in range(2)
    )
    make_state(saved)  # which changes nothing, also before the first step
    other = trained(dataset, batches[:3], config_of(seed=7, precision=precision))
    assert not same(state_of_training(other), state_of_training(saved))
    restore(other, *written(saved, tmp_path, parts), RANKS)
    assert same(state_of_training(other), state_of_training(saved))
    for batch in batches[steps:]:
        first, second = (one.step.run([batch], 1e-3) for one in (training, other))
        assert (first.loss, first.grad_norm) == (second.loss, second.grad_norm)
    assert same(state_of_training(other), state_of_training(training))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"intermediate_size": 96},
            (
                r"does not match the model: weights\.\S*intermediate.* is F32"
                r" \[64.*expected F32 \[96"
            ),
        ),
        ({"num_hidden_layers": 3}, r"weights\.\S*layer\.2\.\S* is missing"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused_with_the_tensor_that_differs(
    dataset, batches, tmp_path, change, said
):
    path, manifest = written(trained(dataset, batches[:1]), tmp_path)
    other = training_of(
        config_of(model=ModelSettings(name="m", config=SHAPES["bert"] | change)),
        dataset,
    )
    before = {name: value.clone() for name, value in other.module.named_parameters()}
    with pytest.raises(BadConfig, match=said):
        restore(other, path, manifest, RANKS)
    assert same(before, dict(other.module.named_parameters()))


def test_a_checkpoint_that_lacks_rows_of_a_tensor_is_refused(
    dataset, batches, tmp_path
):
    training = trained(dataset, batches[:1])
    path, manifest = written(training, tmp_path, parts=2)
    name = next(
        name for name, entry in manifest.tensors.items() if len(entry.shape) == 2
    )
    for parts in (
        manifest.tensors[name].parts[:1],
        manifest.tensors[name].parts[1:],
        [],
    ):
        lacking = manifest.tensors | {
            name: manifest.tensors[name].model_copy(update={"parts": parts})
        }
        with pytest.raises(BadConfig, match=f"lacks a part of {name}"):
            restore(
                training, path, manifest.model_copy(update={"tensors": lacking}), RANKS
            )


def test_weights_that_are_tied_are_kept_once_and_stay_tied(dataset, batches, tmp_path):
    training, other = (
        trained(dataset, batches[:1]),
        training_of(config_of(seed=7), dataset),
    )
    restore(other, *written(training, tmp_path), RANKS)
    for one in (training, other):
        assert (
            one.module.model.get_output_embeddings().weight
            is one.module.model.get_input_embeddings().weight
        )
    held = [
        one for one in tensor_shards(training, RANKS) if one.name.startswith("weights.")
    ]
    assert [one.shape for one in held].count(
        tuple(training.module.model.get_input_embeddings().weight.shape)
    ) == 1
    assert len({one.local.data_ptr() for one in held}) == len(held)


def test_frozen_parameters_are_kept_without_an_optimizers_state(
    dataset, batches, tmp_path
):
    def frozen(seed):
        training = training_of(config_of(seed=seed), dataset)
        training.module.model.get_submodule(
            "bert.embeddings.position_embeddings"
        ).requires_grad_(False)
        optimizer = make_optimizer(training.module, CONFIG, RANKS)
        return replace(
            training,
            optimizer=optimizer,
            step=TrainStep(
                training.parallel_module,
                optimizer,
                CONFIG,
                RANKS,
                weights_changed=lambda: None,
            ),
        )

    training, other = frozen(0), frozen(7)
    training.step.run([batches[0]], 1e-3)
    path, manifest = written(training, tmp_path)
    name = "model.bert.embeddings.position_embeddings.weight"
    assert f"weights.{name}" in manifest.tensors
    assert f"exp_avg.{name}" not in manifest.tensors
    restore(other, path, manifest, RANKS)
    assert same(state_of_training(other), state_of_training(training))


def test_tensors_of_all_widths_lie_where_their_numbers_may():
    values = [
        torch.ones(3, dtype=torch.uint8),
        torch.full((3, 1), 2.5),
        torch.tensor(7),
        torch.zeros(0, 4),
        torch.full((5,), 1.5, dtype=torch.bfloat16),
        torch.tensor([True]),
        torch.full((1,), 9.0, dtype=torch.float64),
    ]
    whole = {"begin": 0, "saved_here": True, "shared": True}
    held = [
        TensorShard(name=str(n), local=one, shape=tuple(one.shape), **whole)
        for n, one in enumerate(values)
    ]
    copy = HostCopy(held, FILE, pinned=False)
    copy.take(held)
    read = load(bytes(copy.content))
    assert all(
        torch.equal(read[str(number)], value) for number, value in enumerate(values)
    )

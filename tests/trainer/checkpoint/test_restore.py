"""Trainings that are restored from checkpoints of one or more ranks."""

from dataclasses import replace

import pytest
from safetensors.torch import load_file

from testbed.examples.checkpoints import state_of
from tests.trainer.checkpoint.saves import SHARE
from tests.trainer.tiny_models import SHAPES, config_of, micro_batches, training_of
from tests.trainer.training_states import state_of_training, tensors_are_equal
from trainer.checkpoint.checkpoint_writer import CheckpointWriter
from trainer.checkpoint.format import checkpoint_name
from trainer.checkpoint.host_copy import HostCopy
from trainer.checkpoint.restore import restore
from trainer.checkpoint.stored_checkpoints import read_checkpoint
from trainer.checkpoint.tensors import make_optimizer_state, tensor_shards
from trainer.distributed.optimizer import make_optimizer
from trainer.distributed.step import TrainStep
from trainer.formats.errors import BadConfig
from trainer.formats.train_config import ModelSettings
from trainer.runtime.ranks import join_ranks

CONFIG = config_of()
LEARNING_RATE = 1e-3
SINGLE_RANK = join_ranks(CONFIG, environment={})
OTHER_SEED = 7
"""Seed with which a training has other weights than with that of ``CONFIG``."""
POSITION_EMBEDDINGS = "bert.embeddings.position_embeddings"


@pytest.fixture
def batches(dataset):
    """Micro-batches of the first five steps."""
    return micro_batches(dataset, CONFIG, steps=5)


def trained(dataset, batches, *, config=CONFIG):
    """Return a training after a step on each of the micro-batches."""
    training = training_of(config, dataset)
    for batch in batches:
        training.step.run([batch], LEARNING_RATE)
    return training


def save(training, root, *, ranks=1):
    """Save a training in as many parts as so many ranks do under fsdp2.

    Returns:
        The checkpoint's directory, and its manifest.
    """
    shards = tensor_shards(training, SINGLE_RANK)
    shards_with_dimensions = [shard for shard in shards if shard.shape]
    scalars = [shard for shard in shards if not shard.shape]
    name = checkpoint_name(step=5, rollbacks=0)
    for rank in reversed(range(ranks)):  # rank 0 waits for all others
        own_shards = [
            part_of(shard, rank=rank, ranks=ranks) for shard in shards_with_dimensions
        ]
        if rank == 0:
            own_shards += scalars
        copy = HostCopy(own_shards, f"rank-{rank:05d}.safetensors", pinned=False)
        copy.take(own_shards)
        writer = CheckpointWriter(
            root,
            name,
            attempt=1,
            rank=rank,
            writing_ranks=range(ranks),
            timeout_s=1.0,
        )
        writer.write(copy.content, copy.tensors, state_of(5))
    return root / name, read_checkpoint(root / name)


def part_of(shard, *, rank, ranks):
    """Return a rank's part of a tensor with dimensions."""
    lengths = [len(part) for part in shard.local.chunk(ranks)]
    begin = sum(lengths[:rank])
    end = sum(lengths[: rank + 1])
    return replace(shard, local=shard.local[begin:end], begin=begin)


def training_with_frozen_positions(dataset, *, seed):
    """Return a training whose position embeddings are not trained."""
    training = training_of(config_of(seed=seed), dataset)
    positions = training.module.model.get_submodule(POSITION_EMBEDDINGS)
    positions.requires_grad_(False)
    # Made again, as an optimizer has the parameters that are trained when it is made.
    optimizer = make_optimizer(training.module, CONFIG, SINGLE_RANK)
    step = TrainStep(
        training.parallel_module,
        optimizer,
        CONFIG,
        SINGLE_RANK,
        weights_changed=lambda: None,
    )
    return replace(training, optimizer=optimizer, step=step)


def test_safetensors_reads_the_file(dataset, batches, tmp_path):
    training = trained(dataset, batches[:2])
    path, manifest = save(training, tmp_path)
    tensors = load_file(path / SHARE)
    assert tensors_are_equal(tensors, state_of_training(training))
    assert tensors.keys() == manifest.tensors.keys()


def test_checkpoint_holds_weights_and_optimizer_state(dataset, batches, tmp_path):
    training = trained(dataset, batches[:2])
    path, _ = save(training, tmp_path)
    tensors = load_file(path / SHARE)
    names = [name for name, _ in training.module.named_parameters()]
    for kind in ("weights", "step", "exp_avg", "exp_avg_sq"):
        assert tensors.keys() >= {f"{kind}.{name}" for name in names}
    assert float(tensors[f"step.{names[0]}"]) == 2.0


@pytest.mark.parametrize(
    ("steps", "ranks", "precision"),
    [
        pytest.param(2, 1, "bf16", id="bf16"),
        pytest.param(2, 3, "fp32", id="saved by three ranks"),
        pytest.param(0, 1, "fp32", id="before the first step"),
    ],
)
def test_restored_training_continues_bit_by_bit(
    dataset, batches, tmp_path, steps, ranks, precision
):
    config = config_of(precision=precision)
    uninterrupted = trained(dataset, batches[:steps], config=config)
    saved = trained(dataset, batches[:steps], config=config)
    make_optimizer_state(saved)  # as a save does, before the first step as well
    # Before it is restored, it has other weights, and optimizer state of another step.
    other_config = config_of(seed=OTHER_SEED, precision=precision)
    restored = trained(dataset, batches[:3], config=other_config)
    assert not tensors_are_equal(state_of_training(restored), state_of_training(saved))
    path, manifest = save(saved, tmp_path, ranks=ranks)
    restore(restored, path, manifest, SINGLE_RANK)
    assert tensors_are_equal(state_of_training(restored), state_of_training(saved))
    for batch in batches[steps:]:
        expected = uninterrupted.step.run([batch], LEARNING_RATE)
        result = restored.step.run([batch], LEARNING_RATE)
        assert (result.loss, result.grad_norm) == (expected.loss, expected.grad_norm)
    assert tensors_are_equal(
        state_of_training(restored), state_of_training(uninterrupted)
    )


@pytest.mark.parametrize(
    ("model_change", "message"),
    [
        pytest.param(
            {"intermediate_size": 96},
            r"weights\.\S*intermediate.* is F32 \[64.*expected F32 \[96",
            id="other shape",
        ),
        pytest.param(
            {"num_hidden_layers": 3},
            r"weights\.\S*layer\.2\.\S* is missing",
            id="more layers",
        ),
    ],
)
def test_rejects_checkpoint_of_another_model(
    dataset, batches, tmp_path, model_change, message
):
    path, manifest = save(trained(dataset, batches[:1]), tmp_path)
    model = ModelSettings(name="m", config=SHAPES["bert"] | model_change)
    other = training_of(config_of(model=model), dataset)
    before = {name: value.clone() for name, value in other.module.named_parameters()}
    with pytest.raises(BadConfig, match=f"does not match the model: {message}"):
        restore(other, path, manifest, SINGLE_RANK)
    assert tensors_are_equal(before, dict(other.module.named_parameters()))


@pytest.mark.parametrize(
    "kept_parts",
    [
        pytest.param([0], id="second part is missing"),
        pytest.param([1], id="first part is missing"),
        pytest.param([], id="both parts are missing"),
    ],
)
def test_rejects_checkpoint_without_a_part(dataset, batches, tmp_path, kept_parts):
    training = trained(dataset, batches[:1])
    path, manifest = save(training, tmp_path, ranks=2)
    name = f"weights.model.{POSITION_EMBEDDINGS}.weight"
    entry = manifest.tensors[name]
    assert len(entry.parts) == 2  # one of each rank
    parts = [entry.parts[number] for number in kept_parts]
    incomplete_entry = entry.model_copy(update={"parts": parts})
    incomplete = manifest.model_copy(
        update={"tensors": manifest.tensors | {name: incomplete_entry}}
    )
    with pytest.raises(BadConfig, match=f"lacks a part of {name}"):
        restore(training, path, incomplete, SINGLE_RANK)


def test_tied_weights_stay_tied(dataset, batches, tmp_path):
    training = trained(dataset, batches[:1])
    restored = training_of(config_of(seed=OTHER_SEED), dataset)
    path, manifest = save(training, tmp_path)
    restore(restored, path, manifest, SINGLE_RANK)
    for model in (training.module.model, restored.module.model):
        embeddings = model.get_input_embeddings()
        assert model.get_output_embeddings().weight is embeddings.weight


def test_frozen_parameters_have_no_optimizer_state(dataset, batches, tmp_path):
    training = training_with_frozen_positions(dataset, seed=0)
    training.step.run([batches[0]], LEARNING_RATE)
    path, manifest = save(training, tmp_path)
    name = f"model.{POSITION_EMBEDDINGS}.weight"
    assert f"weights.{name}" in manifest.tensors
    assert f"exp_avg.{name}" not in manifest.tensors
    restored = training_with_frozen_positions(dataset, seed=OTHER_SEED)
    restore(restored, path, manifest, SINGLE_RANK)
    assert tensors_are_equal(state_of_training(restored), state_of_training(training))

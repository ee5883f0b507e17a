from tests.trainer.oracles import config_of, micro_batches, training_of
from trainer.checkpoint.tensors import tensor_shards
from trainer.distributed.ranks import join_ranks


def test_tied_weights_are_saved_once(dataset):
    config = config_of()
    training = training_of(config, dataset)
    training.step.run(micro_batches(dataset, config), 1e-3)
    weights = [
        shard
        for shard in tensor_shards(training, join_ranks(config, environment={}))
        if shard.name.startswith("weights.")
    ]
    embeddings_shape = tuple(training.module.model.get_input_embeddings().weight.shape)
    assert [shard.shape for shard in weights].count(embeddings_shape) == 1
    assert len({shard.local.data_ptr() for shard in weights}) == len(weights)

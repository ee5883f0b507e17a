"""A small profile, whose dataset is beside its directory."""

PROFILE = """
schema_version = 3
[train]
micro_batch_size = 4
learning_rate = 0.001
[train.model]
name = "m"
[train.model.config]
model_type = "bert"
[train.data]
path = "../data"
"""

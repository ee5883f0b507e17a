"""Configurations resolved from a profile, the command line and the environment."""

from pathlib import Path

import pytest

from tests.trainer.config.profile_file import PROFILE
from trainer.config.resolve import resolve
from trainer.formats.errors import BadConfig

EXAMPLE = "train.max_steps=30"
"""Example of an assignment, which the next step of an error shows."""


def test_names_the_source_of_each_value(profile):
    resolved = resolve(
        profile, assignments=["train.micro_batch_size=7"], environment={}
    )
    assert resolved.config.micro_batch_size == 7
    assert resolved.sources["train.micro_batch_size"] == "command line"
    assert resolved.sources["train.learning_rate"] == "profile"
    assert resolved.sources["train.max_steps"] == "default"
    # Keys of inner tables are dotted; the model's config is a single value.
    assert resolved.sources["train.data.num_workers"] == "default"
    assert resolved.sources["train.parallel.strategy"] == "default"
    assert resolved.sources["train.model.config"] == "profile"


def test_dataset_of_command_line_precedes_environment(profile):
    resolved = resolve(profile, data=Path("cli"), environment={"AUTOTUNE_DATA": "env"})
    assert resolved.data_dir == Path("cli")
    assert resolved.sources["train.data.path"] == "command line"


def test_dataset_of_environment_precedes_profile(profile):
    resolved = resolve(profile, environment={"AUTOTUNE_DATA": "env"})
    assert resolved.data_dir == Path("env")
    assert resolved.sources["train.data.path"] == "environment"


def test_dataset_of_profile_is_relative_to_it(profile):
    resolved = resolve(profile, environment={})
    assert resolved.data_dir == profile.parent / "../data"
    assert resolved.sources["train.data.path"] == "profile"


@pytest.mark.parametrize(
    ("assignment", "key", "value"),
    [
        pytest.param(
            "train.weight_decay=0", "weight_decay", 0.0, id="integer for a float"
        ),
        pytest.param("train.precision=bf16", "precision", "bf16", id="bare word"),
    ],
)
def test_assignment_takes_the_type_of_its_setting(profile, assignment, key, value):
    resolved = resolve(profile, assignments=[assignment], environment={})
    assigned = getattr(resolved.config, key)
    assert assigned == value
    assert type(assigned) is type(value)


@pytest.mark.parametrize(
    ("assignment", "next_step"),
    [
        pytest.param("max_steps=3", EXAMPLE, id="without a table"),
        pytest.param("train.max_steps", EXAMPLE, id="without a value"),
        pytest.param("=3", EXAMPLE, id="without a key"),
        pytest.param("train=3", EXAMPLE, id="only a table"),
        pytest.param("train.max_step=3", "'max_steps'", id="misspelt key"),
        pytest.param("train.seed.x=3", "Check the key", id="key of a number"),
    ],
)
def test_rejects_bad_assignment(profile, assignment, next_step):
    with pytest.raises(BadConfig) as raised:
        resolve(profile, assignments=["train.seed=1", assignment], environment={})
    assert next_step in raised.value.next_step


@pytest.mark.parametrize(
    ("assignment", "key", "model"),
    [
        pytest.param(
            "train.model.name=bert-small", "train.model.name", "bert-small", id="name"
        ),
        pytest.param(
            'train.model={name="n",config={model_type="bert"}}',
            "train.model.name",
            "n",
            id="whole model",
        ),
        pytest.param(
            "train.model.config.hidden_size=64",
            "config.hidden_size",
            "CONFIG.json",
            id="key of the config",
        ),
        pytest.param(
            "train.model.config.model_type=roberta",
            "config.model_type",
            "CONFIG.json",
            id="model type",
        ),
        pytest.param(
            'train.model.config={model_type="x"}',
            "config.model_type",
            "CONFIG.json",
            id="whole config",
        ),
        pytest.param(
            'train.model.null_keys=["a"]',
            "train.model.null_keys",
            "CONFIG.json",
            id="null keys",
        ),
    ],
)
def test_rejects_another_model_than_the_profile(profile, assignment, key, model):
    with pytest.raises(BadConfig) as raised:
        resolve(profile, assignments=[assignment], environment={})
    assert key in raised.value.message
    assert "'m'" in raised.value.message  # the profile's model
    assert f"autotune tune --model {model} --data" in raised.value.next_step


@pytest.mark.parametrize(
    "assignment",
    [
        "train.model.name=m",
        "train.model.config.model_type=bert",
        "train.model.config.attention_probs_dropout_prob=0.1",
        "train.model.config.layer_norm_eps=1e-5",
        "train.model.config.initializer_range=0.01",
    ],
)
def test_accepts_assignment_that_keeps_the_model(profile, assignment):
    resolved = resolve(profile, assignments=[assignment], environment={})
    assert resolved.config.model.name == "m"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        pytest.param(
            "schema_version = 3",
            "schema_version = 99",
            "schema version 99",
            id="schema version",
        ),
        pytest.param(
            "../data",
            "/data",
            "relative to the profile",
            id="absolute path of the dataset",
        ),
        pytest.param(
            "[train.data]",
            "[evidence.workers]\nseconds = inf\n[train.data]",
            r"evidence\.workers\.seconds = inf",
            id="infinite number",
        ),
        pytest.param(
            "[train.data]",
            "[evidence.workers]\nseconds = nan\n[train.data]",
            r"evidence\.workers\.seconds = nan",
            id="NaN",
        ),
        pytest.param("[train", "[other", r"no \[train\] table", id="no train table"),
    ],
)
def test_rejects_unusable_profile(profile, old, new, message):
    profile.write_text(PROFILE.replace(old, new))
    with pytest.raises(BadConfig, match=message) as raised:
        resolve(profile, environment={})
    assert raised.value.next_step


@pytest.mark.parametrize(
    ("assignments", "message"),
    [
        pytest.param(
            ["train.parallel.shard_ranks=2"],
            "parallel.shard_ranks requires parallel.strategy = 'fsdp2'",
            id="shards without fsdp2",
        ),
        pytest.param(
            ["train.parallel.strategy=fsdp2", "train.parallel.static_graph=true"],
            "parallel.static_graph cannot be used",
            id="static graph of fsdp2",
        ),
        pytest.param(
            ["train.global_batch_tokens=9", "train.global_batch_samples=9"],
            "cannot be used with global_batch_samples",
            id="two global batches",
        ),
        pytest.param(["train.precision=fp16"], "fp16 is not supported", id="fp16"),
    ],
)
def test_rejects_settings_that_conflict(profile, assignments, message):
    with pytest.raises(BadConfig, match=message) as raised:
        resolve(profile, assignments=assignments, data=Path("d"), environment={})
    assert "Value error" not in raised.value.message  # pydantic's words
    assert "''" not in raised.value.next_step

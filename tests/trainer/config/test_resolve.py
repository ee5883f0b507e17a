"""Configurations resolved from a profile, the command line and the environment."""

import datetime
import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from trainer.config.resolve import is_modified, resolve
from trainer.config.settings_text import settings_text
from trainer.config.tables import canonical_sha256
from trainer.errors import BadConfig, ProfileMismatch

PROFILE = """
schema_version = 2
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
EXAMPLE = "train.max_steps=30"
"""Example of an assignment, which the next step of an error shows."""
HASH_OF_PROFILE = canonical_sha256(tomllib.loads(PROFILE))
OTHER_HASH = "0" * 64


@pytest.fixture
def profile(tmp_path) -> Path:
    path = tmp_path / "profiles" / "p.toml"
    path.parent.mkdir()
    path.write_text(PROFILE)
    return path


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
    ("key", "text", "value"),
    [("weight_decay", "0", 0.0), ("precision", "bf16", "bf16")],
    ids=["integer for a float", "bare word"],
)
def test_assignment_takes_the_type_of_its_setting(profile, key, text, value):
    resolved = resolve(profile, assignments=[f"train.{key}={text}"], environment={})
    assigned = getattr(resolved.config, key)
    assert (assigned, type(assigned)) == (value, type(value))


@pytest.mark.parametrize(
    ("assignment", "next_step"),
    [
        pytest.param("max_steps=3", EXAMPLE, id="without train"),
        pytest.param("train.max_steps", EXAMPLE, id="without a value"),
        pytest.param("=3", EXAMPLE, id="without a key"),
        pytest.param("train=3", EXAMPLE, id="only train"),
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
        ("schema_version = 2", "schema_version = 99", "schema version 99"),
        ("../data", "/data", "relative to the profile"),
        (
            "[train.data]",
            "[evidence.workers]\nseconds = inf\n[train.data]",
            r"evidence\.workers\.seconds = inf",
        ),
        (
            "[train.data]",
            "[evidence.workers]\nseconds = nan\n[train.data]",
            r"evidence\.workers\.seconds = nan",
        ),
        ("[train", "[other", r"no \[train\] table"),
    ],
    ids=[
        "schema version",
        "absolute path of the dataset",
        "infinite number",
        "NaN",
        "no train table",
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
        (
            ["train.parallel.shard_ranks=2"],
            "parallel.shard_ranks requires parallel.strategy = 'fsdp2'",
        ),
        (
            ["train.parallel.strategy=fsdp2", "train.parallel.static_graph=true"],
            "parallel.static_graph cannot be used",
        ),
        (
            ["train.global_batch_tokens=9", "train.global_batch_samples=9"],
            "cannot be used with global_batch_samples",
        ),
        (["train.precision=fp16"], "fp16 is not supported"),
    ],
    ids=["shards without fsdp2", "static graph of fsdp2", "two batches", "fp16"],
)
def test_rejects_settings_that_conflict(profile, assignments, message):
    with pytest.raises(BadConfig, match=message) as raised:
        resolve(profile, assignments=assignments, data=Path("d"), environment={})
    assert "Value error" not in raised.value.message  # pydantic's words
    assert "''" not in raised.value.next_step


def test_profile_hash_ignores_assignments(profile):
    plain = resolve(profile, environment={"AUTOTUNE_DATA": "d"})
    changed = resolve(
        profile,
        assignments=["train.max_steps=7"],
        data=Path("d"),
        expect_sha256=plain.profile_sha256,
    )
    assert changed.profile_sha256 == plain.profile_sha256
    assert changed.config_sha256 != plain.config_sha256


def test_profile_hash_ignores_comments(profile):
    sha256 = resolve(profile, data=Path("d")).profile_sha256
    profile.write_text(f"# a comment\n{PROFILE}")
    resolve(profile, data=Path("d"), expect_sha256=sha256)


def test_rejects_modified_profile(profile):
    sha256 = resolve(profile, data=Path("d")).profile_sha256
    profile.write_text(PROFILE.replace("0.001", "0.002"))
    with pytest.raises(ProfileMismatch, match=f"expected {sha256[:12]}"):
        resolve(profile, data=Path("d"), expect_sha256=sha256)


def test_trainer_rejects_modified_profile_before_it_writes(profile, tmp_path):
    command = [
        sys.executable,
        "-m",
        "trainer",
        profile,
        "--data",
        "d",
        "--out",
        tmp_path / "run",
        "--expect-profile-sha256",
        OTHER_HASH,
    ]
    process = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=60
    )
    assert process.returncode == 6
    assert "was modified" in process.stderr
    assert "  next: " in process.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("recorded", "expected"),
    [
        pytest.param(HASH_OF_PROFILE, False, id="its hash"),
        pytest.param(OTHER_HASH, True, id="another hash"),
        pytest.param(3, True, id="a number"),
    ],
)
def test_recorded_hash_tells_whether_profile_was_modified(profile, recorded, expected):
    profile.write_text(f"content_sha256 = {json.dumps(recorded)}\n{PROFILE}")
    resolved = resolve(profile, assignments=["train.seed=3"], environment={})
    assert resolved.profile_modified == expected


def test_profile_written_by_hand_is_not_modified(profile):
    resolved = resolve(profile, assignments=["train.seed=3"], environment={})
    assert not resolved.profile_modified


def test_date_in_a_profile_is_a_modification():
    # Dates have no JSON form, so that the profile cannot be hashed as it was written.
    assert is_modified(
        {"content_sha256": OTHER_HASH, "date": datetime.date(2026, 1, 1)}
    )


def test_trainer_warns_once_of_a_modified_profile(profile, tmp_path):
    profile.write_text(f'content_sha256 = "{OTHER_HASH}"\n{PROFILE}')
    command = [sys.executable, "-m", "trainer", profile, "--data", tmp_path / "none"]
    process = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=60
    )
    warning, error, *other_lines = process.stderr.splitlines()
    assert warning.startswith(f"warning: {profile} was modified after it was tuned")
    # The trainer went on, up to the missing dataset.
    assert "dataset not found" in error
    assert not any("modified" in line for line in (error, *other_lines))


def test_settings_text_names_differences_with_their_source(profile):
    assignments = ["train.seed=3", "train.model.config.hidden_dropout_prob=0.0"]
    resolved = resolve(profile, assignments=assignments, data=Path("d"))
    headline, *lines = settings_text(resolved, Path("r")).splitlines()
    assert (
        headline == "train: settings that differ from the defaults; r has all of them"
    )
    assert {
        "  train.seed = 3  (command line)",
        "  train.data.path = d  (command line)",
        "  train.model.config.hidden_dropout_prob = 0.0  (command line)",
    } <= set(lines)


def test_settings_text_leaves_out_defaults(profile):
    default_max_steps = "train.max_steps=1000"
    assignments = [default_max_steps, "train.model.config.hidden_dropout_prob=0.0"]
    resolved = resolve(profile, assignments=assignments, data=Path("d"))
    text = settings_text(resolved, Path("r"))
    assert "max_steps" not in text
    assert "(default)" not in text
    # The config of the model is printed by its keys, not as a whole.
    assert "model.config =" not in text

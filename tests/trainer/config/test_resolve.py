import datetime
import json
import math
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Annotated

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field

from tests.trainer.oracles import config_of
from trainer.__main__ import _print_settings
from trainer.config.resolve import is_modified, resolve
from trainer.config.tables import (
    StrictTable,
    canonical_json,
    canonical_sha256,
    parse_table,
    read_json,
    read_toml,
)
from trainer.config.train_config import (
    CheckpointSettings,
    ParallelSettings,
    gradient_accumulation_steps,
)
from trainer.data.global_batch import make_plan
from trainer.errors import BadConfig, ProfileMismatch, printable


@given(
    global_batch_size=st.integers(1, 500),
    micro_batch_size=st.integers(1, 64),
    world_size=st.integers(1, 9),
)
def test_batch_split_keeps_the_global_batch(
    global_batch_size, micro_batch_size, world_size
):
    config = config_of(
        micro_batch_size=micro_batch_size, global_batch_size=global_batch_size
    )
    plan = make_plan(config, 1000, world_size)
    micro_batches = gradient_accumulation_steps(config, world_size) * world_size
    assert plan.sequences_per_micro_batch <= micro_batch_size
    assert plan.sequences_per_micro_batch * micro_batches >= global_batch_size


@pytest.mark.parametrize(
    ("kind", "key", "value"),
    [
        *((ParallelSettings, "timeout_s", value) for value in (1.0, 600.0, 604800.0)),
        (CheckpointSettings, "interval_s", 1e-6),
    ],
)
def test_accepts_possible_time(kind, key, value):
    assert getattr(parse_table(kind, {key: value}, where="p.toml"), key) == value


@pytest.mark.parametrize(
    ("kind", "key", "value"),
    [
        *(
            (ParallelSettings, "timeout_s", value)
            for value in (0.0, 0.9, math.inf, math.nan, 1e10)
        ),
        *(
            (CheckpointSettings, "interval_s", value)
            for value in (0.0, -1.0, math.inf, math.nan)
        ),
    ],
)
def test_rejects_impossible_time(kind, key, value):
    with pytest.raises(BadConfig) as raised:
        parse_table(kind, {key: value}, where="p.toml")
    assert f"{key} = {value}" in raised.value.message


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


HASH_OF_PROFILE = canonical_sha256(tomllib.loads(PROFILE))


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
    assert {
        "train.data.num_workers",
        "train.parallel.strategy",
        "train.model.config",
    } <= set(resolved.sources)


@pytest.mark.parametrize(
    ("data", "environment", "expected", "source"),
    [
        (Path("cli"), {"AUTOTUNE_DATA": "env"}, Path("cli"), "command line"),
        (None, {"AUTOTUNE_DATA": "env"}, Path("env"), "environment"),
        (None, {}, None, "profile"),
    ],
)
def test_command_line_names_the_dataset_before_environment(
    profile, data, environment, expected, source
):
    resolved = resolve(profile, data=data, environment=environment)
    assert resolved.data_dir == (expected or profile.parent / "../data")
    assert resolved.sources["train.data.path"] == source


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
        ("max_steps=3", "train.max_steps=30"),
        ("train.max_steps", "train.max_steps=30"),
        ("=3", "train.max_steps=30"),
        ("train=3", "train.max_steps=30"),
        ("train.max_step=3", "'max_steps'"),
        ("train.seed.x=3", "Check the key"),
    ],
)
def test_rejects_bad_assignment(profile, assignment, next_step):
    with pytest.raises(BadConfig) as raised:
        resolve(profile, assignments=["train.seed=1", assignment], environment={})
    assert next_step in raised.value.next_step


@pytest.mark.parametrize(
    ("assignment", "key", "model"),
    [
        ("train.model.name=bert-small", "train.model.name", "bert-small"),
        ('train.model={name="n",config={model_type="bert"}}', "train.model.name", "n"),
        ("train.model.config.hidden_size=64", "config.hidden_size", "CONFIG.json"),
        ("train.model.config.model_type=roberta", "config.model_type", "CONFIG.json"),
        ('train.model.config={model_type="x"}', "config.model_type", "CONFIG.json"),
        ('train.model.null_keys=["a"]', "train.model.null_keys", "CONFIG.json"),
    ],
)
def test_rejects_another_model_than_the_profile(profile, assignment, key, model):
    with pytest.raises(BadConfig) as raised:
        resolve(profile, assignments=[assignment], environment={})
    assert key in raised.value.message
    assert "'m'" in raised.value.message
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
            r"evidence\.workers\.seconds",
        ),
        (
            "[train.data]",
            "[evidence.workers]\nseconds = nan\n[train.data]",
            r"evidence\.workers\.seconds",
        ),
        ("[train", "[other", r"no \[train\] table"),
    ],
    ids=["schema version", "absolute path", "infinite", "NaN", "no table"],
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
        "0" * 64,
    ]
    process = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=60
    )
    assert process.returncode == 6
    assert "was modified" in process.stderr
    assert "  next: " in process.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("recorded", "is_edited"),
    [
        pytest.param(None, False, id="by hand"),
        pytest.param(HASH_OF_PROFILE, False, id="as written"),
        pytest.param("0" * 64, True, id="edited"),
        pytest.param(3, True, id="no hash"),
    ],
)
def test_knows_whether_the_profile_was_edited(profile, recorded, is_edited):
    if recorded is not None:
        text = f"content_sha256 = {json.dumps(recorded)}\n" + profile.read_text()
        profile.write_text(text)
    resolved = resolve(profile, assignments=["train.seed=3"], environment={})
    assert resolved.profile_modified == is_edited


def test_date_in_a_profile_is_an_edit():
    assert is_modified({"content_sha256": "0" * 64, "date": datetime.date(2026, 1, 1)})


def test_trainer_warns_once_of_an_edited_profile(profile, tmp_path):
    text = f'content_sha256 = "{"0" * 64}"\n' + profile.read_text()
    profile.write_text(text)
    command = [sys.executable, "-m", "trainer", profile, "--data", tmp_path / "none"]
    process = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=60
    )
    first, *others = process.stderr.splitlines()
    assert first.startswith(f"warning: {profile} was modified after it was tuned")
    # Training was not refused for it.
    assert "dataset not found" in others[0]
    assert not any("modified" in line for line in others)


def test_prints_settings_that_differ_from_defaults(profile, capsys):
    assignments = [
        "train.seed=3",
        "train.max_steps=1000",
        "train.model.config.hidden_dropout_prob=0.0",
    ]
    _print_settings(
        resolve(profile, assignments=assignments, data=Path("d")), Path("r")
    )
    first, *lines = capsys.readouterr().err.splitlines()
    assert first == "train: settings that differ from the defaults; r has all of them"
    assert {
        "  train.seed = 3  (command line)",
        "  train.data.path = d  (command line)",
        "  train.model.config.hidden_dropout_prob = 0.0  (command line)",
    } <= set(lines)
    assert not any(
        "max_steps" in line or "(default)" in line or "model.config =" in line
        for line in lines
    )


def test_escapes_control_characters():
    assert (
        printable("a\x1b[2Jb\r\x07\nc\u202ed\tä") == "a\\x1b[2Jb\\r\\x07\nc\\u202ed\\tä"
    )
    error = BadConfig("unknown key 'x\x1b]0;'", next_step="remove 'x\x1b]0;'")
    assert error.message == "unknown key 'x\\x1b]0;'"
    assert error.next_step == "remove 'x\\x1b]0;'"


class Inner(StrictTable):
    learning_rate: float = 1.0


class Outer(StrictTable):
    inner: Inner = Inner()
    others: list[Inner] = Field(default_factory=list)
    batch_size: Annotated[int, Field(gt=0)] = 1


@pytest.mark.parametrize(
    ("value", "message", "next_step"),
    [
        ({"inner": {"learning_rat": 1.0}}, "inner.learning_rat", "'learning_rate'"),
        ({"others": [{"learning_ratee": 1.0}]}, "learning_ratee", "'learning_rate'"),
        ({"zzz": 1}, "zzz", "closest of 3 known keys"),
        ({"batch_size": -3}, "batch_size = -3", "Correct 'batch_size'"),
        # Nothing is converted silently.
        ({"batch_size": "3"}, "batch_size = '3'", "Correct 'batch_size'"),
    ],
)
def test_names_wrong_key_with_next_step(value, message, next_step):
    with pytest.raises(BadConfig) as raised:
        parse_table(Outer, value, where="p.toml")
    assert message in raised.value.message
    assert next_step in raised.value.next_step


@pytest.mark.parametrize(
    ("read", "content", "message"),
    [
        (read_toml, b"a = 1\n" * 200_000, "limit of 1,048,576 bytes"),
        (read_json, b"[" * 40 + b"]" * 40, "32 nested levels"),
        (read_json, b"[" * 100_000 + b"]" * 100_000, "not valid JSON"),
        (read_json, b"{", "not valid JSON"),
        (read_toml, b"x" + b".x" * 5000 + b" = 1\n", "nested levels|not valid TOML"),
        (read_toml, b"x =", "not valid TOML"),
        (read_toml, b"\xff\xfe\x00", "not UTF-8"),
    ],
    ids=["large", "deep", "deepest", "no JSON", "dotted", "no TOML", "no text"],
)
def test_rejects_invalid_file(tmp_path, read, content, message):
    (tmp_path / "f").write_bytes(content)
    with pytest.raises(BadConfig, match=message):
        read(tmp_path / "f")


@pytest.mark.parametrize(
    ("name", "next_step"),
    [
        ("bert-mini-cpy.toml", "Did you mean {}/bert-mini-cpu.toml?"),
        ("other.toml", "Write one."),
        # Similar by its suffix only.
        ("mini.toml", "Write one."),
        ("none/bert-mini-cpu.toml", "Write one."),
    ],
)
def test_suggests_file_for_missing_one(tmp_path, name, next_step):
    (tmp_path / "bert-mini-cpu.toml").touch()
    with pytest.raises(BadConfig) as raised:
        read_toml(tmp_path / name, if_missing="Write one.")
    assert raised.value.next_step == next_step.format(tmp_path)


@given(st.dictionaries(st.text(), st.integers() | st.text()))
def test_canonical_json_ignores_the_order_of_keys(value):
    assert canonical_json(value) == canonical_json(dict(reversed(value.items())))

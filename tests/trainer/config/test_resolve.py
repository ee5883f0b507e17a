import math
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field

from tests.trainer.oracles import config_of
from trainer.__main__ import _print_settings
from trainer.config.resolve import resolve
from trainer.config.tables import (
    StrictTable,
    canonical_json,
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


@given(rows=st.integers(1, 500), micro=st.integers(1, 64), world=st.integers(1, 9))
def test_the_global_batch_is_kept_and_no_micro_batch_exceeds_what_fits(
    rows, micro, world
):
    config = config_of(micro_batch_size=micro, global_batch_size=rows)
    plan = make_plan(config, 1000, world)
    assert plan.sequences_per_micro_batch <= micro
    assert (
        plan.sequences_per_micro_batch
        * gradient_accumulation_steps(config, world)
        * world
        >= rows
    )


@pytest.mark.parametrize(
    ("kind", "key", "possible", "impossible"),
    [
        (
            ParallelSettings,
            "timeout_s",
            (1.0, 600.0, 7 * 86400.0),
            (0.0, 0.9, math.inf, math.nan, 1e10),
        ),
        (CheckpointSettings, "interval_s", (1e-6,), (0.0, -1.0, math.inf, math.nan)),
    ],
)
def test_times_that_no_clock_can_wait_for_are_refused_with_their_key(
    kind, key, possible, impossible
):
    for value in possible:
        assert getattr(parse_table(kind, {key: value}, where="p.toml"), key) == value
    for value in impossible:
        with pytest.raises(BadConfig) as caught:
            parse_table(kind, {key: value}, where="p.toml")
        assert f"{key} = {value}" in caught.value.message


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


@pytest.fixture
def profile(tmp_path) -> Path:
    path = tmp_path / "profiles" / "p.toml"
    path.parent.mkdir()
    path.write_text(PROFILE)
    return path


def test_the_command_line_comes_before_the_profile_and_the_profile_before_the_default(
    profile,
):
    resolved = resolve(
        profile, assignments=["train.micro_batch_size=7"], environment={}
    )
    assert (
        resolved.config.micro_batch_size,
        resolved.sources["train.micro_batch_size"],
    ) == (7, "command line")
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
def test_the_dataset_is_named_by_command_line_then_environment_then_profile(
    profile, data, environment, expected, source
):
    resolved = resolve(profile, data=data, environment=environment)
    assert resolved.data_dir == (expected or profile.parent / "../data")
    assert resolved.sources["train.data.path"] == source


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [("weight_decay", "0", 0.0), ("precision", "bf16", "bf16")],
)
def test_an_integer_is_a_float_where_one_is_asked_for_and_a_bare_word_is_a_string(
    profile, key, text, value
):
    found = getattr(
        resolve(profile, assignments=[f"train.{key}={text}"], environment={}).config,
        key,
    )
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(
    ("assignment", "next_step"),
    [
        (text, "train.max_steps=30")
        for text in ("max_steps=3", "train.max_steps", "=3", "train=3")
    ]
    + [("train.max_step=3", "'max_steps'"), ("train.seed.x=3", "Check the key")],
)
def test_an_assignment_of_another_form_or_key_is_refused_with_an_example_or_the_nearest(
    profile, assignment, next_step
):
    with pytest.raises(BadConfig) as caught:
        resolve(profile, assignments=["train.seed=1", assignment], environment={})
    assert next_step in caught.value.next_step


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("schema_version = 2", "schema_version = 99", "schema version 99"),
        ("../data", "/data", "relative to the profile"),
        *(
            (
                "[train.data]",
                f"[evidence.workers]\nseconds = {number}\n[train.data]",
                r"evidence\.workers\.seconds",
            )
            for number in ("inf", "nan")
        ),
        ("[train", "[other", r"no \[train\] table"),
    ],
)
def test_a_profile_of_another_kind_is_refused(profile, old, new, why):
    profile.write_text(PROFILE.replace(old, new))
    with pytest.raises(BadConfig, match=why) as refused:
        resolve(profile, environment={})
    assert refused.value.next_step


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
def test_settings_that_do_not_go_together_are_refused_in_words(
    profile, assignments, message
):
    with pytest.raises(BadConfig, match=message) as caught:
        resolve(profile, assignments=assignments, data=Path("d"), environment={})
    assert "Value error" not in caught.value.message
    assert "''" not in caught.value.next_step


def test_a_profile_is_known_by_what_it_says_and_one_that_says_something_else_is_refused(
    profile,
):
    plain = resolve(profile, environment={"AUTOTUNE_DATA": "d"})
    said = plain.profile_sha256
    changed = resolve(
        profile, assignments=["train.max_steps=7"], data=Path("d"), expect_sha256=said
    )
    assert changed.profile_sha256 == said  # what the command line adds is no part of it
    assert changed.config_sha256 != plain.config_sha256
    profile.write_text(f"# a comment says nothing\n{PROFILE}")
    resolve(profile, data=Path("d"), expect_sha256=said)
    profile.write_text(PROFILE.replace("0.001", "0.002"))
    with pytest.raises(ProfileMismatch, match=f"expected {said[:12]}"):
        resolve(profile, data=Path("d"), expect_sha256=said)


def test_the_trainer_refuses_it_before_it_writes_or_computes_anything(
    profile, tmp_path
):
    command = [
        sys.executable,
        "-m",
        "trainer",
        profile,
        "--data",
        "d",
        "--out",
        tmp_path / "run",
    ]
    command += ["--expect-profile-sha256", "0" * 64]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 6
    assert "was modified" in done.stderr
    assert "  next: " in done.stderr
    assert not (tmp_path / "run").exists()


def test_a_run_prints_only_settings_that_differ_with_their_source_and_the_file_of_all(
    profile, capsys
):
    assigned = [
        "train.seed=3",
        "train.max_steps=1000",
        "train.model.config.hidden_size=64",
    ]
    _print_settings(resolve(profile, assignments=assigned, data=Path("d")), Path("r"))
    first, *lines = capsys.readouterr().err.splitlines()
    assert first == "train: settings that differ from the defaults; r has all of them"
    shown = ("seed = 3", "data.path = d", "model.config.hidden_size = 64")
    assert {f"  train.{one}  (command line)" for one in shown} <= set(lines)
    assert not any(
        "max_steps" in line or "(default)" in line or "model.config =" in line
        for line in lines
    )


def test_what_steers_a_terminal_is_written_out_and_lines_stay_also_in_errors_that_quote_a_strangers_file():
    assert (
        printable("a\x1b[2Jb\r\x07\nc\u202ed\tä") == "a\\x1b[2Jb\\r\\x07\nc\\u202ed\\tä"
    )
    error = BadConfig("unknown key 'x\x1b]0;'", next_step="remove 'x\x1b]0;'")
    assert (error.message, error.next_step) == (
        "unknown key 'x\\x1b]0;'",
        "remove 'x\\x1b]0;'",
    )


class Inner(StrictTable):
    learning_rate: float = 1.0


class Outer(StrictTable):
    inner: Inner = Inner()
    others: list[Inner] = Field(default_factory=list)
    rows: Annotated[int, Field(gt=0)] = 1


@pytest.mark.parametrize(
    ("value", "message", "next_step"),
    [
        ({"inner": {"learning_rat": 1.0}}, "inner.learning_rat", "'learning_rate'"),
        ({"others": [{"learning_ratee": 1.0}]}, "learning_ratee", "'learning_rate'"),
        ({"zzz": 1}, "zzz", "closest of 3 known keys"),
        ({"rows": -3}, "rows = -3", "Correct 'rows'"),
        (
            {"rows": "3"},
            "rows = '3'",
            "Correct 'rows'",
        ),  # nothing is converted silently
    ],
)
def test_a_wrong_key_or_value_is_named_with_what_to_do(value, message, next_step):
    with pytest.raises(BadConfig) as caught:
        parse_table(Outer, value, where="p.toml")
    assert message in caught.value.message
    assert next_step in caught.value.next_step


@pytest.mark.parametrize(
    ("read", "content", "why"),
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
def test_a_file_that_is_no_such_file_is_refused(tmp_path, read, content, why):
    (tmp_path / "f").write_bytes(content)
    with pytest.raises(BadConfig, match=why):
        read(tmp_path / "f")


@pytest.mark.parametrize(
    ("name", "next_step"),
    [
        ("bert-mini-cpy.toml", "Did you mean {}/bert-mini-cpu.toml?"),
        ("other.toml", "Write one."),
        ("none/bert-mini-cpu.toml", "Write one."),
    ],
)
def test_a_file_that_is_missing_is_asked_for_by_a_name_that_is_close_or_as_the_caller_knows(
    tmp_path, name, next_step
):
    (tmp_path / "bert-mini-cpu.toml").touch()
    with pytest.raises(BadConfig) as refused:
        read_toml(tmp_path / name, if_missing="Write one.")
    assert refused.value.next_step == next_step.format(tmp_path)


@given(st.dictionaries(st.text(), st.integers() | st.text()))
def test_canonical_json_does_not_depend_on_the_order_of_keys(value):
    assert canonical_json(value) == canonical_json(dict(reversed(value.items())))

import tomllib
from pathlib import Path

import pytest

from autotune.core.profile import profile_from_tables, profile_to_toml
from autotune.errors import BadInput
from tests.autotune.profiles import estimated_profile, example_profile

SHIPPED = Path(__file__).parents[3] / "profiles"


def test_a_profile_reads_back_as_it_was_written_and_is_intact():
    profile = example_profile()
    assert profile_from_tables(tomllib.loads(profile_to_toml(profile)), where="p") == (profile, True)


def test_a_hand_edit_is_noticed_and_not_refused():
    text = profile_to_toml(example_profile()).replace("micro_batch_rows = 2", "micro_batch_rows = 1")
    profile, intact = profile_from_tables(tomllib.loads(text), where="p")
    assert profile.train.micro_batch_rows == 1
    assert not intact


def test_a_comment_is_no_edit():
    text = "# seen by me\n" + profile_to_toml(example_profile())
    assert profile_from_tables(tomllib.loads(text), where="p")[1]


def test_the_train_table_is_short_and_holds_what_was_decided():
    train = tomllib.loads(profile_to_toml(example_profile()))["train"]
    assert {"micro_batch_rows", "global_batch_rows", "precision", "device"} <= set(train)
    assert "weight_decay" not in train


@pytest.mark.parametrize(
    ("old", "new", "suggestion"),
    [
        ("micro_batch_rows", "micro_batch_row", "'micro_batch_rows'"),
        ("feasible_max", "feasable_max", "'feasible_max'"),
        ("[constraints]", "[constraint]", "'constraints'"),
        ("loader_workers = 1", "loader_worker = 1", "'loader_workers'"),
    ],
)
def test_a_misspelt_key_anywhere_is_refused_with_the_nearest(old, new, suggestion):
    text = profile_to_toml(example_profile()).replace(old, new, 1)
    with pytest.raises(BadInput) as caught:
        profile_from_tables(tomllib.loads(text), where="p")
    assert suggestion in caught.value.next_step


def test_a_decision_is_written_even_where_it_is_the_default():
    profile = example_profile()
    none = profile.train.data.model_copy(update={"loader_workers": 0})
    profile = profile.model_copy(update={"train": profile.train.model_copy(update={"data": none})})
    assert tomllib.loads(profile_to_toml(profile))["train"]["data"]["loader_workers"] == 0


def test_an_estimated_profile_reads_back_and_says_first_that_nothing_was_measured():
    text = profile_to_toml(estimated_profile())
    assert profile_from_tables(tomllib.loads(text), where="p") == (estimated_profile(), True)
    assert text.startswith("# An estimated profile: ")
    assert profile_to_toml(example_profile()).startswith("# A tuned profile.")


def test_what_nobody_knows_of_a_machine_is_absent_and_what_is_predicted_is_called_so():
    tables = tomllib.loads(profile_to_toml(estimated_profile()))
    assert set(tables["fingerprint"]) == {"device", "gpu_name", "gpu_total_bytes", "model_sha256"}
    assert "ledger_sha256" not in tables["provenance"]
    assert tables["evidence"]["estimate"]["label"] == "predicted"
    assert list(tables["evidence"]) == ["estimate"]


@pytest.mark.parametrize("line", ["torch =", "allotted_cpus =", "dataset_hash =", "ledger_sha256 ="])
def test_only_an_estimated_profile_may_leave_out_what_it_was_measured_on(line):
    lines = profile_to_toml(example_profile()).splitlines()
    text = "\n".join(one for one in lines if not one.startswith(line))
    with pytest.raises(BadInput, match=line.removesuffix(" =")):
        profile_from_tables(tomllib.loads(text), where="p")


def test_ranks_parameters_and_rows_are_the_probes_where_there_is_one_and_else_the_estimates():
    estimated = estimated_profile()
    assert estimated.is_estimated
    assert (estimated.local_ranks, estimated.parameters) == (2, 110_000_000)
    assert estimated.mean_real_tokens_per_row is None  # it is assumed
    assert estimated_profile(rows_assumed=False).mean_real_tokens_per_row == 510.464
    probe = example_profile().evidence.probe
    both = estimated.model_copy(update={"evidence": estimated.evidence.model_copy(update={"probe": probe})})
    assert not both.is_estimated
    assert (both.local_ranks, both.parameters, both.mean_real_tokens_per_row) == (1, None, 33.5)


@pytest.mark.parametrize("name", ["bert-mini-cpu.toml", "modernbert-tiny-cpu.toml"])
def test_profiles_from_before_there_were_estimates_read_as_they_were_written(name):
    tables = tomllib.loads((SHIPPED / name).read_text())
    profile, intact = profile_from_tables(tables, where=name)
    assert intact
    assert tomllib.loads(profile_to_toml(profile)) == tables

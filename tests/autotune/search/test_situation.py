import json
from dataclasses import replace

import pytest

from autotune.core.profile import profile_to_toml
from autotune.errors import BadInput
from autotune.search.estimate import assumed_contents, contents_of
from autotune.search.profiles import StoredProfile, read_profile
from autotune.search.situation import data_facts, profile_of_run, read_foreign, situation_of_profile
from tests.autotune.decide.worlds import World, run_of, settings
from tests.autotune.profiles import but, example_profile
from tests.fakes import FakeHost
from trainer.dataset import read_manifest
from trainer.errors import TrainerError
from trainer.resolve import profile_sha256, read_profile_tables, resolve

HOST = FakeHost()


def test_a_dataset_is_prepared_and_raw_files_are_told_by_kind_the_largest_first_and_no_directory_is_no_data(
    make_dataset, tmp_path
):
    facts = data_facts(make_dataset([[5, 6, 7]] * 4), HOST)
    assert (facts.prepared, facts.raw_bytes, facts.vocab_size) == (True, 1000, 512)
    raw = tmp_path / "raw"
    raw.mkdir()
    (raw / "a.jsonl").write_text('{"text": "words"}\n' * 100)
    (raw / "b.txt").write_text("words\n" * 10)
    facts = data_facts(raw, HOST)
    assert (facts.prepared, facts.kinds[0], facts.raw_bytes) == (False, "jsonl", 100 * 18 + 60)
    assert data_facts(tmp_path / "none", HOST) is None


def test_arguments_of_transformers_are_read_and_something_else_is_refused_with_the_next_step(tmp_path):
    path = tmp_path / "args.json"
    path.write_text(json.dumps({"optim": "adamw_torch", "fp16": True, "bf16": False}))
    found = read_foreign(path)
    assert (found.is_foreach, found.precision) == (True, "fp16")
    for said in ("[]", "{}", '{"other": 1}'):
        path.write_text(said)
        with pytest.raises(BadInput) as refused:
            read_foreign(path)
        assert "TrainingArguments" in refused.value.next_step
    path.write_text("{" * 5000)
    with pytest.raises(TrainerError):
        read_foreign(path)


def test_what_was_not_measured_has_its_command(tmp_path):
    bare = but(example_profile(), evidence={"workers": None})
    now = situation_of_profile(StoredProfile(path=tmp_path / "p.toml", profile=bare, intact=True), (), HOST)
    assert now.missing == (("loader workers", f"autotune workers --profile {tmp_path / 'p.toml'}"),)
    assert now.data is None


def test_the_profile_of_a_run_is_found_by_what_it_says_whatever_was_overridden(tmp_path):
    other, own, broken = (tmp_path / f"{name}.toml" for name in ("a", "b", "broken"))
    other.write_text(profile_to_toml(but(example_profile(), train={"seed": 7})))
    own.write_text(profile_to_toml(example_profile()))
    broken.write_text("nothing = [")
    told = resolve(own, assignments=["train.max_steps=3"], data=tmp_path).profile_sha256
    assert told == profile_sha256(read_profile_tables(own))
    world = World()
    run = run_of(world, settings(world))
    mine = replace(run, header=run.header.model_copy(update={"profile_sha256": told}))
    found = profile_of_run(mine, [other, own, broken])
    assert (found.path, found.profile) == (own, read_profile(own).profile)
    assert profile_of_run(run, [other, own, broken]) is None


def test_without_a_dataset_packed_rows_are_nearly_full_and_others_hold_a_sample():
    packed, padded = (assumed_contents(500, layout, 512) for layout in ("packed", "padded"))
    assert packed.assumed
    assert packed.dataset_hash is None
    assert (packed.mean_real_tokens, packed.documents) == (0.997 * 512, 4.0)
    assert (padded.mean_real_tokens, padded.documents) == (512, 1.0)
    assert (packed.vocab_size, packed.mean_samples) == (500, 1.0)


def test_a_dataset_is_laid_out_and_named(patterned_dataset):
    found = contents_of(patterned_dataset, "packed", 64)
    manifest = read_manifest(patterned_dataset)
    assert not found.assumed
    assert (found.dataset_hash, found.vocab_size) == (manifest.dataset_hash, manifest.vocab_size)
    assert 32 < found.mean_real_tokens <= 64
    assert found.documents >= found.mean_samples > 1

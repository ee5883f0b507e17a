"""What is known of a training, put together from files."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from autotune.core.profile import profile_to_toml
from autotune.errors import AutotuneError, BadInput
from autotune.search.profiles import StoredProfile, read_profile
from autotune.search.situation import data_facts, profile_of_run, read_foreign, situation_of_profile
from tests.autotune.decide.worlds import World, run_of, settings
from tests.autotune.profiles import example_profile
from tests.fakes import FakeHost
from trainer.errors import TrainerError
from trainer.resolve import profile_sha256, read_profile_tables, resolve

HOST = FakeHost()


class TestData:
    def test_a_dataset_is_prepared(self, make_dataset):
        facts = data_facts(make_dataset([[5, 6, 7]] * 4), HOST)
        assert facts is not None
        assert facts.prepared
        assert facts.raw_bytes == 1000
        assert facts.vocab_size == 512

    def test_raw_files_are_told_by_kind_the_largest_first(self, tmp_path):
        (tmp_path / "a.jsonl").write_text('{"text": "words"}\n' * 100)
        (tmp_path / "b.txt").write_text("words\n" * 10)
        facts = data_facts(tmp_path, HOST)
        assert facts is not None
        assert not facts.prepared
        assert facts.kinds[0] == "jsonl"
        assert facts.raw_bytes == 100 * 18 + 60

    def test_no_directory_is_no_data(self, tmp_path):
        assert data_facts(tmp_path / "none", HOST) is None


class TestForeign:
    def write(self, tmp_path: Path, said: object) -> Path:
        path = tmp_path / "args.json"
        path.write_text(json.dumps(said))
        return path

    def test_arguments_of_transformers_are_read(self, tmp_path):
        found = read_foreign(self.write(tmp_path, {"optim": "adamw_torch", "fp16": True, "bf16": False}))
        assert (found.is_foreach, found.precision) == (True, "fp16")

    @pytest.mark.parametrize("said", [[], {}, {"other": 1}])
    def test_something_else_is_refused_with_the_next_step(self, tmp_path, said):
        with pytest.raises(BadInput) as refused:
            read_foreign(self.write(tmp_path, said))
        assert "TrainingArguments" in refused.value.next_step

    def test_what_is_no_json_is_refused(self, tmp_path):
        path = tmp_path / "args.json"
        path.write_text("{" * 5000)
        with pytest.raises((AutotuneError, TrainerError)):
            read_foreign(path)


class TestProfile:
    def test_what_was_not_measured_has_its_command(self, tmp_path):
        profile = example_profile()
        bare = profile.model_copy(update={"evidence": profile.evidence.model_copy(update={"workers": None})})
        stored = StoredProfile(path=tmp_path / "p.toml", profile=bare, intact=True)
        now = situation_of_profile(stored, (), HOST)
        assert now.missing == (("loader workers", f"autotune workers --profile {tmp_path / 'p.toml'}"),)
        assert now.data is None


class TestProfileOfRun:
    def test_it_is_found_by_what_it_says_whatever_was_overridden(self, tmp_path):
        paths = [tmp_path / "a.toml", tmp_path / "b.toml", tmp_path / "broken.toml"]
        profile = example_profile()
        paths[0].write_text(
            profile_to_toml(profile.model_copy(update={"train": profile.train.model_copy(update={"seed": 7})}))
        )
        paths[1].write_text(profile_to_toml(profile))
        paths[2].write_text("nothing = [")
        told = resolve(paths[1], assignments=["train.max_steps=3"], data=tmp_path).profile_sha256
        assert told == profile_sha256(read_profile_tables(paths[1]))
        world = World()
        run = run_of(world, settings(world))
        mine = replace(run, header=run.header.model_copy(update={"profile_sha256": told}))
        found = profile_of_run(mine, paths)
        assert found is not None
        assert found.path == paths[1]
        assert found.profile == read_profile(paths[1]).profile
        assert profile_of_run(run, paths) is None

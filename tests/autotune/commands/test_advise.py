"""``autotune advise`` as people call it."""

import json
from pathlib import Path

import pytest

from autotune.cli import run
from autotune.core.profile import Profile, profile_to_toml
from autotune.decide.advice import RULES
from autotune.search.profiles import read_profile
from tests.autotune.decide.worlds import World, profile_of, run_of, settings
from trainer.record import RUN_FILE, STEPS_FILE, Run

SLOW = World(load_s_per_row=2e-3)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("AUTOTUNE_DATA", raising=False)


def write_profile(path: Path, profile: Profile) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(profile_to_toml(profile))
    return path


def write_run(directory: Path, record: Run) -> Path:
    directory.mkdir(parents=True)
    (directory / RUN_FILE).write_text(record.header.model_dump_json())
    (directory / STEPS_FILE).write_text("".join(f"{row.model_dump_json()}\n" for row in record.steps))
    return directory


def starved(path: Path = Path("profiles/p.toml")) -> Path:
    """Swept, and then edited to have too few workers."""
    profile = profile_of(SLOW, settings(SLOW, data__loader_workers=1))
    return write_profile(path, profile)


class TestProfile:
    def test_it_says_what_limits_and_what_to_set(self, capsys):
        assert run(["advise", str(starved())]) == 0
        said = capsys.readouterr().out
        assert "limited by input" in said
        assert "set: train.data.loader_workers = 4 (was 1), safe" in said
        assert "would change this:" in said

    def test_machines_get_the_same(self, capsys):
        assert run(["advise", str(starved()), "--json"]) == 0
        said = json.loads(capsys.readouterr().out)
        assert said["bottleneck"]["limit"] == "input"
        assert said["advice"][0]["rule"] == "more-workers"
        assert said["advice"][0]["gain"]["low"] > 1
        assert said["applied"] is None

    def test_safe_changes_are_written_into_a_new_profile(self, capsys):
        path = starved()
        before = path.read_text()
        assert run(["advise", str(path), "--apply"]) == 0
        assert "train.data.loader_workers = 4 (was 1)" in capsys.readouterr().out
        written = read_profile(Path("profiles/p.advised.toml"))
        assert written.intact
        assert written.profile.train.data.loader_workers == 4
        assert written.profile.provenance.commands[-1] == "advise"
        assert path.read_text() == before

    def test_figures_of_another_micro_batch_are_dropped(self):
        world = World()
        profile = profile_of(world, settings(world, micro_batch_rows=2, global_batch_rows=256))
        path = write_profile(Path("p.toml"), profile)
        assert run(["advise", str(path), "--apply"]) == 0
        written = read_profile(Path("p.advised.toml")).profile
        assert written.train.micro_batch_rows > 2
        assert written.evidence.workers is None
        assert written.evidence.probe is not None

    def test_nothing_safe_writes_nothing(self, capsys):
        world = World()
        path = write_profile(Path("p.toml"), profile_of(world, settings(world, data__loader_workers=1)))
        assert run(["advise", str(path), "--apply"]) == 0
        assert "the profile is as it was" in capsys.readouterr().out
        assert not Path("p.advised.toml").exists()

    def test_an_edited_profile_is_not_made_to_look_measured(self, capsys):
        path = starved()
        path.write_text(path.read_text().replace("seed = 0", "seed = 1"))
        assert run(["advise", str(path), "--apply"]) == 6
        assert "edited by hand" in capsys.readouterr().err
        assert run(["advise", str(path), "--json"]) == 0
        found = json.loads(capsys.readouterr().out)["advice"]
        assert found[0]["rule"] == "edited"
        assert not any(one["safe"] for one in found)

    def test_what_lay_there_is_kept(self, capsys):
        path = starved()
        Path("profiles/p.advised.toml").write_text("somebody's\n")
        assert run(["advise", str(path), "--apply"]) == 0
        assert "kept as profiles/p.advised.previous.toml" in capsys.readouterr().out
        assert Path("profiles/p.advised.previous.toml").read_text() == "somebody's\n"

    def test_elsewhere_it_names_the_same_dataset(self):
        profile = profile_of(SLOW, settings(SLOW, data__loader_workers=1, data__path="../data"))
        path = write_profile(Path("profiles/p.toml"), profile)
        assert run(["advise", str(path), "--apply", "--out", "deep/er/q.toml"]) == 0
        assert read_profile(Path("deep/er/q.toml")).profile.train.data.path == "../../data"

    def test_the_profile_itself_is_not_overwritten(self, capsys):
        path = starved()
        assert run(["advise", str(path), "--apply", "--out", str(path)]) == 2
        assert "is the profile itself" in capsys.readouterr().err


class TestRun:
    def test_a_run_is_enough(self, capsys):
        world = World()
        place = write_run(Path("runs/a"), run_of(world, settings(world, layout="padded")))
        assert run(["advise", str(place)]) == 0
        said = capsys.readouterr().out
        assert "limited by padding" in said
        assert "--layout packed" in said

    def test_the_newest_run_is_taken_where_none_is_named(self, capsys):
        world = World()
        write_run(Path("runs/a"), run_of(world, settings(world)))
        assert run(["advise"]) == 0
        assert "computing limits" in capsys.readouterr().out

    def test_a_profile_of_another_step_is_refused(self, capsys):
        world = World()
        place = write_run(Path("runs/a"), run_of(world, settings(world, layout="padded")))
        path = write_profile(Path("p.toml"), profile_of(world, settings(world)))
        assert run(["advise", str(place), "--profile", str(path)]) == 6
        assert "layout" in capsys.readouterr().err

    def test_applying_needs_a_profile(self, capsys):
        world = World()
        place = write_run(Path("runs/a"), run_of(world, settings(world, layout="padded")))
        assert run(["advise", str(place), "--apply"]) == 2
        assert "--profile" in capsys.readouterr().err


class TestData:
    def test_raw_data_is_to_be_prepared(self, capsys):
        Path("raw").mkdir()
        Path("raw/a.txt").write_text("words\n" * 100)
        assert run(["advise", "raw"]) == 0
        assert "autotune data prepare text:raw --out DATASET" in capsys.readouterr().out


class TestBadInput:
    @pytest.mark.parametrize("place", ["nowhere", "empty"])
    def test_a_place_with_nothing_is_named(self, capsys, place):
        Path("empty").mkdir()
        assert run(["advise", place]) == 3
        said = capsys.readouterr().err
        assert place in said
        assert "next: Name a profile" in said

    def test_no_place_at_all(self, capsys):
        assert run(["advise"]) == 2
        assert "autotune advise PROFILE" in capsys.readouterr().err

    def test_several_profiles_want_a_name(self, capsys):
        starved(Path("profiles/a.toml"))
        starved(Path("profiles/b.toml"))
        assert run(["advise"]) == 2
        assert "2 profiles" in capsys.readouterr().err

    def test_a_run_of_another_schema(self, capsys):
        world = World()
        place = write_run(Path("runs/a"), run_of(world, settings(world)))
        header = json.loads((place / RUN_FILE).read_text()) | {"schema_version": 1}
        (place / RUN_FILE).write_text(json.dumps(header))
        assert run(["advise", str(place)]) != 0
        assert "next:" in capsys.readouterr().err


class TestRules:
    def test_they_are_listed(self, capsys):
        assert run(["advise", "--rules", "--json"]) == 0
        listed = json.loads(capsys.readouterr().out)
        assert [one["rule"] for one in listed] == [rule.name for rule in RULES]
        assert all(one["looks_for"] for one in listed)


class TestOptionsWithoutUse:
    @pytest.mark.parametrize(
        ("place", "option"),
        [
            ("profiles/p.toml", ["--profile", "profiles/p.toml"]),
            ("profiles/p.toml", ["--out", "other.toml"]),
            ("runs/r", ["--nodes", "8"]),
            (".", ["--nodes", "8"]),
        ],
    )
    def test_they_are_refused_and_not_passed_over(self, place, option, capsys):
        starved()
        write_run(Path("runs/r"), run_of(SLOW, settings(SLOW)))
        assert run(["advise", place, *option]) == 2
        assert f"{' '.join(option)} has no use here" in capsys.readouterr().err

    def test_nodes_of_which_nothing_is_known_are_said_to_be_unknown(self, capsys):
        assert run(["advise", str(starved()), "--nodes", "8"]) == 0
        said = " ".join(capsys.readouterr().out.split())
        assert "links between nodes, and so what 8 would do" in said
        assert "autotune network --profile profiles/p.toml --slurm" in said

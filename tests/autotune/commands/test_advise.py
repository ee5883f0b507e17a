"""``autotune advise`` as people call it."""

import json
from pathlib import Path

import pytest

from autotune.core.profile import Profile, profile_to_toml
from autotune.decide.advice.table import RULES
from autotune.search.profiles import read_profile
from tests.autotune.decide.worlds import World, profile_of, run_of, settings
from trainer.record import RUN_FILE, STEPS_FILE, Run

SLOW = World(load_s_per_row=2e-3)


pytestmark = pytest.mark.usefixtures("here")


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


@pytest.fixture
def advise(says):
    return lambda *words, code=0: says("advise", *words, code=code)


def test_it_says_what_limits_and_what_to_set_and_machines_get_the_same(advise):
    said = advise(starved())
    assert "limited by input" in said
    assert "set: train.data.loader_workers = 4 (was 1), safe" in said
    assert "would change this:" in said
    found = json.loads(advise(starved(), "--json"))
    assert found["bottleneck"]["limit"] == "input"
    assert found["advice"][0]["rule"] == "more-workers"
    assert found["advice"][0]["gain"]["low"] > 1
    assert found["applied"] is None


def test_safe_changes_are_written_into_a_new_profile(advise):
    path = starved()
    before = path.read_text()
    assert "train.data.loader_workers = 4 (was 1)" in advise(path, "--apply")
    written = read_profile(Path("profiles/p.advised.toml"))
    assert written.intact
    assert written.profile.train.data.loader_workers == 4
    assert written.profile.provenance.commands[-1] == "advise"
    assert path.read_text() == before
    Path("profiles/p.advised.toml").write_text("somebody's\n")
    assert "kept as profiles/p.advised.previous.toml" in advise(path, "--apply")
    assert Path("profiles/p.advised.previous.toml").read_text() == "somebody's\n"
    assert "is the profile itself" in advise(path, "--apply", "--out", path, code=2)


def test_figures_of_another_micro_batch_are_dropped(advise):
    world = World()
    profile = profile_of(world, settings(world, micro_batch_rows=2, global_batch_rows=256))
    path = write_profile(Path("p.toml"), profile)
    advise(path, "--apply")
    written = read_profile(Path("p.advised.toml")).profile
    assert written.train.micro_batch_rows > 2
    assert written.evidence.workers is None
    assert written.evidence.probe is not None


def test_nothing_safe_writes_nothing(advise):
    world = World()
    path = write_profile(Path("p.toml"), profile_of(world, settings(world, data__loader_workers=1)))
    assert "the profile is as it was" in advise(path, "--apply")
    assert not Path("p.advised.toml").exists()


def test_an_edited_profile_is_not_made_to_look_measured(advise):
    path = starved()
    path.write_text(path.read_text().replace("seed = 0", "seed = 1"))
    assert "edited by hand" in advise(path, "--apply", code=6)
    found = json.loads(advise(path, "--json"))["advice"]
    assert found[0]["rule"] == "edited"
    assert not any(one["safe"] for one in found)


def test_elsewhere_it_names_the_same_dataset(advise):
    profile = profile_of(SLOW, settings(SLOW, data__loader_workers=1, data__path="../data"))
    path = write_profile(Path("profiles/p.toml"), profile)
    advise(path, "--apply", "--out", "deep/er/q.toml")
    assert read_profile(Path("deep/er/q.toml")).profile.train.data.path == "../../data"


def test_a_run_is_enough(advise):
    world = World()
    place = write_run(Path("runs/a"), run_of(world, settings(world, layout="padded")))
    said = advise(place)
    assert "limited by padding" in said
    assert "--layout packed" in said


def test_the_newest_run_is_taken_where_none_is_named(advise):
    world = World()
    write_run(Path("runs/a"), run_of(world, settings(world)))
    assert "computing limits" in advise()


def test_a_profile_of_another_step_is_refused_and_applying_needs_one(advise):
    world = World()
    place = write_run(Path("runs/a"), run_of(world, settings(world, layout="padded")))
    path = write_profile(Path("p.toml"), profile_of(world, settings(world)))
    assert "layout" in advise(place, "--profile", path, code=6)
    assert "--profile" in advise(place, "--apply", code=2)


def test_raw_data_is_to_be_prepared(advise):
    Path("raw").mkdir()
    Path("raw/a.txt").write_text("words\n" * 100)
    assert "autotune data prepare text:raw --out DATASET" in advise("raw")


@pytest.mark.parametrize("place", ["nowhere", "empty"])
def test_a_place_with_nothing_is_named(advise, place):
    Path("empty").mkdir()
    said = advise(place, code=3)
    assert place in said
    assert "next: Name a profile" in said


def test_no_place_and_several_profiles_want_a_name(advise):
    assert "autotune advise PROFILE" in advise(code=2)
    starved(Path("profiles/a.toml"))
    starved(Path("profiles/b.toml"))
    assert "2 profiles" in advise(code=2)


def test_a_run_of_another_schema(advise):
    world = World()
    place = write_run(Path("runs/a"), run_of(world, settings(world)))
    header = json.loads((place / RUN_FILE).read_text()) | {"schema_version": 1}
    (place / RUN_FILE).write_text(json.dumps(header))
    assert "next:" in advise(place, code=3)


def test_they_are_listed(advise):
    listed = json.loads(advise("--rules", "--json"))
    assert [one["rule"] for one in listed] == [rule.name for rule in RULES]
    assert all(one["looks_for"] for one in listed)


@pytest.mark.parametrize(
    ("place", "option"),
    [
        ("profiles/p.toml", ["--profile", "profiles/p.toml"]),
        ("profiles/p.toml", ["--out", "other.toml"]),
        ("runs/r", ["--nodes", "8"]),
        (".", ["--nodes", "8"]),
    ],
)
def test_they_are_refused_and_not_passed_over(place, option, advise):
    starved()
    write_run(Path("runs/r"), run_of(SLOW, settings(SLOW)))
    assert f"{' '.join(option)} has no use here" in advise(place, *option, code=2)


def test_nodes_of_which_nothing_is_known_are_said_to_be_unknown(advise):
    said = " ".join(advise(starved(), "--nodes", "8").split())
    assert "links between nodes, and so what 8 would do" in said
    assert "autotune network --profile profiles/p.toml --slurm" in said

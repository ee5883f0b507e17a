import json
import re
from pathlib import Path

import pytest

from autotune.advice.decide.rules import RULES
from autotune.profiles.store import read_profile
from autotune.profiles.values import profile_to_toml
from testbed.simulators.worlds import World, profile_of, run_of, settings
from trainer.record.run_record import RUN_FILE, STEPS_FILE

WORLD, SLOW = World(), World(load_s_per_row=2e-3)
pytestmark = pytest.mark.usefixtures("here")


def write_profile(path: str, world: World = WORLD, **changes) -> Path:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(
        profile_to_toml(profile_of(world, settings(world, **changes)))
    )
    return Path(path)


def starved(path: str = "profiles/p.toml", **changes) -> Path:
    return write_profile(path, SLOW, data__num_workers=1, **changes)


def write_run(place: str, **changes) -> str:
    record = run_of(WORLD, settings(WORLD, **changes))
    Path(place).mkdir(parents=True)
    Path(place, RUN_FILE).write_text(record.header.model_dump_json())
    Path(place, STEPS_FILE).write_text(
        "".join(f"{row.model_dump_json()}\n" for row in record.steps)
    )
    return place


@pytest.fixture(autouse=True)
def predicted(monkeypatch):
    """Gains that predictions find, by setting; none, without tracing."""
    found, asked = {}, []

    def predict(train, vocab_size, rates, changes, update):
        asked.append(set(changes))
        return found

    monkeypatch.setattr("autotune.advice.read_context.predicted_gains", predict)
    return found, asked


def test_gains_are_predicted_for_settings_that_a_gpu_step_lacks(advise, predicted):
    found, asked = predicted
    found["compile"] = 1.5
    said = json.loads(
        advise(write_profile("p.toml", attention_dropout=0.1, compile=False), "--json")
    )["advice"]
    gains = {one["rule"]: one["gain"] for one in said}
    assert gains["memory-bound"]["low"] < 1.4 < gains["memory-bound"]["ratio"] <= 1.5
    assert asked == [{"compile", "attention_dropout"}]


@pytest.fixture
def advise(says):
    return lambda *words, code=0: says("advise", *words, code=code)


def test_it_says_what_limits_and_what_to_set_and_machines_get_the_same(advise):
    said = advise(starved())
    assert "Bottleneck: data loading, " in said
    assert "set: train.data.num_workers = 4 (was 1), safe" in said
    assert "would change this:" in said
    found = json.loads(advise(starved(), "--json"))
    assert (found["bottleneck"]["limit"], found["advice"][0]["rule"]) == (
        "data loading",
        "more-workers",
    )
    assert found["advice"][0]["gain"]["low"] > 1
    assert found["applied"] is None


def test_safe_changes_are_written_into_a_new_profile(advise):
    path = starved()
    before = path.read_text()
    assert "train.data.num_workers = 4 (was 1)" in advise(path, "--apply")
    written = read_profile(Path("profiles/p.advised.toml"))
    assert written.intact
    assert (
        written.profile.train.data.num_workers,
        written.profile.provenance.commands[-1],
    ) == (4, "advise")
    assert path.read_text() == before
    Path("profiles/p.advised.toml").write_text("somebody's\n")
    assert "kept as profiles/p.advised.previous.toml" in advise(path, "--apply")
    assert Path("profiles/p.advised.previous.toml").read_text() == "somebody's\n"
    assert "is the profile itself" in advise(path, "--apply", "--out", path, code=2)
    path = starved("profiles/q.toml", data__path="../data")
    advise(path, "--apply", "--out", "deep/er/q.toml")
    assert read_profile(Path("deep/er/q.toml")).profile.train.data.path == "../../data"


def test_figures_of_another_micro_batch_are_dropped(advise):
    advise(
        write_profile("p.toml", micro_batch_size=2, global_batch_size=256), "--apply"
    )
    written = read_profile(Path("p.advised.toml")).profile
    assert written.train.micro_batch_size > 2
    assert written.evidence.workers is None
    assert written.evidence.probe is not None


def test_nothing_safe_writes_nothing_and_an_edited_profile_is_not_made_to_look_measured(
    advise,
):
    path = write_profile("p.toml", data__num_workers=1)
    assert "the profile is unchanged" in advise(path, "--apply")
    path = starved()
    path.write_text(path.read_text().replace("seed = 0", "seed = 1"))
    assert "it was modified after it was measured" in advise(path, "--apply", code=6)
    assert [*Path().rglob("*.advised.toml")] == []
    found = json.loads(advise(path, "--json"))["advice"]
    assert found[0]["rule"] == "edited"
    assert not any(one["safe"] for one in found)


def test_a_run_is_enough_and_found_where_none_is_named_and_a_profile_of_another_step_is_refused(
    advise,
):
    place = write_run("runs/a", layout="padded")
    said = advise(place)
    assert "Bottleneck: padding, " in said
    assert "--layout packed" in said
    assert advise() == said
    assert "layout" in advise(place, write_profile("profiles/p.toml"), code=6)
    assert "autotune advise RUN PROFILE --apply" in advise(place, "--apply", code=2)


def test_raw_data_is_to_be_prepared(advise):
    Path("raw").mkdir()
    Path("raw/a.txt").write_text("words\n" * 100)
    assert "autotune data prepare text:raw --out DATASET" in advise("raw")


def test_a_place_with_nothing_and_several_profiles_want_a_name(advise):
    Path("empty").mkdir()
    for place in ("nowhere", "empty"):
        said = advise(place, code=3)
        assert place in said
        assert "next: Name a profile" in said
    assert "autotune advise PROFILE" in advise(code=2)
    starved("profiles/a.toml")
    starved("profiles/b.toml")
    assert "2 profiles" in advise(code=2)


def test_rules_are_listed(advise):
    listed = json.loads(advise("--rules", "--json"))
    assert [one["rule"] for one in listed] == [rule.name for rule in RULES]
    assert all(one["looks_for"] for one in listed)


@pytest.mark.parametrize(
    ("place", "option"),
    [
        ("profiles/p.toml", ["profiles/p.toml"]),
        ("profiles/p.toml", ["--out", "other.toml"]),
        ("runs/r", ["--nodes", "8"]),
        (".", ["--nodes", "8"]),
    ],
)
def test_options_without_use_are_refused_and_nodes_of_which_nothing_is_known_are_said_to_be(
    place, option, advise
):
    write_run("runs/r")
    said = " ".join(advise(starved(), "--nodes", "8").split())
    assert "links between nodes, required to predict 8 nodes" in said
    assert "autotune network profiles/p.toml --slurm" in said
    assert re.search(
        f"error: .*{option[-1]}.* requires ", advise(place, *option, code=2)
    )

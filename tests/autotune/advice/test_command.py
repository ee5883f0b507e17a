import json
import re
from pathlib import Path

import pytest

from autotune.advice.decide.rules import RULES
from autotune.profiles.store import read_profile
from autotune.profiles.toml_file import profile_to_toml
from testbed.simulators.worlds import World, profile_of, run_of, settings
from trainer.formats.run_record import RUN_FILE, STEPS_FILE

WORLD = World()
SLOW = World(load_s_per_row=2e-3)
pytestmark = pytest.mark.usefixtures("workdir")


def write_profile(path: str, world: World = WORLD, **changes) -> Path:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(
        profile_to_toml(profile_of(world, settings(world, **changes)))
    )
    return Path(path)


def starved(path: str = "profiles/p.toml", **changes) -> Path:
    return write_profile(path, SLOW, data__num_workers=1, **changes)


def write_run(directory: str, **changes) -> str:
    record = run_of(WORLD, settings(WORLD, **changes))
    Path(directory).mkdir(parents=True)
    Path(directory, RUN_FILE).write_text(record.header.model_dump_json())
    Path(directory, STEPS_FILE).write_text(
        "".join(f"{row.model_dump_json()}\n" for row in record.steps)
    )
    return directory


@pytest.fixture(autouse=True)
def predicted(monkeypatch):
    """Replace tracing; the test fills in the predicted gain of each setting."""
    gains = {}
    asked_settings = []

    def predict(train, vocab_size, rates, changes, update):
        asked_settings.append(set(changes))
        return gains

    monkeypatch.setattr("autotune.advice.read_context.predicted_gains", predict)
    return gains, asked_settings


def test_predicts_gains_of_unused_settings(advise, predicted):
    gains, asked_settings = predicted
    gains["compile"] = 1.5
    advice = json.loads(
        advise(write_profile("p.toml", attention_dropout=0.1, compile=False), "--json")
    )["advice"]
    gain_by_rule = {entry["rule"]: entry["gain"] for entry in advice}
    assert (
        gain_by_rule["memory-bound"]["low"]
        < 1.4
        < gain_by_rule["memory-bound"]["ratio"]
        <= 1.5
    )
    assert asked_settings == [{"compile", "attention_dropout"}]


@pytest.fixture
def advise(says):
    return lambda *words, code=0: says("advise", *words, code=code)


def test_names_limit(advise):
    text = advise(starved())
    assert "Bottleneck: data loading, " in text
    assert "set: train.data.num_workers = 4 (was 1), safe" in text
    assert "would change this:" in text


def test_json_names_limit(advise):
    answer = json.loads(advise(starved(), "--json"))
    assert (answer["bottleneck"]["limit"], answer["advice"][0]["rule"]) == (
        "data loading",
        "more-workers",
    )
    assert answer["advice"][0]["gain"]["low"] > 1
    assert answer["applied"] is None


def test_apply_writes_new_profile(advise):
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


def test_apply_keeps_previous_file(advise):
    path = starved()
    Path("profiles/p.advised.toml").write_text("somebody's\n")
    assert "kept as profiles/p.advised.previous.toml" in advise(path, "--apply")
    assert Path("profiles/p.advised.previous.toml").read_text() == "somebody's\n"


def test_apply_does_not_overwrite_the_profile(advise):
    path = starved()
    assert "is the profile itself" in advise(path, "--apply", "--out", path, code=2)


def test_apply_keeps_data_path_relative(advise):
    path = starved("profiles/q.toml", data__path="../data")
    advise(path, "--apply", "--out", "deep/er/q.toml")
    assert read_profile(Path("deep/er/q.toml")).profile.train.data.path == "../../data"


def test_apply_drops_figures_of_another_micro_batch(advise):
    advise(
        write_profile("p.toml", micro_batch_size=2, global_batch_size=256), "--apply"
    )
    written = read_profile(Path("p.advised.toml")).profile
    assert written.train.micro_batch_size > 2
    assert written.evidence.workers is None
    assert written.evidence.probe is not None


def test_apply_without_safe_changes_writes_nothing(advise):
    path = write_profile("p.toml", data__num_workers=1)
    assert "the profile is unchanged" in advise(path, "--apply")


def test_apply_refuses_edited_profile(advise):
    path = starved()
    path.write_text(path.read_text().replace("seed = 0", "seed = 1"))
    assert "it was modified after it was measured" in advise(path, "--apply", code=6)
    assert [*Path().rglob("*.advised.toml")] == []
    advice = json.loads(advise(path, "--json"))["advice"]
    assert advice[0]["rule"] == "edited"
    assert not any(entry["safe"] for entry in advice)


def test_advises_on_a_run(advise):
    run = write_run("runs/a", layout="padded")
    text = advise(run)
    assert "Bottleneck: padding, " in text
    assert "--layout packed" in text
    assert advise() == text
    assert "layout" in advise(run, write_profile("profiles/p.toml"), code=6)
    assert "autotune advise RUN PROFILE --apply" in advise(run, "--apply", code=2)


def test_raw_data_is_to_be_prepared(advise):
    Path("raw").mkdir()
    Path("raw/a.txt").write_text("words\n" * 100)
    assert "autotune data prepare text:raw --out DATASET" in advise("raw")


def test_fails_without_profile_or_run(advise):
    Path("empty").mkdir()
    for directory in ("nowhere", "empty"):
        message = advise(directory, code=3)
        assert directory in message
        assert "next: Name a profile" in message


def test_several_profiles_require_a_name(advise):
    assert "autotune advise PROFILE" in advise(code=2)
    starved("profiles/a.toml")
    starved("profiles/b.toml")
    assert "2 profiles" in advise(code=2)


def test_lists_rules(advise):
    listed = json.loads(advise("--rules", "--json"))["rules"]
    assert [rule["rule"] for rule in listed] == [rule.name for rule in RULES]
    assert all(rule["looks_for"] for rule in listed)


@pytest.mark.parametrize(
    ("place", "option"),
    [
        ("profiles/p.toml", ["profiles/p.toml"]),
        ("profiles/p.toml", ["--out", "other.toml"]),
        ("runs/r", ["--nodes", "8"]),
        (".", ["--nodes", "8"]),
    ],
)
def test_rejects_option_without_use(place, option, advise):
    write_run("runs/r")
    text = " ".join(advise(starved(), "--nodes", "8").split())
    assert "links between nodes, required to predict 8 nodes" in text
    assert "autotune network profiles/p.toml --slurm" in text
    assert re.search(
        f"error: .*{option[-1]}.* requires ", advise(place, *option, code=2)
    )

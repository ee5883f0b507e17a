import json
from pathlib import Path

import numpy as np
import pytest

from autotune.cli import run
from autotune.profiles.values import profile_to_toml
from autotune.trials.trial_log import TrialLog
from testbed.examples.checkpoints import end_of, header_of, leave
from testbed.examples.profiles import but, example_profile
from testbed.examples.run_rows import row_of
from testbed.examples.trials import TRAINING_FIGURES, record
from trainer.config.train_config import ModelSettings, TrainConfig
from trainer.record.writer import RunWriter

CONFIG = TrainConfig(
    model=ModelSettings(name="tiny", config={"model_type": "bert", "hidden_size": 64})
)


def _write_run(name, speed, *, steps=200, seed=0, loss=1.0, config=CONFIG, **changes):
    """A run of so many tokens per second, give or take."""
    rng = np.random.default_rng(seed)
    writer = RunWriter(Path(name), active=True)
    writer.start(header_of(config, versions={"torch": "2.13.0"}, **changes))
    for step in range(1, steps + 1):
        slow = 5.0 if step <= 2 else 1.0  # warm-up
        step_s = slow * 256 / speed * float(np.exp(0.03 * rng.normal()))
        falling = (
            loss * (3 + 4 * np.exp(-step / 30)) * float(np.exp(0.003 * rng.normal()))
        )
        figures = {
            "step_s": step_s,
            "tokens_per_s": 256 / step_s,
            "loss": float(falling),
            "mfu": speed / 3000,
        }
        writer.append(
            row_of(
                step,
                data_wait_s=0.01 * step_s,
                communication_s=0.02 * step_s,
                **figures,
            )
        )
    writer.finish(end_of(steps=steps))
    leave(writer)
    return name


@pytest.fixture
def compared(here, says):
    return lambda *words: json.loads(says("compare", *words, "--json"))[0]


def _verdicts(told) -> dict:
    return {one["metric"]["name"]: one["verdict"] for one in told["figures"]}


def test_two_runs_of_the_same_are_the_same_within_noise_and_figures_that_are_none_are_left_out(
    here, compared
):
    told = compared(_write_run("a", 1000), _write_run("b", 1000, seed=1))
    assert told["settings"] == told["circumstances"] == []
    assert (told["headline"]["verdict"], told["headline"]["a"]["n"]) == (
        "the same within noise",
        180,
    )
    assert (_verdicts(told)["loss"], _verdicts(told)["peak memory"]) == (
        "the same within noise",
        "not judged",
    )
    path = here / "b" / "steps.jsonl"
    lines = path.read_text().splitlines()
    lines[50] = json.dumps(json.loads(lines[50]) | {"step_s": 0.0, "loss": None})
    lines[51] = json.dumps(json.loads(lines[51]) | {"tokens_per_s": 0.0, "loss": -1.0})
    path.write_text("\n".join(lines) + "\n")
    assert compared("a", "b")["headline"]["b"]["n"] == 178


def test_a_slower_run_is_found_and_what_changed_is_told(here, says, compared):
    config = CONFIG.model_copy(update={"tf32": False})
    told = compared(
        _write_run("a", 1000), _write_run("b", 900, seed=1, config=config, loss=1.05)
    )
    assert [change["key"] for change in told["settings"]] == ["tf32"]
    assert told["headline"]["verdict"] == "slower"
    assert told["headline"]["change"]["value"] == pytest.approx(0.9, abs=0.01)
    assert _verdicts(told)["loss"] == "more"
    out = says("compare", "a", "b")
    assert "B is 0.90" in out
    assert "tf32" in out
    says("compare", "a", "b", "--fail-if-slower", "20%")


@pytest.mark.parametrize(
    ("speed", "share", "codes"),
    [
        (1000, "5%", (0, 0)),
        (900, "5%", (9, 9)),
        (900, "0.05", (9, 9)),
        (955, "5%", (0, 8)),
    ],
)
def test_ci_fails_only_for_what_is_proven_or_strictly_also_for_what_is_not_disproven(
    here, capsys, speed, share, codes
):
    _write_run("a", 1000)
    _write_run("b", speed, seed=2)
    for options, code in zip(([], ["--strict"]), codes, strict=True):
        assert run(["compare", "a", "b", "--fail-if-slower", share, *options]) == code
        out, err = capsys.readouterr()
        assert "verdict: " in out
        assert ("B trains at" in err) == (speed < 1000)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"dataset_hash": "e"}, "another dataset"),
        ({"world_size": 4}, "another number of ranks"),
        ({"global_batch_size": 16}, "another global batch"),
        ({"device": "NVIDIA H100"}, "another machine"),
    ],
)
def test_runs_of_different_work_are_not_comparable_and_ci_is_told(
    here, changes, why, says, compared
):
    _write_run("a", 1000)
    _write_run("b", 500, **changes)
    told = compared("a", "b")
    assert (told["headline"]["verdict"], told["headline"]["why"]) == (
        "not comparable",
        why,
    )
    assert why in says("compare", "a", "b", "--fail-if-slower", "5%", code=7)


@pytest.mark.parametrize(
    "share", ["", "5 percent", "-5%", "100%", "nan", "1", "5%%", None]
)
def test_a_share_that_is_none_and_strict_without_one_are_usage_errors(
    here, says, share
):
    says(
        "compare",
        "a",
        "b",
        "--strict" if share is None else f"--fail-if-slower={share}",
        code=2,
    )


def test_several_are_compared_with_the_first_and_the_worst_decides(here, says):
    names = [
        _write_run(name, speed, seed=speed)
        for name, speed in (("a", 1000), ("b", 1001), ("c", 850))
    ]
    told = json.loads(says("compare", *names, "--json"))
    assert [(one["a"]["name"], one["b"]["name"]) for one in told] == [
        ("a", "b"),
        ("a", "c"),
    ]
    assert [one["headline"]["verdict"] for one in told] == [
        "the same within noise",
        "slower",
    ]
    says("compare", *names, "--fail-if-slower", "10%", code=9)


def test_datasets_are_compared_by_their_counts_and_how_they_were_made(
    here, make_dataset, says, compared
):
    make_dataset([[5, 6, 7]] * 4).rename(here / "a")
    make_dataset([[5, 6, 7]] * 6).rename(here / "b")
    told = compared("a", "b")
    assert [change["key"] for change in told["circumstances"]] == ["dataset"]
    found = {
        (one["metric"]["name"], one["of"]): (one["verdict"], one["change"]["value"])
        for one in told["figures"]
    }
    assert found["samples", "training"] == ("more", pytest.approx(1.5))
    assert found["tokens", "training"] == ("more", pytest.approx(1.5))
    assert "training speed" not in says("compare", "a", "b")


def test_settings_of_profiles_that_differ_are_told_with_their_meaning(
    here, says, compared
):
    _write_profile("a.toml")
    assert "settings: the same" in says("compare", "a.toml", "a.toml")
    tables = {"constraints": {"headroom_share": 0.5}, "fingerprint": {"torch": "9"}}
    told = compared(
        "a.toml", _write_profile("b.toml", train={"micro_batch_size": 1}, **tables)
    )
    assert told["settings"][0] == {"key": "micro_batch_size", "old": 2, "new": 1}
    assert "constraints.headroom_share" in {
        change["key"] for change in told["settings"]
    }
    assert "torch" in {change["key"] for change in told["facts"]}
    assert "Sequences per micro-batch on each GPU." in says(
        "compare", "a.toml", "b.toml"
    )


def _write_profile(name, **tables):
    Path(name).write_text(profile_to_toml(but(example_profile(), **tables)))
    return name


def test_profiles_are_compared_by_the_windows_of_their_sweeps_and_those_of_an_edited_one_are_older(
    here, compared
):
    workers = example_profile().evidence.workers
    rows = [
        row.model_copy(update={"padded_tokens_per_s": [119.0, 120.0, 121.0]})
        for row in workers.rows
    ]
    faster = {"workers": workers.model_copy(update={"rows": rows})}
    told = compared(_write_profile("a.toml"), _write_profile("b.toml", evidence=faster))
    assert (told["headline"]["of"], told["headline"]["verdict"]) == (
        "windows of the worker sweep",
        "faster",
    )
    assert told["headline"]["change"]["value"] == pytest.approx(1.2, abs=0.001)
    (here / "b.toml").write_text(
        (here / "a.toml")
        .read_text()
        .replace("micro_batch_size = 2", "micro_batch_size = 1")
    )
    told = compared("a.toml", "b.toml")
    assert told["a"]["notes"] == []
    assert "edited by hand" in told["b"]["notes"][0]


def test_a_profile_without_evidence_and_a_run_that_has_not_begun_have_no_speed(
    says, compared
):
    told = compared(
        _write_profile("a.toml", evidence={"probe": None, "workers": None}),
        _write_profile("b.toml"),
    )
    assert (told["headline"], told["figures"]) == (None, [])
    says("compare", "a.toml", "b.toml", "--fail-if-slower", "5%", code=7)
    assert (
        compared(_write_run("a", 1000, steps=1), _write_run("b", 1000))["headline"]
        is None
    )


def test_a_run_is_compared_with_its_profile(here, compared):
    profile = example_profile()
    _write_profile("a.toml")
    fill = (
        profile.evidence.probe.mean_tokens_per_sequence
        / profile.train.seq_length_tokens
    )
    _write_run(
        "b",
        100 * fill,
        world_size=1,
        dataset_hash="d",
        global_batch_size=profile.train.global_batch_size,
        layout=profile.train.layout,
    )
    told = compared("a.toml", "b")
    assert (
        told["headline"]["of"] == "A: windows of the worker sweep; B: the run's steps"
    )
    assert told["headline"]["change"]["value"] == pytest.approx(1.0, abs=0.05)


def _write_tuning(name, speed, *, num_workers=1, rounds=5, **made_on):
    config = CONFIG.model_dump(mode="json") | {
        "micro_batch_size": 2,
        "global_batch_size": 8,
    }
    config["data"] = config["data"] | {"num_workers": num_workers}
    trial_log = TrialLog(Path(name) / "trials", "w")
    for number in range(rounds):
        rates = {
            "tokens_per_s": 0.9 * speed,
            "padded_tokens_per_s": speed * (1 + 0.01 * (number % 3)),
        }
        outcome = {
            "kind": "measured",
            "figures": TRAINING_FIGURES | rates | {"gradient_accumulation_steps": 4},
        }
        found = record(
            "training", outcome, config, key=f"{number}", old=not made_on, **made_on
        )
        told = found.model_dump(mode="json", exclude_unset=True)
        trial_log.append(
            told
            | {
                "measured": {
                    "config": config,
                    "cached": False,
                    "local_ranks": 1,
                    "round": number,
                }
            }
        )
    return name


def test_tunings_are_compared_by_what_both_measured(says, compared):
    told = compared(_write_tuning("a", 1000), _write_tuning("b", 900))
    assert (
        told["headline"]["of"]
        == "2 sequences, 1 rank, global batch 8, 1 DataLoader worker"
    )
    assert told["headline"]["verdict"] == "slower"
    says("compare", "a", "b", "--fail-if-slower", "5%", code=9)
    told = compared("a", _write_tuning("c", 900, num_workers=3))
    assert told["figures"] == []
    assert len(told["only_a"]) == len(told["only_b"]) == 2


@pytest.mark.parametrize(
    ("one", "other", "verdict", "why"),
    [
        (
            {"torch": "2.13.0"},
            {"gpu_name": "H100", "gpu_count": 2},
            "not comparable",
            "another machine",
        ),
        ({"torch": "2.13.0"}, {"allotted_cpus": 3}, "not comparable", "processors"),
        ({"torch": "2.13.0"}, {"torch": "2.14.0"}, "slower", ""),
        ({}, {"torch": "2.13.0"}, "slower", ""),
    ],
)
def test_tunings_are_judged_on_one_machine_only_and_what_is_not_known_is_said(
    says, compared, one, other, verdict, why
):
    told = compared(_write_tuning("a", 1000, **one), _write_tuning("b", 900, **other))
    assert told["headline"]["verdict"] == verdict
    assert why in (told["headline"]["why"] or "")
    assert ["do not name their machine" in note for note in told["a"]["notes"]] == [
        True
    ] * (not one)
    assert told["b"]["notes"] == []
    assert ("2.14.0" in says("compare", "a", "b")) == (other.get("torch") == "2.14.0")


def test_a_torn_ledger_is_read_as_far_as_it_goes_and_says_so(here, compared):
    _write_tuning("a", 1000)
    _write_tuning("b", 1000)
    (path,) = (here / "b" / "trials").iterdir()
    path.write_bytes(path.read_bytes()[:-40])
    told = compared("a", "b")
    assert told["b"]["notes"][0] == "1 records are left out: corrupt, or of other sites"
    assert told["headline"]["b"]["n"] == 4


def test_things_of_different_kinds_and_what_is_neither_are_named(here, says):
    _write_tuning("t", 1000)
    _write_run("r", 900, steps=3)
    (here / "empty" / "trials").mkdir(parents=True)
    (here / "bin").mkdir()
    for a, b, words, code in (
        ("t", "p.toml", "is a profile", 2),
        ("t", "r", "is a run", 2),
        ("empty", "t", "no measured trial", 3),
        ("bin", "p.toml", "bin is neither a run", 3),
        ("nowhere", "p.toml", "nowhere", 3),
    ):
        assert words in says("compare", a, b, code=code)


def test_hostile_names_steer_nothing(here, says):
    config = CONFIG.model_copy(
        update={
            "model": CONFIG.model.model_copy(
                update={"config": {"\x1b[31m\u202e": "\x07"}}
            )
        }
    )
    _write_run("a", 1000, device="\x1b]0;x\x07")
    _write_run("b", 900, config=config)
    assert all(c.isprintable() or c == "\n" for c in says("compare", "a", "b"))


NVL, NULL = "NVIDIA H100 NVL", "0.0 (nullgpu)"


@pytest.mark.parametrize(
    ("changes", "code", "said"),
    [({"driver": NULL}, 5, f"pretended {NVL}"), ({}, 8, "exceeds its peak")],
)
def test_rates_of_a_run_on_a_pretended_gpu_or_beyond_a_real_one_are_taken_for_nothing(
    here, says, changes, code, said
):
    # At a tenth of which a GPU is at 0.3 of its peak.
    speed = 1000 if "driver" in changes else 10_000
    name = _write_run(
        "a", speed, steps=20, device=NVL, peak_flops_per_s=835e12, **changes
    )
    for command in (
        ["compare", name, name],
        ["report", "p.toml", "--run", name],
        ["advise", name],
    ):
        assert said in says(*command, code=code)
    [told] = json.loads(says("status", name, "--json"))["runs"]
    assert (told["step"], told["tokens_per_s"]) == (20, None)


def _write_steps(name, *, timed_steps=8, **made_on):
    trial_log = TrialLog(Path(name) / "trials", "w")
    found = record("step", budget_bytes=2**30, **made_on).model_dump(mode="json")
    trial_log.append(
        found | {"measured": found["measured"] | {"timed_steps": timed_steps}}
    )


def test_memory_trials_and_pretended_gpus_have_peaks_and_no_rates(here, compared):
    _write_steps("a")
    assert _verdicts(compared("a", "a")).keys() == {
        "tokens/s including padding",
        "peak memory",
    }
    _write_steps("b", timed_steps=1)
    assert _verdicts(compared("b", "b")).keys() == {"peak memory"}
    _write_steps("c", gpu_name=NVL, driver=NULL)
    told = compared("c", "c")
    assert told["headline"] is None
    [peak] = told["figures"]
    assert (peak["metric"]["name"], peak["of"]) == (
        "peak memory",
        "None sequences, 1 rank, under 1 GiB, allocator",
    )
    assert "a pretended one" in told["a"]["notes"][0]

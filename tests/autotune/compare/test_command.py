import json
from pathlib import Path

import numpy as np
import pytest

from autotune.cli import run
from autotune.compare.decide import Change
from autotune.compare.sections import _change_cells
from autotune.profiles.decide.explain import meaning_of
from autotune.profiles.toml_file import profile_to_toml
from autotune.trials.trial_log import TrialLog
from testbed.examples.checkpoints import exit_of, header_of, release_run
from testbed.examples.kernels import near_bounds, with_kernels
from testbed.examples.profiles import but, example_profile
from testbed.examples.run_rows import row_of
from testbed.examples.trials import WINDOW_FIGURES, record
from trainer.formats.train_config import ModelSettings, TrainConfig
from trainer.record.writer import RunWriter

CONFIG = TrainConfig(
    model=ModelSettings(name="tiny", config={"model_type": "bert", "hidden_size": 64})
)


def _write_run(name, speed, *, steps=200, seed=0, loss=1.0, config=CONFIG, **changes):
    """Write a run of so many tokens/s, with noise."""
    rng = np.random.default_rng(seed)
    writer = RunWriter(Path(name))
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
    writer.finish(exit_of(steps=steps))
    release_run(writer)
    return name


@pytest.fixture
def compared(workdir, says):
    return lambda *words: json.loads(says("compare", *words, "--json"))["comparisons"][
        0
    ]


def _verdicts(comparison) -> dict:
    return {
        figure["metric"]["name"]: figure["verdict"] for figure in comparison["figures"]
    }


def test_equal_runs_are_equal_within_noise(workdir, compared):
    comparison = compared(_write_run("a", 1000), _write_run("b", 1000, seed=1))
    assert comparison["settings"] == comparison["circumstances"] == []
    assert (comparison["headline"]["verdict"], comparison["headline"]["a"]["n"]) == (
        "the same within noise",
        180,
    )
    assert (_verdicts(comparison)["loss"], _verdicts(comparison)["peak memory"]) == (
        "the same within noise",
        "not judged",
    )


def test_headline_without_verdict_says_so_first(workdir, says):
    _write_run("a", 1000)
    _write_run("b", 1000, seed=1, steps=3)
    lines = says("compare", "a", "b").splitlines()
    (headline,) = (line for line in lines if "training speed" in line)
    assert headline.startswith("not judged")


def test_meaning_of_a_setting_is_a_whole_sentence():
    change = Change(key="learning_rate", old=1e-4, new=1e-3)
    meaning = _change_cells(change, meaning_of("learning_rate"))[-1]
    assert meaning == "Peak learning rate (default: Devlin et al. 2018)."


def test_invalid_figures_of_steps_are_dropped(workdir, compared):
    _write_run("a", 1000)
    _write_run("b", 1000, seed=1)
    path = workdir / "b" / "steps.jsonl"
    lines = path.read_text().splitlines()
    lines[50] = json.dumps(json.loads(lines[50]) | {"step_s": 0.0, "loss": None})
    lines[51] = json.dumps(json.loads(lines[51]) | {"tokens_per_s": 0.0, "loss": -1.0})
    path.write_text("\n".join(lines) + "\n")
    assert compared("a", "b")["headline"]["b"]["n"] == 178


def test_slower_run_is_found(workdir, says, compared):
    config = CONFIG.model_copy(update={"tf32": False})
    comparison = compared(
        _write_run("a", 1000), _write_run("b", 900, seed=1, config=config, loss=1.05)
    )
    assert [change["key"] for change in comparison["settings"]] == ["tf32"]
    assert comparison["headline"]["verdict"] == "slower"
    assert comparison["headline"]["change"]["value"] == pytest.approx(0.9, abs=0.01)
    assert _verdicts(comparison)["loss"] == "more"
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
def test_gate_fails_only_proven_slowdown(workdir, capsys, speed, share, codes):
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
    ids=["dataset", "ranks", "global batch", "machine"],
)
def test_runs_of_different_work_are_not_comparable(
    workdir, changes, why, says, compared
):
    _write_run("a", 1000)
    _write_run("b", 500, **changes)
    comparison = compared("a", "b")
    assert (comparison["headline"]["verdict"], comparison["headline"]["why"]) == (
        "not comparable",
        why,
    )
    assert why in says("compare", "a", "b", "--fail-if-slower", "5%", code=7)


@pytest.mark.parametrize(
    "share", ["", "5 percent", "-5%", "100%", "nan", "1", "5%%", None]
)
def test_rejects_invalid_share(workdir, says, share):
    says(
        "compare",
        "a",
        "b",
        "--strict" if share is None else f"--fail-if-slower={share}",
        code=2,
    )


def test_compares_several_with_the_first(workdir, says):
    names = [
        _write_run(name, speed, seed=speed)
        for name, speed in (("a", 1000), ("b", 1001), ("c", 850))
    ]
    comparisons = json.loads(says("compare", *names, "--json"))["comparisons"]
    assert [
        (comparison["a"]["name"], comparison["b"]["name"]) for comparison in comparisons
    ] == [
        ("a", "b"),
        ("a", "c"),
    ]
    assert [comparison["headline"]["verdict"] for comparison in comparisons] == [
        "the same within noise",
        "slower",
    ]
    says("compare", *names, "--fail-if-slower", "10%", code=9)


def test_compares_datasets_by_their_counts(workdir, make_dataset, says, compared):
    make_dataset([[5, 6, 7]] * 4).rename(workdir / "a")
    make_dataset([[5, 6, 7]] * 6).rename(workdir / "b")
    comparison = compared("a", "b")
    assert [change["key"] for change in comparison["circumstances"]] == ["dataset"]
    figures = {
        (figure["metric"]["name"], figure["of"]): (
            figure["verdict"],
            figure["change"]["value"],
        )
        for figure in comparison["figures"]
    }
    assert figures["samples", "training"] == ("more", pytest.approx(1.5))
    assert figures["tokens", "training"] == ("more", pytest.approx(1.5))
    assert "training speed" not in says("compare", "a", "b")


def test_explains_settings_that_differ(workdir, says, compared):
    _write_profile("a.toml")
    assert "settings: the same" in says("compare", "a.toml", "a.toml")
    tables = {"constraints": {"headroom_share": 0.5}, "fingerprint": {"torch": "9"}}
    comparison = compared(
        "a.toml", _write_profile("b.toml", train={"micro_batch_size": 1}, **tables)
    )
    assert comparison["settings"][0] == {"key": "micro_batch_size", "old": 2, "new": 1}
    assert "constraints.headroom_share" in {
        change["key"] for change in comparison["settings"]
    }
    assert "torch" in {change["key"] for change in comparison["facts"]}
    assert "Sequences per micro-batch on each GPU." in says(
        "compare", "a.toml", "b.toml"
    )


def _write_profile(name, **tables):
    Path(name).write_text(profile_to_toml(but(example_profile(), **tables)))
    return name


def test_compares_profiles_by_sweep_windows(workdir, compared):
    workers = example_profile().evidence.workers
    rows = [
        row.model_copy(update={"units_per_s": [119.0, 120.0, 121.0]})
        for row in workers.rows
    ]
    faster = {"workers": workers.model_copy(update={"rows": rows})}
    comparison = compared(
        _write_profile("a.toml"), _write_profile("b.toml", evidence=faster)
    )
    assert (comparison["headline"]["of"], comparison["headline"]["verdict"]) == (
        "windows of the worker sweep",
        "faster",
    )
    assert comparison["headline"]["change"]["value"] == pytest.approx(1.2, abs=0.001)


def test_compares_profiles_by_what_they_promise(workdir, compared):
    evidence = with_kernels(example_profile(), near_bounds()).evidence
    slower = evidence.confirm
    faster = slower.model_copy(
        update={
            "promised_tokens_per_s": 120.0,
            "promised_low": 117.0,
            "promised_high": 123.0,
        }
    )
    comparison = compared(
        _write_profile("a.toml", evidence={"confirm": slower}),
        _write_profile("b.toml", evidence={"confirm": faster}),
    )
    assert (comparison["headline"]["of"], comparison["headline"]["verdict"]) == (
        "windows as training runs, 1 rank",
        "faster",
    )
    assert comparison["headline"]["change"]["value"] == pytest.approx(1.2, abs=0.001)


def test_edited_profile_has_older_measurements(workdir, compared):
    _write_profile("a.toml")
    (workdir / "b.toml").write_text(
        (workdir / "a.toml")
        .read_text()
        .replace("micro_batch_size = 2", "micro_batch_size = 1")
    )
    comparison = compared("a.toml", "b.toml")
    assert comparison["a"]["notes"] == []
    assert "edited by hand" in comparison["b"]["notes"][0]


def test_profile_without_evidence_has_no_speed(says, compared):
    comparison = compared(
        _write_profile("a.toml", evidence={"probe": None, "workers": None}),
        _write_profile("b.toml"),
    )
    assert (comparison["headline"], comparison["figures"]) == (None, [])
    says("compare", "a.toml", "b.toml", "--fail-if-slower", "5%", code=7)


def test_one_step_has_no_speed(compared):
    assert (
        compared(_write_run("a", 1000, steps=1), _write_run("b", 1000))["headline"]
        is None
    )


def test_compares_run_with_its_profile(workdir, compared):
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
    comparison = compared("a.toml", "b")
    assert (
        comparison["headline"]["of"]
        == "A: windows of the worker sweep; B: the run's steps"
    )
    assert comparison["headline"]["change"]["value"] == pytest.approx(1.0, abs=0.05)


def _write_tuning(name, speed, *, num_workers=1, rounds=5, **made_on):
    config = CONFIG.model_dump(mode="json") | {
        "micro_batch_size": 2,
        "global_batch_size": 8,
    }
    config["data"] = config["data"] | {"num_workers": num_workers}
    trial_log = TrialLog(Path(name) / "trials", "w")
    for number in range(rounds):
        rates = {
            "units_per_s": 0.9 * speed,
            "padded_units_per_s": speed * (1 + 0.01 * (number % 3)),
        }
        outcome = {
            "kind": "measured",
            "figures": WINDOW_FIGURES | rates | {"gradient_accumulation_steps": 4},
        }
        entry = record(
            "window", outcome, config, key=f"{number}", old=not made_on, **made_on
        )
        trial = entry.model_dump(mode="json", exclude_unset=True)
        trial_log.append(
            trial
            | {
                "measured": {
                    "loader": {
                        "function": "m:build_loader",
                        "arguments": {
                            "config": config,
                            "num_workers": num_workers,
                            "prefetch_factor": 2,
                        },
                    },
                    "cached": False,
                    "local_ranks": 1,
                    "round": number,
                }
            }
        )
    return name


def test_compares_tunings_by_common_measurements(says, compared):
    comparison = compared(_write_tuning("a", 1000), _write_tuning("b", 900))
    assert (
        comparison["headline"]["of"]
        == "2 sequences, 1 rank, global batch 8, 1 DataLoader worker"
    )
    assert comparison["headline"]["verdict"] == "slower"
    says("compare", "a", "b", "--fail-if-slower", "5%", code=9)
    comparison = compared("a", _write_tuning("c", 900, num_workers=3))
    assert comparison["figures"] == []
    assert len(comparison["only_a"]) == len(comparison["only_b"]) == 2


@pytest.mark.parametrize(
    ("machine", "other_machine", "verdict", "why"),
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
    ids=["GPU", "CPUs", "torch", "unknown machine"],
)
def test_tunings_of_other_machines_are_not_comparable(
    says, compared, machine, other_machine, verdict, why
):
    comparison = compared(
        _write_tuning("a", 1000, **machine), _write_tuning("b", 900, **other_machine)
    )
    assert comparison["headline"]["verdict"] == verdict
    assert why in (comparison["headline"]["why"] or "")
    assert [
        "do not name their machine" in note for note in comparison["a"]["notes"]
    ] == [True] * (not machine)
    assert comparison["b"]["notes"] == []
    assert ("2.14.0" in says("compare", "a", "b")) == (
        other_machine.get("torch") == "2.14.0"
    )


def test_counts_corrupt_trial_log_records(workdir, compared):
    _write_tuning("a", 1000)
    _write_tuning("b", 1000)
    (path,) = (workdir / "b" / "trials").iterdir()
    path.write_bytes(path.read_bytes()[:-40])
    comparison = compared("a", "b")
    assert (
        comparison["b"]["notes"][0]
        == "1 records are left out: corrupt, or of other sites"
    )
    assert comparison["headline"]["b"]["n"] == 4


def test_rejects_different_kinds(workdir, says):
    _write_tuning("t", 1000)
    _write_run("r", 900, steps=3)
    (workdir / "empty" / "trials").mkdir(parents=True)
    (workdir / "bin").mkdir()
    for a, b, words, code in (
        ("t", "p.toml", "is a profile", 2),
        ("t", "r", "is a run", 2),
        ("empty", "t", "no measured trial", 3),
        ("bin", "p.toml", "bin is neither a run", 3),
        ("nowhere", "p.toml", "nowhere", 3),
    ):
        assert words in says("compare", a, b, code=code)


def test_hostile_names_cannot_steer_the_terminal(workdir, says):
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


NVL = "NVIDIA H100 NVL"
NULL = "0.0 (nullgpu)"


@pytest.mark.parametrize(
    ("changes", "code", "message"),
    [({"driver": NULL}, 5, f"pretended {NVL}"), ({}, 8, "exceeds its peak")],
    ids=["simulated GPU", "beyond the peak"],
)
def test_implausible_rates_are_rejected(workdir, says, changes, code, message):
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
        assert message in says(*command, code=code)
    [status] = json.loads(says("status", name, "--json"))["runs"]
    assert (status["step"], status["tokens_per_s"]) == (20, None)


def _write_steps(name, *, timed_steps=8, **made_on):
    trial_log = TrialLog(Path(name) / "trials", "w")
    entry = record("step", budget_bytes=2**30, **made_on).model_dump(mode="json")
    trial_log.append(
        entry | {"measured": entry["measured"] | {"timed_steps": timed_steps}}
    )


def test_memory_trials_have_peaks_without_rates(workdir, compared):
    _write_steps("a")
    assert _verdicts(compared("a", "a")).keys() == {
        "tokens/s including padding",
        "peak memory",
    }
    _write_steps("b", timed_steps=1)
    assert _verdicts(compared("b", "b")).keys() == {"peak memory"}


def test_trials_on_simulated_gpu_have_peaks_only(workdir, compared):
    _write_steps("c", gpu_name=NVL, driver=NULL)
    comparison = compared("c", "c")
    assert comparison["headline"] is None
    [peak] = comparison["figures"]
    assert (peak["metric"]["name"], peak["of"]) == (
        "peak memory",
        "None sequences, 1 rank, under 1 GiB, allocator",
    )
    assert "pretended GPU" in comparison["a"]["notes"][0]

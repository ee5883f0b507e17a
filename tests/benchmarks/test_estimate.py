import datetime
import json

import pytest

from benchmarks import estimate
from testbed.simulators import allocator as truth
from testbed.simulators import memory
from testbed.simulators.allocator import Case
from testbed.simulators.memory import SimulatedMachine

TINY = {
    "num_hidden_layers": 1,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "intermediate_size": 64,
}


def measured(tmp_path, capsys, *arguments: str) -> tuple[int, dict, str]:
    path = tmp_path / "estimate.json"
    code = estimate.main([*arguments, "--json", str(path)])
    return code, json.loads(path.read_text()), capsys.readouterr().out


def test_of_three_sets_of_simulated_machines_the_first_is_held_against_the_bars(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(estimate, "MACHINES", 5)
    code, content, told = measured(
        tmp_path, capsys, "--only", "simulated", "--seed", "7"
    )
    runs = content["parts"]["simulated"]["runs"]
    assert sorted({one["base_seed"] for one in runs}) == [7000, 7005, 7010]
    assert all(sum(one["machines_by_trials"].values()) == 5 for one in runs)
    predicted = [one for one in runs if one["predicted"]]
    assert len(predicted) == 3
    bars = {bar["name"]: bar["figure"] for bar in content["bars"]}
    assert list(bars) == [
        "simulated_trials_median",
        "simulated_trials_max",
        "simulated_wrong_count",
    ]
    assert bars["simulated_trials_max"] == predicted[0]["trials_max"]
    assert code == (0 if all(bar["holds"] for bar in content["bars"]) else 1)
    assert told.splitlines()[-1] == "simulated_wrong_count figure=0 bar<=0 ok"


def test_seeds_are_drawn_from_the_date_and_told(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(estimate, "MACHINES", 1)
    before = datetime.date.today()
    _, content, told = measured(tmp_path, capsys, "--only", "simulated")
    seed = content["parts"]["simulated"]["seed"]
    assert str(seed) in {f"{day:%Y%m%d}" for day in (before, datetime.date.today())}
    assert f"{seed}000" in told


def test_trials_that_fail_count_as_trials_and_a_search_that_does_not_end_is_wrong(
    monkeypatch,
):
    machine = SimulatedMachine(1)
    assert memory.search(machine, predicted=True) == (len(machine.attempts), True)
    monkeypatch.setattr(memory, "ENDLESS_TRIALS", 1)
    assert memory.search(SimulatedMachine(1), predicted=True) == (1, False)


def test_predictions_are_held_against_real_steps(tmp_path, capsys, monkeypatch):
    case = Case(
        family="bert", dropout=0.1, vocab_size=256, rows=4, width=32, shape=TINY
    )
    monkeypatch.setattr(truth, "CASES", (case,))
    code, content, told = measured(tmp_path, capsys, "--only", "accuracy")
    found = content["parts"]["accuracy"][case.name]
    assert code == 0
    assert found["real_bytes"] > 4 * 256 * 32
    assert abs(found["predicted_bytes"] / found["real_bytes"] - 1) < 0.02
    assert case.name in told


@pytest.mark.slow
@pytest.mark.system
def test_starts_of_trials_are_held_against_new_interpreters(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(estimate, "FORKED_TRIALS", 2)
    monkeypatch.setattr(estimate, "FRESH_INTERPRETERS", 1)
    _, content, _ = measured(tmp_path, capsys, "--only", "fork")
    found = content["parts"]["fork"]
    assert (len(found["forked_s"]), len(found["fresh_s"])) == (2, 1)
    assert content["bars"][0]["figure"] > 1


def test_a_part_that_does_not_exist_is_refused(capsys):
    with pytest.raises(SystemExit):
        estimate.main(["--only", "speed,fast"])
    assert "no such part: fast" in capsys.readouterr().err


def test_bars_are_ratios_of_medians_and_the_worst_of_figures():
    run = {"predicted": True, "trials_median": 3, "trials_max": 8, "wrong": 0}
    found: dict[str, estimate.Figures] = {
        "speed": {"law_s": [1.0, 2.0, 9.0], "mem_tracker_s": [30.0, 10.0, 20.0]},
        "cold": {"runs_s": {"one": [9.0, 8.0, 30.0], "two": [14.0, 15.5, 16.0]}},
        "accuracy": {
            one: {"predicted_bytes": one_bytes, "real_bytes": 100}
            for one, one_bytes in (("a", 101), ("b", 97))
        },
        "simulated": {
            "runs": [
                run,
                run | {"trials_max": 9, "wrong": 1},
                run | {"predicted": False, "wrong": 5},
            ]
        },
        "fork": {"forked_s": [0.1, 0.1, 5.0], "fresh_s": [3.0]},
    }
    bars = {bar.name: bar for bar in estimate.make_bars(found)}
    assert list(bars) == list(estimate.BARS)
    assert {name: bar.figure for name, bar in bars.items()}.items() >= {
        "estimate_law_against_memtracker_ratio": 10,
        "estimate_cold_s": 15.5,
        "simulated_trials_max": 8,
        "estimate_peak_error_share": pytest.approx(0.03),
        "trial_start_ratio": pytest.approx(30),
    }.items()
    assert bars["estimate_law_against_memtracker_ratio"].holds
    assert not bars["simulated_wrong_count"].holds

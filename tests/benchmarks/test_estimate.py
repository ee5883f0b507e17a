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


def test_first_set_of_machines_counts(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(estimate, "MACHINES", 5)
    code, content, output = measured(
        tmp_path, capsys, "--only", "simulated", "--seed", "7"
    )
    runs = content["parts"]["simulated"]["runs"]
    assert sorted({run["base_seed"] for run in runs}) == [7000, 7005, 7010]
    assert all(sum(run["machines_by_trials"].values()) == 5 for run in runs)
    predicted = [run for run in runs if run["predicted"]]
    assert len(predicted) == 3
    bars = {bar["name"]: bar["figure"] for bar in content["bars"]}
    assert list(bars) == [
        "simulated_trials_median",
        "simulated_trials_max",
        "simulated_wrong_count",
    ]
    assert bars["simulated_trials_max"] == predicted[0]["trials_max"]
    assert code == (0 if all(bar["holds"] for bar in content["bars"]) else 1)
    assert output.splitlines()[-1] == "simulated_wrong_count figure=0 bar<=0 ok"


def test_seeds_come_from_the_date(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(estimate, "MACHINES", 1)
    before = datetime.date.today()
    _, content, output = measured(tmp_path, capsys, "--only", "simulated")
    seed = content["parts"]["simulated"]["seed"]
    assert str(seed) in {f"{day:%Y%m%d}" for day in (before, datetime.date.today())}
    assert f"{seed}000" in output


def test_failed_trials_count_as_trials(monkeypatch):
    machine = SimulatedMachine(1)
    assert memory.search(machine, predicted=True) == (len(machine.attempts), True)


def test_endless_search_is_wrong(monkeypatch):
    monkeypatch.setattr(memory, "ENDLESS_TRIALS", 1)
    assert memory.search(SimulatedMachine(1), predicted=True) == (1, False)


def test_compares_predictions_with_real_steps(tmp_path, capsys, monkeypatch):
    case = Case(
        family="bert", dropout=0.1, vocab_size=256, rows=4, width=32, shape=TINY
    )
    monkeypatch.setattr(truth, "CASES", (case,))
    code, content, output = measured(tmp_path, capsys, "--only", "accuracy")
    figures = content["parts"]["accuracy"][case.name]
    assert code == 0
    assert figures["real_bytes"] > 4 * 256 * 32
    assert abs(figures["predicted_bytes"] / figures["real_bytes"] - 1) < 0.02
    assert case.name in output


@pytest.mark.slow
@pytest.mark.system
def test_compares_forks_with_new_interpreters(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(estimate, "FORKED_TRIALS", 2)
    monkeypatch.setattr(estimate, "FRESH_INTERPRETERS", 1)
    _, content, _ = measured(tmp_path, capsys, "--only", "fork")
    figures = content["parts"]["fork"]
    assert (len(figures["forked_s"]), len(figures["fresh_s"])) == (2, 1)
    assert content["bars"][0]["figure"] > 1


def test_unknown_part_is_rejected(capsys):
    with pytest.raises(SystemExit):
        estimate.main(["--only", "speed,fast"])
    assert "no such part: fast" in capsys.readouterr().err


def test_bars_take_medians_with_worst_figures():
    run = {"predicted": True, "trials_median": 3, "trials_max": 8, "wrong": 0}
    figures: dict[str, estimate.Figures] = {
        "speed": {"law_s": [1.0, 2.0, 9.0], "mem_tracker_s": [30.0, 10.0, 20.0]},
        "cold": {"runs_s": {"one": [9.0, 8.0, 30.0], "two": [14.0, 15.5, 16.0]}},
        "accuracy": {
            case: {"predicted_bytes": predicted_bytes, "real_bytes": 100}
            for case, predicted_bytes in (("a", 101), ("b", 97))
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
    bars = {bar.name: bar for bar in estimate.make_bars(figures)}
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

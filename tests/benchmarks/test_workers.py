import itertools
import json

import pytest

from benchmarks import workers
from benchmarks.bars import EXIT_HELD, EXIT_SHORT
from benchmarks.workers import (
    BY_THROUGHPUT,
    MOST_WINDOWS,
    Verdict,
    ladder_rule,
    make_bars,
    summary,
    sweep,
)
from testbed.simulators.loader import SimulatedFeed


def verdict(**changes) -> Verdict:
    settings = {
        "seed": 0,
        "noise": 0.05,
        "borderline": False,
        "true": 2,
        "chosen": 2,
        "undecided_between": (),
        "within": True,
        "windows": 20,
        "exhaustive_windows": 60,
    }
    return Verdict(**settings | changes)


def quiet(count: int) -> list[int]:
    """Return seeds of trainings that are quickly decided: clear, quiet, and small."""
    feeds = ((seed, SimulatedFeed(seed)) for seed in range(2000))
    clear = (
        seed
        for seed, feed in feeds
        if feed.noise < 0.03
        and feed.max_workers <= 12
        and not feed.is_borderline(0.98, 0.01)
    )
    return list(itertools.islice(clear, count))


def test_rule_is_right_on_clear_trainings():
    assert all(sweep(seed, by_wait=False).right for seed in quiet(3))
    for seed in quiet(8):
        verdict = sweep(seed)
        assert verdict.right
        assert verdict.within or verdict.undecided_between
        assert verdict.windows <= MOST_WINDOWS + 100
        assert verdict.true == SimulatedFeed(seed).true_count(0.98)


def test_rival_is_never_undecided():
    for seed in range(60):
        answer = ladder_rule(seed, 2)
        assert answer.windows in range(0, 2 * workers.LADDER_COUNTS + 1, 2)
        assert answer.undecided_between == ()
        assert 0 <= answer.chosen <= SimulatedFeed(seed).max_workers
    assert (ladder_rule(seed, 3), sweep(seed)) == (ladder_rule(seed, 3), sweep(seed))


def test_undecided_answer_must_contain_the_truth():
    wrong = verdict(chosen=3)
    assert not wrong.right
    assert verdict(chosen=1, undecided_between=(1, 3)).right
    assert not verdict(chosen=3, undecided_between=(3, 4)).right


def test_summary_counts_right_verdicts():
    wrong = verdict(chosen=3)
    summarised = summary(
        [
            verdict(),
            wrong,
            verdict(chosen=3, borderline=True),
            verdict(undecided_between=(1, 2)),
        ]
    )
    assert summarised["right_share"] == 0.75
    assert summarised["right_share_without_borderline"] == pytest.approx(2 / 3)
    assert summarised["borderline_share"] == summarised["undecided_share"] == 0.25
    assert summarised["windows_of_exhaustive_share"] == pytest.approx(1 / 3)


def bars_of(ours: list[Verdict], rival: list[Verdict], real=None):
    simulated = {
        "ours": ours,
        "loadtune": [verdict(chosen=0)] * 4,
        "loadtune, as many windows": rival,
    }
    return {
        bar.name: bar
        for bar in make_bars(simulated, real or {}, with_real=real is not None)
    }


def test_rival_counts_by_its_better_figure():
    bars = bars_of(
        [verdict()] * 4, [verdict(), verdict(), verdict(chosen=0), verdict(chosen=0)]
    )
    assert bars["workers_simulated_right_against_loadtune_ratio"].figure == 2.0
    assert all(bar.holds for bar in bars.values())
    assert "workers_real_right_datasets" not in bars


def test_wrong_answers_miss_the_bars():
    bars = bars_of([verdict(chosen=1, within=False, windows=50)] * 4, [verdict()] * 4)
    assert not any(bar.holds for name, bar in bars.items() if "undecided" not in name)
    assert not bars_of([verdict(undecided_between=(0, 4))] * 4, [verdict()])[
        "workers_simulated_undecided_share"
    ].holds


def test_real_datasets_must_be_decided():
    answers = {
        "right": (2, [1, 2], []),
        "undecided": (2, [2], [1, 2]),
        "wrong": (3, [2], []),
    }
    keys = ("chosen", "expected", "undecided_between")
    real = {
        name: dict(zip(keys, answer, strict=True)) for name, answer in answers.items()
    }
    bar = bars_of([verdict()], [verdict()], real)["workers_real_right_datasets"]
    assert (bar.figure, bar.bar, bar.holds) == (1, 3, False)


def test_command_writes_its_figures(tmp_path, capsys):
    seed = next(seed for seed in quiet(20) if ladder_rule(seed, 1).right)
    file = tmp_path / "workers.json"
    arguments = [
        "--no-real",
        "--processes",
        "1",
        "--trainings",
        "1",
        "--first-seed",
        str(seed),
        "--json",
        str(file),
    ]
    code = workers.main(arguments)
    out = capsys.readouterr().out
    content = json.loads(file.read_text())
    assert set(content["simulated"]) == {
        "ours",
        "ours, at most 150 windows",
        BY_THROUGHPUT,
        "loadtune",
        "loadtune, as many windows",
    }
    assert code == (
        EXIT_HELD if all(bar["holds"] for bar in content["bars"]) else EXIT_SHORT
    )
    assert "workers_simulated_right_share figure=1 bar>=0.92 ok" in out
    assert "windows (median)" in out
    assert "wrong: " not in out

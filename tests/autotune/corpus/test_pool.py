import sys

import psutil
import pytest

from autotune.corpus import pool
from autotune.corpus.bounded import Extracted, Refused
from autotune.errors import MachineLacks


def no_children():
    return psutil.Process().children() == []


def test_results_come_in_the_order_of_the_files(programs, tmp_path):
    names = ["garbage", "first", "truncated", "second", "script.sh", "copy-of-first"]
    results = list(pool.extract_in_order([programs / name for name in names], workers=3, most=None, spool_dir=tmp_path))
    assert [result.index for result in results] == list(range(len(names)))
    kinds = [type(result.outcome) for result in results]
    assert kinds == [Refused, Extracted, Refused, Extracted, Refused, Extracted]
    assert results[1].spool.read_text() == results[5].spool.read_text()
    assert no_children()


def test_stopping_early_ends_the_processes(programs, tmp_path):
    results = pool.extract_in_order([programs / "first"] * 20, workers=2, most=None, spool_dir=tmp_path)
    next(results)
    assert not no_children()
    results.close()
    assert no_children()


def test_a_process_that_dies_costs_its_file_only(programs, tmp_path):
    results = pool.extract_in_order([programs / "first"] * 30, workers=1, most=None, spool_dir=tmp_path)
    outcomes = [next(results).outcome]
    psutil.Process().children()[0].kill()
    outcomes += [result.outcome for result in results]
    assert len(outcomes) == 30
    refused = [outcome for outcome in outcomes if isinstance(outcome, Refused)]
    assert [outcome.reason for outcome in refused] == ["its extraction process died"]
    assert no_children()


def test_a_process_that_cannot_start_is_explained(programs, tmp_path, monkeypatch):
    monkeypatch.setattr(pool, "_BOOT", "raise SystemExit(1)")
    with pytest.raises(MachineLacks, match="did not start"):
        list(pool.extract_in_order([programs / "first"], workers=2, most=None, spool_dir=tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "missing"))
    with pytest.raises(MachineLacks, match="cannot start"):
        list(pool.extract_in_order([programs / "first"], workers=2, most=None, spool_dir=tmp_path))
    assert no_children()

"""Sweeps of loaders of your own, with real DataLoader workers and ranks."""

from dataclasses import replace
from pathlib import Path

import pytest

from autotune.base.render_console import console_text
from autotune.errors import BadInput
from autotune.subjects.bench import open_subject
from autotune.subjects.own.subject import FunctionSubject
from autotune.trials.sweep_request import SweepRequest
from autotune.workers.sections import sweep_blocks
from autotune.workers.stage import sweep_on
from autotune.workers.windows import windows_of_subject

pytestmark = pytest.mark.system
MODULE = "own_loaders"
LOAD_S = 0.03
"""Time of a sample of ``sleepy``."""


@pytest.fixture(scope="module")
def bench():
    """Return a machine on which trials of the module's functions run."""
    code = FunctionSubject(
        step_function=f"{MODULE}:plain_step", loader_function=f"{MODULE}:sleepy"
    )
    with open_subject(
        "cpu", code, Path(__file__).parent, import_timeout_s=60
    ) as opened:
        yield opened


@pytest.fixture
def sweep(bench, tmp_path):
    """Return a function that sweeps a loader of the module, with a step or a replay."""

    def run(loader, *, step=None, parameters=("num_workers",), **changes):
        names = {"loader_function": f"{MODULE}:{loader}"}
        if step is not None:
            names["step_function"] = f"{MODULE}:{step}"
        code = FunctionSubject(
            **names, arguments={"micro_batch_size": 8, "batch_size": 8}
        )
        request = SweepRequest(
            reports=tmp_path,
            trial_timeout_s=60.0,
            **{
                "replayed_step_s": None if step else 0.01,
                "budget_s": 12.0,
                "window_s": 0.3,
                "max_workers": 4,
            }
            | changes,
        )
        opened = replace(bench, subject=code, loader_parameters=frozenset(parameters))
        windows = windows_of_subject(code, {}, request, opened)
        return sweep_on(opened, windows, tmp_path / f"{loader}.toml")[0]

    return run


def lines_of(evidence) -> str:
    return console_text(sweep_blocks(evidence))


def test_finds_fewest_workers_that_keep_up(sweep):
    evidence = sweep("sleepy")
    within = evidence.undecided_between or [evidence.chosen]
    # A batch takes three times as long as a step.
    assert within[0] <= 4 <= within[-1]
    assert evidence.worker_bytes > 2**20
    assert evidence.batch_bytes == 4000


def test_plain_code_is_counted_in_batches(sweep):
    evidence = sweep("sleepy", budget_s=3.0, max_workers=0)
    assert evidence.unit == "batches"
    assert max(evidence.rows[0].units_per_s) < 1 / LOAD_S
    assert "batches/s (median)" in lines_of(evidence)


def test_replayed_step_loads_nothing_in_process(sweep):
    evidence = sweep("sleepy", replayed_step_s=0.045, budget_s=6.0, max_workers=2)
    assert evidence.chosen != 0
    # The batch is loaded after the step, not while it is computed.
    assert max(evidence.rows[0].units_per_s) < 1 / (0.045 + LOAD_S)


def test_own_step_consumes_the_batches(sweep):
    evidence = sweep("sleepy", step="plain_step", budget_s=5.0, max_workers=1)
    assert evidence.replayed_step_s is None
    assert evidence.consumer == "your step"
    assert {row.num_workers for row in evidence.rows} <= {0, 1}


def test_loader_without_workers_is_the_limit(sweep):
    evidence = sweep("locked", budget_s=4.0)
    assert not evidence.keeps_up
    text = lines_of(evidence)
    assert "the loader itself is the limit" in text
    assert "ignores num_workers" in text


def test_end_of_epoch_counts_as_cost(sweep):
    evidence = sweep("short", budget_s=3.0, max_workers=0)
    assert evidence.epoch_batches == 3
    assert "n epoch has 3 batches" in lines_of(evidence)


@pytest.mark.parametrize(
    ("name", "step", "words"),
    [
        ("once", None, "has no batches after 3 batches"),
        ("empty", None, "has no batches"),
        ("not_iterable", None, "returned int, which is not iterable"),
        ("sleepy", "trains", "took 16 optimizer steps in one call"),
        ("sleepy", "builds_nothing", "returned NoneType|returned int"),
    ],
)
def test_unusable_loader_is_named(sweep, name, step, words):
    with pytest.raises(BadInput, match=words):
        sweep(name, step=step)


def test_ranks_under_ddp_share_a_step(sweep):
    evidence = sweep(
        "sharded",
        step="ddp_step",
        local_ranks=2,
        window_s=0.2,
        budget_s=3.0,
        max_workers=0,
    )
    assert evidence.local_ranks == 2
    assert evidence.unit == "samples"
    assert not evidence.counts_padding
    (row,) = evidence.rows
    assert len(row.model_flops_per_s_per_rank) == len(row.units_per_s)


def test_joint_search_adopts_longer_queue(sweep):
    evidence = sweep(
        "prefetches",
        parameters=("num_workers", "prefetch_factor"),
        replayed_step_s=0.002,
        window_s=0.1,
        max_workers=1,
        budget_s=90.0,
    )
    assert evidence.joint.adopted
    assert evidence.loader_settings == {"num_workers": 1, "prefetch_factor": 8}


def test_failure_in_joint_search_keeps_the_sweep(sweep, capsys):
    evidence = sweep(
        "fails_with_prefetching",
        parameters=("num_workers", "prefetch_factor"),
        window_s=0.1,
        max_workers=1,
        budget_s=60.0,
    )
    assert evidence.joint is None
    assert evidence.loader_settings == {"num_workers": 1}
    assert "the search of prefetch_factor ended early" in capsys.readouterr().err

"""``find_batch_size`` and ``find_num_workers`` in a program."""

import ast
import functools
import subprocess
import sys
import time
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from autotune import find_batch_size, find_num_workers
from autotune.api.functions import importable_name, is_guarded
from autotune.errors import ExceedsMemory
from autotune.subjects.jobs.describe import described_sha256
from tests.autotune.subjects.own.hostile import step_of

pytestmark = pytest.mark.system
PROGRAM = """
import sys
import torch
from autotune import find_batch_size

def step_of(size):
    weight = torch.zeros(256, 256, requires_grad=True)
    optimizer = torch.optim.AdamW([weight])
    batch = torch.ones(size * 64, 256)
    def step():
        (batch @ weight).relu().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return step

@find_batch_size(starting_batch_size=1024, memory="60MB", device="cpu", headroom=0)
def train(batch_size, steps, *, loud=False):
    step = step_of(batch_size)
    for _ in range(steps):
        step()
    return batch_size, steps

if __name__ == "__main__":
    print(train(5))
"""


@pytest.mark.slow
def test_decorated_script_remembers_its_size(tmp_path):
    (tmp_path / "train.py").write_text(PROGRAM)
    ran = [
        subprocess.run(
            [sys.executable, "train.py"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        for _ in range(2)
    ]
    assert [process.returncode for process in ran] == [0, 0], ran
    first, second = (ast.literal_eval(process.stdout) for process in ran)
    assert first == second
    assert first[1] == 5
    assert 100 < first[0] < 1024
    (log,) = tmp_path.glob("reports/*/trials")
    assert len(list(log.glob("*.jsonl"))) == 1  # the second start tried nothing


def test_unguarded_script_is_told_its_guard(tmp_path):
    unguarded = PROGRAM.replace('if __name__ == "__main__":\n    ', "")
    (tmp_path / "bare.py").write_text(unguarded)
    bare = subprocess.run(
        [sys.executable, "bare.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "begin it under 'if __name__ == \"__main__\":'" in bare.stderr


def test_searches_closure_in_this_process(tmp_path):
    # A list of the function itself would be one of the values that make it another
    # function.
    class Calls:
        sizes: ClassVar[list] = []

    calls = Calls.sizes

    def build(micro_batch_size):
        Calls.sizes.append(micro_batch_size)
        return step_of(micro_batch_size)

    result = find_batch_size(
        build, memory="60MB", device="cpu", reports=tmp_path, headroom=0.0
    )
    assert result.verified_in == "this process"
    assert calls.count(result.feasible_max) >= 2
    assert int(result) == result.feasible_max
    before = len(calls)
    again = find_batch_size(
        build, memory="60MB", device="cpu", reports=tmp_path, headroom=0.0
    )
    assert again.feasible_max == result.feasible_max
    assert len(calls) == before


class Builder:
    def __init__(self, size):
        self.size = size

    def build(self, micro_batch_size):
        return step_of(self.size)

    __call__ = build


@pytest.mark.parametrize(
    "build",
    [
        functools.partial(step_of, before=lambda: None),
        Builder(3),
        Builder(3).build,
        lambda size: step_of(size + 1),
    ],
    ids=["partial", "callable object", "bound method", "lambda"],
)
def test_tries_unimportable_builder_in_this_process(tmp_path, build):
    result = find_batch_size(
        build,
        memory="60MB",
        device="cpu",
        headroom=0,
        max_size=4,
        reports=tmp_path,
    )
    assert result.verified_in == "this process"
    assert result.feasible_max == 4


def test_imports_only_what_another_process_defines():
    assert importable_name(step_of) == "tests.autotune.subjects.own.hostile:step_of"
    made = {"__name__": __name__}
    exec("def step_of(size): ...", made)
    assert importable_name(made["step_of"]) is None
    assert is_guarded(Path(__file__), 1) is False


def test_decorator_fixes_arguments_of_the_call(tmp_path):
    @find_batch_size(
        starting_batch_size=4,
        memory="60MB",
        headroom=0,
        reports=tmp_path,
        arguments={"steps": 5},
    )
    def train(batch_size, *more, steps=3):
        step = step_of(batch_size)
        for _ in range(steps):
            step()
        return batch_size, more, steps

    assert train(7) == (4, (7,), 5)
    assert train(steps=4) == (4, (), 4)


def test_results_depend_on_code_with_its_values():
    def made(constant, around, default=1):
        space = {"__name__": "__main__", "around": around}
        exec(f"def build(size, more={default}): return around, {constant}", space)
        return described_sha256(space["build"])

    whole = made(1, {"a": [2]})
    assert whole == made(1, {"a": [2]})
    assert (
        len(
            {
                whole,
                made(2, {"a": [2]}),
                made(1, {"a": [3]}),
                made(1, {"a": [2]}, default=2),
            }
        )
        == 4
    )


def test_methods_are_told_apart_by_their_object():
    first, second, other_size = (
        described_sha256(Builder(size).build) for size in (3, 3, 4)
    )
    assert first == second != other_size


def test_endless_value_is_described():
    endless = []
    endless.append(endless)
    assert described_sha256(functools.partial(step_of, endless))


def test_memory_error_has_next_step(tmp_path):
    with pytest.raises(ExceedsMemory) as caught:
        find_batch_size(
            lambda size: step_of(10**4 * size),
            memory="20MB",
            device="cpu",
            reports=tmp_path,
        )
    assert any(
        note.startswith("next: Raise --memory") for note in caught.value.__notes__
    )


def test_decorator_requires_a_size_argument():
    with pytest.raises(TypeError, match="takes no batch_size"):
        find_batch_size()(lambda: None)
    with pytest.raises(
        TypeError, match="takes self first: make batch_size its first argument"
    ):
        find_batch_size()(Builder.build)


def test_decorated_function_requires_its_other_arguments():
    with pytest.raises(TypeError, match="missing a required argument: 'steps'"):
        find_batch_size()(lambda batch_size, steps: None)()


def test_rejects_invalid_options():
    with pytest.raises(ValueError, match="headroom must be at least 0"):
        find_batch_size(step_of, headroom=1.5)
    with pytest.raises(ValueError, match="'lots' is not a size"):
        find_batch_size(step_of, memory="lots")
    with pytest.raises(ValueError, match="needs step_time"):
        find_num_workers(lambda num_workers: [])


def test_counts_workers_of_a_closure(tmp_path):
    class Slow(torch.utils.data.Dataset):
        def __len__(self):
            return 10_000

        def __getitem__(self, number):
            time.sleep(0.018)
            return torch.zeros(4)

    def build(num_workers):
        return torch.utils.data.DataLoader(
            Slow(), batch_size=None, num_workers=num_workers
        )

    result = find_num_workers(
        build,
        step_time="20ms",
        max_workers=1,
        time_limit="5s",
        window="0.3s",
        reports=tmp_path,
    )
    within = result.undecided_between or (result.value, result.value)
    assert within[0] <= 1 <= within[-1]
    assert result.measured_in == "this process"


def test_progress_reaches_a_function(tmp_path, capsys):
    notes = []

    def keep(completed, total, note):
        notes.append(note)

    search = functools.partial(
        find_batch_size,
        step_of,
        memory="60MB",
        device="cpu",
        max_size=2,
        reports=tmp_path,
    )
    search(progress=keep)
    assert notes
    search(progress=False)
    assert "probe" not in capsys.readouterr().err

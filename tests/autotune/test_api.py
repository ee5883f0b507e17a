"""The six functions for other programs: every example in their words is run as it stands."""

import doctest
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import autotune
from autotune import api
from autotune.errors import AutotuneError, BadInput, DoesNotFit, UsageError

ROOT = Path(__file__).parent.parent.parent
TINY = {
    "model_type": "bert", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64,
    "max_position_embeddings": 64,
}  # fmt: skip
LOADS_TORCH = ("estimate", "plan")


def _examples(name, **names):
    found = doctest.DocTestFinder(recurse=False).find(getattr(api, name), name, globs=names)
    (example,) = [one for one in found if one.examples]
    return example


def _run(example):
    said = []
    result = doctest.DocTestRunner(verbose=False).run(example, out=said.append)
    assert result.attempted > 1
    assert result.failed == 0, "".join(said)


@pytest.fixture
def at_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.delenv("AUTOTUNE_DATA", raising=False)


@pytest.mark.usefixtures("at_the_root")
@pytest.mark.parametrize("name", [name for name in autotune.__all__ if name not in (*LOADS_TORCH, "tune")])
def test_examples_that_read_files_do_what_they_say(name):
    _run(_examples(name))


@pytest.mark.usefixtures("at_the_root", "warm_server")
@pytest.mark.parametrize("name", LOADS_TORCH)
def test_examples_that_trace_a_model_do_what_they_say(name):
    _run(_examples(name))


@pytest.mark.slow
@pytest.mark.usefixtures("at_the_root", "warm_server")
def test_the_example_of_a_tuning_really_tunes(tmp_path, patterned_dataset, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")  # no sbatch: this is no login node
    model = tmp_path / "tiny.json"
    model.write_text(json.dumps(TINY))
    _run(_examples("tune", model=str(model), data=patterned_dataset, out=tmp_path))


def test_there_are_six_functions_whose_words_say_everything():
    assert len(autotune.__all__) <= 6
    for name in autotune.__all__:
        function = getattr(autotune, name)
        parameters = inspect.signature(function).parameters
        assert all(one.kind is inspect.Parameter.KEYWORD_ONLY for one in parameters.values()), name
        for part in ("Args:", "Returns:", "Raises:", ">>> "):
            assert part in function.__doc__, f"{name}: {part}"
        for parameter in parameters:
            assert f"        {parameter}: " in function.__doc__, f"{name}: {parameter}"


def test_importing_the_package_costs_nothing_and_its_functions_load_no_torch():
    code = (
        "import sys; import autotune; before = set(sys.modules)\n"
        "heavy = {'torch', 'transformers', 'pydantic', 'numpy', 'optuna', 'typer'}\n"
        "assert not heavy & before, heavy & before\n"
        "assert {'tune', 'estimate'} <= set(dir(autotune))\n"
        "autotune.read_profile(path='profiles/bert-mini-cpu.toml')\n"
        "autotune.advise(place='profiles/bert-mini-cpu.toml')\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr


def test_a_name_that_is_none_is_refused_as_everywhere():
    with pytest.raises(AttributeError, match="no attribute 'tuen'"):
        _ = autotune.tuen


def test_errors_are_of_one_tree_and_name_the_next_step(tmp_path):
    with pytest.raises(BadInput) as found:
        autotune.read_profile(path=tmp_path / "none.toml")
    assert isinstance(found.value, AutotuneError)
    assert found.value.next_step
    with pytest.raises(UsageError, match="how long to train"):
        autotune.plan(profile=ROOT / "profiles" / "bert-mini-cpu.toml", tokens=1e9, hours=3)
    with pytest.raises(UsageError, match="a model or of a profile"):
        autotune.plan(model="bert-mini", profile=ROOT / "profiles" / "bert-mini-cpu.toml")
    with pytest.raises(BadInput, match="unknown model 'bert-mnii'") as misspelt:
        autotune.estimate(model="bert-mnii", device="cpu", memory_bytes=2**30)
    assert "bert-mini" in misspelt.value.next_step


@pytest.mark.usefixtures("warm_server")
def test_a_model_that_does_not_fit_is_an_error(tmp_path):
    model = tmp_path / "tiny.json"
    model.write_text(json.dumps(TINY))
    with pytest.raises(DoesNotFit):
        autotune.estimate(model=str(model), device="cpu", memory_bytes=2**20, seq_length_tokens=32)


@pytest.mark.usefixtures("at_the_root", "warm_server")
def test_the_page_about_python_runs(capsys):
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "python.md").read_text(), re.DOTALL)
    exec(block, {})
    assert "True" in capsys.readouterr().out

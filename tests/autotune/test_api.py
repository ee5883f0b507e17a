"""The functions for other programs: the page's example is run as it stands."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from autotune import api
from autotune.errors import DoesNotFit
from trainer.config.presets import model_settings

ROOT = Path(__file__).parent.parent.parent


def run_code(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_page_about_python_runs_names_what_is_there_and_loads_no_torch():
    page = (ROOT / "docs" / "python.md").read_text()
    (block,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    for line in page.splitlines():
        if line.startswith("| ") and "`" in line.split("|")[2]:
            assert set(re.findall(r"(\w+)\(", line.split("|")[2])) <= {*api.__all__, "run"}, line
    said = run_code(f"{block}\nimport sys\nassert not {{'torch', 'transformers'}} & set(sys.modules)")
    assert said.endswith("True\n['model']\n")


def test_all_names_are_there_and_importing_the_package_costs_nothing():
    assert all(hasattr(api, name) for name in api.__all__)
    run_code("import sys; import autotune; assert not {'pydantic', 'numpy', 'typer'} & set(sys.modules)")


def test_errors_name_the_next_step_and_the_exit_code(tmp_path):
    with pytest.raises((api.AutotuneError, api.TrainerError)) as found:
        api.read_profile(tmp_path / "none.toml")
    assert found.value.next_step
    assert found.value.exit_code == 3


@pytest.mark.usefixtures("warm_server")
def test_an_estimate_is_what_fits_or_an_error():
    def predicted(memory):
        model = model_settings("bert-mini")
        config = api.settings_of_step(model, "cpu", layout=None, precision=None, seq_length_tokens=32)
        asked = api.PredictionRequest(
            configs=(config,), gpu=None, memory=memory, data=None, vocab_size=512, ranks=1, accumulate=True,
            tensor_ranks=1, pipeline_stages=1, max_rows=64,
        )  # fmt: skip
        return api.predict(asked, api.find_target(asked), what_if=False, update=lambda *_: None)

    answer, refused = predicted("256MiB")
    (found,) = answer.models
    assert found.rows_low <= found.rows <= found.rows_high
    assert not refused
    ((error,),) = (predicted("1MiB")[1].values(),)
    assert isinstance(error, DoesNotFit)

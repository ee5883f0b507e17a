import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[2]


def required() -> dict[str, str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *(line for lines in project["optional-dependencies"].values() for line in lines)]
    return {(one := Requirement(line)).name: str(one.specifier).removeprefix(">=") for line in lines}


def test_lower_bounds_that_the_documentation_names_are_those_that_are_installed_by():
    named = dict(re.findall(r"^\| ([\w-]+) ≥ ([\d.]+) \|", (ROOT / "docs/dependencies.md").read_text(), re.MULTILINE))
    assert {"torch", "transformers"} <= set(named)
    assert named == {name: required()[name] for name in named}


def test_torch_is_new_enough_for_attention_over_a_sliding_window():
    assert Version(required()["torch"]) >= Version("2.11")  # varlen_attn takes no window_size before

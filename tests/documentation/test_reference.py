"""What the reference says by hand is what the code has."""

import ast
import re
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from autotune import errors as tuner
from autotune.cluster.site_file import SiteFile
from autotune.profiles.values import Constraints, Fingerprint, Provenance
from tests.documentation.blocks import ROOT
from trainer import errors as trainer
from trainer.config.train_config import TrainConfig

REFERENCE = ROOT / "docs" / "reference"
VARIABLE = re.compile(
    r"(AUTOTUNE|CUBLAS|CUDA|GLOO|HF|MKL|NCCL|OMP|PYTORCH|SLURM|SLURMD|TORCHELASTIC|TOKENIZERS|RAYON|MASTER)_[A-Z0-9_]+"
    r"|LD_PRELOAD|TMPDIR|(LOCAL_)?(RANK|WORLD_SIZE)"
)


def _first_cells(name: str) -> list[str]:
    return re.findall(
        r"^\| `?(\w+)`? \|", (REFERENCE / name).read_text(), re.MULTILINE
    )[1:]


def test_every_variable_that_the_code_names_is_explained_and_no_other():
    files = [
        path for room in ("autotune", "trainer") for path in (ROOT / room).rglob("*.py")
    ]
    nodes = [node for path in files for node in ast.walk(ast.parse(path.read_text()))]
    texts = {
        node.value
        for node in nodes
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    assert {text for text in texts if VARIABLE.fullmatch(text)} == set(
        _first_cells("environment.md")
    ) - {"variable"}


def test_every_exit_code_is_explained_once():
    codes = {
        one.exit_code
        for room in (tuner, trainer)
        for one in vars(room).values()
        if hasattr(one, "exit_code")
    }
    codes |= {0, tuner.EXIT_INTERRUPTED, tuner.EXIT_TERMINATED}
    assert list(map(int, _first_cells("exit-codes.md"))) == sorted(codes)


@pytest.mark.parametrize(
    "kind", [TrainConfig, Constraints, Fingerprint, Provenance, SiteFile]
)
def test_whatever_people_may_edit_or_must_match_says_what_it_means(kind):
    schema = kind.model_json_schema()
    for table in (schema, *schema.get("$defs", {}).values()):
        for name, field in table.get("properties", {}).items():
            assert "description" in field or "$ref" in str(field), (
                f"{table['title']}.{name}"
            )


def test_lower_bounds_that_the_documentation_names_are_those_that_are_installed_by():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [
        *project["dependencies"],
        *(
            line
            for lines in project["optional-dependencies"].values()
            for line in lines
        ),
    ]
    required = {
        (one := Requirement(line)).name: str(one.specifier).removeprefix(">=")
        for line in lines
    }
    named = dict(
        re.findall(
            r"^\| ([\w-]+) ≥ ([\d.]+) \|",
            (ROOT / "docs/install.md").read_text(),
            re.MULTILINE,
        )
    )
    assert {"torch", "transformers"} <= set(named)
    assert named == {name: required[name] for name in named}
    # varlen_attn takes no window_size before.
    assert Version(required["torch"]) >= Version("2.11")

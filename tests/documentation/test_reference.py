"""The handwritten part of the reference matches the code."""

import ast
import re
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from autotune import errors as tuner
from autotune.cluster.site_file import SiteFile
from autotune.evidence.profile import Constraints, Fingerprint, Provenance
from tests.documentation.blocks import ROOT
from trainer.formats import errors as trainer
from trainer.formats.train_config import TrainConfig

REFERENCE = ROOT / "docs" / "reference"
VARIABLE = re.compile(
    r"(AUTOTUNE|CUBLAS|CUDA|GLOO|HF|MKL|NCCL|OMP|PYTORCH|SLURM|SLURMD|TORCHELASTIC|TOKENIZERS|RAYON|MASTER)_[A-Z0-9_]+"
    r"|LD_PRELOAD|TMPDIR|(LOCAL_)?(RANK|WORLD_SIZE)"
)


def _first_cells(name: str) -> list[str]:
    return re.findall(
        r"^\| `?(\w+)`? \|", (REFERENCE / name).read_text(), re.MULTILINE
    )[1:]


def test_explains_every_environment_variable():
    files = [
        path
        for package in ("autotune", "trainer")
        for path in (ROOT / package).rglob("*.py")
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


def test_explains_every_exit_code():
    codes = {
        error.exit_code
        for module in (tuner, trainer)
        for error in vars(module).values()
        if hasattr(error, "exit_code")
    }
    codes |= {0, tuner.EXIT_INTERRUPTED, tuner.EXIT_TERMINATED}
    assert list(map(int, _first_cells("exit-codes.md"))) == sorted(codes)


@pytest.mark.parametrize(
    "kind", [TrainConfig, Constraints, Fingerprint, Provenance, SiteFile]
)
def test_editable_settings_have_descriptions(kind):
    schema = kind.model_json_schema()
    for table in (schema, *schema.get("$defs", {}).values()):
        for name, field in table.get("properties", {}).items():
            assert "description" in field or "$ref" in str(field), (
                f"{table['title']}.{name}"
            )


def test_lower_bounds_match_the_project():
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
        (requirement := Requirement(line)).name: str(
            requirement.specifier
        ).removeprefix(">=")
        for line in lines
    }
    documented = dict(
        re.findall(
            r"^\| ([\w-]+) ≥ ([\d.]+) \|",
            (ROOT / "docs/install.md").read_text(),
            re.MULTILINE,
        )
    )
    assert {"torch", "transformers"} <= set(documented)
    assert documented == {name: required[name] for name in documented}
    # varlen_attn takes no window_size before.
    assert Version(required["torch"]) >= Version("2.11")

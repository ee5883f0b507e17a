"""What the reference says by hand is what the code has."""

import ast
import re
from collections.abc import Iterator

import pytest

from autotune import errors as tuner
from autotune.cluster.site import SiteFile
from autotune.core.profile import Constraints, Fingerprint, Provenance
from tests.documentation.blocks import ROOT
from trainer import errors as trainer
from trainer.config import TrainConfig

REFERENCE = ROOT / "docs" / "reference"
VARIABLE = re.compile(
    r"(AUTOTUNE|CUBLAS|CUDA|GLOO|HF|MKL|NCCL|OMP|PYTORCH|SLURM|SLURMD|TORCHELASTIC|TOKENIZERS|RAYON|MASTER)_[A-Z0-9_]+"
    r"|LD_PRELOAD|TMPDIR|(LOCAL_)?(RANK|WORLD_SIZE)"
)


def _first_cells(name: str) -> list[str]:
    return re.findall(r"^\| `?(\w+)`? \|", (REFERENCE / name).read_text(), re.MULTILINE)[1:]


def _texts() -> Iterator[str]:
    for path in (path for room in ("autotune", "trainer") for path in (ROOT / room).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def test_every_variable_that_the_code_names_is_explained_and_no_other():
    named = {text for text in _texts() if VARIABLE.fullmatch(text)}
    assert named == set(_first_cells("environment.md")) - {"variable"}


def test_every_exit_code_is_explained_once():
    codes = {one.exit_code for room in (tuner, trainer) for one in vars(room).values() if hasattr(one, "exit_code")}
    codes |= {0, tuner.EXIT_INTERRUPTED, tuner.EXIT_TERMINATED}
    assert list(map(int, _first_cells("exit-codes.md"))) == sorted(codes)


@pytest.mark.parametrize("kind", [TrainConfig, Constraints, Fingerprint, Provenance, SiteFile])
def test_whatever_people_may_edit_or_must_match_says_what_it_means(kind):
    schema = kind.model_json_schema()
    for table in (schema, *schema.get("$defs", {}).values()):
        for name, field in table.get("properties", {}).items():
            assert "description" in field or "$ref" in str(field), f"{table['title']}.{name}"

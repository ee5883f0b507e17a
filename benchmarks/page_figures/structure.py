"""The structure of the project, read from its code: packages, layers and imports."""

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

from benchmarks.page_figures.formats import Figures, Rows, row
from benchmarks.page_figures.recorded import RecordedFigures

ROOT = Path(__file__).parents[2]
LAYERS = "packages point one way"
"""Name of the contract in ``pyproject.toml`` that has the layers."""
EVERYWHERE = frozenset({"base", "errors"})
"""Packages that nearly all others import, which are left out of the rows."""


def figures(_recorded: RecordedFigures) -> Figures:
    """Return the packages of ``autotune`` from the top down, with their imports."""
    return {"architecture.packages": _package_rows()}


def _package_rows() -> Rows:
    rows = []
    for number, names in enumerate(_layers(), start=1):
        for name in names:
            if not (ROOT / "autotune" / name).is_dir():
                continue
            imported = sorted(imported_packages(name) - EVERYWHERE - {name})
            rows.append(
                row(str(number), f"`{name}`", _purpose(name), ", ".join(imported))
            )
    return rows


def _layers() -> Iterator[list[str]]:
    """Yield the packages of each layer, from the top down."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    contracts = settings["tool"]["importlinter"]["contracts"]
    (layers,) = (one["layers"] for one in contracts if one["name"] == LAYERS)
    for layer in layers:
        yield [name.strip() for name in layer.split("|")]


def _purpose(name: str) -> str:
    """Return the first sentence of a package's docstring."""
    source = (ROOT / "autotune" / name / "__init__.py").read_text()
    docstring = ast.get_docstring(ast.parse(source)) or ""
    return docstring.splitlines()[0].replace("``", "`")


def imported_packages(name: str) -> set[str]:
    """Return the packages of ``autotune`` that a package imports, when loaded or later.

    Args:
        name: Name of the package below ``autotune``.
    """
    packages = set()
    for path in (ROOT / "autotune" / name).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                parts = node.module.split(".")
                if parts[0] == "autotune" and len(parts) > 1:
                    packages.add(parts[1])
    return packages

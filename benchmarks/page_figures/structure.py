"""The structure of the project, read from its code: packages, and capabilities."""

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

from benchmarks.page_figures.formats import Figures, Rows, row
from benchmarks.page_figures.recorded import RecordedFigures
from testbed.capabilities.table import CAPABILITIES, SUBJECTS, marks

ROOT = Path(__file__).parents[2]
LAYERS = "packages point one way"
"""Name of the contract in ``pyproject.toml`` that has the layers."""
EVERYWHERE = frozenset({"base", "errors"})
"""Packages that nearly all others import, which are left out of the rows."""
NESTED = frozenset({"subjects.mlm"})
"""Packages below another one that have a separate layer."""


def figures(_recorded: RecordedFigures) -> Figures:
    """Return the packages of ``autotune``, and the capabilities by kind of subject."""
    return {
        "architecture.packages": _package_rows(),
        "capabilities.subjects": _capability_rows(),
    }


def _capability_rows() -> Rows:
    """Return a row for each capability, with a column for each kind of subject."""
    return [
        row(capability.words, *(marks(subject, capability) for subject in SUBJECTS))
        for capability in CAPABILITIES
    ]


def _package_rows() -> Rows:
    """Return the packages from the top down, with their imports."""
    rows = []
    for number, names in enumerate(_layers(), start=1):
        for name in names:
            if not _directory(name).is_dir():
                continue
            imported = sorted(imported_packages(name) - EVERYWHERE - {name})
            label = f"`{name.replace('.', '/')}`"
            paths = ", ".join(imported).replace(".", "/")
            rows.append(row(str(number), label, _purpose(name), paths))
    return rows


def _layers() -> Iterator[list[str]]:
    """Yield the packages of each layer, from the top down."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    contracts = settings["tool"]["importlinter"]["contracts"]
    (layers,) = (one["layers"] for one in contracts if one["name"] == LAYERS)
    for layer in layers:
        modules = [module.strip() for module in re.split("[|:]", layer)]
        # A layer may have the parts of a package, whose name is theirs.
        yield list(dict.fromkeys(map(_package_of, modules)))


def _package_of(module: str) -> str:
    """Return the package with a row that a module below ``autotune`` belongs to."""
    parts = module.split(".")
    nested = ".".join(parts[:2])
    return nested if nested in NESTED else parts[0]


def _directory(name: str) -> Path:
    return ROOT.joinpath("autotune", *name.split("."))


def _purpose(name: str) -> str:
    """Return the first sentence of a package's docstring."""
    source = (_directory(name) / "__init__.py").read_text()
    docstring = ast.get_docstring(ast.parse(source)) or ""
    return docstring.splitlines()[0].replace("``", "`")


def imported_packages(name: str) -> set[str]:
    """Return the packages of ``autotune`` that a package imports, when loaded or later.

    Args:
        name: Name of the package below ``autotune``, dotted if it is nested.
    """
    packages = set()
    for path in _directory(name).rglob("*.py"):
        if _package_of(_module_of(path)) != name:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                root, _, module = node.module.partition(".")
                if root == "autotune" and module:
                    packages.add(_package_of(module))
    return packages


def _module_of(path: Path) -> str:
    """Return the name of a file's module below ``autotune``."""
    parts = path.relative_to(ROOT / "autotune").with_suffix("").parts
    return ".".join(parts)

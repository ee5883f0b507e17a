"""Results of stages that are known: of a directory, and of kept checks."""

import ast
import functools
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.stage import Stage

ROOT = Path(__file__).parents[2]
KEPT = ROOT / "reports" / "gpu"
CHECK_NAME = "check.json"
ENDED, FAILED, CUT_OFF = "ended", "failed", "cut off"


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """The result of a stage, and the check that has it."""

    result: Mapping[str, Any]
    directory: Path

    @property
    def status(self) -> str:
        """``ended``, ``failed`` or ``cut off``."""
        return str(self.result["status"])

    @property
    def date(self) -> str:
        """Day on which the stage began, in UTC."""
        return str(self.result["began_utc"])[:10]

    def is_of(self, stage: Stage, libraries: Mapping[str, str | None]) -> bool:
        """Return whether this stage would measure the same again.

        Its command, the code it depends on, the dataset and the libraries are compared.

        Args:
            stage: The stage of today's queue.
            libraries: Dataset and versions of the machine; None is not compared.
        """
        made_with = self.result.get("made_with", {})
        return (
            self.result.get("words") == list(stage.words)
            and made_with.get("code") == code_digest(stage.code)
            and all(
                value is None or made_with.get(name) == value
                for name, value in libraries.items()
            )
        )


def read_checks(directories: Iterable[Path]) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield each directory that has a check, with the check."""
    for directory in directories:
        if (directory / CHECK_NAME).is_file():
            yield directory, json.loads((directory / CHECK_NAME).read_text())


def known_results(out: Path, gpu: str, kept: Path = KEPT) -> dict[str, Known]:
    """Return the newest result of each stage on a kind of GPU, preferably an ended one.

    Args:
        out: Directory of the queue.
        gpu: Short name of the GPU.
        kept: Directory of kept checks.
    """
    known: dict[str, Known] = {}
    for directory, check in read_checks([*sorted((kept / gpu).glob("*")), out / gpu]):
        for name, result in check["stages"].items():
            if "began_utc" not in result:
                continue  # had no time
            other = known.get(name)
            rank = (result["status"] == ENDED, result["began_utc"])
            if other is None or rank >= (
                other.status == ENDED,
                other.result["began_utc"],
            ):
                known[name] = Known(result=result, directory=directory)
    return known


@functools.cache
def code_digest(paths: tuple[str, ...]) -> str:
    """Return a hash of the code of packages and files, without docstrings and comments.

    Args:
        paths: Paths relative to the repository.
    """
    digest = hashlib.sha256()
    for path in paths:
        digest.update(_digest_of(path).encode())
    return digest.hexdigest()[:16]


@functools.cache
def _digest_of(path: str) -> str:
    start = ROOT / path
    files = [start] if start.is_file() else sorted(start.rglob("*.py"))
    digest = hashlib.sha256()
    for file in files:
        tree = _WithoutStrings().visit(ast.parse(file.read_bytes()))
        digest.update(str(file.relative_to(ROOT)).encode() + b"\0")
        digest.update(ast.dump(tree).encode())
    return digest.hexdigest()


class _WithoutStrings(ast.NodeTransformer):
    """Remove strings that are statements: the documentation of code."""

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        """Remove an expression that is only a string."""
        if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            return None
        return node

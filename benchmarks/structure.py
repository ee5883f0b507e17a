"""Measure how the product is laid out: packages, files, imports, names, docstrings, and how values travel.

``benchmarks.size`` prints the figures against their targets; ``docs/architecture.md``
quotes the picture of the house and lists the stations of values, which are checked here
against the sources.
"""

import ast
import re
import subprocess
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from benchmarks.bars import Bar

ROOT = Path(__file__).parent.parent
ARCHITECTURE = Path("docs/architecture.md")
ANATOMY = frozenset(
    {"__init__", "values", "decide", "measure", "stage", "job", "command", "sections"}
)
"""Module names that mean the same in every package."""
FOUNDATION = frozenset({"base", "errors"})
SMALL_FILE_LINES = 50
FRAGMENT = re.compile(r"(What|How|Whether|Of|As|That|Where)\b")
"""Docstrings that begin so are no sentences."""
_STATION_TABLE = re.compile(r"<!-- stations of (\w+) -->\n(.*?)<!-- end -->", re.DOTALL)
_STATION = re.compile(r"^\| `([\w./]+\.py)` \| (.*?) \|$", re.MULTILINE)
CARRIES = "carries it"
"""Said of a station that passes a value on without knowing it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportEdge:
    """One module that imports another of ``autotune``."""

    source: tuple[str, ...]
    target: tuple[str, ...]


def tracked(root: Path = ROOT) -> list[str]:
    """Return the paths of all files that git tracks and that exist, relative to ``root``; without git, of all files."""
    command = ["git", "ls-files", "-z"]
    said = subprocess.run(
        command, cwd=root, capture_output=True, check=False, text=True
    )
    if said.returncode:
        every = (
            path.relative_to(root) for path in sorted(root.rglob("*")) if path.is_file()
        )
        return [
            str(path)
            for path in every
            if not any(
                part.startswith((".", "__", "build")) for part in path.parts[:-1]
            )
        ]
    return [
        path for path in said.stdout.split("\0") if path and (root / path).is_file()
    ]


class Sources:
    """The tracked Python files of the product, parsed once."""

    def __init__(self, paths: Sequence[str], root: Path = ROOT) -> None:
        """Read the files below ``autotune/`` and ``trainer/`` among ``paths``, which are relative to ``root``."""
        self.root = root
        self.paths = [
            path
            for path in paths
            if path.startswith(("autotune/", "trainer/")) and path.endswith(".py")
        ]
        self.trees = {
            path: ast.parse((root / path).read_text(encoding="utf-8"))
            for path in self.paths
        }

    @cached_property
    def layers(self) -> list[list[str]]:
        """The packages of ``autotune`` from the top down, as the import contract declares them."""
        contracts = tomllib.loads((self.root / "pyproject.toml").read_text())["tool"][
            "importlinter"
        ]["contracts"]
        layers = next(one["layers"] for one in contracts if one["type"] == "layers")
        return [[name.strip() for name in layer.split("|")] for layer in layers]

    @cached_property
    def edges(self) -> list[ImportEdge]:
        """Imports between modules of ``autotune``, each pair once."""
        modules = {_module(path) for path in self.paths if path.startswith("autotune/")}
        found = {
            ImportEdge(source=_module(path), target=target)
            for path, tree in self.trees.items()
            if path.startswith("autotune/")
            for target in _imported(tree, modules)
        }
        return sorted(found, key=lambda edge: (edge.source, edge.target))

    @property
    def inside_share(self) -> float:
        """Share of imports that stay inside one package, the foundation left out."""
        counted = [
            edge
            for edge in self.edges
            if edge.source and edge.target[0] not in FOUNDATION
        ]
        return sum(edge.source[0] == edge.target[0] for edge in counted) / max(
            1, len(counted)
        )

    @property
    def against_direction(self) -> list[ImportEdge]:
        """Imports that point up or sideways.

        Commands stand above all packages, values below.
        """
        rank = {
            name: number for number, layer in enumerate(self.layers) for name in layer
        }
        return [
            edge
            for edge in self.edges
            if edge.source
            and edge.source[0] != edge.target[0]
            and not _is_command(edge.source)
            and edge.target[1:] != ("values",)
            and rank[edge.source[0]] >= rank[edge.target[0]]
        ]

    @property
    def repeated_modules(self) -> list[str]:
        """Module names outside the anatomy that occur more than once in ``autotune``, jobs aside."""
        names = Counter(
            Path(path).stem
            for path in self.paths
            if path.startswith("autotune/")
            and Path(path).stem not in ANATOMY
            and "/jobs/" not in path
        )
        return sorted(name for name, count in names.items() if count > 1)

    @property
    def repeated_classes(self) -> list[str]:
        """Class names that modules declare more than once at their top level."""
        names = Counter(
            node.name
            for tree in self.trees.values()
            for node in tree.body
            if isinstance(node, ast.ClassDef)
        )
        return sorted(name for name, count in names.items() if count > 1)

    @property
    def fragments(self) -> tuple[list[str], int]:
        """Docstrings and field docs that begin with a word of ``FRAGMENT``, with their place, and the number of all."""
        found, count = [], 0
        for path, tree in self.trees.items():
            for line, text in _docs(tree):
                count += 1
                if FRAGMENT.match(text):
                    found.append(f"{path}:{line}: {text.splitlines()[0]}")
        return found, count

    def bars(self) -> list[Bar]:
        """Return all figures of the layout against their targets."""
        folders = Counter(str(Path(path).parent) for path in self.paths)
        lines = {
            path: len((self.root / path).read_text(encoding="utf-8").splitlines())
            for path in self.paths
        }
        small = [
            path
            for path, count in lines.items()
            if count < SMALL_FILE_LINES and not path.endswith("__init__.py")
        ]
        fragments, docs = self.fragments
        tops = {
            path.split("/")[1] for path in self.paths if path.startswith("autotune/")
        } | {"py.typed"}
        stations = stations_of((self.root / ARCHITECTURE).read_text(encoding="utf-8"))
        most = {"micro_batch_size": 12, "num_workers": 10, "term": 10}
        return [
            _bar("product_files", len(self.paths), 290),
            _bar("top_level_names_count", len(tops), 25),
            _bar("largest_folder_files", max(folders.values()), 16),
            _bar("small_files", len(small), 25),
            _bar("repeated_module_names_count", len(self.repeated_modules), 8),
            _bar("repeated_class_names_count", len(self.repeated_classes), 0),
            _bar("imports_against_the_direction_count", len(self.against_direction), 0),
            Bar(
                name="fragment_docstrings_share",
                figure=len(fragments) / docs,
                unit="share",
                bar=0.01,
                direction="<=",
            ),
            *(
                _bar(f"stations_of_{name}_files", len(stations[name]), count)
                for name, count in most.items()
            ),
        ]

    def house(self) -> str:
        """Return a picture of the packages of ``autotune``, from the top down, with what each is."""
        layers = [layer for layer in self.layers if layer != ["__main__"]]
        docs = {name: self._sentence(name) for layer in layers for name in layer}
        width = max(map(len, docs)) + 2
        rule = "├" + "─" * (width + 1)
        rows = [
            "\n".join(f"│ {name:<{width}}{docs[name]}" for name in layer)
            for layer in layers
        ]
        return "\n```text\n" + f"\n{rule}\n".join(rows) + "\n```\n"

    def _sentence(self, name: str) -> str:
        path = f"autotune/{name}/__init__.py"
        tree = self.trees[path if path in self.trees else f"autotune/{name}.py"]
        return (ast.get_docstring(tree) or "").partition("\n")[0].rstrip(".")


def stations_of(page: str) -> dict[str, list[tuple[str, str]]]:
    """Return the files on the way of each value that a page describes, with what each does."""
    return {
        name: _STATION.findall(table) for name, table in _STATION_TABLE.findall(page)
    }


def wrong_stations(
    page: str, words: Mapping[str, str], root: Path = ROOT
) -> Iterator[str]:
    """Yield what is wrong with the stations of a page.

    Args:
        page: Markdown with one table of stations for each value.
        words: The word by which the files of each value know it.
        root: Directory of the files.
    """
    for name, stations in stations_of(page).items():
        files = [file for file, _ in stations]
        for file in sorted({file for file in files if files.count(file) > 1}):
            yield f"{name} comes back to {file}"
        for file, does in stations:
            if not (root / file).is_file():
                yield f"{name}: {file} does not exist"
            elif CARRIES not in does and not re.search(
                words[name], (root / file).read_text(encoding="utf-8")
            ):
                yield f"{name}: {file} does not name it"


def _module(path: str) -> tuple[str, ...]:
    parts = Path(path).with_suffix("").parts[1:]
    return parts[:-1] if parts[-1] == "__init__" else parts


def _imported(
    tree: ast.Module, modules: set[tuple[str, ...]]
) -> Iterator[tuple[str, ...]]:
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.ImportFrom)
            and node.module
            and node.module.startswith("autotune.")
        ):
            target = tuple(node.module.split(".")[1:])
            for alias in node.names:
                deeper = (*target, alias.name)
                yield deeper if deeper in modules else target


def _is_command(module: tuple[str, ...]) -> bool:
    return module[0] in ("cli", "__main__", "console") or module[-1] in (
        "command",
        "job_commands",
    )


def _docs(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield every docstring and field doc with its line."""
    for node in ast.walk(tree):
        if not isinstance(
            node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        ):
            continue
        if (text := ast.get_docstring(node)) is not None:
            yield node.body[0].lineno, text
        for before, after in zip(node.body, node.body[1:], strict=False):
            if isinstance(before, ast.Assign | ast.AnnAssign) and isinstance(
                after, ast.Expr
            ):
                value = after.value
                if isinstance(value, ast.Constant) and isinstance(value.value, str):
                    yield after.lineno, value.value


def _bar(name: str, figure: int, bar: int) -> Bar:
    return Bar(name=name, figure=figure, unit="count", bar=bar, direction="<=")

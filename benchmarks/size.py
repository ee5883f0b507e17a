"""``python -m benchmarks.size``: count tracked lines, files and repeated declarations against their targets.

Lines are counted as git tracks them, generated files included. A constructor call
counts as passed through if at least five of its keywords only repeat a name, as in
``Request(seed=seed)`` or ``Answer(seed=evidence.seed)``. The layout is measured in
``benchmarks.structure``.
"""

import argparse
import ast
import sys
from collections.abc import Iterable, Sequence

from benchmarks.bars import Bar, exit_code, lines
from benchmarks.structure import ROOT, Sources, tracked

PASSED_THROUGH = 5
NOT_COUNTED_TESTS = ("tests/nullgpu/", "tests/simulators/")
DOCUMENT_SUFFIXES = (".json", ".jsonl", ".html", ".md")


def main(arguments: Sequence[str] | None = None) -> int:
    """Count, print and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.size",
        description="Count lines against their targets.",
    )
    parser.add_argument(
        "--list", action="store_true", help="also name what is repeated"
    )
    options = parser.parse_args(arguments)
    paths = tracked()
    sources = Sources(paths)
    walls = [
        f"{path}:{line}"
        for path, tree in sources.trees.items()
        for line in passed_through(tree)
    ]
    if options.list:
        against = [
            f"{'.'.join(one.source)} -> {'.'.join(one.target)}"
            for one in sources.against_direction
        ]
        repeated = [*sources.repeated_modules, *sources.repeated_classes]
        sys.stdout.writelines(
            f"{entry}\n"
            for entry in [*repeated, *walls, *against, *sources.fragments[0]]
        )
    tests = [
        path
        for path in paths
        if path.startswith("tests/") and not path.startswith(NOT_COUNTED_TESTS)
    ]
    documents = [
        path
        for path in paths
        if path.startswith(("docs/", "reports/")) and path.endswith(DOCUMENT_SUFFIXES)
    ]
    bars = [
        _bar(
            "product_lines",
            count_lines(
                path for path in paths if path.startswith(("autotune/", "trainer/"))
            ),
            42_000,
        ),
        _bar(
            "benchmark_lines",
            count_lines(path for path in paths if path.startswith("benchmarks/")),
            7_600,
        ),
        _bar("test_lines", count_lines(tests), 31_000),
        _bar("document_lines", count_lines(documents), 12_000),
        _bar("passed_through_constructors_count", len(walls), 10),
        *sources.bars(),
    ]
    sys.stdout.write(
        f"imports inside one package, foundation left out: {sources.inside_share:.1%}\n"
    )
    sys.stdout.write(
        f"all tracked files: {count_lines(paths):,} lines\n{lines(bars)}\n"
    )
    return exit_code(bars)


def count_lines(paths: Iterable[str]) -> int:
    """Return the number of lines in all ``paths``, relative to the repository."""
    return sum((ROOT / path).read_bytes().count(b"\n") for path in paths)


def passed_through(tree: ast.Module) -> list[int]:
    """Return the lines of constructor calls that pass at least five keywords through unchanged."""
    calls = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and _called(node.func)[:1].isupper()
    ]
    return [
        call.lineno
        for call in calls
        if sum(map(_repeats, call.keywords)) >= PASSED_THROUGH
    ]


def _called(function: ast.expr) -> str:
    return (
        function.attr
        if isinstance(function, ast.Attribute)
        else function.id
        if isinstance(function, ast.Name)
        else ""
    )


def _repeats(keyword: ast.keyword) -> bool:
    return keyword.arg is not None and keyword.arg == _called(keyword.value)


def _bar(name: str, figure: int, bar: int) -> Bar:
    return Bar(name=name, figure=figure, unit="count", bar=bar, direction="<=")


if __name__ == "__main__":
    sys.exit(main())

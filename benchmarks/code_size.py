"""``python -m benchmarks.code_size``: print how much code each package has.

Only printed, never compared with a limit. Nodes of the syntax tree and tokens do not
depend on the layout, so that joining lines or shortening names changes nothing.
Docstrings and comments are not counted.
"""

import ast
import io
import sys
import tokenize
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
TOP_LEVEL = ("autotune", "trainer", "benchmarks", "tests", "examples")
NOT_CODE = {
    tokenize.COMMENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
    tokenize.INDENT,
    tokenize.NEWLINE,
    tokenize.NL,
}


@dataclass(slots=True)
class CodeSize:
    """Size of some Python files."""

    files: int = 0
    nodes: int = 0
    tokens: int = 0

    def add(self, source: str) -> None:
        """Count one more file."""
        tree = ast.parse(source)
        docstrings = [node for node in ast.walk(tree) if _is_docstring(node)]
        self.files += 1
        self.nodes += sum(1 for _ in ast.walk(tree)) - 2 * len(docstrings)
        lines = io.StringIO(source).readline
        tokens = [
            token
            for token in tokenize.generate_tokens(lines)
            if token.type not in NOT_CODE
        ]
        self.tokens += len(tokens) - len(docstrings)


def main() -> int:
    """Print one line for each package."""
    sizes: dict[str, CodeSize] = defaultdict(CodeSize)
    for path in sorted(ROOT.glob("*/**/*.py")):
        package = path.relative_to(ROOT).parts[0]
        if package in TOP_LEVEL:
            source = path.read_text(encoding="utf-8")
            sizes[package].add(source)
    sys.stdout.write(f"{'':12}{'files':>8}{'AST nodes':>12}{'tokens':>12}\n")
    for package, size in sizes.items():
        row = f"{package:12}{size.files:>8,}{size.nodes:>12,}{size.tokens:>12,}"
        sys.stdout.write(f"{row}\n")
    return 0


def _is_docstring(node: ast.AST) -> bool:
    """Return whether a statement is a string alone; field docs are such, too."""
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


if __name__ == "__main__":
    sys.exit(main())

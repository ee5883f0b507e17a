"""Functions of a program, and the names by which another process imports them."""

import ast
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from autotune.subjects.own.subject import WRAPPED


def parameter_names(function: Callable[..., Any]) -> list[str]:
    """Return the names of a function's parameters, in their order."""
    return list(inspect.signature(function).parameters)


def qualified_name(function: Callable[..., Any]) -> str:
    """Return the name of a function in its module; that of the class of an object."""
    return getattr(function, "__qualname__", type(function).__qualname__)


def importable_name(function: Callable[..., Any]) -> str | None:
    """Return the name by which another process can import a function.

    Returns:
        ``module:function``, or ``path/of/script.py:function`` for the running script;
        None if the function cannot be imported, as a closure.
    """
    name, module = qualified_name(function), getattr(function, "__module__", None)
    code = getattr(inspect.unwrap(function), "__code__", None)
    # Code of exec and of a notebook has no file.
    if code is None or code.co_filename.startswith("<"):
        return None
    # A bound method or a partial is another object than the one its name stands for.
    imported = _attribute(sys.modules.get(module or ""), name)
    if getattr(imported, WRAPPED, imported) != function:
        return None
    if getattr(function, "__closure__", None) and not hasattr(function, "__wrapped__"):
        return None
    if module != "__main__":
        return f"{module}:{name}"
    script = Path(getattr(sys.modules["__main__"], "__file__", None) or "")
    if script.suffix != ".py" or is_guarded(script, code.co_firstlineno):
        return None
    return f"{script.resolve()}:{name}"


def _attribute(module: Any, name: str) -> Any:
    """Return the attribute of a module by its dotted name; None if there is none."""
    value = module
    for part in name.split("."):
        value = getattr(value, part, None)
    return value


def is_guarded(script: Path, line: int) -> bool:
    """Return whether a line of a script is in ``if __name__ == "__main__":``.

    Another process does not run such a line.
    """
    return any(
        isinstance(statement, ast.If)
        and statement.lineno <= line <= (statement.end_lineno or 0)
        and "__name__" in ast.unparse(statement.test)
        for statement in ast.parse(script.read_bytes()).body
    )


def shown_name(function: Callable[..., Any]) -> str:
    """Return a name for a function that cannot be imported, for messages and files."""
    module = getattr(function, "__module__", "__main__")
    name = qualified_name(function).rpartition(".")[2].strip("<>")
    return f"{module}:{name}"

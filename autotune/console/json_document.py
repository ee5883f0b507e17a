"""The one JSON document that a command prints with ``--json``, also when it fails."""

import contextlib
import importlib.metadata
import io
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

ANSWER_SCHEMA_VERSION = 1
"""Version of the keys of JSON answers, which grows when a key changes its meaning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandFailure:
    """A command that failed, as its document tells it."""

    code: int
    """Exit code of the command."""
    message: str
    next: str
    """Next step, as an instruction."""


def wants_json(arguments: Sequence[str]) -> bool:
    """Return whether a command line asks for JSON."""
    end_of_options = len(arguments)
    if "--" in arguments:
        end_of_options = arguments.index("--")
    return "--json" in arguments[:end_of_options]


def run_for_json(run: Callable[[], tuple[int, CommandFailure | None]]) -> int:
    """Run a command, and print one document on standard output.

    What the command itself printed is the answer, an object. A command that fails after
    it has printed keeps its answer beside the error.

    Args:
        run: Runs the command; returns its exit code, and its error if it failed.

    Returns:
        The exit code.
    """
    with _captured() as printed:
        try:
            code, failure = run()
        except Exception as error:  # noqa: BLE001 - reported in the document, and as a bug
            traceback.print_exc()
            code = os.EX_SOFTWARE
            failure = CommandFailure(
                code=code,
                message=f"{type(error).__name__}: {error}",
                next="Report this as a bug.",
            )
    answer = printed.getvalue()
    if not answer.strip() and failure is None:
        # Help, or the output of another program.
        return code
    sys.stdout.write(document_text(answer, failure) + "\n")
    return code


@contextlib.contextmanager
def _captured() -> Iterator[io.StringIO]:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        yield printed


def document_text(answer: str, failure: CommandFailure | None) -> str:
    """Return the document of a command.

    Args:
        answer: JSON object that the command printed, or nothing.
        failure: Its error; None if it succeeded.

    Raises:
        ValueError: If the answer is no JSON object, or has a key of the document.
    """
    document: dict[str, Any] = {
        "schema_version": ANSWER_SCHEMA_VERSION,
        "tool_version": importlib.metadata.version("encoder-autotune"),
    }
    values = json.loads(answer) if answer.strip() else {}
    if not isinstance(values, dict):
        raise ValueError(f"the answer is {type(values).__name__}, not an object")
    taken = document.keys() & values.keys()
    if taken:
        raise ValueError(f"the answer has keys of the document: {sorted(taken)}")
    document |= values
    if failure is not None:
        document["error"] = {
            "code": failure.code,
            "message": failure.message,
            "next": failure.next,
        }
    return json.dumps(document, indent=2)

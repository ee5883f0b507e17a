"""Answers of commands as JSON."""

import json
from typing import Any


def answer_json(answer: object) -> str:
    """Return a command's answer as JSON text, indented by two spaces."""
    return json.dumps(jsonable(answer), indent=2)


def jsonable(answer: object) -> Any:
    """Return an answer as dictionaries, lists and scalars, which JSON can hold.

    Fields of dataclasses and models become keys; properties are left out.
    """
    # Imported here, as most commands print no JSON.
    from pydantic_core import to_jsonable_python

    return to_jsonable_python(answer)

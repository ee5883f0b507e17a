"""What commands answer machines: the value itself, whose fields are the keys of its JSON."""

import json
from typing import Any


def answer_json(answer: object) -> str:
    """One JSON value with the names of the fields; properties are left out."""
    return json.dumps(plain(answer), indent=2)


def plain(answer: object) -> Any:  # noqa: ANN401 - any JSON value
    """The same as dictionaries, lists and scalars."""
    from pydantic_core import to_jsonable_python

    return to_jsonable_python(answer)

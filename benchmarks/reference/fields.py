"""Every key of a profile and of a site file, from the schemas that read them and the words that stand there."""

import functools
import inspect
from collections.abc import Iterator, Mapping
from typing import Any, get_args

from autotune.cluster.site import SiteFile
from autotune.core.profile import Profile
from autotune.search.meanings import texts_of
from benchmarks.reference.markdown import code, table
from benchmarks.reference.units import unit_of
from trainer.schema import Table

_PROFILE = """\
# Keys of a profile

Written by `make figures` from the schemas that read profiles. A profile is TOML; `[[…]]` is a table that may stand
there several times. Keys without a default must be there; *absent* means that the key may be left out, and then nothing
is known or set. Unknown keys are refused with the nearest known one. What profiles are for:
[profiles](../profiles.md).

"""
_SITE = """\
# Keys of a site file

Written by `make figures` from the schema that reads site files. What they are for, with an example:
[under SLURM](../slurm.md).

"""
_ROOT = "the top"
_KINDS = {"integer": "integer", "number": "number", "string": "text", "boolean": "true or false", "null": ""}
_BOUNDS = (("minimum", "≥"), ("exclusiveMinimum", ">"), ("maximum", "≤"), ("exclusiveMaximum", "<"))
_INFERRED = {"_low": "Lower bound of it.", "_high": "Upper bound of it."}


def profile_page() -> str:
    """Every key of every table of a profile."""
    return _PROFILE + _tables(Profile)


def site_page() -> str:
    """Every key of a site file."""
    return _SITE + _tables(SiteFile)


def unexplained(kind: type[Table]) -> list[str]:
    """Keys of a schema, as ``Class.key``, whose meaning nobody has said; keys that hold a table have that one's."""
    return [
        f"{found.__name__}.{name}"
        for found in _places(kind)
        for name, field in found.model_fields.items()
        if _table_in(field.annotation) is None and not _meaning(found, name)
    ]


def _tables(kind: type[Table]) -> str:
    text = ""
    places = _places(kind)
    for found, where in places.items():
        rows = []
        for name, field in found.model_fields.items():
            inner = _table_in(field.annotation)
            if inner is None:
                rows.append(_row(found, name))
            else:
                rows.append((code(name), f"{code(places[inner][0])}, below", "", "", _in_markdown(_doc(inner))))
        text += f"## {', '.join(map(code, where)) if where[0] else _ROOT}\n\n{_in_markdown(_doc(found))}\n\n"
        text += table(("key", "value", "unit", "default", "meaning"), rows) + "\n"
    return text.rstrip("\n") + "\n"


def _places(kind: type[Table]) -> dict[type[Table], list[str]]:
    """Every table inside of a schema, with the places at which a TOML file names it; the schema itself is first."""
    found: dict[type[Table], list[str]] = {}
    for place, one in _walk(kind, ""):
        found.setdefault(one, []).append(place)
    return found


def _walk(kind: type[Table], place: str) -> Iterator[tuple[str, type[Table]]]:
    yield place, kind
    for name, field in kind.model_fields.items():
        inner = _table_in(field.annotation)
        if inner is not None:
            dotted = f"{place.strip('[]')}.{name}".lstrip(".")
            yield from _walk(inner, f"[[{dotted}]]" if _is_list(field.annotation) else f"[{dotted}]")


def _row(kind: type[Table], name: str) -> tuple[str, str, str, str, str]:
    schema = _schema(kind)["properties"][name]
    value = _value(schema)
    quantity = any(word in value for word in ("integer", "number")) or name.endswith("_utc")
    unit = (unit_of(name) or "") if quantity else ""
    return code(name), value, unit, _default(kind, name), _in_markdown(_meaning(kind, name))


@functools.cache
def _schema(kind: type[Table]) -> dict[str, Any]:
    return kind.model_json_schema()


@functools.cache
def _texts(kind: type[Table]) -> dict[str, str]:
    return texts_of(kind)


def _value(schema: Mapping[str, Any]) -> str:
    if "anyOf" in schema:
        return " or ".join(text for text in (_value(one) for one in schema["anyOf"]) if text)
    if "const" in schema:
        return code(schema["const"])
    if "enum" in schema:
        return ", ".join(sorted(code(choice) for choice in schema["enum"]))  # else by who was imported first
    if schema.get("type") == "array":
        return f"list of {_value(schema.get('items', {}))}"
    if schema.get("type") == "object":
        values = schema.get("additionalProperties")
        return f"table of {_value(values)}" if isinstance(values, dict) and values else "table"
    bounds = [f"{sign} {schema[key]:g}" for key, sign in _BOUNDS if key in schema]
    return " ".join((_KINDS.get(str(schema.get("type")), "any"), *bounds)).strip()


def _default(kind: type[Table], name: str) -> str:
    field = kind.model_fields[name]
    if field.is_required():
        return ""
    default = field.get_default(call_default_factory=True)
    if default is None:
        return "absent"
    if isinstance(default, bool):
        return code(str(default).lower())
    return "empty" if default in ([], {}, "") else code(default)


def _meaning(kind: type[Table], name: str) -> str:
    texts = _texts(kind)
    if name in texts:
        return texts[name]
    base = name.removesuffix("_low").removesuffix("_high")
    if base != name and (base in kind.model_fields or f"{base}_low" in texts):
        return next(text for ending, text in _INFERRED.items() if name.endswith(ending))
    return ""


def _doc(kind: type[Table]) -> str:
    return inspect.getdoc(kind) or ""


def _in_markdown(text: str) -> str:
    """Docstrings set code between two backticks."""
    return text.replace("``", "`")


def _table_in(annotation: object) -> type[Table] | None:
    if isinstance(annotation, type) and issubclass(annotation, Table):
        return annotation
    return next((found for one in get_args(annotation) if (found := _table_in(one)) is not None), None)


def _is_list(annotation: object) -> bool:
    return "list[" in str(annotation)

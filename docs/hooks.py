"""Generate parts of the reference from the code while MkDocs builds the pages."""

from collections.abc import Iterator, Mapping
from typing import Any

import typer
from pydantic import BaseModel
from typer.cli import get_docs_for_click

from autotune.advice.decide.rules import RULES
from autotune.cli import application
from autotune.cluster.site_file import SiteFile
from autotune.evidence.profile import Profile
from trainer.command_line import build_parser

_BOUNDS = (
    ("minimum", "≥"),
    ("exclusiveMinimum", ">"),
    ("maximum", "≤"),
    ("exclusiveMaximum", "<"),
)


def on_page_markdown(markdown: str, **_: object) -> str:
    """Replace each mark by its generated text."""
    made = {
        "commands": commands,
        "trainer": lambda: f"```text\n{build_parser().format_help()}```",
        "rules": rules,
        "keys of a profile": lambda: keys(Profile),
        "keys of a site file": lambda: keys(SiteFile),
    }
    for mark, make in made.items():
        if f"<!-- {mark} -->" in markdown:
            markdown = markdown.replace(f"<!-- {mark} -->", make())
    return markdown


def commands() -> str:
    """Return the help of every command."""
    group = _shown(typer.main.get_command(application()))
    text = get_docs_for_click(
        obj=group, ctx=typer.Context(group), name="autotune", indent=1
    )
    return text.replace(" <int range>", " <int>").replace(" <float range>", " <float>")


def _shown(command: Any) -> Any:
    inner = getattr(command, "commands", {})
    for name in [name for name, one in inner.items() if _shown(one).hidden]:
        del inner[name]
    return command


def rules() -> str:
    """Return the rules of advice as a table."""
    rows = [
        f"| `{rule.name}` | {', '.join(rule.covers)} | {rule.looks_for} |\n"
        for rule in RULES
    ]
    return "| rule | covers | check |\n|---|---|---|\n" + "".join(rows)


def keys(kind: type[BaseModel]) -> str:
    """Return the keys of all tables of a TOML file, with their meaning and default."""
    schema = kind.model_json_schema()
    schema = _with_choices(schema, schema["$defs"])
    tables = list(_tables(schema, schema["$defs"], ""))
    return "\n".join(
        f"## {f'`{place}`' if place else 'Top level'}\n\n{text}"
        for place, text in tables
    )


def _with_choices(schema: Any, defs: Mapping[str, Any]) -> Any:
    """Return a schema in which references to choices are replaced by the choices.

    References to tables stay.
    """
    if isinstance(schema, list):
        return [_with_choices(one, defs) for one in schema]
    if not isinstance(schema, dict):
        return schema
    name = str(schema.get("$ref", "")).rpartition("/")[2]
    if "enum" in defs.get(name, {}):
        return defs[name] | {
            key: value for key, value in schema.items() if key != "$ref"
        }
    return {key: _with_choices(value, defs) for key, value in schema.items()}


def _tables(
    table: Mapping[str, Any], defs: Mapping[str, Any], place: str
) -> Iterator[tuple[str, str]]:
    rows, inner = [], []
    for name, field in table["properties"].items():
        value = _value(field)
        for found in [one for one in defs if f"`{one}`" in value]:
            dotted = f"{place.strip('[]')}.{name}".lstrip(".")
            there = f"[[{dotted}]]" if "list of" in value else f"[{dotted}]"
            inner.append((defs[found], there))
            value = value.replace(f"`{found}`", f"`{there}`").removeprefix("list of ")
        default = field.get("default", "")
        default = (
            "absent"
            if default is None
            else ""
            if isinstance(default, dict)
            else default
        )
        rows.append(
            [
                f"`{name}`",
                value,
                str(default),
                " ".join(field.get("description", "").split()),
            ]
        )
    words = table.get("description", "").replace("``", "`")
    head = f"{words}\n\n| key | value | default | meaning |\n|---|---|---|---|\n"
    yield (
        place,
        head + "".join(f"| {' | '.join(row).replace('``', '`')} |\n" for row in rows),
    )
    for schema, there in inner:
        yield from _tables(schema, defs, there)


def _value(schema: Mapping[str, Any]) -> str:
    if "$ref" in schema:
        return f"`{schema['$ref'].rpartition('/')[2]}`"
    if "anyOf" in schema:
        return " or ".join(
            _value(one) for one in schema["anyOf"] if one.get("type") != "null"
        )
    if "enum" in schema or "const" in schema:
        return ", ".join(f"`{one}`" for one in schema.get("enum") or [schema["const"]])
    if schema.get("type") == "array":
        return f"list of {_value(schema.get('items', {}))}"
    return " ".join(
        [
            schema.get("type", "any"),
            *(f"{sign} {schema[key]:g}" for key, sign in _BOUNDS if key in schema),
        ]
    )

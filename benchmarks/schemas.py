"""``python -m benchmarks.schemas``: write ``docs/schemas`` from the types of what commands answer and write.

One JSON Schema (draft 2020-12) for each command with ``--json``, and for each file that others may read. Descriptions
are the words under the fields in the source.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaMode, JsonSchemaValue
from pydantic_core import core_schema

from autotune.cluster.site import SiteFile
from autotune.core.evidence import BaselineEvidence, NetworkEvidence, WorkersEvidence
from autotune.core.export import Export
from autotune.core.profile import Profile
from autotune.core.review import ReviewFile
from autotune.core.tuning import TuningResult
from autotune.decide.explain import Explanation
from autotune.search.meanings import texts_of
from autotune.show.answers.advise import AdviseAnswer, RuleAnswer
from autotune.show.answers.compare import CompareAnswer
from autotune.show.answers.data import InspectAnswer, PreparedAnswer, StagedAnswer, VerifiedAnswer
from autotune.show.answers.doctor import DoctorAnswer
from autotune.show.answers.estimate import EstimateAnswer
from autotune.show.answers.launch import LaunchedAnswer, StatusAnswer, SubmittedAnswer
from autotune.show.answers.probe import ProbeAnswer
from autotune.show.answers.profile import DiffAnswer, ShownProfile, VerifyAnswer
from autotune.show.answers.report import BuiltAnswer, ReviewAnswer
from autotune.show.answers.scale import ScaleAnswer
from autotune.show.plan_answer import PlanAnswer
from autotune.store import write_atomically
from trainer.config import TrainConfig
from trainer.dataset import Manifest
from trainer.events import EventRow
from trainer.record import EvaluationRow, RunExit, RunHeader, StartUp, StepRow

PLACE = Path(__file__).parent.parent / "docs" / "schemas"
PAGE = PLACE.with_suffix(".md")
DIALECT = "https://json-schema.org/draft/2020-12/schema"


_PAGE = """\
# Schemas

Written by `make figures` from the types in the source, and held against real answers by the tests. Each is a JSON
Schema (draft 2020-12) with the words that stand under the fields in the source; units are in the names. Where a
command can submit itself with `--slurm`, its schema has two forms: its own answer, and the job that was submitted.

A table in TOML is an object here, so an editor that reads schemas can check a profile or a site file while it is
written.

| schema | of |
|---|---|"""


class ProfileFile(Profile):
    """A profile as it lies on disk, in TOML: ``[train]`` is what the trainer reads."""

    content_sha256: str | None = None
    """SHA-256 of the canonical JSON of all other tables. A file without it, or with another one, was edited."""


class RunFile(RunHeader):
    """``run.json``."""

    config: TrainConfig  # type: ignore[assignment]  # as this version writes it; readers take that of others too
    """Every setting."""


ANSWERS: Mapping[str, Any] = {
    "advise": AdviseAnswer | list[RuleAnswer],
    "baseline": BaselineEvidence | SubmittedAnswer,
    "data inspect": InspectAnswer,
    "data prepare": PreparedAnswer | SubmittedAnswer,
    "data stage": StagedAnswer,
    "data verify": VerifiedAnswer,
    "doctor": DoctorAnswer,
    "estimate": EstimateAnswer,
    "export": Export,
    "launch slurm": LaunchedAnswer,
    "launch status": StatusAnswer,
    "network": NetworkEvidence | SubmittedAnswer,
    "plan": PlanAnswer,
    "probe": ProbeAnswer | SubmittedAnswer,
    "profile diff": DiffAnswer,
    "profile explain": list[Explanation],
    "profile show": ShownProfile,
    "profile verify": VerifyAnswer,
    "report build": BuiltAnswer,
    "report compare": CompareAnswer,
    "report review": ReviewAnswer,
    "scale": list[ScaleAnswer] | SubmittedAnswer,
    "tune": TuningResult | SubmittedAnswer,
    "workers": WorkersEvidence | SubmittedAnswer,
}
"""What a command answers with ``--json``; with ``--slurm``, the job that it submits instead."""
FILES: Mapping[str, tuple[str, Any]] = {
    "file-dataset": ("manifest.json of a dataset", Manifest),
    "file-profile": ("a profile, in TOML", ProfileFile),
    "file-review": ("review.json beside a report", ReviewFile),
    "file-run": ("run.json of a run", RunFile),
    "file-run-evaluations": ("a line of evaluations.jsonl of a run", EvaluationRow),
    "file-run-events": ("a line of events.jsonl of a run", EventRow),
    "file-run-exit": ("exit.json of a run", RunExit),
    "file-run-startup": ("startup.json of a run", StartUp),
    "file-run-steps": ("a line of steps.jsonl of a run", StepRow),
    "file-site": ("a site file, in TOML", SiteFile),
}
"""Files that other programs may read, or people may write."""


class _Described(GenerateJsonSchema):
    """Says of every field what stands under it in the source, and of answers that they have no further ones."""

    def dataclass_schema(self, schema: core_schema.DataclassSchema) -> JsonSchemaValue:
        return _describe(super().dataclass_schema(schema), schema["cls"]) | {"additionalProperties": False}

    def model_schema(self, schema: core_schema.ModelSchema) -> JsonSchemaValue:
        return _describe(super().model_schema(schema), schema["cls"])

    def field_is_required(
        self,
        field: core_schema.ModelField | core_schema.DataclassField | core_schema.TypedDictField,
        total: bool,
    ) -> bool:
        return self.mode == "serialization" or super().field_is_required(field, total)

    def field_title_should_be_set(self, schema: Any) -> bool:  # noqa: ANN401 - as in the base class
        return False


def _describe(json_schema: JsonSchemaValue, kind: type) -> JsonSchemaValue:
    for one in kind.__mro__:
        for name, text in texts_of(one).items() if one.__module__.partition(".")[0] in _OURS else ():
            if name in json_schema.get("properties", {}):
                json_schema["properties"][name].setdefault("description", text)
    return json_schema


_OURS = ("autotune", "trainer", "benchmarks", "__main__")
"""Packages whose sources have words under fields; this module is the last one where it is run."""


def schemas() -> dict[str, dict[str, Any]]:
    """Every schema by the name of its file, without its ending."""
    found = {
        _link(command): _schema(kind, f"autotune {command} --json", "serialization")
        for command, kind in ANSWERS.items()
    }
    return found | {name: _schema(kind, title, "validation") for name, (title, kind) in FILES.items()}


def _schema(kind: Any, title: str, mode: JsonSchemaMode) -> dict[str, Any]:  # noqa: ANN401 - any type
    found = TypeAdapter(kind).json_schema(mode=mode, schema_generator=_Described)
    return {"$schema": DIALECT, **found, "title": title}


def text_of(schema: Mapping[str, Any]) -> str:
    """As it lies in ``docs/schemas``."""
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


def page() -> str:
    """``docs/schemas.md``: which schema is of what."""
    commands = [
        f"| [{_link(name)}](schemas/{_link(name)}.json) | `autotune {name} --json` |" for name in sorted(ANSWERS)
    ]
    files = [f"| [{name}](schemas/{name}.json) | {title} |" for name, (title, _) in sorted(FILES.items())]
    return "\n".join([_PAGE, *commands, *files]) + "\n"


def _link(command: str) -> str:
    return command.replace(" ", "-")


def write() -> None:
    """Write all of them and their page; a file that is none of them any more goes."""
    found = schemas()
    write_atomically(PAGE, page())
    for path in PLACE.glob("*.json"):
        if path.stem not in found:
            path.unlink()
    for name, schema in found.items():
        write_atomically(PLACE / f"{name}.json", text_of(schema))


if __name__ == "__main__":
    write()

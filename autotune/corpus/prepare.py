"""Raw data to a tokenised dataset: find, work through the stages, publish."""

import contextlib
import json
import os
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from autotune.corpus import assemble
from autotune.corpus.engine import Engine, InProcessEngine, cluster_engine, local_engine, slurm_engine
from autotune.corpus.place import check_place, publish, writing
from autotune.corpus.rejects import read_rejects, strict
from autotune.corpus.request import Input, Request, find_input, request_key
from autotune.corpus.sources.base import Reject
from autotune.corpus.stages import NothingUsableError, Preparation, Stages
from autotune.corpus.tokenizer import load_tokenizer
from autotune.corpus.workplace import Workplace, open_workplace, other_workplaces, workplace_path
from trainer.dataset import PREPARED_NAME, REJECTS_NAME, Manifest, read_manifest
from trainer.schema import read_json

Tell = Callable[[str], None]

_SHOWN_REJECTS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A published dataset, and the first things that were left out on the way."""

    directory: Path
    manifest: Manifest
    first_rejects: tuple[Reject, ...]
    other_files: int


def prepare(request: Request, stages: Stages, tell: Tell) -> Prepared:
    """Build the dataset and publish it, going on from where an earlier run of the same request was ended.

    Args:
        request: What to do.
        stages: Where progress is shown.
        tell: Called with a line for the user.

    Raises:
        BadInput: If a source, the tokenizer or the place cannot be used, nothing usable was found, or the disk is full.
        MachineLacks: If a library that reads the source is not installed.
    """
    given = load_tokenizer(request.tokenizer) if isinstance(request.tokenizer, Path) else None
    with stages("find files") as update:
        found = find_input(request, update)
    out = request.out.resolve()
    key = request_key(request, found.found, given.content if given else None)
    unfinished = workplace_path(out, key)
    with writing(out):
        manifest = _made_already(out, key)
        if manifest is not None and (unfinished.exists() or not request.overwrite):
            # Ended between its last two steps, or asked for twice.
            if request.strict and manifest.source.rejected:
                raise strict(read_rejects(out / REJECTS_NAME, 1)[0], manifest.source.rejected)
            tell(f"{request.out} was prepared by the same request already")
            shutil.rmtree(unfinished, ignore_errors=True)
        else:
            check_place(out, overwrite=request.overwrite)
            for path, size_bytes in other_workplaces(out, key):
                tell(f"{path} is left of a preparation with other settings or files ({size_bytes / 2**20:.0f} MiB)")
            with open_workplace(out, key) as workplace:
                try:
                    with _engine(request, found, workplace) as engine:
                        manifest = Preparation(request, found, workplace, engine, stages).run(given)
                except NothingUsableError:
                    shutil.rmtree(workplace.path, ignore_errors=True)
                    raise
                note = json.dumps({"request": key}).encode() + b"\n"
                assemble.write_durably(workplace.path / "dataset" / PREPARED_NAME, note)
                # Again: the work took time, and someone may have put something there.
                check_place(out, overwrite=request.overwrite)
                publish(workplace.path / "dataset", out)
                shutil.rmtree(workplace.path, ignore_errors=True)
    return Prepared(
        directory=request.out,
        manifest=manifest,
        first_rejects=tuple(read_rejects(out / REJECTS_NAME, _SHOWN_REJECTS)),
        other_files=sum(each.other_files for each in found.found),
    )


def _made_already(out: Path, key: str) -> Manifest | None:
    """The dataset that is there, if the same request made it."""
    note = out / PREPARED_NAME
    if not note.is_file() or read_json(note) != {"request": key}:
        return None
    return read_manifest(out)


def _engine(request: Request, found: Input, workplace: Workplace) -> AbstractContextManager[Engine]:
    if request.scheduler:
        return cluster_engine(workplace, request.scheduler)
    if request.site:
        return slurm_engine(workplace, request.site, request.workers)
    workers = request.workers or len(os.sched_getaffinity(0))
    if min(workers, len(found.partitions)) == 1:
        return contextlib.nullcontext(InProcessEngine(threads=workers > 1))
    return local_engine(workplace, workers)

"""Preparation of a dataset.

Its stages find files, extract, find duplicates, learn a tokenizer, encode, assemble and
publish. Every stage is a set of tasks whose results are files (see ``workplace``), so
that any number of processes can run them and an interrupted run resumes.

Partitions have a fixed order and of equal samples the first is kept, so the same files
give the same bytes.
"""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from autotune.corpus import pieces as parts
from autotune.corpus import tokenizer as learning
from autotune.corpus import workplace as places
from autotune.corpus.encode import (
    ENCODE,
    SPLITS,
    LengthLimit,
    assemble_shard,
    encode_piece,
    gather,
    shard_edges,
)
from autotune.corpus.engine import (
    AHEAD,
    Engine,
    OnDone,
    Task,
    Work,
    Workers,
    open_engine,
)
from autotune.corpus.extract import REJECTS_FILE, extract_partition
from autotune.corpus.sources import SOURCES, Found, Input, find_input
from autotune.corpus.sources.base import Reject, SourceOptions
from autotune.corpus.tokenizer import DatasetTokenizer, load_tokenizer
from autotune.corpus.values import HISTOGRAM_EDGES
from autotune.errors import BadInput
from trainer.formats.canonical_json import canonical_json
from trainer.formats.files import sync, write_atomically
from trainer.formats.manifest import (
    MANIFEST_NAME,
    PREPARED_NAME,
    REJECTS_NAME,
    TOKENIZER_NAME,
    LengthHistogram,
    Manifest,
    Shard,
    SourceStatistics,
    Split,
    read_manifest,
)
from trainer.formats.progress import Update
from trainer.formats.tables import read_json

Stages = Callable[[str], AbstractContextManager[Update]]
"""Function that opens the progress display of a stage, by its title."""

_SHOWN_REJECTS = 5
_BPE_TEXT_BYTES = 64 * 2**20
"""Size of the text to learn byte pairs from; more changes little and exceeds a worker's
memory."""
_COUNTED = ("samples", "tokens", "unknown", "empty", "truncated", "split")
_FORMAT_VERSION = 2
"""Version to raise when the same request gives other bytes; results of older versions
are not resumed."""


class NothingUsableError(BadInput):
    """A request that yields nothing, with no work to resume."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Request for a dataset: everything that determines the result."""

    sources: tuple[str, ...]
    """Specifications of sources such as ``elf:/usr/bin``; one or several."""
    options: SourceOptions
    max_samples: int | None
    """Number of distinct samples to take, from the first on; None takes all."""
    keep_duplicates: bool
    validation_share: float
    split_seed: int
    tokenizer: Path | Literal["wordlevel", "bpe"] | None
    """Path of a ``tokenizer.json`` to use, or the kind to learn; None learns words of
    programs, byte pairs of text."""
    vocab_size: int
    """Number of ids of a learned tokenizer, a multiple of 64."""
    limit: LengthLimit


def request_key(
    request: Request, files: Sequence[Found], tokenizer: bytes | None
) -> str:
    """Return a hash of everything that determines the result.

    A run resumes only work of the same key.
    """
    settings = asdict(request) | {
        "format": _FORMAT_VERSION,
        "tokenizer": (
            hashlib.sha256(tokenizer).hexdigest()
            if tokenizer
            else str(request.tokenizer)
        ),
        "sources": [spec.partition(":")[0] for spec in request.sources],
    }
    named = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    for found in files:
        for file in found.files:
            named.update(
                f"{file.path}\0{file.size_bytes}\0{file.modified_ns}\n".encode(
                    errors="surrogateescape"
                )
            )
        named.update(b"\n")
    return named.hexdigest()[:16]


def prepare(
    request: Request,
    out: Path,
    stages: Stages,
    tell: Callable[[str], None],
    *,
    workers: Workers,
    strict: bool,
    overwrite: bool,
) -> tuple[Manifest, list[Reject], int]:
    """Build the dataset and publish it as ``out``.

    An earlier run of the same request is resumed.

    Args:
        request: What to prepare.
        out: Directory of the dataset.
        stages: Progress display.
        tell: Function that is called with each line for the user.
        workers: Workers to run tasks on.
        strict: True to fail at the first input that cannot be used.
        overwrite: True to replace an existing dataset.

    Returns:
        The manifest, the first inputs that were left out, and the number of files of
        other kinds.

    Raises:
        BadInput: If a source, the tokenizer or ``out`` cannot be used, nothing usable
            was found, or the disk is full.
        MachineLacks: If a library that reads the source is not installed.
    """
    given = (
        load_tokenizer(request.tokenizer)
        if isinstance(request.tokenizer, Path)
        else None
    )
    with stages("find files") as update:
        found = find_input(request.sources, request.options, update)
    shown, out = out, out.resolve()
    key = request_key(request, found.found, given.content if given else None)
    unfinished, note = places.workplace_path(out, key), {"request": key}
    with places.writing(out):
        made = (out / PREPARED_NAME).is_file() and read_json(
            out / PREPARED_NAME
        ) == note
        if made and (unfinished.exists() or not overwrite):
            # Interrupted between its last two steps, or requested twice.
            manifest = read_manifest(out)
            if strict and manifest.source.rejected:
                raise _strict(
                    read_rejects(out / REJECTS_NAME, 1)[0],
                    manifest.source.rejected,
                )
            tell(f"{shown} already contains this dataset")
            shutil.rmtree(unfinished, ignore_errors=True)
        else:
            places.check_place(out, overwrite=overwrite)
            for path, size_bytes in places.other_workplaces(out, key):
                tell(
                    f"{path} is left from a preparation with other settings or files"
                    f" ({size_bytes / 2**20:.0f} MiB)"
                )
            with places.open_workplace(out, key) as workplace:
                try:
                    with open_engine(
                        workplace, workers, len(found.partitions)
                    ) as engine:
                        manifest = _Preparation(
                            request, found, workplace, engine, stages
                        ).all(given, strict=strict)
                except NothingUsableError:
                    shutil.rmtree(workplace.path, ignore_errors=True)
                    raise
                write_atomically(
                    workplace.dataset / PREPARED_NAME,
                    json.dumps(note).encode() + b"\n",
                )
                # Checked again, as the directory may have changed meanwhile.
                places.check_place(out, overwrite=overwrite)
                places.publish(workplace.dataset, out)
                shutil.rmtree(unfinished, ignore_errors=True)
    return (
        manifest,
        read_rejects(out / REJECTS_NAME, _SHOWN_REJECTS),
        sum(one.other_files for one in found.found),
    )


def _strict(reject: Reject, count: int) -> BadInput:
    where = f"{reject.path}, {reject.where}" if reject.where else reject.path
    return BadInput(
        f"{count} inputs are unusable, and --strict is set; the first, {where!r}:"
        f" {reject.reason}",
        next_step=(
            "Correct or remove it, or omit --strict to skip and list unusable inputs;"
            " finished work is kept."
        ),
    )


def read_rejects(path: Path, most: int) -> list[Reject]:
    """Read the first ``most`` entries of a list of rejects."""
    if not path.is_file():
        return []
    with path.open() as file:
        return [
            Reject(**json.loads(line))
            for line, _ in zip(file, range(most), strict=False)
        ]


@dataclass(slots=True)
class _Preparation:
    request: Request
    input: Input
    workplace: places.Workplace
    engine: Engine
    stages: Stages
    pieces: list[parts.Piece] = field(default_factory=list)

    def all(self, given: DatasetTokenizer | None, *, strict: bool) -> Manifest:
        """Run all stages.

        Returns:
            The manifest of the dataset, whose files are then in the work directory.
        """
        request, extracted = self.request, self._extract(strict=strict)
        parts.write_pieces(self.workplace, self.pieces)
        buckets, duplicates = 0, 0
        if not request.keep_duplicates:
            buckets = parts.buckets_for(sum(piece.samples for piece in self.pieces))
            compared = [
                {"bucket": bucket, "buckets": buckets} for bucket in range(buckets)
            ]
            duplicates = sum(
                one["duplicates"]
                for one in self._run(parts.DISTINCT, parts.find_duplicates, compared)
            )
        selection = parts.Selection(
            buckets=buckets,
            validation_share=request.validation_share,
            seed=request.split_seed,
        )
        tokenizer = given or self._learn(selection)
        write_atomically(self.workplace.path / TOKENIZER_NAME, tokenizer.content)
        encoded = self._run_pieces(
            ENCODE, encode_piece, selection=selection, limit=request.limit
        )
        splits = {name: self._assemble(name, encoded, tokenizer) for name in SPLITS}
        said = {
            name: sum(one[split][name] for one in encoded for split in SPLITS)
            for name in _COUNTED
        }
        if not said["tokens"]:
            raise NothingUsableError(
                "the tokenizer yields no token from this data",
                next_step="Omit --tokenizer.",
            )
        text_bytes = 0
        for receipt in extracted:
            text_bytes += sum(receipt["text_bytes"])
        manifest = Manifest(
            schema_version=2,
            dtype=tokenizer.dtype,
            vocab_size=tokenizer.vocab_size,
            used_vocab_size=tokenizer.used_vocab_size,
            special_ids=tokenizer.special_ids,
            tokenizer_sha256=hashlib.sha256(tokenizer.content).hexdigest(),
            train=splits["train"],
            validation=splits["validation"],
            source=SourceStatistics(
                kinds=self.input.kinds,
                files=sum(one["files"] for one in extracted),
                rejected=sum(one["rejected"] for one in extracted)
                + len(self.input.unreadable),
                duplicate_samples=duplicates,
                empty_samples=said["empty"],
                truncated_samples=said["truncated"],
                split_samples=said["split"],
                raw_bytes=sum(one["raw_bytes"] for one in extracted),
                text_bytes=text_bytes,
                token_bytes=said["tokens"] * np.dtype(tokenizer.dtype).itemsize,
                unknown_tokens=said["unknown"],
            ),
        )
        with (self.workplace.dataset / REJECTS_NAME).open("w") as file:
            file.writelines(
                json.dumps(asdict(reject)) + "\n" for reject in self.input.unreadable
            )
            for number in range(len(extracted)):
                with self._rejects_of(number).open() as rejects:
                    shutil.copyfileobj(rejects, file)
        sync(self.workplace.dataset / REJECTS_NAME)
        write_atomically(self.workplace.dataset / TOKENIZER_NAME, tokenizer.content)
        content = canonical_json(manifest.model_dump(mode="json")) + b"\n"
        write_atomically(self.workplace.dataset / MANIFEST_NAME, content)
        return manifest

    def _extract(self, *, strict: bool) -> list[places.Receipt]:
        """Extract partitions to pieces; return the receipts of those that are used."""
        most, inputs = self.request.max_samples, self.input.partitions
        if strict and self.input.unreadable:
            raise _strict(self.input.unreadable[0], len(self.input.unreadable))
        first = parts.FirstDistinct(self.workplace, most) if most else None

        def on_done(task: Task, receipt: places.Receipt) -> None:
            if strict and receipt["rejected"]:
                raise _strict(
                    read_rejects(self._rejects_of(task.number), 1)[0],
                    receipt["rejected"],
                )
            if first is not None:
                first.add(task.number, receipt)

        asked = [
            {"partition": part, "options": self.request.options, "most": most}
            for part in inputs
        ]
        sizes = [part.raw_bytes for part in inputs]
        receipts = self._run(
            parts.EXTRACT,
            extract_partition,
            asked,
            sizes_bytes=sizes,
            on_done=on_done,
            first=first,
        )
        if first is None:
            self.pieces = [
                piece
                for number, one in enumerate(receipts)
                for piece in parts.pieces_of(number, one)
            ]
        else:
            receipts, self.pieces = receipts[: first.partitions], first.pieces
        if not any(piece.samples for piece in self.pieces):
            listed = (
                read_rejects(self._rejects_of(number), 1)
                for number in range(len(inputs))
            )
            rejects = self.input.unreadable + [
                reject for some in listed for reject in some
            ]
            files = sum(len(found.files) for found in self.input.found)
            why = (
                f"; the first, {rejects[0].path!r}: {rejects[0].reason}"
                if rejects
                else ""
            )
            next_step = (
                "Pass a path with samples, such as"
                f" {SOURCES[self.input.kinds[0]].example}"
            )
            if rejects and rejects[0].reason.startswith(("field ", "column ")):
                next_step = "Name the field or column of text: --field NAME"
            raise NothingUsableError(
                f"no sample found in {files} files{why}", next_step=next_step
            )
        return receipts

    def _rejects_of(self, partition: int) -> Path:
        return self.workplace.directory(parts.EXTRACT, partition) / REJECTS_FILE

    def _learn(self, selection: parts.Selection) -> DatasetTokenizer:
        kind = self.request.tokenizer or (
            "wordlevel" if self.input.kinds == ["elf"] else "bpe"
        )
        vocab_size, pieces = self.request.vocab_size, len(self.pieces)
        if kind == "wordlevel":
            counted = self._run_pieces(
                learning.COUNT, learning.count_words, selection=selection
            )
            merges = learning.merges_for(
                sum(one["entries"] for one in counted),
                sum(one["bytes"] for one in counted),
            )
            shared = {"merges": merges, "pieces": pieces, "most": vocab_size}
            self._run(
                learning.MERGE,
                learning.merge_words,
                [{"merge": merge, **shared} for merge in range(merges)],
            )
            (learned,) = self._run(
                learning.LEARN,
                learning.learn_words,
                [{"merges": merges, "vocab_size": vocab_size}],
            )
        else:
            share = min(
                1.0,
                _BPE_TEXT_BYTES
                / max(1, sum(piece.text_bytes for piece in self.pieces)),
            )
            self._run_pieces(
                learning.SAMPLE, learning.sample_texts, selection=selection, share=share
            )
            (learned,) = self._run(
                learning.LEARN,
                learning.learn_pairs,
                [{"pieces": pieces, "vocab_size": vocab_size}],
            )
        return load_tokenizer(
            self.workplace.directory(learning.LEARN, 0) / TOKENIZER_NAME,
            used=learned["used"],
        )

    def _assemble(
        self, split: str, encoded: list[places.Receipt], tokenizer: DatasetTokenizer
    ) -> Split:
        sizes = [(one[split]["samples"], one[split]["tokens"]) for one in encoded]
        arguments = [
            {
                "split": split,
                "shard": number,
                "pieces": edges,
                "samples": sum(samples for samples, _ in sizes[slice(*edges)]),
                "tokens": sum(tokens for _, tokens in sizes[slice(*edges)]),
                "dtype": tokenizer.dtype,
            }
            for number, edges in enumerate(shard_edges(sizes))
        ]
        stage = f"assemble-{split}"
        shards = [
            Shard(**one)
            for one in (
                self._run(stage, assemble_shard, arguments) if arguments else []
            )
        ]
        self.workplace.dataset.mkdir(exist_ok=True)
        for number, shard in enumerate(shards):
            gather(self.workplace, self.workplace.directory(stage, number), shard)
        counts = [
            sum(bin_counts)
            for bin_counts in zip(
                *(one[split]["histogram"] for one in encoded), strict=True
            )
        ]
        return Split(
            shards=shards,
            length_histogram=LengthHistogram(
                edges=list(HISTOGRAM_EDGES), counts=counts
            ),
        )

    def _run_pieces(
        self, stage: str, work: Work, **arguments: object
    ) -> list[places.Receipt]:
        each = [{"number": number, **arguments} for number in range(len(self.pieces))]
        return self._run(
            stage, work, each, sizes_bytes=[piece.text_bytes for piece in self.pieces]
        )

    def _run(
        self,
        stage: str,
        work: Work,
        arguments: Sequence[dict[str, Any]],
        *,
        sizes_bytes: Sequence[int] | None = None,
        on_done: OnDone = lambda task, receipt: None,
        first: parts.FirstDistinct | None = None,
    ) -> list[places.Receipt]:
        """Run the unfinished tasks of a stage, one for each set of arguments.

        Without ``first``, the largest tasks start first, so that the others need not
        wait for them at the end. With it, tasks are taken in order until there are
        enough samples.

        Returns:
            The receipts in the order of ``arguments``. With ``first``, only receipts of
            the first tasks are guaranteed.
        """
        sizes = sizes_bytes or [1] * len(arguments)
        order = sorted(
            range(len(arguments)),
            key=lambda number: -sizes[number] if first is None else number,
        )
        receipts: dict[int, places.Receipt] = {}
        (self.workplace.path / stage).mkdir(exist_ok=True)
        with self.stages(stage.replace("-", " ")) as update:
            meter = places.StageMeter(
                update, sum(sizes), in_bytes=sizes_bytes is not None
            )

            def note(
                task: Task, receipt: places.Receipt, *, fresh: bool = True
            ) -> None:
                receipts[task.number] = receipt
                meter.add(sizes[task.number], fresh=fresh)
                on_done(task, receipt)

            def unfinished() -> Iterator[Task]:
                for number in order:
                    if first is not None and first.reached:
                        return
                    task = Task(
                        stage=stage,
                        number=number,
                        work=work,
                        arguments=arguments[number],
                    )
                    receipt = self.workplace.receipt(stage, number)
                    if receipt is None:
                        yield task
                    else:
                        note(task, receipt, fresh=False)

            # With a bound, tasks started beyond it are wasted.
            self.engine(unfinished(), note, AHEAD if first is None else 1)
            meter.finish()
        return [receipts[number] for number in sorted(receipts)]

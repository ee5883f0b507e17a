"""Preparation of a dataset.

Its stages find files, extract, find duplicates, learn a tokenizer, encode, assemble and
publish. Every stage is a set of tasks whose results are files (see ``workplace``), so
that any number of processes can run them and an interrupted run resumes. Begin with
``prepare``; ``_Preparation.run`` has the stages in order.

Partitions have a fixed order and of equal samples the first is kept, so the same files
give the same bytes.
"""

import contextlib
import hashlib
import itertools
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from autotune.corpus import workplace as workplaces
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
from autotune.corpus.pieces import (
    DISTINCT,
    EXTRACT,
    FirstDistinct,
    Piece,
    Selection,
    buckets_for,
    find_duplicates,
    pieces_of,
    write_pieces,
)
from autotune.corpus.sources import SOURCES, Input, SourceFiles, find_input
from autotune.corpus.sources.base import Reject, SourceOptions
from autotune.corpus.tokenizer import (
    COUNT,
    LEARN,
    MERGE,
    SAMPLE,
    DatasetTokenizer,
    count_words,
    learn_pairs,
    learn_words,
    load_tokenizer,
    merge_words,
    merges_for,
    sample_texts,
)
from autotune.corpus.values import HISTOGRAM_EDGES
from autotune.corpus.workplace import Receipt, StageMeter, Workplace
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
"""Number of inputs that were left out to return; the dataset lists all."""
_BPE_TEXT_BYTES = 64 * 2**20
"""Size of the text to learn byte pairs from; more changes little and exceeds a worker's
memory."""
_ENCODED_COUNTS = ("samples", "tokens", "unknown", "empty", "truncated", "split")
"""Counts in the receipt of a piece that was encoded, for each split."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A dataset that was prepared, and what was left out."""

    manifest: Manifest
    first_rejects: list[Reject]
    """First inputs that were left out."""
    other_files: int
    """Number of files of other kinds."""


def request_key(
    request: Request, files: Sequence[SourceFiles], tokenizer: bytes | None
) -> str:
    """Return a hash of everything that determines the result.

    A run resumes only work of the same key.
    """
    tokenizer_id = str(request.tokenizer)
    if tokenizer:
        tokenizer_id = hashlib.sha256(tokenizer).hexdigest()
    settings = asdict(request) | {
        "format": _FORMAT_VERSION,
        "tokenizer": tokenizer_id,
        "sources": [spec.partition(":")[0] for spec in request.sources],
    }
    key = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    for source_files in files:
        for file in source_files.files:
            line = f"{file.path}\0{file.size_bytes}\0{file.modified_ns}\n"
            # Names of files may be no valid UTF-8.
            key.update(line.encode(errors="surrogateescape"))
        key.update(b"\n")
    return key.hexdigest()[:16]


def prepare(
    request: Request,
    out: Path,
    stages: Stages,
    tell: Callable[[str], None],
    *,
    workers: Workers,
    strict: bool,
    overwrite: bool,
) -> Prepared:
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

    Raises:
        BadInput: If a source, the tokenizer or ``out`` cannot be used, nothing usable
            was found, or the disk is full.
        MachineLacks: If a library that reads the source is not installed.
    """
    tokenizer = None
    if isinstance(request.tokenizer, Path):
        tokenizer = load_tokenizer(request.tokenizer)
    with stages("find files") as update:
        source_input = find_input(request.sources, request.options, update)
    final = out.resolve()
    content = None if tokenizer is None else tokenizer.content
    key = request_key(request, source_input.sources, content)
    unfinished = workplaces.workplace_path(final, key)
    with workplaces.writing(final):
        # With both, the last run was interrupted between its last two steps.
        is_prepared = _is_prepared(final, key)
        if is_prepared and (unfinished.exists() or not overwrite):
            manifest = read_manifest(final)
            if strict and manifest.source.rejected:
                (first,) = read_rejects(final / REJECTS_NAME, 1)
                raise _strict(first, manifest.source.rejected)
            tell(f"{out} already contains this dataset")
            shutil.rmtree(unfinished, ignore_errors=True)
        else:
            workplaces.check_place(final, overwrite=overwrite)
            for path, size_bytes in workplaces.other_workplaces(final, key):
                tell(
                    f"{path} is left from a preparation with other settings or files"
                    f" ({size_bytes / 2**20:.0f} MiB)"
                )
            with workplaces.open_workplace(final, key) as workplace:
                tasks = len(source_input.partitions)
                with (
                    _removed_if_unusable(workplace),
                    open_engine(workplace, workers, tasks) as engine,
                ):
                    preparation = _Preparation(
                        request, source_input, workplace, engine, stages
                    )
                    manifest = preparation.run(tokenizer, strict=strict)
                note = json.dumps(_preparation_note(key)).encode() + b"\n"
                write_atomically(workplace.dataset / PREPARED_NAME, note)
                # Checked again, as the directory may have changed meanwhile.
                workplaces.check_place(final, overwrite=overwrite)
                workplaces.publish(workplace.dataset, final)
                shutil.rmtree(unfinished, ignore_errors=True)
    return Prepared(
        manifest=manifest,
        first_rejects=read_rejects(final / REJECTS_NAME, _SHOWN_REJECTS),
        other_files=sum(files.other_files for files in source_input.sources),
    )


def _preparation_note(key: str) -> dict[str, str]:
    """Return the content of the file by which a dataset knows its request."""
    return {"request": key}


def _is_prepared(dataset: Path, key: str) -> bool:
    """Return whether a directory has the dataset of a request."""
    path = dataset / PREPARED_NAME
    return path.is_file() and read_json(path) == _preparation_note(key)


@contextlib.contextmanager
def _removed_if_unusable(workplace: Workplace) -> Iterator[None]:
    """Remove the work directory if the input yields nothing, so nothing can resume."""
    try:
        yield
    except NothingUsableError:
        shutil.rmtree(workplace.path, ignore_errors=True)
        raise


def _strict(reject: Reject, count: int) -> BadInput:
    """Return the error of ``--strict`` for the first of the rejected inputs."""
    position = f"{reject.path}, {reject.where}" if reject.where else reject.path
    return BadInput(
        f"{count} inputs are unusable, and --strict is set; the first, {position!r}:"
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
        return [Reject(**json.loads(line)) for line in itertools.islice(file, most)]


@dataclass(slots=True)
class _Preparation:
    """Stages of a preparation, in its work directory."""

    request: Request
    input: Input
    workplace: Workplace
    engine: Engine
    stages: Stages
    pieces: list[Piece] = field(default_factory=list)
    """Pieces of text that are used, once they are extracted."""

    def run(self, tokenizer: DatasetTokenizer | None, *, strict: bool) -> Manifest:
        """Run all stages.

        Args:
            tokenizer: Tokenizer to use; None learns one.
            strict: True to fail at the first input that cannot be used.

        Returns:
            The manifest of the dataset, whose files are then in the work directory.
        """
        extracted = self._extract(strict=strict)
        write_pieces(self.workplace, self.pieces)
        buckets = 0
        duplicates = 0
        if not self.request.keep_duplicates:
            buckets = buckets_for(sum(piece.samples for piece in self.pieces))
            duplicates = self._find_duplicates(buckets)
        selection = Selection(
            buckets=buckets,
            validation_share=self.request.validation_share,
            seed=self.request.split_seed,
        )
        if tokenizer is None:
            tokenizer = self._learn(selection)
        write_atomically(self.workplace.path / TOKENIZER_NAME, tokenizer.content)
        encoded = self._run_pieces(
            ENCODE, encode_piece, selection=selection, limit=self.request.limit
        )
        splits = {name: self._assemble(name, encoded, tokenizer) for name in SPLITS}
        manifest = Manifest(
            schema_version=2,
            dtype=tokenizer.dtype,
            vocab_size=tokenizer.vocab_size,
            used_vocab_size=tokenizer.used_vocab_size,
            special_ids=tokenizer.special_ids,
            tokenizer_sha256=hashlib.sha256(tokenizer.content).hexdigest(),
            train=splits["train"],
            validation=splits["validation"],
            source=self._statistics(extracted, encoded, duplicates, tokenizer),
        )
        self._write_rejects(len(extracted))
        write_atomically(self.workplace.dataset / TOKENIZER_NAME, tokenizer.content)
        content = canonical_json(manifest.model_dump(mode="json")) + b"\n"
        write_atomically(self.workplace.dataset / MANIFEST_NAME, content)
        return manifest

    def _extract(self, *, strict: bool) -> list[Receipt]:
        """Extract partitions to pieces; return the receipts of those that are used.

        Raises:
            BadInput: If there is no sample, or with ``strict``, an unusable input.
        """
        unreadable = self.input.unreadable
        if strict and unreadable:
            raise _strict(unreadable[0], len(unreadable))
        max_samples = self.request.max_samples
        first = FirstDistinct(self.workplace, max_samples) if max_samples else None

        def on_done(task: Task, receipt: Receipt) -> None:
            if strict and receipt["rejected"]:
                (reject,) = read_rejects(self._rejects_of(task.number), 1)
                raise _strict(reject, receipt["rejected"])
            if first is not None:
                first.add(task.number, receipt)

        receipts = self._run(
            EXTRACT,
            extract_partition,
            [
                {
                    "partition": partition,
                    "options": self.request.options,
                    "most": max_samples,
                }
                for partition in self.input.partitions
            ],
            sizes_bytes=[partition.raw_bytes for partition in self.input.partitions],
            on_done=on_done,
            first=first,
        )
        if first is None:
            self.pieces = []
            for number, receipt in enumerate(receipts):
                self.pieces += pieces_of(number, receipt)
        else:
            receipts = receipts[: first.partitions]
            self.pieces = first.pieces
        if not any(piece.samples for piece in self.pieces):
            raise self._no_sample()
        return receipts

    def _no_sample(self) -> NothingUsableError:
        """Return the error for input without a sample, with the first reason."""
        rejects = self.input.unreadable
        for number in range(len(self.input.partitions)):
            rejects += read_rejects(self._rejects_of(number), 1)
        files = sum(len(source.files) for source in self.input.sources)
        message = f"no sample found in {files} files"
        example = SOURCES[self.input.kinds[0]].example
        next_step = f"Pass a path with samples, such as {example}"
        if rejects:
            reject = rejects[0]
            message += f"; the first, {reject.path!r}: {reject.reason}"
            if reject.reason.startswith(("field ", "column ")):
                next_step = "Name the field or column of text: --field NAME"
        return NothingUsableError(message, next_step=next_step)

    def _rejects_of(self, partition: int) -> Path:
        return self.workplace.directory(EXTRACT, partition) / REJECTS_FILE

    def _write_rejects(self, partitions: int) -> None:
        """Write the list of all inputs that were left out."""
        path = self.workplace.dataset / REJECTS_NAME
        with path.open("w") as file:
            for reject in self.input.unreadable:
                file.write(json.dumps(asdict(reject)) + "\n")
            for number in range(partitions):
                with self._rejects_of(number).open() as rejects:
                    shutil.copyfileobj(rejects, file)
        sync(path)

    def _find_duplicates(self, buckets: int) -> int:
        """Find duplicates in every bucket of digests; return their number."""
        arguments = [
            {"bucket": bucket, "buckets": buckets} for bucket in range(buckets)
        ]
        receipts = self._run(DISTINCT, find_duplicates, arguments)
        return sum(receipt["duplicates"] for receipt in receipts)

    def _learn(self, selection: Selection) -> DatasetTokenizer:
        """Learn a tokenizer: words of programs, byte pairs of text by default."""
        kind = self.request.tokenizer
        if kind is None:
            kind = "wordlevel" if self.input.kinds == ["elf"] else "bpe"
        if kind == "wordlevel":
            learned = self._learn_words(selection)
        else:
            learned = self._learn_pairs(selection)
        path = self.workplace.directory(LEARN, 0) / TOKENIZER_NAME
        return load_tokenizer(path, used=learned["used"])

    def _learn_words(self, selection: Selection) -> Receipt:
        vocab_size = self.request.vocab_size
        counted = self._run_pieces(COUNT, count_words, selection=selection)
        merges = merges_for(
            sum(receipt["entries"] for receipt in counted),
            sum(receipt["bytes"] for receipt in counted),
        )
        arguments = [
            {
                "merge": merge,
                "merges": merges,
                "pieces": len(self.pieces),
                "most": vocab_size,
            }
            for merge in range(merges)
        ]
        self._run(MERGE, merge_words, arguments)
        (learned,) = self._run(
            LEARN, learn_words, [{"merges": merges, "vocab_size": vocab_size}]
        )
        return learned

    def _learn_pairs(self, selection: Selection) -> Receipt:
        text_bytes = sum(piece.text_bytes for piece in self.pieces)
        share = min(1.0, _BPE_TEXT_BYTES / max(1, text_bytes))
        self._run_pieces(SAMPLE, sample_texts, selection=selection, share=share)
        arguments = {
            "pieces": len(self.pieces),
            "vocab_size": self.request.vocab_size,
        }
        (learned,) = self._run(LEARN, learn_pairs, [arguments])
        return learned

    def _assemble(
        self, split: str, encoded: Sequence[Receipt], tokenizer: DatasetTokenizer
    ) -> Split:
        """Join the encoded pieces of a split to shards."""
        sizes = [
            (receipt[split]["samples"], receipt[split]["tokens"]) for receipt in encoded
        ]
        arguments = []
        for number, (first, end) in enumerate(shard_edges(sizes)):
            arguments.append(
                {
                    "split": split,
                    "shard": number,
                    "pieces": (first, end),
                    "samples": sum(samples for samples, _ in sizes[first:end]),
                    "tokens": sum(tokens for _, tokens in sizes[first:end]),
                    "dtype": tokenizer.dtype,
                }
            )
        stage = f"assemble-{split}"
        receipts = self._run(stage, assemble_shard, arguments) if arguments else []
        shards = [Shard(**receipt) for receipt in receipts]
        self.workplace.dataset.mkdir(exist_ok=True)
        for number, shard in enumerate(shards):
            gather(self.workplace, self.workplace.directory(stage, number), shard)
        histograms = [receipt[split]["histogram"] for receipt in encoded]
        counts = [sum(bin_counts) for bin_counts in zip(*histograms, strict=True)]
        return Split(
            shards=shards,
            length_histogram=LengthHistogram(
                edges=list(HISTOGRAM_EDGES), counts=counts
            ),
        )

    def _statistics(
        self,
        extracted: Sequence[Receipt],
        encoded: Sequence[Receipt],
        duplicates: int,
        tokenizer: DatasetTokenizer,
    ) -> SourceStatistics:
        """Return the statistics of the raw data.

        Raises:
            NothingUsableError: If there is no token.
        """
        counts = dict.fromkeys(_ENCODED_COUNTS, 0)
        for receipt in encoded:
            for split in SPLITS:
                for name in _ENCODED_COUNTS:
                    counts[name] += receipt[split][name]
        if not counts["tokens"]:
            raise NothingUsableError(
                "the tokenizer yields no token from this data",
                next_step="Omit --tokenizer.",
            )
        rejected = sum(receipt["rejected"] for receipt in extracted)
        return SourceStatistics(
            kinds=self.input.kinds,
            files=sum(receipt["files"] for receipt in extracted),
            rejected=rejected + len(self.input.unreadable),
            duplicate_samples=duplicates,
            empty_samples=counts["empty"],
            truncated_samples=counts["truncated"],
            split_samples=counts["split"],
            raw_bytes=sum(receipt["raw_bytes"] for receipt in extracted),
            text_bytes=sum(sum(receipt["text_bytes"]) for receipt in extracted),
            token_bytes=counts["tokens"] * np.dtype(tokenizer.dtype).itemsize,
            unknown_tokens=counts["unknown"],
        )

    def _run_pieces(self, stage: str, work: Work, **arguments: object) -> list[Receipt]:
        """Run a task for each piece, with the same further arguments."""
        return self._run(
            stage,
            work,
            [{"number": number, **arguments} for number in range(len(self.pieces))],
            sizes_bytes=[piece.text_bytes for piece in self.pieces],
        )

    def _run(
        self,
        stage: str,
        work: Work,
        arguments: Sequence[dict[str, Any]],
        *,
        sizes_bytes: Sequence[int] | None = None,
        on_done: OnDone = lambda task, receipt: None,
        first: FirstDistinct | None = None,
    ) -> list[Receipt]:
        """Run the unfinished tasks of a stage, one for each set of arguments.

        Without ``first``, the largest tasks start first, so that the others need not
        wait for them at the end. With it, tasks are taken in order until there are
        enough samples.

        Returns:
            The receipts in the order of ``arguments``. With ``first``, only receipts of
            the first tasks are guaranteed.
        """
        sizes = sizes_bytes or [1] * len(arguments)
        order = list(range(len(arguments)))
        if first is None:
            order.sort(key=lambda number: -sizes[number])
        receipts: dict[int, Receipt] = {}
        (self.workplace.path / stage).mkdir(exist_ok=True)
        with self.stages(stage.replace("-", " ")) as update:
            meter = StageMeter(update, sum(sizes), in_bytes=sizes_bytes is not None)

            def record(task: Task, receipt: Receipt, *, fresh: bool = True) -> None:
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
                        record(task, receipt, fresh=False)

            # With a bound, tasks started beyond it are wasted.
            self.engine(unfinished(), record, AHEAD if first is None else 1)
            meter.finish()
        return [receipts[number] for number in sorted(receipts)]

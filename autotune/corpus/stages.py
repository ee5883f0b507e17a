"""The stages of a preparation: extract, find duplicates, learn a tokenizer, encode, assemble.

Every stage is a set of tasks whose results are files (see ``workplace``), so that any number of processes may do them,
and whoever is interrupted goes on. Partitions are taken in a fixed order and of equal samples the first is kept, so
that the same files give the same bytes whoever finishes first.
"""

import dataclasses
import json
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from autotune.core.dataset import HISTOGRAM_EDGES
from autotune.corpus import assemble, distinct, encode, learn, words
from autotune.corpus.engine import AHEAD, Engine, Task
from autotune.corpus.enough import Extraction, FirstDistinct
from autotune.corpus.extract import extract_partition
from autotune.corpus.meter import Meter, Update
from autotune.corpus.pieces import PiecePaths
from autotune.corpus.rejects import read_rejects, strict
from autotune.corpus.request import Input, Request
from autotune.corpus.sources.base import Partition, Reject, SourceOptions
from autotune.corpus.tokenizer import DatasetTokenizer, load_tokenizer
from autotune.corpus.worker import REJECTS_FILE
from autotune.corpus.workplace import Receipt, UnfinishedTask, Workplace
from autotune.errors import BadInput
from trainer.dataset import (
    MANIFEST_NAME,
    REJECTS_NAME,
    TOKENIZER_NAME,
    LengthHistogram,
    Manifest,
    Shard,
    SourceStatistics,
    Split,
)
from trainer.disk import sync
from trainer.schema import canonical_json

Stages = Callable[[str], AbstractContextManager[Update]]
"""Opens the display of one stage, by its title."""

EXTRACT_STAGE = "extract"
_BPE_TEXT_BYTES = 64 * 2**20
"""Byte pairs are learned from about so much text: more changes little, and would not fit a worker."""
_COUNTED = ("samples", "tokens", "unknown", "empty", "truncated", "split")


class NothingUsableError(BadInput):
    """The same request comes to nothing however often it is made: there is no work to go on with."""


class Preparation:
    """One run through the stages.

    Args:
        request: What to do.
        found: What to read.
        workplace: Where results of tasks lie, earlier ones too.
        engine: What runs the tasks.
        stages: Where progress is shown.
    """

    def __init__(self, request: Request, found: Input, workplace: Workplace, engine: Engine, stages: Stages) -> None:
        self._request, self._input, self._workplace = request, found, workplace
        self._engine, self._stages = engine, stages
        self._pieces: list[distinct.Piece] = []
        self._buckets = 0

    def run(self, given: DatasetTokenizer | None) -> Manifest:
        """All stages; the dataset's files lie in the work directory then."""
        extracted = self._extract()
        distinct.write_pieces(self._workplace, self._pieces)
        duplicates = self._find_duplicates()
        tokenizer = given or self._learn()
        assemble.write_durably(self._workplace.path / encode.TOKENIZER_FILE, tokenizer.content)
        encoded = self._encode()
        splits = {name: self._assemble(name, encoded, tokenizer) for name in encode.SPLITS}
        said = {name: sum(one[split][name] for one in encoded for split in encode.SPLITS) for name in _COUNTED}
        if not said["tokens"]:
            raise NothingUsableError("the tokenizer makes no token of this data", next_step="Leave out --tokenizer.")
        manifest = Manifest(
            schema_version=2,
            dtype=tokenizer.dtype,
            vocab_size=tokenizer.vocab_size,
            used_vocab_size=tokenizer.used_vocab_size,
            special_ids=tokenizer.special_ids,
            tokenizer_sha256=tokenizer.sha256,
            train=splits["train"],
            validation=splits["validation"],
            source=SourceStatistics(
                kinds=self._input.kinds,
                files=sum(one["files"] for one in extracted),
                rejected=sum(one["rejected"] for one in extracted) + len(self._unreadable),
                duplicate_samples=duplicates,
                empty_samples=said["empty"],
                truncated_samples=said["truncated"],
                split_samples=said["split"],
                raw_bytes=sum(one["raw_bytes"] for one in extracted),
                token_bytes=said["tokens"] * tokenizer.id_bytes,
                unknown_tokens=said["unknown"],
            ),
        )
        self._write_dataset(manifest, tokenizer, len(extracted))
        return manifest

    @property
    def _unreadable(self) -> list[Reject]:
        return [reject for found in self._input.found for reject in found.unreadable]

    def _extract(self) -> list[Receipt]:
        """Partitions to pieces; returns the receipts of those that count."""
        request, parts = self._request, self._input.partitions
        if request.strict and self._unreadable:
            raise strict(self._unreadable[0], len(self._unreadable))
        tasks = [
            Task(
                stage=EXTRACT_STAGE,
                name=words.piece_name(number),
                work=extract_task,
                arguments={"partition": part, "options": request.options, "most": request.max_samples},
            )
            for number, part in enumerate(parts)
        ]
        first = FirstDistinct(self._workplace, request.max_samples) if request.max_samples else None

        def on_done(task: Task, receipt: Receipt) -> None:
            if request.strict and receipt["rejected"]:
                path = self._workplace.directory(EXTRACT_STAGE, task.name) / REJECTS_FILE
                raise strict(read_rejects(path, 1)[0], receipt["rejected"])
            if first is not None:
                first.add(int(task.name), Extraction(task=task.name, receipt=receipt))

        def wanted() -> Iterator[Task]:
            if first is None:
                # The largest first: one that is begun last would have the others wait for it.
                yield from sorted(tasks, key=lambda task: -sizes[task.name])
                return
            for task in tasks:
                if first.reached:
                    return
                yield task

        sizes = {task.name: part.raw_bytes for task, part in zip(tasks, parts, strict=True)}
        receipts = self._run(
            "extract samples",
            wanted(),
            bytes_of=lambda task: sizes[task.name],
            total_bytes=sum(sizes.values()),
            on_done=on_done,
            ahead=AHEAD if first is None else 1,  # what is begun beyond enough is for nothing
        )
        counted = [receipts[task.name] for task in (tasks if first is None else tasks[: first.partitions])]
        everything = zip(tasks, counted, strict=False)
        self._pieces = (
            first.pieces
            if first is not None
            else [p for task, one in everything for p in Extraction(task=task.name, receipt=one).pieces()]
        )
        if not any(piece.samples for piece in self._pieces):
            raise self._nothing_usable(tasks)
        return counted

    def _nothing_usable(self, tasks: list[Task]) -> "NothingUsableError":
        rejects = self._unreadable
        for task in tasks:
            rejects += read_rejects(self._workplace.directory(EXTRACT_STAGE, task.name) / REJECTS_FILE, 1)
        files = sum(len(found.files) for found in self._input.found)
        why = f"; the first, {rejects[0].path!r}: {rejects[0].reason}" if rejects else ""
        return NothingUsableError(
            f"no sample in {files} files{why}",
            next_step=f"Name a place that holds some, such as {self._input.sources[0].example}",
        )

    def _find_duplicates(self) -> int:
        if self._request.keep_duplicates:
            return 0
        self._buckets = distinct.buckets_for(sum(piece.samples for piece in self._pieces))
        tasks = [
            Task(
                stage=distinct.STAGE,
                name=distinct.bucket_name(bucket),
                work=distinct.find_duplicates,
                arguments={"bucket": bucket, "buckets": self._buckets},
            )
            for bucket in range(self._buckets)
        ]
        return sum(one["duplicates"] for one in self._run("find duplicates", tasks).values())

    def _learn(self) -> DatasetTokenizer:
        kind = self._request.tokenizer or ("wordlevel" if self._input.kinds == ["elf"] else "bpe")
        shared = {"buckets": self._buckets, "split": self._request.validation}
        arguments: dict[str, Any] = {"pieces": len(self._pieces), "vocab_size": self._request.vocab_size}
        if kind == "wordlevel":
            counted = self._run_pieces("count words", words.COUNT_STAGE, words.count_words, shared)
            merges = words.merges_for(sum(one["entries"] for one in counted), sum(one["bytes"] for one in counted))
            merging = arguments | {"merges": merges, "most": self._request.vocab_size}
            del merging["vocab_size"]
            self._run(
                "merge words",
                [
                    Task(
                        stage=words.MERGE_STAGE,
                        name=f"{merge:03d}",
                        work=words.merge_words,
                        arguments=merging | {"merge": merge},
                    )
                    for merge in range(merges)
                ],
            )
            arguments["merges"] = merges
        else:
            share = min(1.0, _BPE_TEXT_BYTES / max(1, sum(piece.text_bytes for piece in self._pieces)))
            sampling = shared | {"share": share}
            self._run_pieces("sample texts", words.SAMPLE_STAGE, words.sample_texts, sampling)
        work = learn.learn_words_task if kind == "wordlevel" else learn.learn_bpe_task
        task = Task(stage=learn.STAGE, name=learn.TASK, work=work, arguments=arguments)
        receipt = self._run("learn tokenizer", [task])[learn.TASK]
        learned = self._workplace.directory(learn.STAGE, learn.TASK) / TOKENIZER_NAME
        return load_tokenizer(learned, used=receipt["used"])

    def _encode(self) -> list[Receipt]:
        arguments = {"buckets": self._buckets, "split": self._request.validation, "limit": self._request.limit}
        return self._run_pieces("encode", encode.STAGE, encode.encode_piece, arguments)

    def _assemble(self, split: str, encoded: list[Receipt], tokenizer: DatasetTokenizer) -> Split:
        sizes = [(one[split]["samples"], one[split]["tokens"]) for one in encoded]
        tasks = [
            Task(
                stage=assemble.STAGE,
                name=f"{split}-{number:05d}",
                work=assemble.assemble_shard,
                arguments={
                    "split": split,
                    "shard": number,
                    "pieces": edges,
                    "samples": sum(samples for samples, _ in sizes[slice(*edges)]),
                    "tokens": sum(tokens for _, tokens in sizes[slice(*edges)]),
                    "dtype": tokenizer.dtype,
                },
            )
            for number, edges in enumerate(assemble.shard_edges(sizes))
        ]
        receipts = self._run(f"assemble {split}", tasks) if tasks else {}
        dataset = self._workplace.path / "dataset"
        dataset.mkdir(exist_ok=True)
        shards = [Shard(**receipts[task.name]) for task in tasks]
        for task, shard in zip(tasks, shards, strict=True):
            assemble.gather(self._workplace, task.name, shard, dataset)
        counts = [sum(bin_counts) for bin_counts in zip(*(one[split]["histogram"] for one in encoded), strict=True)]
        return Split(shards=shards, length_histogram=LengthHistogram(edges=list(HISTOGRAM_EDGES), counts=counts))

    def _write_dataset(self, manifest: Manifest, tokenizer: DatasetTokenizer, partitions: int) -> None:
        dataset = self._workplace.path / "dataset"
        with (dataset / REJECTS_NAME).open("w") as file:
            for reject in self._unreadable:
                file.write(json.dumps(dataclasses.asdict(reject)) + "\n")
            for number in range(partitions):
                path = self._workplace.directory(EXTRACT_STAGE, words.piece_name(number)) / REJECTS_FILE
                with path.open() as rejects:
                    shutil.copyfileobj(rejects, file)
        sync(dataset / REJECTS_NAME)
        assemble.write_durably(dataset / TOKENIZER_NAME, tokenizer.content)
        content = canonical_json(manifest.model_dump(mode="json")) + b"\n"
        assemble.write_durably(dataset / MANIFEST_NAME, content)

    def _run_pieces(self, title: str, stage: str, work: Any, arguments: dict[str, Any]) -> list[Receipt]:  # noqa: ANN401
        """One task per piece; the receipts in reading order."""
        tasks = [
            Task(stage=stage, name=words.piece_name(number), work=work, arguments={"number": number, **arguments})
            for number in range(len(self._pieces))
        ]
        sizes = {task.name: piece.text_bytes for task, piece in zip(tasks, self._pieces, strict=True)}
        receipts = self._run(title, tasks, bytes_of=lambda task: sizes[task.name], total_bytes=sum(sizes.values()))
        return [receipts[task.name] for task in tasks]

    def _run(
        self,
        title: str,
        tasks: Iterable[Task],
        *,
        bytes_of: Callable[[Task], int] | None = None,
        total_bytes: int | None = None,
        on_done: Callable[[Task, Receipt], None] | None = None,
        ahead: int = AHEAD,
    ) -> dict[str, Receipt]:
        """Run what is not finished of a stage; all receipts by task."""
        receipts: dict[str, Receipt] = {}
        todo = tasks if total_bytes is not None else list(tasks)
        with self._stages(title) as update:
            total = total_bytes if isinstance(total_bytes, int) else len(todo)  # type: ignore[arg-type]
            meter = Meter(update, total, in_bytes=total_bytes is not None)

            def note(task: Task, receipt: Receipt, *, fresh: bool) -> None:
                receipts[task.name] = receipt
                meter.add(bytes_of(task) if bytes_of else 1, fresh=fresh)
                if on_done:
                    on_done(task, receipt)

            def unfinished() -> Iterator[Task]:
                for task in todo:
                    (self._workplace.path / task.stage).mkdir(exist_ok=True)
                    receipt = self._workplace.receipt(task.stage, task.name)
                    if receipt is None:
                        yield task
                    else:
                        note(task, receipt, fresh=False)

            self._engine.run(
                self._workplace, unfinished(), lambda task, receipt: note(task, receipt, fresh=True), ahead=ahead
            )
            meter.finish()
        return receipts


def extract_task(
    workplace: Workplace,
    task: UnfinishedTask,
    *,
    partition: Partition,
    options: SourceOptions,
    most: int | None,
) -> Receipt:
    """Extract one partition, and sort the digests of its pieces."""
    result = extract_partition(partition, options, task.directory, most=most)
    for piece in Extraction(task=".", receipt=dataclasses.asdict(result)).pieces():
        distinct.sort_digests(PiecePaths.of(task.directory, piece.number))
    return dataclasses.asdict(result)

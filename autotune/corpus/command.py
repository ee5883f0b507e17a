"""``autotune data``: prepare, inspect, verify and stage a tokenised dataset."""

import contextlib
import shlex
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NoReturn

import typer

from autotune.base.document import answer_json, plain
from autotune.base.units import format_bytes, format_count, format_seconds, format_share
from autotune.base.wording import per_s
from autotune.console.options import AsJson, grouped, make_request, sites
from autotune.console.slurm_job import JobRequest, SlurmOptions
from autotune.corpus.sections import counts_of, dataset_text, facts_of, facts_text
from autotune.corpus.values import DEFAULT_VOCAB_SIZE, MIN_VOCAB_SIZE
from autotune.errors import EXIT_TERMINATED, INTERRUPTED, BadInput, UsageError
from trainer.record.progress import progress

if TYPE_CHECKING:
    from trainer.staging.stage import Staged

_SHOWN_FAULTS = 20
Dataset = Annotated[Path, typer.Argument(metavar="DIR", help="The dataset.")]

app = typer.Typer(
    no_args_is_help=True,
    help="Prepare a tokenised dataset, look at it, check it, and copy it to a local disk.",
    rich_markup_mode=None,
)


@app.command("inspect")
def inspect(
    *,
    directory: Dataset,
    seq_length: Annotated[
        list[int] | None, typer.Option(min=8, max=2**20, help="A sequence length to consider; may be repeated.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show sizes, sample lengths, padding and packing."""
    from autotune.corpus.verify import DEFAULT_SEQ_LENGTHS_TOKENS
    from autotune.corpus.verify import inspect as inspect_dataset

    found = inspect_dataset(directory, seq_length or DEFAULT_SEQ_LENGTHS_TOKENS)
    if as_json:
        print(answer_json({**counts_of(directory, found.manifest), **plain(found)}))
    else:
        print(dataset_text(found))
        print(f"next: autotune data verify {shlex.quote(str(directory))}")


@app.command("verify")
def verify(*, directory: Dataset, as_json: AsJson = False) -> None:
    """Check every hash, offset and id of a dataset.

    Reads all of it. Exits with code 3 if anything is wrong.
    """
    from autotune.corpus.verify import verify as verify_dataset

    found = verify_dataset(directory, progress)
    if as_json:
        said = {"path": directory, "dataset_hash": found.manifest.dataset_hash, "files": found.files}
        print(answer_json({**said, "bytes_read": found.bytes_read, "faults": found.faults}))
    else:
        for fault in found.faults[:_SHOWN_FAULTS]:
            print(f"{fault.file!r}: {fault.what}")
    if found.faults:
        files = sorted({fault.file for fault in found.faults})
        more = f" and {len(files) - 3} more" if len(files) > 3 else ""
        raise BadInput(
            f"{directory} is corrupt: {len(found.faults)} faults in {', '.join(map(repr, files[:3]))}{more}",
            next_step="Copy these files again from where they came from, or prepare the dataset again.",
        )
    if not as_json:
        samples = found.manifest.train.samples + found.manifest.validation.samples
        size = format_bytes(found.bytes_read)
        print(f"{directory} is intact: {format_count(samples)} samples, {found.files} files, {size} read")


@app.command("stage")
def stage(
    *,
    source: Annotated[Path, typer.Argument(metavar="SRC", help="The dataset.")],
    to: Annotated[Path, typer.Option(metavar="LOCAL", help="A directory on the node's own disk.")],
    timeout_s: Annotated[float, typer.Option(min=1.0, help="Longest wait for who copies.")] = 3600.0,
    as_json: AsJson = False,
) -> None:
    """Copy a dataset to local disk, checking every byte.

    One process per node copies; others that run this command wait for it.
    """
    from trainer.staging.stage import stage as stage_dataset

    with contextlib.suppress(OSError):  # what is wrong with either is said when it is used
        if to.stat().st_dev == source.stat().st_dev:
            sys.stderr.write(f"note: {to} lies on the same file system as {source}\n")
    started_s = time.monotonic()
    with progress("stage") as update:
        staged = stage_dataset(source, to, timeout_s=timeout_s, update=update)
    seconds = time.monotonic() - started_s
    figures = {"break_even_epochs": staged.break_even_epochs, "seconds": round(seconds, 3)}
    print(answer_json({**plain(staged), **figures}) if as_json else _staged_text(staged, seconds))


def _staged_text(staged: "Staged", seconds: float) -> str:
    following = f"next: export AUTOTUNE_DATA={shlex.quote(str(staged.directory))}"
    copied = staged.copied
    if copied is None:
        took = format_seconds(seconds)
        return f"{staged.directory} is there; this process copied nothing ({took})\n{following}"
    lines = [
        str(staged.directory),
        f"copied       {format_bytes(copied.size_bytes)} in {format_seconds(copied.seconds)}, "
        f"{per_s(copied.size_bytes / copied.seconds)}; one thread reads {per_s(copied.size_bytes / copied.read_s)} "
        f"and writes {per_s(copied.size_bytes / copied.write_s)}",
    ]
    if staged.source_s_per_sample is not None and staged.local_s_per_sample is not None:
        epochs = staged.break_even_epochs
        worth = "never: the copy is not faster to read than the source"
        lines += [
            f"one sample   {staged.source_s_per_sample * 1e6:,.0f} us from the source, "
            f"{staged.local_s_per_sample * 1e6:,.0f} us from the copy (measured, one reader at random, cold)",
            f"breaks even  {worth if epochs is None else f'after {epochs:,.2f} epochs'}",
        ]
    return "\n".join([*lines, following])


_PADDED_TOKENS = 512
"""Sequence length to which the paper recipe pads every sample."""


@app.command("prepare")
@grouped
def prepare(
    context: typer.Context,
    *,
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE...", help="elf:, text:, jsonl: or parquet: and a directory, a file, or a quoted glob."
        ),
    ],
    out: Annotated[Path, typer.Option(help="The directory that is to become the dataset.")],
    field: Annotated[
        str, typer.Option(help="jsonl and parquet: what holds the text; dots lead into jsonl objects.")
    ] = "text",
    text_unit: Annotated[Literal["line", "paragraph", "file"], typer.Option(help="text: what one sample is.")] = "line",
    max_samples: Annotated[
        int | None, typer.Option(min=1, max=5_000_000, help="Take the first so many distinct samples.")
    ] = None,
    keep_duplicates: Annotated[
        bool, typer.Option("--keep-duplicates", help="Keep equal samples. Default: the first of them.")
    ] = False,
    validation_share: Annotated[
        float, typer.Option(min=0.0, max=0.5, help="Share kept apart, chosen by content.")
    ] = 0.01,
    split_seed: Annotated[int, typer.Option(min=0, help="Another seed keeps others apart.")] = 0,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            help="wordlevel, bpe, or a tokenizer.json to use. Default: wordlevel for elf, bpe for everything else."
        ),
    ] = None,
    vocab_size: Annotated[
        int | None,
        typer.Option(
            min=MIN_VOCAB_SIZE,
            max=2**24,
            help="Most ids of the learned tokenizer, rounded up to a multiple of 64.",
            show_default=str(DEFAULT_VOCAB_SIZE),
        ),
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(min=8, help="Longest sample that is stored. Default: any.")] = None,
    long: Annotated[
        Literal["truncate", "split"], typer.Option(help="What becomes of samples over --max-tokens.")
    ] = "truncate",
    strict: Annotated[bool, typer.Option("--strict", help="Stop at anything that cannot be used.")] = False,
    workers: Annotated[
        int | None,
        typer.Option(min=1, max=4096, help="Processes; with --slurm-workers jobs. Default: one per allotted CPU."),
    ] = None,
    scheduler: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Use the workers of this dask scheduler.")
    ] = None,
    slurm_workers: Annotated[
        Path | None,
        typer.Option(metavar="SITE", help="Use SLURM jobs as workers, set up by a site file.", autocompletion=sites),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the dataset that --out holds.")] = False,
    job: SlurmOptions,
) -> None:
    """Make a tokenised dataset from programs or text.

    Extracts samples, drops exact duplicates, learns a tokenizer, and encodes.
    """
    from autotune.corpus.encode import LengthLimit
    from autotune.corpus.engine import Workers
    from autotune.corpus.prepare import Request
    from autotune.corpus.prepare import prepare as prepare_dataset
    from autotune.corpus.sources.base import SourceOptions

    given = None if tokenizer in (None, "wordlevel", "bpe") else Path(str(tokenizer))
    if given is not None and vocab_size is not None:
        raise UsageError("--vocab-size has no effect with a given tokenizer", next_step="Leave out one of the two.")
    if sum(map(bool, (scheduler, slurm_workers, job.slurm is not None))) > 1:
        raise UsageError(
            "--scheduler, --slurm-workers and --slurm all say where to work", next_step="Leave out all but one."
        )
    name = out.resolve().name
    asked = JobRequest(name=f"prepare-{name}", purpose=f"Prepares the dataset {name}.", on_gpus=False, cpus=workers)
    if job.submitted(context, asked):
        return
    request = make_request(
        Request,
        context,
        sources=tuple(sources),
        options=SourceOptions(field=field, unit=text_unit),
        tokenizer=given or tokenizer,
        vocab_size=-(-(vocab_size or DEFAULT_VOCAB_SIZE) // 64) * 64,
        limit=LengthLimit(max_tokens=max_tokens, long=long),
    )
    started_s = time.monotonic()
    signal.signal(signal.SIGTERM, _terminate)
    prepared = prepare_dataset(
        request,
        out,
        progress,
        tell=lambda line: print(f"note: {line}", file=sys.stderr),
        workers=Workers(count=workers, scheduler=scheduler, site=slurm_workers),
        strict=strict,
        overwrite=overwrite,
    )
    seconds = time.monotonic() - started_s
    for reject in prepared.first_rejects:
        # repr: a stranger's file name must not write control characters to a terminal.
        print(f"left out {reject.path!r}{', ' * bool(reject.where)}{reject.where}: {reject.reason}", file=sys.stderr)
    manifest, source = prepared.manifest, prepared.manifest.source
    more = source.rejected - len(prepared.first_rejects)
    if more > 0:
        print(f"left out {format_count(more)} more (listed in {out / 'rejects.jsonl'})", file=sys.stderr)
    tokens = manifest.train.tokens + manifest.validation.tokens
    unknown = source.unknown_tokens / tokens
    if unknown > 0.1:
        print(
            f"note: the tokenizer does not know {format_share(unknown)} of all tokens; "
            "--tokenizer bpe knows every text, a larger --vocab-size more words",
            file=sys.stderr,
        )
    # What storing masks, a byte a token, would add; and rows padded to the paper's width, ids and masks.
    samples = manifest.train.samples + manifest.validation.samples
    padded = samples * _PADDED_TOKENS * ((2 if manifest.dtype == "uint16" else 4) + 1)
    if job.as_json:
        answer = counts_of(out, manifest) | {
            "vocab_size": manifest.vocab_size,
            "used_vocab_size": manifest.used_vocab_size,
            **plain(source),
            "reduction": 1 - source.token_bytes / source.raw_bytes,
            "mask_bytes_not_stored": tokens,
            "padded_with_masks_bytes": padded,
            "other_files": prepared.other_files,
            "rejects": out / "rejects.jsonl",
            "seconds": round(seconds, 3),
        }
        print(answer_json(answer))
        return
    facts = facts_of(manifest) | {
        "masks not stored": f"would add {format_bytes(tokens)}; ids and masks padded to {_PADDED_TOKENS} take "
        f"{format_bytes(padded)}",
        "samples": f"{format_count(manifest.train.samples)} to train, "
        f"{format_count(manifest.validation.samples)} for validation",
        "tokens": f"{format_count(tokens)}, special tokens not counted",
        "duplicates dropped": format_count(source.duplicate_samples),
        "unknown tokens": f"{format_share(unknown)} of all tokens",
        "left out": f"{format_count(source.rejected)} that cannot be used (rejects.jsonl), "
        f"{format_count(prepared.other_files)} files of other kinds",
        "took": format_seconds(seconds),
    }
    print(facts_text(facts, "tokens per sample", manifest))
    print(f"\nnext: autotune tune --model bert-mini --data {shlex.quote(str(out))} --memory 1GiB")


def _terminate(*_: object) -> NoReturn:
    sys.stderr.write(INTERRUPTED)
    raise SystemExit(EXIT_TERMINATED)

"""``autotune data``: prepare, inspect, verify and stage a tokenised dataset."""

import contextlib
import shlex
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NoReturn

import typer

from autotune.base.answer_json import answer_json, jsonable
from autotune.base.units import format_bytes, format_count, format_seconds, format_share
from autotune.base.wording import format_bytes_per_s, shorten_list
from autotune.console.options import (
    AsJson,
    duration,
    flag,
    grouped,
    make_request,
    option,
    sites,
)
from autotune.console.slurm_job import JobRequest, SlurmOptions
from autotune.corpus.sections import (
    counts_of,
    dataset_text,
    facts_of,
    facts_text,
    preparation_warnings,
    uncompressed_bytes,
)
from autotune.corpus.values import DEFAULT_VOCAB_SIZE, MIN_VOCAB_SIZE
from autotune.errors import EXIT_TERMINATED, INTERRUPTED, BadInput, UsageError
from trainer.formats.progress import progress

if TYPE_CHECKING:
    from trainer.staging.stage import Staged

_SOURCE_HELP = (
    "Raw data: elf:, text:, jsonl: or parquet: before a directory, file or quoted glob."
)
_VOCAB_SIZE_HELP = (
    f"Vocabulary size of a learned tokenizer. Default: {DEFAULT_VOCAB_SIZE}."
)
_PADDED_TOKENS = 512
"""Sequence length to which the paper recipe pads every sample."""
Dataset = Annotated[Path, typer.Argument(metavar="DIR", help="Dataset directory.")]

app = typer.Typer(
    no_args_is_help=True,
    help="Prepare, inspect, verify and stage datasets.",
    rich_markup_mode=None,
)


@app.command("inspect")
def inspect(
    *,
    directory: Dataset,
    seq_length: Annotated[
        list[int] | None,
        option("TOKENS", "Sequence length to consider; repeatable.", min=8, max=2**20),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show sizes, sample lengths, padding and packing."""
    from autotune.corpus.verify import DEFAULT_SEQ_LENGTHS_TOKENS
    from autotune.corpus.verify import inspect as inspect_dataset

    found = inspect_dataset(directory, seq_length or DEFAULT_SEQ_LENGTHS_TOKENS)
    if as_json:
        print(answer_json({**counts_of(directory, found.manifest), **jsonable(found)}))
    else:
        print(dataset_text(found))
        print(f"next: autotune data verify {shlex.quote(str(directory))}")


@app.command("verify")
def verify(*, directory: Dataset, as_json: AsJson = False) -> None:
    """Check every hash, offset and id of a dataset.

    Reads all of it. Exits with code 3 if it is corrupt.
    """
    from autotune.corpus.verify import verify as verify_dataset

    found = verify_dataset(directory, progress)
    if as_json:
        said = {
            "path": directory,
            "dataset_hash": found.manifest.dataset_hash,
            "files": found.files,
        }
        print(
            answer_json(
                {**said, "bytes_read": found.bytes_read, "faults": found.faults}
            )
        )
    else:
        for fault in found.faults[:20]:
            print(f"{fault.file!r}: {fault.what}")
    if found.faults:
        files = sorted({repr(fault.file) for fault in found.faults})
        raise BadInput(
            f"{directory} is corrupt: {len(found.faults)} faults in"
            f" {shorten_list(files, 'files')}",
            next_step=(
                "Copy these files again from where they came from, or prepare the"
                " dataset again."
            ),
        )
    if not as_json:
        samples = found.manifest.train.samples + found.manifest.validation.samples
        size = format_bytes(found.bytes_read)
        print(
            f"{directory} is intact: {format_count(samples)} samples, {found.files}"
            f" files, {size} read"
        )


@app.command("stage")
def stage(
    *,
    source: Dataset,
    to: Annotated[Path, option("DIR", "Directory on the node's local disk.")],
    timeout_s: Annotated[
        float,
        duration(
            "--timeout",
            "1h",
            "Longest wait for the process that copies.",
            3600.0,
            least_s=1,
        ),
    ] = 3600.0,
    as_json: AsJson = False,
) -> None:
    """Copy a dataset to local disk and verify it.

    One process per node copies; the others wait for it.
    """
    from trainer.staging.stage import stage as stage_dataset

    with contextlib.suppress(OSError):  # reported when they are used
        if to.stat().st_dev == source.stat().st_dev:
            sys.stderr.write(f"warning: {to} is on the same file system as {source}\n")
    started_s = time.monotonic()
    with progress("stage") as update:
        staged = stage_dataset(source, to, timeout_s=timeout_s, update=update)
    seconds = time.monotonic() - started_s
    figures = {
        "break_even_epochs": staged.break_even_epochs,
        "seconds": round(seconds, 3),
    }
    print(
        answer_json({**jsonable(staged), **figures})
        if as_json
        else _staged_text(staged, seconds)
    )


def _staged_text(staged: "Staged", seconds: float) -> str:
    following = f"next: export AUTOTUNE_DATA={shlex.quote(str(staged.directory))}"
    if (copied := staged.copied) is None:
        return (
            f"{staged.directory} is complete; another process copied it"
            f" ({format_seconds(seconds)})\n{following}"
        )
    lines = [
        str(staged.directory),
        (
            f"copied       {format_bytes(copied.size_bytes)} in"
            f" {format_seconds(copied.seconds)},"
            f" {format_bytes_per_s(copied.size_bytes / copied.seconds)};"
            f" one thread reads {format_bytes_per_s(copied.size_bytes / copied.read_s)}"
            f" and writes {format_bytes_per_s(copied.size_bytes / copied.write_s)}"
        ),
    ]
    if staged.source_s_per_sample is not None and staged.local_s_per_sample is not None:
        epochs = staged.break_even_epochs
        worth = "never: the copy is not faster to read than the source"
        lines += [
            (
                f"one sample   {staged.source_s_per_sample * 1e6:,.0f} us from the"
                f" source, {staged.local_s_per_sample * 1e6:,.0f} us from the copy"
                " (measured, one reader at random, cold)"
            ),
            (
                "breaks even "
                f" {worth if epochs is None else f'after {epochs:,.2f} epochs'}"
            ),
        ]
    return "\n".join([*lines, following])


@app.command("prepare")
@grouped
def prepare(
    context: typer.Context,
    *,
    sources: Annotated[list[str], typer.Argument(metavar="SOURCE", help=_SOURCE_HELP)],
    out: Annotated[Path, option("DIR", "Output directory.")],
    field: Annotated[
        str,
        option(
            "NAME", "Text field of jsonl and parquet; dots lead into jsonl objects."
        ),
    ] = "text",
    text_unit: Annotated[
        Literal["line", "paragraph", "file"],
        option(None, "Sample of a text file.", advanced=True),
    ] = "line",
    max_samples: Annotated[
        int | None,
        option("N", "Maximum number of samples. Default: all.", min=1, max=5_000_000),
    ] = None,
    keep_duplicates: Annotated[
        bool, flag("--keep-duplicates", "Keep equal samples.", advanced=True)
    ] = False,
    validation_share: Annotated[
        float, option("SHARE", "Share held out for validation.", min=0.0, max=0.5)
    ] = 0.01,
    split_seed: Annotated[
        int, option("N", "Seed of the train/validation split.", advanced=True, min=0)
    ] = 0,
    tokenizer: Annotated[
        str | None,
        option(
            "NAME",
            "wordlevel, bpe, or a tokenizer.json. Default: wordlevel for elf, else"
            " bpe.",
        ),
    ] = None,
    vocab_size: Annotated[
        int | None, option("N", _VOCAB_SIZE_HELP, min=MIN_VOCAB_SIZE, max=2**24)
    ] = None,
    max_tokens: Annotated[
        int | None, option("N", "Longest sample to store. Default: no limit.", min=8)
    ] = None,
    long: Annotated[
        Literal["truncate", "split"],
        option(None, "Treatment of samples over --max-tokens.", advanced=True),
    ] = "truncate",
    strict: Annotated[
        bool, flag("--strict", "Fail on the first unusable sample.", advanced=True)
    ] = False,
    workers: Annotated[
        int | None,
        option(
            "N", "Worker processes. Default: one per allotted CPU.", min=1, max=4096
        ),
    ] = None,
    scheduler: Annotated[
        str | None,
        option("ADDRESS", "dask scheduler whose workers to use.", advanced=True),
    ] = None,
    slurm_workers: Annotated[
        Path | None,
        option(
            "SITE",
            "Use SLURM jobs as workers, configured by this site file.",
            advanced=True,
            autocompletion=sites,
        ),
    ] = None,
    overwrite: Annotated[
        bool, flag("--overwrite", "Replace the dataset in --out.")
    ] = False,
    job: SlurmOptions,
) -> None:
    """Make a tokenised dataset from programs or text.

    Extracts samples, drops exact duplicates, learns a tokenizer, and encodes. Only one
    of --slurm, --slurm-workers and --scheduler can be used.
    """
    from autotune.corpus.encode import LengthLimit
    from autotune.corpus.engine import Workers
    from autotune.corpus.prepare import Request
    from autotune.corpus.prepare import prepare as prepare_dataset
    from autotune.corpus.sources.base import SourceOptions

    given = None if tokenizer in (None, "wordlevel", "bpe") else Path(str(tokenizer))
    if given is not None and vocab_size is not None:
        what = f"--vocab-size cannot be used with --tokenizer {str(given)!r}"
        raise UsageError(what, next_step="Remove one of them.")
    if sum(map(bool, (scheduler, slurm_workers, job.slurm is not None))) > 1:
        raise UsageError(
            "--scheduler, --slurm-workers and --slurm exclude each other",
            next_step="Keep one of them.",
        )
    name = out.resolve().name
    asked = JobRequest(
        name=f"prepare-{name}",
        purpose=f"Prepares the dataset {name}.",
        on_gpus=False,
        cpus=workers,
    )
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
    manifest, first_rejects, other_files = prepare_dataset(
        request,
        out,
        progress,
        tell=lambda line: print(f"info: {line}", file=sys.stderr),
        workers=Workers(count=workers, scheduler=scheduler, site=slurm_workers),
        strict=strict,
        overwrite=overwrite,
    )
    seconds = time.monotonic() - started_s
    for reject in first_rejects:
        # repr: a stranger's file name must not write control characters to a terminal.
        print(
            f"skipped {reject.path!r}{', ' * bool(reject.where)}{reject.where}:"
            f" {reject.reason}",
            file=sys.stderr,
        )
    source = manifest.source
    if (more := source.rejected - len(first_rejects)) > 0:
        print(
            f"skipped {format_count(more)} more (listed in {out / 'rejects.jsonl'})",
            file=sys.stderr,
        )
    tokens = manifest.train.tokens + manifest.validation.tokens
    unknown = source.unknown_tokens / tokens
    if unknown > 0.1:
        advice = "use --tokenizer bpe, or a larger --vocab-size"
        print(
            f"warning: the tokenizer does not know {format_share(unknown)} of all"
            f" tokens; {advice}",
            file=sys.stderr,
        )
    for warning in preparation_warnings(manifest, validation_share):
        print(f"warning: {warning}", file=sys.stderr)
    # Size of stored masks, a byte per token; and of sequences padded as in the paper
    # baseline, ids and masks.
    samples = manifest.train.samples + manifest.validation.samples
    padded = samples * _PADDED_TOKENS * ((2 if manifest.dtype == "uint16" else 4) + 1)
    if job.as_json:
        print(
            answer_json(
                counts_of(out, manifest)
                | {
                    "vocab_size": manifest.vocab_size,
                    "used_vocab_size": manifest.used_vocab_size,
                    **jsonable(source),
                    "reduction": 1 - source.token_bytes / uncompressed_bytes(source),
                    "mask_bytes_not_stored": tokens,
                    "padded_with_masks_bytes": padded,
                    "other_files": other_files,
                    "rejects": out / "rejects.jsonl",
                    "seconds": round(seconds, 3),
                }
            )
        )
        return
    facts = facts_of(manifest) | {
        "masks not stored": (
            f"would add {format_bytes(tokens)}; ids and masks padded to"
            f" {_PADDED_TOKENS} take {format_bytes(padded)}"
        ),
        "samples": (
            f"{format_count(manifest.train.samples)} to train, "
            f"{format_count(manifest.validation.samples)} for validation"
        ),
        "tokens": f"{format_count(tokens)}, special tokens not counted",
        "duplicates dropped": format_count(source.duplicate_samples),
        "unknown tokens": f"{format_share(unknown)} of all tokens",
        "skipped": (
            f"{format_count(source.rejected)} unusable samples (rejects.jsonl), "
            f"{format_count(other_files)} files of other kinds"
        ),
        "took": format_seconds(seconds),
    }
    print(facts_text(facts, "tokens per sample", manifest))
    print(f"\nnext: autotune tune --model bert-mini --data {shlex.quote(str(out))}")


def _terminate(*_: object) -> NoReturn:
    sys.stderr.write(INTERRUPTED)
    raise SystemExit(EXIT_TERMINATED)

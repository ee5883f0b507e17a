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
    from autotune.corpus.prepare import Prepared
    from trainer.formats.manifest import Manifest
    from trainer.staging.stage import Staged

_SOURCE_HELP = (
    "Raw data: elf:, text:, jsonl: or parquet: before a directory, file or quoted glob."
)
_VOCAB_SIZE_HELP = (
    f"Vocabulary size of a learned tokenizer. Default: {DEFAULT_VOCAB_SIZE}."
)
_PADDED_TOKENS = 512
"""Sequence length to which the paper recipe pads every sample."""
_MANY_UNKNOWN_SHARE = 0.1
"""Share of unknown tokens above which a tokenizer does not suit the data."""
_REJECTS = "rejects.jsonl"
"""Name of the list of rejects; help must not load ``trainer.formats.manifest``."""
_MOST_FAULTS = 20
"""Number of faults that ``verify`` prints; its JSON has all."""
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

    inspected = inspect_dataset(directory, seq_length or DEFAULT_SEQ_LENGTHS_TOKENS)
    if as_json:
        counts = counts_of(directory, inspected.manifest)
        print(answer_json({**counts, **jsonable(inspected)}))
        return
    print(dataset_text(inspected))
    print(f"next: autotune data verify {shlex.quote(str(directory))}")


@app.command("verify")
def verify(*, directory: Dataset, as_json: AsJson = False) -> None:
    """Check every hash, offset and id of a dataset.

    Reads all of it. Exits with code 3 if it is corrupt.
    """
    from autotune.corpus.verify import verify as verify_dataset

    verified = verify_dataset(directory, progress)
    faults = verified.faults
    if as_json:
        answer = {
            "path": directory,
            "dataset_hash": verified.manifest.dataset_hash,
            "files": verified.files,
            "bytes_read": verified.bytes_read,
            "faults": faults,
        }
        print(answer_json(answer))
    else:
        for fault in faults[:_MOST_FAULTS]:
            print(f"{fault.file!r}: {fault.what}")
    if faults:
        files = sorted({repr(fault.file) for fault in faults})
        raise BadInput(
            f"{directory} is corrupt: {len(faults)} faults in"
            f" {shorten_list(files, 'files')}",
            next_step=(
                "Copy these files again from where they came from, or prepare the"
                " dataset again."
            ),
        )
    if not as_json:
        manifest = verified.manifest
        samples = manifest.train.samples + manifest.validation.samples
        print(
            f"{directory} is intact: {format_count(samples)} samples,"
            f" {verified.files} files, {format_bytes(verified.bytes_read)} read"
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
    if not as_json:
        print(_staged_text(staged, seconds))
        return
    answer = {
        **jsonable(staged),
        "break_even_epochs": staged.break_even_epochs,
        "seconds": round(seconds, 3),
    }
    print(answer_json(answer))


def _staged_text(staged: "Staged", seconds: float) -> str:
    """Return the speeds of a copy, and after how many epochs it has paid off.

    Args:
        staged: The copy; another process may have made it.
        seconds: Time that the command took.
    """
    next_line = f"next: export AUTOTUNE_DATA={shlex.quote(str(staged.directory))}"
    copied = staged.copied
    if copied is None:
        return (
            f"{staged.directory} is complete; another process copied it"
            f" ({format_seconds(seconds)})\n{next_line}"
        )
    speed = format_bytes_per_s(copied.size_bytes / copied.seconds)
    read_speed = format_bytes_per_s(copied.size_bytes / copied.read_s)
    write_speed = format_bytes_per_s(copied.size_bytes / copied.write_s)
    lines = [
        str(staged.directory),
        f"copied       {format_bytes(copied.size_bytes)} in"
        f" {format_seconds(copied.seconds)}, {speed}; one thread reads {read_speed}"
        f" and writes {write_speed}",
    ]
    if staged.source_s_per_sample is not None and staged.local_s_per_sample is not None:
        source_us = staged.source_s_per_sample * 1e6
        local_us = staged.local_s_per_sample * 1e6
        lines.append(
            f"one sample   {source_us:,.0f} us from the source, {local_us:,.0f} us from"
            " the copy (measured, one reader at random, cold)"
        )
        break_even = "never: the copy is not faster to read than the source"
        if staged.break_even_epochs is not None:
            break_even = f"after {staged.break_even_epochs:,.2f} epochs"
        lines.append(f"breaks even  {break_even}")
    return "\n".join([*lines, next_line])


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
    from autotune.corpus.tokenizer import padded_vocab_size

    tokenizer_path = None
    if tokenizer not in (None, "wordlevel", "bpe"):
        tokenizer_path = Path(str(tokenizer))
    if tokenizer_path is not None and vocab_size is not None:
        raise UsageError(
            f"--vocab-size cannot be used with --tokenizer {str(tokenizer_path)!r}",
            next_step="Remove one of them.",
        )
    ways_to_run = [scheduler, slurm_workers, job.slurm is not None]
    if sum(map(bool, ways_to_run)) > 1:
        raise UsageError(
            "--scheduler, --slurm-workers and --slurm exclude each other",
            next_step="Keep one of them.",
        )
    name = out.resolve().name
    job_request = JobRequest(
        name=f"prepare-{name}",
        purpose=f"Prepares the dataset {name}.",
        on_gpus=False,
        cpus=workers,
    )
    if job.submitted(context, job_request):
        return
    request = make_request(
        Request,
        context,
        sources=tuple(sources),
        options=SourceOptions(field=field, unit=text_unit),
        tokenizer=tokenizer_path or tokenizer,
        vocab_size=padded_vocab_size(vocab_size or DEFAULT_VOCAB_SIZE),
        limit=LengthLimit(max_tokens=max_tokens, long=long),
    )
    started_s = time.monotonic()
    signal.signal(signal.SIGTERM, _terminate)
    prepared = prepare_dataset(
        request,
        out,
        progress,
        tell=lambda line: print(f"info: {line}", file=sys.stderr),
        workers=Workers(count=workers, scheduler=scheduler, site=slurm_workers),
        strict=strict,
        overwrite=overwrite,
    )
    seconds = time.monotonic() - started_s
    _print_rejects(prepared, out)
    _print_warnings(prepared.manifest, validation_share)
    if job.as_json:
        print(answer_json(_prepared_answer(prepared, out, seconds)))
        return
    facts = _prepared_facts(prepared, seconds)
    print(facts_text(facts, "tokens per sample", prepared.manifest))
    print(f"\nnext: autotune tune --model bert-mini --data {shlex.quote(str(out))}")


def _print_rejects(prepared: "Prepared", out: Path) -> None:
    """Print the first inputs that were left out, and the number of the others."""
    for reject in prepared.first_rejects:
        # repr: a stranger's file name must not write control characters to a terminal.
        position = f"{reject.path!r}"
        if reject.where:
            position += f", {reject.where}"
        print(f"skipped {position}: {reject.reason}", file=sys.stderr)
    more = prepared.manifest.source.rejected - len(prepared.first_rejects)
    if more > 0:
        print(
            f"skipped {format_count(more)} more (listed in {out / _REJECTS})",
            file=sys.stderr,
        )


def _print_warnings(manifest: "Manifest", validation_share: float) -> None:
    """Print warnings of unknown tokens, and of what is likely wrong otherwise."""
    unknown_share = _unknown_share(manifest)
    if unknown_share > _MANY_UNKNOWN_SHARE:
        print(
            f"warning: the tokenizer does not know {format_share(unknown_share)} of all"
            " tokens; use --tokenizer bpe, or a larger --vocab-size",
            file=sys.stderr,
        )
    for warning in preparation_warnings(manifest, validation_share):
        print(f"warning: {warning}", file=sys.stderr)


def _prepared_answer(
    prepared: "Prepared", out: Path, seconds: float
) -> dict[str, object]:
    """Return the JSON answer about a dataset that was prepared."""
    manifest = prepared.manifest
    source = manifest.source
    return {
        **counts_of(out, manifest),
        "vocab_size": manifest.vocab_size,
        "used_vocab_size": manifest.used_vocab_size,
        **jsonable(source),
        "reduction": 1 - source.token_bytes / uncompressed_bytes(source),
        # Masks would take a byte per token.
        "mask_bytes_not_stored": _tokens(manifest),
        "padded_with_masks_bytes": _padded_bytes(manifest),
        "other_files": prepared.other_files,
        "rejects": out / _REJECTS,
        "seconds": round(seconds, 3),
    }


def _prepared_facts(prepared: "Prepared", seconds: float) -> dict[str, str]:
    """Return the facts about a dataset that was prepared, in words."""
    manifest = prepared.manifest
    source = manifest.source
    tokens = _tokens(manifest)
    return facts_of(manifest) | {
        "masks not stored": (
            f"would add {format_bytes(tokens)}; ids and masks padded to"
            f" {_PADDED_TOKENS} take {format_bytes(_padded_bytes(manifest))}"
        ),
        "samples": (
            f"{format_count(manifest.train.samples)} to train, "
            f"{format_count(manifest.validation.samples)} for validation"
        ),
        "tokens": f"{format_count(tokens)}, special tokens not counted",
        "duplicates dropped": format_count(source.duplicate_samples),
        "unknown tokens": f"{format_share(_unknown_share(manifest))} of all tokens",
        "skipped": (
            f"{format_count(source.rejected)} unusable samples ({_REJECTS}), "
            f"{format_count(prepared.other_files)} files of other kinds"
        ),
        "took": format_seconds(seconds),
    }


def _tokens(manifest: "Manifest") -> int:
    return manifest.train.tokens + manifest.validation.tokens


def _unknown_share(manifest: "Manifest") -> float:
    return manifest.source.unknown_tokens / _tokens(manifest)


def _padded_bytes(manifest: "Manifest") -> int:
    """Return the size of ids and masks, padded as in the paper baseline."""
    samples = manifest.train.samples + manifest.validation.samples
    id_bytes = 2 if manifest.dtype == "uint16" else 4
    mask_bytes = 1
    return samples * _PADDED_TOKENS * (id_bytes + mask_bytes)


def _terminate(*_: object) -> NoReturn:
    sys.stderr.write(INTERRUPTED)
    raise SystemExit(EXIT_TERMINATED)

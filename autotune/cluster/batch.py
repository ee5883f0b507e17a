"""Jobs as scripts: what is asked for, by a job and by a site, becomes one readable file for ``sbatch``.

Pure but for reading the template, which a site may replace by one of its own.
"""

import importlib.resources
import itertools
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autotune.cluster.site import SiteFile, job_variables
from autotune.errors import BadInput

DEFAULT_GRES = "gpu:{count}"
_MAX_TEMPLATE_BYTES = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What a job takes of a cluster."""

    nodes: int = 1
    gpus: int = 0
    """Of each node."""
    cpus: int = 1
    """Of each node's one task."""
    memory_mib: int | None = None
    """Of each node, where the site does not say otherwise."""
    time: str | None = None
    """Instead of the site's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureJob:
    """A measuring command as a job."""

    name: str
    purpose: str
    """One line, for whoever reads the script."""
    command: Sequence[str]
    """Nothing in it is expanded by the shell."""
    shape: Shape
    log: Path
    directory: Path | None = None
    """Where it runs; None leaves that to where it is submitted from."""
    with_srun: bool = True
    """One process on each node. Otherwise the command runs once, on the first, and reaches the others by itself."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Of the environment, beside the site's."""
    typed: bool = True
    """Whether somebody typed the command; otherwise another job leads to this one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainJob:
    """A training run as a job that is started again until it is done."""

    name: str
    model: str
    run: Path
    script: Path
    """Where the script will lie."""
    shape: Shape
    ranks: int
    """On each node."""
    autotune: Sequence[str]
    """How this program is called there, without the site's prefix."""
    torchrun: Sequence[str]
    """One node's command up to its own options; words with a ``$`` are filled in there."""
    trainer: Sequence[str]
    """What each rank runs."""
    preflight: Sequence[str]
    """Arguments of the preflight."""
    term_lead_s: int
    chain: int = 1
    """Jobs that follow one another."""
    approved_sha256: str | None = None
    """Of the profile that somebody approved, and from no other is trained; None where nobody has to."""
    directory: Path | None = None
    """Where it runs; None leaves that to where it is submitted from."""

    @property
    def log(self) -> Path:
        """Of the job; of its nodes beside it."""
        return self.run / "logs" / "%j.log"


def measure_script(job: MeasureJob, site: SiteFile, template: str) -> str:
    """The script of a measuring job. A node's loss ends it: measurements are gone on with by hand, elsewhere."""
    options = _options(job.name, job.shape, site, job.directory) | {"output": str(job.log), "no-requeue": ""}
    return render(
        template,
        {
            "purpose": job.purpose,
            "nodes": job.shape.nodes,
            "cpus": job.shape.cpus,
            "directives": _directives(options, site),
            "prologue": site.prologue,
            "variables": job_variables(site) | dict(job.variables),
            "command": _prefixed(site, shlex.join(job.command)),
            "typed": job.typed,
            "with_srun": job.with_srun,
            "prefix": site.command_prefix,
            "place": str(job.log.parent),
        },
    )


def train_script(job: TrainJob, site: SiteFile, template: str) -> str:
    """The script of a training job."""
    requeue = site.slurm.requeue and job.chain == 1
    options = _options(job.name, job.shape, site, job.directory) | {
        "signal": f"TERM@{job.term_lead_s}",
        "requeue" if requeue else "no-requeue": "",
        "dependency": "singleton" if job.chain > 1 else None,
        "open-mode": "append",
        "output": str(job.log),
    }
    interface = site.network.interface
    return render(
        template,
        {
            "model": job.model,
            "run": str(job.run),
            "script": str(job.script),
            "nodes": job.shape.nodes,
            "ranks": job.ranks,
            "cpus": job.shape.cpus,
            "chain": job.chain,
            "approved": job.approved_sha256,
            "requeue": requeue,
            "directives": _directives(options, site),
            "prologue": site.prologue,
            "variables": job_variables(site),
            "autotune": _prefixed(site, shlex.join(job.autotune)),
            "preflight": _lines(site.command_prefix, job.autotune, job.preflight),
            "torchrun": _lines(site.command_prefix, job.torchrun, filled_in=True),
            "trainer": _lines("", job.trainer),
            "interface_option": "" if interface is None else f" --interface {shlex.quote(interface)}",
        },
    )


def read_template(kind: str, site: SiteFile, site_path: Path | None) -> str:
    """The text of a template: the site's own, relative to the site file, else this project's.

    Args:
        kind: ``measure`` or ``train``.
        site: The cluster.
        site_path: Where the site file lies.

    Raises:
        BadInput: If the site's own cannot be read.
    """
    own: str | None = getattr(site.templates, kind)
    if own is None:
        return (importlib.resources.files("autotune.cluster") / "templates" / f"{kind}.sbatch").read_text("utf-8")
    path = (site_path.parent if site_path else Path()) / own
    try:
        if path.stat().st_size > _MAX_TEMPLATE_BYTES:
            raise BadInput(f"{path} is too large for a template", next_step="Name a text file of less than 1 MiB.")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(
            f"cannot read the template {path}: {getattr(error, 'strerror', None) or error}",
            next_step=f"Correct templates.{kind} in the site file.",
        ) from error


def render(template: str, values: Mapping[str, Any]) -> str:
    """Fill a template; a name that is not among the values is an error. Text goes in as it is, or by ``| quote``.

    Raises:
        BadInput: If the template is wrong.
    """
    import jinja2
    import jinja2.sandbox

    # Sandboxed: a template fills in values, whoever wrote it, and runs nothing here.
    environment = jinja2.sandbox.SandboxedEnvironment(
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    environment.filters["quote"] = lambda value: shlex.quote(str(value))
    try:
        return environment.from_string(template).render(values)
    except jinja2.TemplateError as error:
        line = f", line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
        raise BadInput(
            f"the job's template cannot be filled in{line}: {error}",
            next_step=f"Correct it; what it may use: {', '.join(sorted(values))}.",
        ) from error


def _options(name: str, shape: Shape, site: SiteFile, directory: Path | None) -> dict[str, str | None]:
    """Long options of ``sbatch``; None leaves one out, an empty text gives it without a value."""
    slurm = site.slurm
    memory = {"mem": slurm.mem} if slurm.mem is not None else {"mem-per-cpu": f"{slurm.memory_mib_per_cpu}M"}
    if slurm.mem is None and shape.memory_mib is not None:
        memory = {"mem": f"{shape.memory_mib}M"}
    return {
        "job-name": name,
        "account": slurm.account,
        "partition": slurm.partition,
        "constraint": slurm.constraint,
        "exclude": slurm.exclude,
        "nodes": str(shape.nodes),
        "ntasks-per-node": "1",
        "distribution": slurm.distribution,
        "gres": (slurm.gres or DEFAULT_GRES).replace("{count}", str(shape.gpus)) if shape.gpus else None,
        "cpus-per-task": str(shape.cpus),
        **memory,
        "time": shape.time or slurm.time,
        "chdir": None if directory is None else str(directory),
    }


def _directives(options: Mapping[str, str | None], site: SiteFile) -> list[str]:
    for option, value in options.items():
        if value is not None and not value.isprintable():
            raise BadInput(f"--{option} of a job cannot be {value!r}", next_step="Use a name of printable characters.")
    said = [
        f"--{option}={shlex.quote(value)}" if value else f"--{option}"
        for option, value in options.items()
        if value is not None
    ]
    return said + site.slurm.extra


def _prefixed(site: SiteFile, command: str) -> str:
    return f"{site.command_prefix} {command}".strip()


def _lines(prefix: str, *commands: Sequence[str], filled_in: bool = False) -> list[str]:
    """A command, an option with its value on each line.

    Args:
        prefix: Comes first, as it is.
        commands: Words; all of them together are one command.
        filled_in: Whether words with a ``$`` are for the shell to fill in.
    """
    lines: list[list[str]] = [[prefix] if prefix else []]
    for word in itertools.chain(*commands):
        if word.startswith("--") and lines[0]:
            lines.append([])
        if filled_in and "$" in word:
            lines[-1].append(f'"{word}"')
        else:
            lines[-1].append(shlex.quote(word))
    return [" ".join(line) for line in lines]

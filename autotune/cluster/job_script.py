"""Jobs as scripts.

A job's request and a site's settings become one readable file for ``sbatch``.
Everything here is pure except for reading the template, which a site may replace.
"""

import importlib.resources
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.cluster.site_file import SiteFile, job_variables
from autotune.errors import BadInput

_MAX_TEMPLATE_BYTES = 2**20
"""Largest template that is read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Resources of a job."""

    nodes: int = 1
    gpus: int = 0
    cpus: int = 1
    """CPU cores of each node's single task."""
    memory_mib: int | None = None
    """Memory per node, unless the site sets it."""
    time: str | None = None
    """Time limit, instead of the site's."""


def cpus_of(site: SiteFile, ranks: int, default: int) -> int:
    """Return the CPU cores of a node's task with this many ranks.

    They are the site's setting, or else ``default``.
    """
    if site.slurm.cpus_per_rank is not None:
        return site.slurm.cpus_per_rank * ranks
    if site.slurm.cpus_per_task > 1:
        return site.slurm.cpus_per_task
    return default


def measure_script(
    site: SiteFile,
    template: str,
    *,
    name: str,
    purpose: str,
    command: Sequence[str],
    shape: Shape,
    log: Path,
    directory: Path | None = None,
    with_srun: bool = True,
    variables: Mapping[str, str] | None = None,
    typed: bool = True,
) -> str:
    """Return the script of a measuring job, which ends if a node fails.

    The shell expands no word of ``command``.

    Args:
        site: Settings of the site.
        template: Text of the template.
        name: Name of the job.
        purpose: Comment at the top of the script.
        command: Command that measures.
        shape: Resources of the job.
        log: File for the job's output.
        directory: Working directory; None for the one of submission.
        with_srun: True to start one process per node. Otherwise the command runs on the
            first node and starts the others.
        variables: Environment variables in addition to the site's.
        typed: False if the job follows another job.
    """
    options = {"output": str(log), "no-requeue": ""}
    values = shared_values(name, shape, site, directory, options) | {
        "purpose": purpose,
        "typed": typed,
        "with_srun": with_srun,
        "place": str(log.parent),
        "variables": job_variables(site) | dict(variables or {}),
        "prefix": site.command_prefix,
        "command": f"{site.command_prefix} {shlex.join(command)}".strip(),
    }
    return render(template, values)


def read_template(kind: str, site: SiteFile, site_path: Path | None) -> str:
    """Return a template: the site's, relative to its file, or the built-in one.

    Raises:
        BadInput: If the template cannot be read.
    """
    site_template: str | None = getattr(site.templates, kind)
    if site_template is None:
        return _built_in_template(f"{kind}.sbatch")
    directory = Path() if site_path is None else site_path.parent
    path = directory / site_template
    next_step = f"Correct templates.{kind} in the site file."
    try:
        if path.stat().st_size > _MAX_TEMPLATE_BYTES:
            raise BadInput(f"template {path} exceeds 1 MiB", next_step=next_step)
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise BadInput(
            f"cannot read the template {path}: {reason}", next_step=next_step
        ) from error


def _built_in_template(name: str) -> str:
    templates = importlib.resources.files("autotune.cluster") / "templates"
    return (templates / name).read_text("utf-8")


def render(template: str, values: Mapping[str, Any]) -> str:
    """Fill in a template.

    Text is inserted verbatim, or shell-quoted with ``| quote``. Any template may
    include ``head.sbatch``, which has the directives, the prologue, the variables and
    the job's end.

    Raises:
        BadInput: If the template is invalid, or has an unknown name.
    """
    import jinja2
    import jinja2.sandbox

    # Sandboxed, so that no template can run code here.
    environment = jinja2.sandbox.SandboxedEnvironment(
        loader=jinja2.DictLoader({"head.sbatch": _built_in_template("head.sbatch")}),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["quote"] = lambda value: shlex.quote(str(value))
    try:
        return environment.from_string(template).render(values)
    except jinja2.TemplateError as error:
        position = ""
        if isinstance(error, jinja2.TemplateSyntaxError):
            position = f", line {error.lineno}"
        variables = ", ".join(sorted(values))
        raise BadInput(
            f"cannot render the job template{position}: {error}",
            next_step=f"Correct the template; available variables: {variables}.",
        ) from error


def shared_values(
    name: str,
    shape: Shape,
    site: SiteFile,
    directory: Path | None,
    more: Mapping[str, str | None],
) -> dict[str, Any]:
    """Return the values that both templates fill in.

    Args:
        name: Name of the job.
        shape: Its resources.
        site: Settings of the site.
        directory: Working directory; None for the one of submission.
        more: Further long options of ``sbatch``. None leaves one out, and an empty text
            gives it without a value.

    Raises:
        BadInput: If an option has control characters.
    """
    slurm = site.slurm
    memory = slurm.mem
    if memory is None and shape.memory_mib is not None:
        memory = f"{shape.memory_mib}M"
    gres = None
    if shape.gpus:
        gres = (slurm.gres or "gpu:{count}").replace("{count}", str(shape.gpus))
    options: dict[str, str | None] = {
        "job-name": name,
        "account": slurm.account,
        "partition": slurm.partition,
        "constraint": slurm.constraint,
        "exclude": slurm.exclude,
        "nodes": str(shape.nodes),
        "ntasks-per-node": "1",
        "distribution": slurm.distribution,
        "gres": gres,
        "cpus-per-task": str(shape.cpus),
        "mem": memory,
        "mem-per-cpu": f"{slurm.memory_mib_per_cpu}M" if memory is None else None,
        "time": shape.time or slurm.time,
        "chdir": None if directory is None else str(directory),
        **more,
    }
    directives = []
    for option, value in options.items():
        if value is None:
            continue
        if not value.isprintable():
            raise BadInput(
                f"job option --{option}={value!r} is invalid",
                next_step="Use printable characters only.",
            )
        directives.append(
            f"--{option}={shlex.quote(value)}" if value else f"--{option}"
        )
    return {
        "nodes": shape.nodes,
        "cpus": shape.cpus,
        "directives": directives + slurm.extra,
        "prologue": site.prologue,
        "variables": job_variables(site),
    }


def lines_of(
    prefix: str, words: Sequence[str], *, filled_in: bool = False
) -> list[str]:
    """Return a prefixed command, one option with its value per line.

    With ``filled_in``, a shell expands words that begin with ``$``.
    """
    first_line = [prefix] if prefix else []
    lines: list[list[str]] = [first_line]
    for word in words:
        if word.startswith("--") and first_line:
            lines.append([])
        is_expanded = filled_in and "$" in word
        lines[-1].append(f'"{word}"' if is_expanded else shlex.quote(word))
    return [" ".join(line) for line in lines]

"""A machine on which trials of your own code run.

Each trial is a fresh process, forked from one that has imported your code.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.base.log import LOG
from autotune.errors import BadInput, InternalError
from autotune.evidence.profile import Fingerprint
from autotune.machine.measured_device import DeviceChoice, MeasuredDevice
from autotune.subjects.jobs.load import import_command
from autotune.subjects.subject import Call, Subject
from autotune.trials.fingerprint import fingerprint
from autotune.trials.fork_server import ForkServerMachine
from autotune.trials.messages import Preload
from autotune.trials.runner import TrialRunner
from autotune.trials.session import open_bench
from autotune.trials.sweep_request import SweepRequest
from autotune.trials.trial_bench import Bench
from autotune.trials.values import JOB_MODULES, JobName, Trial, TrialRequest
from trainer.formats.canonical_json import canonical_sha256


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeBench(Bench):
    """A machine that is ready to run trials of your code."""

    subject: Subject
    sources: Mapping[str, str]
    """SHA-256 of your source by role, ``step`` and ``loader``: of all modules that
    importing the function imported, outside of the installed packages."""
    directory: Path
    """Directory from which modules are imported; the working directory of all
    trials."""
    loader_parameters: frozenset[str] = frozenset()
    """Names of the parameters of the function that builds the loader."""
    step_parameters: frozenset[str] | None = None
    """Names of the parameters of your step's function; None if it takes any."""
    model: str | None = None
    """``build_model`` in the module of the step, if it has one."""
    forked: bool = True
    """True if trials are forked from a process that has imported your code."""
    in_this_process: bool = False
    """True if trials run one after the other in this process, as closures do."""

    @property
    def fingerprint(self) -> Fingerprint:
        """Fingerprint of this site, with the subject in the place of a model."""
        return fingerprint(
            self.site,
            measured_sha256(self.subject, self.sources),
            None,
            self.server.versions.get("cuda"),
        )

    @contextlib.contextmanager
    def phase(
        self, name: str, profile: Path, request: SweepRequest, trials: int
    ) -> Iterator[TrialRunner]:
        """Run a phase of tuning a profile; arguments are as for ``Bench.tuning``."""
        with self.tuning(
            f"{name} {self.subject.words}", profile, self.fingerprint, request, trials
        ) as runner:
            yield runner

    def trial(self, asked: TrialRequest, timeout_s: float, **local: object) -> Trial:
        """Return the trial of a request, with inputs that depend on this machine."""
        return asked.trial(timeout_s=timeout_s, **self.local_inputs(timeout_s), **local)

    def local_inputs(self, timeout_s: float) -> dict[str, Any]:
        """Return the inputs of each trial that depend on this machine."""
        used = self.site.used_bytes_by_gpu[0] if self.site.used_bytes_by_gpu else None
        return {
            "directory": str(self.directory.resolve()),
            "limit_s": timeout_s,
            "device_used_before_bytes": used,
        }


@contextlib.contextmanager
def open_own(
    choice: DeviceChoice,
    subject: Subject,
    timeout_s: float,
    directory: Path = Path(),
    *,
    shared: bool = False,
    imports_in_trials: bool = False,
    check: Callable[[MeasuredDevice], None] = lambda site: None,
) -> Iterator[CodeBench]:
    """Choose a device, and start the process that trials are forked from.

    That process imports your code. If it cannot be forked after that, because importing
    it started threads or CUDA, every trial imports it again; so it does with
    ``imports_in_trials``, so that trials of other code can run beside those of yours.
    ``shared`` and ``check`` are as for ``open_bench``.

    Raises:
        BadInput: If your code cannot be imported.
    """
    server = ForkServerMachine(
        preload=_preload(subject, timeout_s, directory), start_timeout_s=timeout_s
    )
    modules = " and ".join(
        dict.fromkeys(name.partition(":")[0] for name in subject.code().values())
    )
    with contextlib.ExitStack() as stack:
        opened = open_bench(
            choice,
            directory,
            lambda _: server,
            check=check,
            shared=shared,
            loading=f"torch and {modules}",
        )
        try:
            bench = stack.enter_context(opened)
        except InternalError as error:  # of the server, which only imports
            raise BadInput(
                f"importing {modules} ended its process, or took longer than"
                f" {timeout_s:g} s: {error.message}",
                next_step=(
                    "Check that it can be imported:"
                    f" {import_command(modules.partition(' ')[0])}"
                ),
            ) from error
        told = server.versions["preloaded"]
        if told["error"] is not None:
            raise BadInput(
                told["error"]["message"], next_step=told["error"]["next_step"]
            )
        check_arguments(subject, told["parameters"])
        if told["unsafe"] is not None:
            LOG.info(
                "every trial imports %s again, because %s", modules, told["unsafe"]
            )
        if told["unsafe"] is not None or imports_in_trials:
            server.restart(_preload(subject, timeout_s, directory, resolved=False))
        yield CodeBench(
            site=bench.site,
            server=bench.server,
            machine=bench.machine,
            display=bench.display,
            load_average_1min=bench.load_average_1min,
            directory=directory,
            loader_parameters=frozenset(told["loader_parameters"]),
            step_parameters=_names(told["parameters"].get("step")),
            model=told["model"],
            forked=told["unsafe"] is None and not imports_in_trials,
            subject=subject,
            sources=told["source_sha256"],
        )


def _names(parameters: Mapping[str, bool] | None) -> frozenset[str] | None:
    """Return the names of parameters; None if they are unknown."""
    return None if parameters is None else frozenset(parameters)


def measured_sha256(subject: Subject, sources: Mapping[str, str]) -> str:
    """Return a hash of the measured code: the step, its arguments and its source.

    It is that of the loader if there is no step.

    Args:
        subject: The subject.
        sources: SHA-256 of your source, by role.
    """
    role, call = "step", subject.step({})
    if call is None:
        role, call = "loader", subject.loader({})
    assert call is not None, "a subject has a step or a loader"
    return canonical_sha256(
        {
            "kind": subject.kind,
            "function": call.function,
            "arguments": dict(call.arguments),
            "size": subject.size.name,
            "source": sources.get(role),
        }
    )


def check_arguments(
    subject: Subject, parameters: Mapping[str, Mapping[str, bool] | None]
) -> None:
    """Check the given arguments against each function's ``parameters``.

    Functions that another one wraps are not checked: it decides what they get.

    Raises:
        BadInput: If a function requires another argument, or no function takes a given
            one.
    """
    calls = {"step": subject.step({}), "loader": subject.loader({})}
    direct = {
        role: call
        for role, call in calls.items()
        if call is not None and call.function == subject.code().get(role)
    }
    given_names: set[str] = set()
    for role, call in direct.items():
        if role not in parameters:
            continue
        known = parameters[role]
        searched = subject.size.name if role == "step" else "num_workers"
        given = {*call.arguments, searched, "device"}
        if calls["step"] is not None:
            # The loader gets the size that the probe chose.
            given.add(subject.size.name)
        given_names |= set(call.arguments)
        is_searched = role == "loader" or calls["loader"] is None
        missing = [
            name
            for name, required in (known or {}).items()
            if required and name not in given
        ]
        lacks_size = is_searched and known is not None and searched not in known
        if missing or lacks_size:
            raise _wrong_arguments(role, call, known or {}, given, missing)
    known_names = [parameters.get(role) for role in direct]
    if not known_names or None in known_names:
        return
    taken = {name for known in known_names for name in known or ()}
    unused = given_names - taken
    if unused and len(direct) == len(parameters):
        raise BadInput(
            f"none of {', '.join(subject.code().values())} takes"
            f" {', '.join(sorted(unused))}",
            next_step=f"They take: {', '.join(sorted(taken))}.",
        )


def _wrong_arguments(
    role: str,
    call: Call,
    known: Mapping[str, bool],
    given: set[str],
    missing: Sequence[str],
) -> BadInput:
    """Return the error about a function that is called with other arguments."""
    named = "call its first argument num_workers"
    searched = "num_workers"
    if role == "step":
        named = "name the size with --along NAME"
        (searched, *_) = given - {*call.arguments, "device"} or {"the size"}
    lacks = f"it does not take {searched}"
    if missing:
        lacks = f"it requires {', '.join(missing)}"
    return BadInput(
        f"{call.function}({', '.join(known)}) is called with"
        f" {', '.join(sorted(given))}, but {lacks}",
        next_step=(
            f"Arguments are given by name: {named}, others with --set NAME=VALUE; or"
            " give them defaults."
        ),
    )


def _jobs_of(code: Subject) -> list[str]:
    """Return the modules of the jobs that call functions of the code."""
    jobs: list[JobName] = []
    if code.step({}) is not None:
        jobs += ["step", "short_training"]
    if code.loader({}) is not None:
        jobs.append("window")
    return [JOB_MODULES[job] for job in jobs]


def _adapter_modules(code: Subject) -> list[str]:
    """Return the modules of functions that wrap yours, to be imported before yours."""
    calls = (code.step({}), code.loader({}))
    functions = {call.function for call in calls if call is not None}
    return sorted(
        function.partition(":")[0] for function in functions - set(code.code().values())
    )


def _preload(
    code: Subject, timeout_s: float, directory: Path, *, resolved: bool = True
) -> Preload:
    loader = code.loader({})
    options: dict[str, Any] = {
        "functions": code.code(),
        "loader_builder": None if loader is None else loader.function,
        "jobs": [*_jobs_of(code), *_adapter_modules(code)],
        "directory": str(directory.resolve()),
        "resolved": resolved,
        "timeout_s": timeout_s,
    }
    return Preload(
        module="autotune.subjects.jobs.load", function="preload", options=options
    )

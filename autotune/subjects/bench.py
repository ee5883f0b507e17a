"""A machine on which trials of a subject run.

Each trial is a fresh process, forked from one that has imported your code, if the
subject has any.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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
from autotune.trials.opened_bench import open_bench
from autotune.trials.runner import TrialRunner
from autotune.trials.sweep_request import SweepRequest
from autotune.trials.trial_bench import Bench
from autotune.trials.trial_machine import START_TIMEOUT_S, StartedMachine
from autotune.trials.values import JOB_MODULES, JobName, Trial, TrialRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class SubjectBench(Bench):
    """A machine that is ready to run trials of a subject.

    What was learned of your code when it was imported has its default if the subject
    has no code of yours.
    """

    subject: Subject
    sources: Mapping[str, str] = field(default_factory=dict)
    """SHA-256 of your source by role, ``step`` and ``loader``: of all modules that
    importing the function imported, outside of the installed packages."""
    directory: Path | None = None
    """Directory from which modules of yours are imported; the working directory of all
    trials. None if there are none."""
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
        """Fingerprint of this site, with the subject."""
        identity = self.subject.identity(self.sources)
        return fingerprint(
            self.site,
            self.server.versions.get("cuda"),
            model_sha256=identity.model_sha256,
            dataset_hash=identity.dataset_hash,
        )

    @property
    def import_directory(self) -> str | None:
        """``directory`` as an input of trials."""
        return None if self.directory is None else str(self.directory.resolve())

    @contextlib.contextmanager
    def phase(
        self, name: str, profile: Path, request: SweepRequest, trials: int
    ) -> Iterator[TrialRunner]:
        """Run a phase of tuning a profile; arguments are as for ``Bench.tuning``."""
        with self.tuning(
            f"{name} {self.subject.words}", profile, self.fingerprint, request, trials
        ) as runner:
            yield runner

    def source_sha256(self, *roles: str) -> str:
        """Return the hash of the source of the first of these roles that has one.

        It is empty if the subject has no code of yours.
        """
        return next((self.sources[role] for role in roles if role in self.sources), "")

    def trial(self, asked: TrialRequest, timeout_s: float, **local: object) -> Trial:
        """Return the trial of a request, with inputs that depend on this machine."""
        return asked.trial(timeout_s=timeout_s, **self.local_inputs(timeout_s), **local)

    def local_inputs(self, timeout_s: float) -> dict[str, Any]:
        """Return the inputs of each trial that depend on this machine."""
        used = self.site.used_bytes_by_gpu[0] if self.site.used_bytes_by_gpu else None
        return {
            "directory": self.import_directory,
            "limit_s": timeout_s,
            "device_used_before_bytes": used,
        }


def with_subject(bench: Bench, subject: Subject, **code: Any) -> SubjectBench:
    """Return a bench for trials of a subject.

    Args:
        bench: The machine.
        subject: The subject.
        code: Fields of ``SubjectBench`` that describe your code.
    """
    return SubjectBench(
        site=bench.site,
        server=bench.server,
        machine=bench.machine,
        display=bench.display,
        load_average_1min=bench.load_average_1min,
        subject=subject,
        **code,
    )


@contextlib.contextmanager
def open_subject(
    choice: DeviceChoice,
    subject: Subject,
    directory: Path = Path(),
    *,
    import_timeout_s: float = START_TIMEOUT_S,
    without_gpu: str | None = None,
    shared: bool = False,
    imports_in_trials: bool = False,
    check: Callable[[MeasuredDevice], None] = lambda site: None,
) -> Iterator[SubjectBench]:
    """Choose a device, and start the process that trials are forked from.

    That process imports your code, if the subject has any. If it cannot be forked after
    that, because importing it started threads or CUDA, every trial imports it again.

    Args:
        choice: Device as you chose it.
        subject: The subject; a bench for others of the same code is
            ``replace(bench, subject=other)``.
        directory: Directory of the dataset, or of your modules.
        import_timeout_s: Time limit of importing your code.
        without_gpu: As for ``open_bench``.
        shared: As for ``open_bench``.
        imports_in_trials: True to import your code in each trial, so that trials of
            other code can run beside them.
        check: As for ``open_bench``.

    Raises:
        BadInput: If your code cannot be imported.
        MachineLacks: As ``open_bench`` does.
    """
    modules = " and ".join(
        dict.fromkeys(name.partition(":")[0] for name in subject.code().values())
    )

    def make_server(site: MeasuredDevice) -> StartedMachine:
        if not modules:
            return ForkServerMachine(device=site.device)
        preload = _preload(subject, import_timeout_s, directory)
        return ForkServerMachine(preload=preload, start_timeout_s=import_timeout_s)

    with contextlib.ExitStack() as stack:
        opened = open_bench(
            choice,
            directory,
            make_server,
            without_gpu=without_gpu,
            check=check,
            shared=shared,
            loading=f"torch and {modules}" if modules else "torch",
        )
        try:
            bench = stack.enter_context(opened)
        except InternalError as error:  # of the server, which only imports
            if not modules:
                raise
            raise BadInput(
                f"importing {modules} ended its process, or took longer than"
                f" {import_timeout_s:g} s: {error.message}",
                next_step=(
                    "Check that it can be imported:"
                    f" {import_command(modules.partition(' ')[0])}"
                ),
            ) from error
        if not modules:
            yield with_subject(bench, subject)
            return
        told = bench.server.versions["preloaded"]
        if told["error"] is not None:
            raise BadInput(
                told["error"]["message"], next_step=told["error"]["next_step"]
            )
        check_arguments(subject, told["parameters"])
        if told["unsafe"] is not None:
            LOG.info(
                "every trial imports %s again, because %s", modules, told["unsafe"]
            )
        forked = told["unsafe"] is None and not imports_in_trials
        if not forked:
            assert isinstance(bench.server, ForkServerMachine), "made above"
            bench.server.restart(
                _preload(subject, import_timeout_s, directory, resolved=False)
            )
        yield with_subject(
            bench,
            subject,
            sources=told["source_sha256"],
            directory=directory,
            loader_parameters=frozenset(told["loader_parameters"]),
            step_parameters=_names(told["parameters"].get("step")),
            model=told["model"],
            forked=forked,
        )


def _names(parameters: Mapping[str, bool] | None) -> frozenset[str] | None:
    """Return the names of parameters; None if they are unknown."""
    return None if parameters is None else frozenset(parameters)


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

"""Import of your code in a child process.

It has the functions of a subject, and a hash of your modules. Your code is untrusted
only in that it may be wrong: it may print, hang, exit, start threads or use the GPU.
All of it runs in children with a time limit.
"""

import faulthandler
import hashlib
import importlib
import importlib.util
import inspect
import os
import runpy
import sys
import sysconfig
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from autotune.subjects.own.subject import IN_TRIAL, WRAPPED
from trainer.formats.errors import BadConfig

SCRIPT = "__mp_main__"
"""Name under which a script is run to import from it, as ``multiprocessing`` does."""
_INSTALLED = [
    sysconfig.get_paths()[name]
    for name in ("stdlib", "platstdlib", "purelib", "platlib")
]
_STACK_SHARE = 0.9
"""Share of a time limit after which a process writes its stack, so that a hang can be
located."""
_THREAD_ENDS_S = 0.02
_TOOL = "autotune"
"""Package of this project that yours of the same name cannot replace."""
_TRAINER = "trainer"
"""Package of this project that makes way for yours of the same name."""
_PROJECT = Path(__file__).parents[3]
"""Directory of this project's packages."""
_left_in: dict[str, str] = {}
"""Working directories that imported code chose, by the one it was imported in."""
_MAX_FILE_BYTES = 16 * 2**20


def preload(
    functions: Mapping[str, str],
    jobs: Sequence[str],
    directory: str,
    timeout_s: float,
    *,
    loader_builder: str | None = None,
    resolved: bool = True,
) -> dict[str, Any]:
    """Import the modules of some functions in the process that trials are forked from.

    Args:
        functions: Names by role, as ``Subject.code``.
        jobs: Modules of the jobs that will run.
        directory: Working directory, from which modules are imported.
        timeout_s: Time limit of the import; shortly before it, the stack is written, so
            that a hang can be located.
        loader_builder: Function that builds the loader: yours, or one that wraps it.
        resolved: False only loads torch: the modules cannot be imported before a fork.

    Returns:
        ``source_sha256`` by role; ``parameters`` by role, as
        ``parameters_of``; ``model``, the step's ``build_model`` or None.
        ``loader_parameters`` are the names of the parameters of ``loader_builder``.
        ``unsafe`` says why trials cannot be forked from this process, or is None.
        ``error`` has ``message`` and ``next_step``, or is None.
    """
    import torch

    importlib.import_module("torch._dynamo")  # which torch's optimizers import
    for job in jobs:
        importlib.import_module(job)
    enter(directory)
    if not resolved:
        return {}
    write_stack_after(timeout_s)
    told: dict[str, Any] = {
        "error": None,
        "unsafe": None,
        "source_sha256": {},
        "model": None,
        "parameters": {},
        "loader_parameters": [],
    }
    try:
        # The step first: its hash must not depend on the loader.
        for role, name in sorted(functions.items(), reverse=True):
            told["parameters"][role] = parameters_of(resolve(name, directory))
            told["source_sha256"][role] = sources_sha256(Path(directory))
            module = name.partition(":")[0]
            if role == "step" and hasattr(_import(module, directory), "build_model"):
                told["model"] = f"{module}:build_model"
        if loader_builder is not None:
            names = named_parameters(resolve(loader_builder, directory))
            told["loader_parameters"] = sorted(names)
    except BadConfig as error:
        return told | {
            "error": {"message": error.message, "next_step": error.next_step}
        }
    finally:
        faulthandler.cancel_dump_traceback_later()
        _left_in[directory] = str(Path.cwd())
        time.sleep(_THREAD_ENDS_S)
    if torch.cuda.is_initialized():
        told["unsafe"] = "importing it initialises CUDA"
    elif (more := _threads() - 1) > 0:
        told["unsafe"] = f"importing it starts threads ({more})"
    return told


def _threads() -> int:
    """Return the number of threads that a fork breaks.

    They are counted after a fork, as OpenBLAS ends its pool before one and Arrow starts
    its threads again.
    """
    if not (child := os.fork()):
        os._exit(0)
    os.waitpid(child, 0)
    names = [(task / "comm").read_text() for task in Path("/proc/self/task").iterdir()]
    return sum(not name.startswith("jemalloc_bg") for name in names)


def write_stack_after(timeout_s: float) -> None:
    """Let this process write its stack shortly before a time limit."""
    faulthandler.dump_traceback_later(_STACK_SHARE * timeout_s, exit=False)


def enter(directory: str) -> None:
    """Make a directory the working directory, and import from it first.

    Code of yours that was imported in it, and chose another working directory, keeps
    that.
    """
    os.environ[IN_TRIAL] = "1"
    _make_way(directory)
    os.chdir(_left_in.get(directory, directory))
    if sys.path[:1] != [directory]:
        sys.path.insert(0, directory)


def _make_way(directory: str) -> None:
    """Forget this project's package ``trainer`` if your directory has one of that name.

    Your imports then find yours. Everything that trials need of ours has been imported
    by now, and keeps working.
    """
    file = getattr(sys.modules.get(_TRAINER), "__file__", None)
    is_ours = file is not None and Path(file).parents[1] == _PROJECT
    if not is_ours or _TRAINER not in _names_in(directory):
        return
    if Path(directory).resolve() == _PROJECT:
        return
    for module in [*sys.modules]:
        if module == _TRAINER or module.startswith(f"{_TRAINER}."):
            del sys.modules[module]


def resolve(name: str, directory: str) -> Callable[..., Any]:
    """Return the function called ``module:function`` or ``path/of/script.py:function``.

    Raises:
        BadConfig: If the module cannot be imported, or the function is not in it or not
            callable.
    """
    module_name, _, path = name.partition(":")
    try:
        module = _import(module_name, directory)
    except BadConfig:
        raise
    except (Exception, SystemExit) as error:
        what = f"cannot import {module_name!r}: {last_lines(error)}"
        step = f"Fix it, and check: {import_command(module_name)}"
        if isinstance(error, ImportError) and _TOOL in _names_in(directory):
            step = (
                f"Rename your {_TOOL!r} in {directory}: this tool has a package of"
                " that name."
            )
        if (
            isinstance(error, ModuleNotFoundError)
            and error.name == module_name.partition(".")[0]
        ):
            what = (
                f"module {module_name!r} not found in {directory} or among the"
                " installed packages"
            )
            step = (
                "Run the command in the directory of the module, or add that directory"
                " to PYTHONPATH."
            )
        raise BadConfig(what, next_step=step) from error
    found: Any = module
    for part in path.split("."):
        if not hasattr(found, part):
            known = sorted(
                one for one in getattr(found, "__dict__", ()) if not one.startswith("_")
            )
            near = ", ".join(
                [one for one in known if callable(getattr(found, one, None))][:8]
            )
            what = (
                f"{module_name!r} ({getattr(module, '__file__', None) or 'built in'})"
                f" has no function {path!r}"
            )
            raise BadConfig(
                what, next_step=f"Name one of its functions: {near or 'it has none'}."
            )
        found = getattr(found, part)
    found = getattr(found, WRAPPED, found)
    if not callable(found):
        what = f"{name} is not callable: it is a {type(found).__name__}"
        raise BadConfig(
            what,
            next_step="Name a function, such as build_step(micro_batch_size, device).",
        )
    function: Callable[..., Any] = found
    return function


def import_command(module: str) -> str:
    """Return a command that imports a module, or runs a script, alone."""
    return (
        f"python {module}" if module.endswith(".py") else f"python -c 'import {module}'"
    )


def _names_in(directory: str) -> set[str]:
    return {
        one.stem
        for one in Path(directory).iterdir()
        if one.suffix == ".py" or one.is_dir()
    }


def _import(name: str, directory: str) -> ModuleType:
    sys.argv = [name]
    if not name.endswith(".py"):
        # Functions of this project are in packages below it.
        if name == _TOOL and name in _names_in(directory):
            raise BadConfig(
                f"this tool has a package called {name!r}, too",
                next_step=f"Rename your {name!r}.",
            )
        return importlib.import_module(name)
    if (
        SCRIPT not in sys.modules
        or getattr(sys.modules[SCRIPT], "__file__", None) != name
    ):
        module = ModuleType(SCRIPT)
        sys.path.insert(1, str(Path(directory, name).parent))
        # So that pickles and dataclasses of the script find it.
        sys.modules[SCRIPT] = module
        module.__dict__.update(
            runpy.run_path(str(Path(directory, name)), run_name=SCRIPT)
        )
        module.__file__ = name
    return sys.modules[SCRIPT]


def last_lines(error: BaseException) -> str:
    """Return an error with the last place in your code that raised it."""
    frames = [
        one
        for one in traceback.extract_tb(error.__traceback__)
        if is_own(Path(one.filename))
    ]
    place = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}"[:1000] + place


def is_own(file: Path) -> bool:
    """Return whether a source file is yours: neither installed nor of this project."""
    own_packages = (f"{_PROJECT}/{_TOOL}/", f"{_PROJECT}/{_TRAINER}/")
    elsewhere = (*_INSTALLED, *own_packages, "<")
    return not str(file).startswith(elsewhere) and "site-packages" not in file.parts


def accepted(
    function: Callable[..., Any], arguments: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arguments of these that a function takes.

    It is all of them if its signature is unknown, or takes any.
    """
    known = parameters_of(function)
    return {
        name: value
        for name, value in arguments.items()
        if known is None or name in known
    }


def named(function: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of these that a function names in its signature."""
    known = named_parameters(function)
    return {name: value for name, value in arguments.items() if name in known}


def named_parameters(function: Callable[..., Any]) -> frozenset[str]:
    """Return the parameters that a function names, even if it takes any others."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return frozenset()
    return frozenset(
        parameter.name
        for parameter in parameters
        if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
    )


def parameters_of(function: Callable[..., Any]) -> dict[str, bool] | None:
    """Return the parameters of a function, and whether each is required.

    Returns:
        The parameters, or None if it takes any, or has no signature.
    """
    try:
        known = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    if any(one.kind is one.VAR_KEYWORD for one in known):
        return None
    return {
        one.name: one.default is one.empty
        for one in known
        if one.kind is not one.VAR_POSITIONAL
    }


def sources_sha256(directory: Path) -> str:
    """Return a hash of all imported modules that are yours, by path and content."""
    sources: dict[str, str] = {}
    for module in list(sys.modules.values()):
        path = Path(directory, str(getattr(module, "__file__", None)))
        if (
            path.suffix == ".py"
            and is_own(path)
            and path.is_file()
            and path.stat().st_size <= _MAX_FILE_BYTES
        ):
            sources[os.path.relpath(path, directory)] = hashlib.sha256(
                path.read_bytes()
            ).hexdigest()
    return hashlib.sha256(
        "\n".join(f"{name} {sources[name]}" for name in sorted(sources)).encode()
    ).hexdigest()

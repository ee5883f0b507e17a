"""Build the stub libraries that an installed CUDA build of torch asks for."""

import hashlib
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

STUBS = Path(__file__).with_name("stubs")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One of NVIDIA's libraries."""

    sources: tuple[str, ...] = ()
    """Functions that need behaviour; all others are generated."""
    define: str = ""
    """Part of a source that serves several libraries."""
    answer: int = 0
    """Returned by generated functions."""
    success: str = ""
    """Functions, as a pattern, that return 0 where ``answer`` is an error."""
    names: str = ""
    """Symbols, as a pattern, that belong to it where references carry no version."""


NOT_SUPPORTED = 801
_TRIVIAL = "|".join(
    [
        "cudaDeviceEnablePeerAccess",
        "cudaFuncSetAttribute",
        r"cudaMemPool\w+",
        "cudaMemcpyToSymbol",
        r"cudaProfilerSt\w+",
        "cudaStreamWaitEvent",
    ]
)
_PLAIN = r"ng_\w+|__cuda(Unr|R)egister\w+|__cudaInitModule|ncclCommGetAsyncError"
"""Functions that no fault is planned for, or that ask for it themselves."""
_WORDS = 24
"""More than any function takes, with what it takes by value; none takes a
floating-point number so."""
_PARAMETERS = ", ".join(f"long a{number}" for number in range(_WORDS))
_ARGUMENTS = ", ".join(f"a{number}" for number in range(_WORDS))
KINDS = {
    "libcudart": Kind(
        sources=(
            "settings.c",
            "state.c",
            "counts.c",
            "memory.c",
            "device.c",
            "stream.c",
            "kernel.c",
        ),
        answer=NOT_SUPPORTED,
        success=_TRIVIAL,
    ),
    "libcuda": Kind(answer=NOT_SUPPORTED, names=r"cu[A-Z](?!FFT)\w*"),
    "libcublas": Kind(sources=("libraries.c",), define="NG_CUBLAS"),
    "libcublasLt": Kind(sources=("libraries.c",), define="NG_CUBLASLT"),
    "libcudnn": Kind(sources=("cudnn.c",), answer=3000, success=r"cudnnBackend\w+"),
    "libcusparse": Kind(answer=10),
    "libcusparseLt": Kind(answer=10, names=r"cusparseLt\w+"),
    "libcusolver": Kind(answer=9),
    "libcufft": Kind(answer=16),
    "libcurand": Kind(),
    "libnvrtc": Kind(sources=("libraries.c",), define="NG_NVRTC"),
    "libcupti": Kind(sources=("libraries.c",), define="NG_CUPTI"),
    "libnccl": Kind(
        sources=("nccl.c",),
        answer=3,
        success=r"ncclGroup\w+|ncclCommFinalize|ncclRedOpDestroy",
        names=r"nccl\w+",
    ),
    "libcufile": Kind(answer=5022, names=r"cuFile\w+"),
    "libnvshmem_host": Kind(answer=1, names=r"nvshmem\w+"),
    "libnvidia-ml": Kind(sources=("nvml.c",), answer=3, names=r"nvml\w+"),
}
"""In the order in which a symbol without a version is looked up from behind: ``cuFile``
is not the driver's."""


@dataclass(slots=True)
class Wanted:
    """Symbols that torch's libraries need from one of NVIDIA's."""

    soname: str
    symbols: dict[str, str | None] = field(default_factory=dict)
    """With the version that a reference carries."""


def build(torch: Path, include: Path, cache: Path) -> Path:
    """Return a folder with stubs for an installed torch.

    It is made if the cache lacks it.

    Args:
        torch: The package's folder, which has its metadata beside it.
        include: A folder with ``cuda.h`` and ``cuda_runtime_api.h`` of CUDA 13.
        cache: Folder with such folders, by torch's version and our sources.
    """
    metadata = next(torch.parent.glob("torch-*.dist-info"))
    sources = b"".join(
        path.read_bytes() for path in (*sorted(STUBS.iterdir()), Path(__file__))
    )
    name = (
        metadata.name.removesuffix(".dist-info")
        + "-"
        + hashlib.sha256(sources).hexdigest()[:12]
    )
    out = cache / name
    if out.exists():
        return out
    cache.mkdir(exist_ok=True)
    new = Path(tempfile.mkdtemp(dir=cache))  # two test processes may come here at once
    versions = _versions(metadata / "METADATA")
    wanted = _wanted(torch / "lib")
    _compile("libcudart", wanted["libcudart"], include, new, versions)
    with ThreadPoolExecutor() as pool:
        others = [stem for stem in wanted if stem != "libcudart"]
        list(
            pool.map(
                lambda stem: _compile(stem, wanted[stem], include, new, versions),
                others,
            )
        )
    try:
        new.rename(out)
    except OSError:
        shutil.rmtree(new)
    return out


def _versions(metadata: Path) -> list[str]:
    """Return the versions that torch was compiled with, and compares when it runs.

    9.24.0 of cuDNN is 92400, 2.30.7 of NCCL 23007.
    """
    text = metadata.read_text()
    flags = []
    for library in ("cudnn", "nccl"):
        match = re.search(rf"nvidia-{library}-cu13==(\d+)\.(\d+)\.(\d+)", text)
        if match is None:
            raise SystemExit(
                f"error: {metadata} does not name nvidia-{library}-cu13; next: install"
                " a CUDA 13 build of torch"
            )
        major, minor, patch = (int(part) for part in match.groups())
        flags.append(
            f"-DNG_{library.upper()}_VERSION={major * 10_000 + minor * 100 + patch}"
        )
    return flags


def _wanted(libraries: Path) -> dict[str, Wanted]:
    wanted = {
        "libcuda": Wanted("libcuda.so.1"),
        "libnvidia-ml": Wanted("libnvidia-ml.so.1"),
    }
    symbols: list[tuple[str, str]] = []
    for library in libraries.glob("*.so*"):
        for soname in re.findall(
            r"Shared library: \[(.+?)\]", _run("readelf", "-d", library)
        ):
            if (stem := soname.split(".so")[0]) in KINDS:
                wanted.setdefault(stem, Wanted(soname))
        symbols += re.findall(
            r"^ +U ([^@\s]+)@?@?(\S*)$", _run("nm", "-D", library), re.MULTILINE
        )
    for name, version in symbols:
        stem = version.split(".so")[0] if ".so" in version else _owner(name)
        if stem in wanted:
            wanted[stem].symbols[name] = version or None
    return wanted


def _owner(name: str) -> str | None:
    return next(
        (
            stem
            for stem in reversed(KINDS)
            if KINDS[stem].names and re.fullmatch(KINDS[stem].names, name)
        ),
        None,
    )


def _compile(
    stem: str, wanted: Wanted, include: Path, out: Path, versions: list[str]
) -> None:
    kind = KINDS[stem]
    flags = [
        "-std=gnu11",
        "-O1",
        "-fPIC",
        "-Wall",
        f"-I{include}",
        f"-I{STUBS}",
        *versions,
    ]
    define = [f"-D{kind.define}"] if kind.define else []
    objects = []
    for source in kind.sources:
        objects.append(out / f"{stem}-{source}.o")
        _run("gcc", *flags, *define, "-c", STUBS / source, "-o", objects[-1])
    written = {name for name in _defined(objects) if not re.fullmatch(_PLAIN, name)}
    renamed = out / f"{stem}.names"
    renamed.write_text("".join(f"{name} {name}_real\n" for name in written))
    for path in objects:
        _run("objcopy", f"--redefine-syms={renamed}", path)
    # libcuda.so.1 is a name for what lies in libcudart.
    elsewhere = written | _defined(
        objects if stem != "libcuda" else out.glob("libcudart.so*")
    )
    generated = out / f"{stem}.c"
    lines = ['#include "nullgpu.h"']
    for name in sorted(written):
        lines.append(f"long {name}_real({_PARAMETERS});")
        lines.append(_asked(name, _PARAMETERS, f"{name}_real({_ARGUMENTS})"))
    for name in sorted(wanted.symbols.keys() - elsewhere):
        answer: int | str = 0 if re.fullmatch(kind.success, name) else kind.answer
        if name.endswith("GetErrorString"):  # printed as text
            answer = f'(long)"{name}"'
        lines.append(_asked(name, "void", str(answer)))
    generated.write_text("\n".join(lines) + "\n")
    command: list[str | Path] = [
        "gcc",
        *flags,
        "-Wno-builtin-declaration-mismatch",
        "-shared",
        *objects,
        generated,
    ]
    if version := next(
        (version for version in wanted.symbols.values() if version), None
    ):
        names = "; ".join(
            sorted(name for name, versions in wanted.symbols.items() if versions)
        )
        script = out / f"{stem}.map"
        script.write_text(f"{version} {{ global: {names}; }};\n")
        command += [f"-Wl,--version-script={script}"]
    command += [
        f"-Wl,-soname,{wanted.soname}",
        "-Wl,-rpath,$ORIGIN",
        "-o",
        out / wanted.soname,
    ]
    if stem != "libcudart":
        command += ["-Wl,--no-as-needed", *out.glob("libcudart.so*")]
    _run(*command, "-ldl", "-lpthread")
    for leftover in (*objects, generated, renamed, out / f"{stem}.map"):
        leftover.unlink(missing_ok=True)


def _asked(name: str, parameters: str, otherwise: str) -> str:
    # An array has its own address, by which calls are counted; equal literals
    # share one.
    return (
        f'NG_API long {name}({parameters}) {{ static const char name[] = "{name}"; int'
        " fault = ng_called(name); return fault != NG_NO_FAULT ? fault :"
        f" {otherwise}; }}"
    )


def _defined(objects: Iterable[Path]) -> set[str]:
    return {
        name
        for path in objects
        for name in re.findall(r" T ([^@\s]+)", _run("nm", path))
    }


def _run(*command: str | Path) -> str:
    process = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, check=False
    )
    if process.returncode:
        raise SystemExit(
            f"error: {' '.join(map(str, command[:3]))} … failed:\n"
            f"{process.stderr[-3000:]}"
        )
    return process.stdout

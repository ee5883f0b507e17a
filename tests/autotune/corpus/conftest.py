"""Small real programs, compiled once."""

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

SHARED = """
int counter;
__attribute__((noinline)) void helper(int x) { counter ^= x * 31; }
__attribute__((noinline)) int shared(int x) {
  counter += x;
  helper(counter);
  return counter * 3 + 0x1234;
}
"""
FIRST = SHARED + "int main(int argc, char **argv) { return shared(argc); }\n"
SECOND = (
    "static long table[4096] = {1};\n__attribute__((noinline)) long before(long x) {"
    " return table[x & 4095] * x + x / 7; }\n"
    + SHARED
    + "int main(int argc, char **argv) { return shared((int)before(argc)) - 2; }\n"
)


@pytest.fixture(scope="session")
def compile_c(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    if shutil.which("gcc") is None:
        pytest.skip("gcc is not installed")

    def build(source: str, *options: str) -> Path:
        directory = tmp_path_factory.mktemp("elf")
        (directory / "source.c").write_text(source)
        program = directory / "program"
        subprocess.run(
            ["gcc", "-O1", *options, "-o", program, directory / "source.c"],
            check=True,
            capture_output=True,
        )
        return program

    return build


@pytest.fixture(scope="session")
def first_program(compile_c) -> Path:
    return compile_c(FIRST)


@pytest.fixture(scope="session")
def second_program(compile_c) -> Path:
    return compile_c(SECOND)


@pytest.fixture
def programs(
    tmp_path: Path, first_program: Path, second_program: Path, compile_c
) -> Path:
    """Return a directory of three programs, with files that are no programs."""
    directory = tmp_path / "programs"
    directory.mkdir()
    shutil.copy(first_program, directory / "first")
    shutil.copy(second_program, directory / "second")
    shutil.copy(first_program, directory / "copy-of-first")
    (directory / "link").symlink_to("first")
    (directory / "dangling").symlink_to("nowhere")
    (directory / "script.sh").write_text("#!/bin/sh\necho hello\n")
    (directory / "empty").write_bytes(b"")
    (directory / "garbage").write_bytes(b"\x7fELF" + bytes(range(256)) * 4)
    (directory / "truncated").write_bytes(first_program.read_bytes()[:1000])
    return directory

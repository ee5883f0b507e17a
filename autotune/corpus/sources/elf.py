"""``elf:``: the functions of x86-64 programs and libraries, static or shared, stripped or not."""

from collections.abc import Iterator
from pathlib import Path

from autotune.corpus.sources.base import Reject, Slice, SourceFile, SourceOptions, whole

ELF_MAGIC = b"\x7fELF"


class ElfSource:
    """Programs, known by their first bytes."""

    kind = "elf"
    libraries: tuple[str, ...] = ("capstone", "elftools")
    example = "elf:/usr/bin"

    def takes(self, path: Path, *, named: bool) -> bool:
        """By the first bytes, whoever named it: a directory of programs holds scripts too."""
        with path.open("rb") as file:
            return file.read(len(ELF_MAGIC)) == ELF_MAGIC

    def cut(self, file: SourceFile, options: SourceOptions) -> list[Slice]:
        """Never."""
        return whole(file)

    def samples(self, part: Slice, options: SourceOptions) -> Iterator[str | Reject]:
        """The token text of each function.

        Raises:
            UnusableFileError: If the file is no program, or has no table of functions.
        """
        from autotune.corpus import elf

        yield from elf.functions(Path(part.path))

"""Random access to the samples of a tokenised dataset. No torch here.

The files are described in ``manifest``.
"""

import contextlib
import errno
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from trainer.data.array_types import Ids, Int64
from trainer.formats.errors import BadConfig
from trainer.formats.manifest import Manifest, SplitName, read_manifest
from trainer.formats.npy_file import open_npy

_OFFSET_BYTES = 8
_BOTH_OFFSETS_BYTES = 2 * _OFFSET_BYTES
"""Size of the begin and the end of a sample, which are neighbours in the offsets."""
_FileRead = tuple[int, int, int, int]
"""One read of a file: descriptor, first byte in the file, first byte in the target, and
end (exclusive) in the target. A tuple, as there are thousands per micro-batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _ShardFiles:
    """Open files of one kind, tokens or offsets: one per shard, in their order."""

    fds: Int64
    """Descriptor of each file."""
    data_offsets_bytes: Int64
    """First byte of each file's data, which follows its header."""


class TokenDataset:
    """Random access to the samples of one split.

    Samples are read with ``pread``, so memory does not grow with their number. Forked
    processes may share one instance.
    """

    def __init__(
        self, directory: Path, manifest: Manifest, split: SplitName = "train"
    ) -> None:
        """Open the files of a split, which ``close`` closes.

        Raises:
            UnreadableFile: If a file may be intact, but cannot be read.
            BadConfig: If a file is missing or does not match the manifest.
        """
        self.directory = directory
        self.manifest = manifest
        self._split = split
        self.dtype: np.dtype[Any] = np.dtype(manifest.dtype)
        split_table = manifest.train if split == "train" else manifest.validation
        self._shards = split_table.shards
        self._names_by_fd: dict[int, str] = {}
        # True if the last reads had to wait for the disk, as the first ones will.
        self._waited_for_disk = True
        try:
            self._open_shards()
        except BaseException:
            self.close()  # files that were opened before the one that failed
            raise
        ends = np.cumsum([shard.samples for shard in self._shards], dtype=np.int64)
        self._sample_count = int(ends[-1]) if len(ends) else 0
        # By shard: the index in the split of its first sample, and the number of ids.
        self._first_samples = np.concatenate(([0], ends[:-1])).astype(np.int64)
        self._shard_tokens = np.array(
            [shard.tokens for shard in self._shards], dtype=np.int64
        )

    @classmethod
    def open(cls, directory: Path, split: SplitName = "train") -> Self:
        """Open a split of the dataset in a directory.

        Raises:
            UnreadableFile: If a file may be intact, but cannot be read.
            BadConfig: If there is no dataset, or its files do not match its manifest.
        """
        return cls(directory, read_manifest(directory), split)

    def _open_shards(self) -> None:
        """Open the files of all shards."""
        tokens_files = []
        offsets_files = []
        for shard in self._shards:
            tokens_files.append(
                self._open_file(shard.tokens_file, self.dtype, shard.tokens)
            )
            offsets_files.append(
                self._open_file(
                    shard.offsets_file, np.dtype("uint64"), shard.samples + 1
                )
            )
        self._tokens_files = _shard_files(tokens_files)
        self._offsets_files = _shard_files(offsets_files)

    def _open_file(
        self, name: str, dtype: np.dtype[Any], length: int
    ) -> tuple[int, int]:
        """Return the descriptor of a file of the dataset, and its data's first byte."""
        fd, data_offset_bytes = open_npy(self.directory / name, dtype, length)
        self._names_by_fd[fd] = name
        return fd, data_offset_bytes

    def __len__(self) -> int:
        """Return the number of samples."""
        return self._sample_count

    def __reduce__(self) -> tuple[Any, ...]:
        """Let a copy by ``pickle`` open the files again."""
        return (type(self), (self.directory, self.manifest, self._split))

    def prefetch_offsets(self, samples: Callable[[], Int64]) -> None:
        """Let the kernel prefetch the offsets of samples that are needed soon.

        It has no effect if the last reads were in the page cache; ``samples``, which
        returns the samples (N,), is then not called.
        """
        if not self._waited_for_disk:
            return
        shards, first_bytes = self._offsets_of(samples())
        fds = self._offsets_files.fds[shards].tolist()
        for fd, first_byte in zip(fds, first_bytes.tolist(), strict=True):
            os.posix_fadvise(
                fd, first_byte, _BOTH_OFFSETS_BYTES, os.POSIX_FADV_WILLNEED
            )

    def locate(self, samples: Int64) -> tuple[Int64, Int64, Int64]:
        """Return the location of samples.

        Args:
            samples: Indices of samples in the split, shape (N,).

        Returns:
            The shard of each sample, the index of its first id in the shard, and the
            number of its ids without special tokens; shapes (N,).

        Raises:
            IndexError: If there is no such sample.
            BadConfig: If a shard's offsets do not ascend within its file, or the file
                became shorter.
        """
        if len(samples):
            lowest = int(samples.min())
            highest = int(samples.max())
            if lowest < 0 or highest >= self._sample_count:
                raise IndexError(
                    f"samples {lowest} to {highest} of {self._sample_count}"
                )
        shards, first_bytes = self._offsets_of(samples)
        begins, ends = self._read_offsets(shards, first_bytes)
        is_wrong = (begins < 0) | (begins > ends) | (ends > self._shard_tokens[shards])
        if is_wrong.any():
            first_wrong = int(np.flatnonzero(is_wrong)[0])
            shard = int(shards[first_wrong])
            sample_in_shard = int(samples[first_wrong] - self._first_samples[shard])
            raise self._corrupt(
                self._shards[shard].offsets_file,
                f"the offsets of sample {sample_in_shard} exceed the shard",
            )
        return shards, begins, ends - begins

    def _offsets_of(self, samples: Int64) -> tuple[Int64, Int64]:
        """Return the shard of each sample, and the first byte of its two offsets.

        The offsets of a sample are its begin and its end. They are neighbours in the
        shard's file of offsets, in which the byte is counted.
        """
        shards = np.searchsorted(self._first_samples, samples, side="right") - 1
        samples_in_shard = samples - self._first_samples[shards]
        data_offsets_bytes = self._offsets_files.data_offsets_bytes[shards]
        return shards, data_offsets_bytes + _OFFSET_BYTES * samples_in_shard

    def _read_offsets(self, shards: Int64, first_bytes: Int64) -> tuple[Int64, Int64]:
        """Read the begins and ends of samples that ``_offsets_of`` found."""
        pairs = np.empty((len(shards), 2), dtype="<u8")
        targets = _BOTH_OFFSETS_BYTES * np.arange(len(shards))
        self._read_all(
            pairs,
            self._offsets_files.fds[shards],
            first_bytes,
            targets,
            targets + _BOTH_OFFSETS_BYTES,
        )
        begins, ends = pairs.astype(np.int64).T.copy()
        return begins, ends

    def read_into(
        self, ids: Ids, targets: Int64, shards: Int64, begins: Int64, tokens: Int64
    ) -> None:
        """Read the ids of located samples.

        Args:
            ids: Array that receives the ids.
            targets: Position in ``ids`` of each sample's first id, shape (N,).
            shards: As ``locate`` returns it.
            begins: As ``locate`` returns it.
            tokens: Number of ids to read of each sample, shape (N,).

        Raises:
            BadConfig: If a file became shorter.
        """
        id_bytes = self.dtype.itemsize
        self._read_all(
            ids,
            self._tokens_files.fds[shards],
            self._tokens_files.data_offsets_bytes[shards] + begins * id_bytes,
            targets * id_bytes,
            (targets + tokens) * id_bytes,
        )

    def _read_all(
        self,
        target: npt.NDArray[Any],
        fds: Int64,
        file_begins: Int64,
        target_begins: Int64,
        target_ends: Int64,
    ) -> None:
        """Fill ranges of ``target`` from files.

        Reads that hit the page cache come first. The kernel prefetches the others
        together, so all of them wait about as long as one.

        Args:
            target: Array that receives the content, of any type.
            fds: Descriptor of the file of each range, shape (N,).
            file_begins: First byte of each range in its file, shape (N,).
            target_begins: First byte of each range in ``target``, shape (N,).
            target_ends: End (exclusive) of each range in ``target``, shape (N,).

        Raises:
            BadConfig: If a read reaches the end of its file.
        """
        view = memoryview(target.reshape(-1).view(np.uint8).data)
        reads: list[_FileRead] = list(
            zip(
                fds.tolist(),
                file_begins.tolist(),
                target_begins.tolist(),
                target_ends.tolist(),
                strict=True,
            )
        )
        waiting = _read_cached(view, reads)
        self._waited_for_disk = len(waiting) > 0
        for fd, file_begin, begin, end in waiting:
            os.posix_fadvise(fd, file_begin, end - begin, os.POSIX_FADV_WILLNEED)
        for fd, file_begin, begin, end in waiting:
            read_bytes = os.preadv(fd, (view[begin:end],), file_begin)
            if read_bytes != end - begin:
                raise self._corrupt(
                    self._names_by_fd[fd], "became shorter while in use"
                )

    def read(self, sample: int, max_tokens: int | None = None) -> Ids:
        """Return the ids of one sample, at most ``max_tokens``, without special tokens.

        Raises:
            IndexError: If there is no such sample.
            BadConfig: As ``locate`` does.
        """
        shards, begins, tokens = self.locate(np.array([sample], dtype=np.int64))
        if max_tokens is not None:
            tokens = np.minimum(tokens, max_tokens)
        ids = np.empty(int(tokens[0]), dtype=self.dtype)
        self.read_into(ids, np.zeros(1, dtype=np.int64), shards, begins, tokens)
        return ids

    def drop_page_cache(self) -> None:
        """Drop the files from the page cache, so that the next reads come from disk.

        The kernel keeps pages that other processes use.
        """
        for fd in self._names_by_fd:
            with contextlib.suppress(OSError):
                os.fsync(fd)  # unsynced pages cannot be dropped
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Close the files."""
        while self._names_by_fd:
            fd, _ = self._names_by_fd.popitem()
            os.close(fd)

    def _corrupt(self, file: str, fault: str) -> BadConfig:
        next_step = (
            "The dataset is corrupt. Find all faults: autotune data verify"
            f" {self.directory}"
        )
        return BadConfig(f"{self.directory / file}: {fault}", next_step=next_step)


def _shard_files(files: Sequence[tuple[int, int]]) -> _ShardFiles:
    """Return open files, given the descriptor and the first byte of data of each."""
    fds = [fd for fd, _ in files]
    data_offsets_bytes = [data_offset_bytes for _, data_offset_bytes in files]
    return _ShardFiles(
        fds=np.array(fds, dtype=np.int64),
        data_offsets_bytes=np.array(data_offsets_bytes, dtype=np.int64),
    )


def _read_cached(view: memoryview, reads: list[_FileRead]) -> list[_FileRead]:
    """Perform the reads that hit the page cache, and return the others.

    A read of which the page cache holds only a part, or the file has only a part, is
    returned as well.
    """
    waiting = []
    for number, read in enumerate(reads):
        fd, file_begin, begin, end = read
        try:
            read_bytes = os.preadv(fd, (view[begin:end],), file_begin, os.RWF_NOWAIT)
        except BlockingIOError:
            waiting.append(read)
            continue
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise
            # This file system does not support RWF_NOWAIT.
            return [*waiting, *reads[number:]]
        if read_bytes != end - begin:
            waiting.append(read)
    return waiting

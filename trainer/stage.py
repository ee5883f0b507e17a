"""A dataset on the node's own disk: one rank of a node copies it, the others wait. No torch here.

    LOCAL/autotune-<uid>/            for this user only
      <hash>/                        a published dataset, named by the first 16 digits of its hash
      <hash>.lock                    held by whoever copies; the kernel lets go of it with the process
      <hash>.<attempt>.json          how the leader of one job is doing, for the ranks that wait
      .partial-<hash>-…/             a copy at work

A copy is hashed while it is made, synced, and renamed: what has its name is whole. Reading during training is random,
so what staging is worth is measured by reading random samples on both sides.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import secrets
import shutil
import stat
import string
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trainer.config import ResolvedConfig
from trainer.copying import CopyFigures, copy_files, dataset_files, is_whole, seconds_per_sample
from trainer.dataset import Manifest, read_manifest
from trainer.errors import BadConfig, TrainerError

Update = Callable[[float, float | None, str], None]
"""Called with (bytes done, bytes in all, note)."""

DEFAULT_TIMEOUT_S = 3600.0
_NAME_LENGTH = 16
_POLL_S = 0.1
_GONE_S = 1.0
"""A leader whose process has been gone for so long, and whose report is still there, is dead."""
_SPARE_BYTES = 64 * 2**20
"""Left free on the local disk, for everything else that writes there."""
_ATTEMPT_NAMES = (
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
    "MASTER_ADDR",
    "MASTER_PORT",
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """A dataset on a local disk.

    Args:
        directory: Where it is.
        dataset_hash: What it is.
        copied: What the copy took; None when it was there already, or another rank copied it.
        source_s_per_sample: Mean time of reading one random sample from the source, measured by one reader; None
            where nothing was copied.
        local_s_per_sample: The same from the copy.
        samples: Of the training split.
    """

    directory: Path
    dataset_hash: str
    samples: int
    copied: CopyFigures | None = None
    source_s_per_sample: float | None = None
    local_s_per_sample: float | None = None

    @property
    def break_even_epochs(self) -> float | None:
        """Epochs of reading after which the copy has paid for itself; None if never, or where nothing was copied."""
        if self.copied is None or self.source_s_per_sample is None or self.local_s_per_sample is None:
            return None
        saved_s_per_epoch = self.samples * (self.source_s_per_sample - self.local_s_per_sample)
        return self.copied.seconds / saved_s_per_epoch if saved_s_per_epoch > 0 else None


def local_rank_of(environment: Mapping[str, str] = os.environ) -> int:
    """This process among those of its node, as torchrun or SLURM say; 0 alone."""
    return int(environment.get("LOCAL_RANK") or environment.get("SLURM_LOCALID") or 0)


def stage(
    source: Path,
    local: Path,
    *,
    local_rank: int = 0,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    update: Update | None = None,
    environment: Mapping[str, str] = os.environ,
) -> Staged:
    """Make sure that a dataset is on the local disk, and say where. All ranks of a node call it, and get one answer.

    Args:
        source: The dataset.
        local: A directory on the node's own disk.
        local_rank: 0 copies, the others wait for it.
        timeout_s: Longest wait, for the leader or for another job that copies the same dataset.
        update: Told how far the copy is.
        environment: Tells jobs apart.

    Raises:
        BadConfig: If the source is no dataset or is damaged, the local disk has no room or cannot be written, the wait
            was too long, or, on a rank that waits, what the leader's error says.
    """
    manifest = read_manifest(source)
    place = _Place(local, manifest, environment)
    if local_rank:
        return place.wait(timeout_s)
    with _writing(local):
        place.prepare()
        try:
            with place.leading():
                return place.provide(source, timeout_s, update or (lambda done, total, note: None))
        except (TrainerError, OSError) as error:
            place.tell_error(error)
            raise


def stage_data(
    resolved: ResolvedConfig, environment: Mapping[str, str] = os.environ, update: Update | None = None
) -> ResolvedConfig:
    """The configuration with its dataset on local disk, where ``train.data.stage_to`` asks for that.

    Raises:
        BadConfig: If an environment variable in the setting is not set, or what ``stage`` says.
    """
    wanted = resolved.config.data.stage_to
    if wanted is None:
        return resolved
    try:
        place = Path(string.Template(wanted).substitute(environment))
    except (KeyError, ValueError) as error:
        raise BadConfig(
            f"train.data.stage_to is {wanted!r}, and {error} is not an environment variable here",
            next_step="Set it, or name the directory: --set train.data.stage_to=/local",
        ) from error
    staged = stage(
        resolved.data_dir, place, local_rank=local_rank_of(environment), update=update, environment=environment
    )
    return replace(resolved, data_dir=staged.directory)


class _Place:
    """Where one dataset goes on one disk."""

    def __init__(self, local: Path, manifest: Manifest, environment: Mapping[str, str]) -> None:
        self._manifest = manifest
        self._name = manifest.dataset_hash[:_NAME_LENGTH]
        self._root = local / f"autotune-{os.getuid()}"
        self._local = local
        self.directory = self._root / self._name
        told = "\0".join(environment.get(name, "") for name in _ATTEMPT_NAMES)
        attempt = hashlib.sha256(told.encode()).hexdigest()[:12]
        self._report = self._root / f"{self._name}.{attempt}.json"

    def prepare(self) -> None:
        """Make the user's own directory, and refuse one that is somebody else's."""
        if not self._local.is_dir():
            raise BadConfig(f"{self._local} is not a directory", next_step="Name one on the node's own disk.")
        with contextlib.suppress(FileExistsError):
            self._root.mkdir(mode=0o700)
        status = self._root.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
            raise BadConfig(
                f"{self._root} is not a directory of yours", next_step="Have it removed, or name another disk."
            )
        self._report.unlink(missing_ok=True)

    @contextlib.contextmanager
    def leading(self) -> Iterator[None]:
        """While the block runs, the others see that this process lives; afterwards there is nothing to be seen."""
        self._say({"pid": os.getpid()})
        yield
        self._report.unlink(missing_ok=True)

    def tell_error(self, error: Exception) -> None:
        """Leave the error to those that wait."""
        if isinstance(error, TrainerError):
            told = {"message": error.message, "next_step": error.next_step}
        else:
            told = {"message": str(error), "next_step": "See the message of local rank 0."}
        with contextlib.suppress(OSError):  # the disk may be what is wrong
            self._say({"pid": os.getpid(), "error": told})

    def _say(self, content: Mapping[str, object]) -> None:
        temporary = self._report.with_suffix(".new")
        temporary.write_text(json.dumps(content))
        temporary.rename(self._report)

    def provide(self, source: Path, timeout_s: float, update: Update) -> Staged:
        """Find the copy or make it, alone among all processes of this user on the node."""
        found = Staged(
            directory=self.directory,
            dataset_hash=self._manifest.dataset_hash,
            samples=self._manifest.train.samples,
        )
        with self._locked(timeout_s):
            if is_whole(self.directory, self._manifest):
                return found
            self._clean()
            files = dataset_files(source, self._manifest)
            self._check_room(sum(file.size_bytes for file in files), len(files))
            source_s = seconds_per_sample(source)
            partial = self._root / f".partial-{self._name}-{secrets.token_hex(4)}"
            partial.mkdir(mode=0o700)
            try:
                figures = copy_files(files, source, partial, update)
                self._publish(partial)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
        return Staged(
            directory=found.directory,
            dataset_hash=found.dataset_hash,
            samples=found.samples,
            copied=figures,
            source_s_per_sample=source_s,
            local_s_per_sample=seconds_per_sample(self.directory),
        )

    def _publish(self, partial: Path) -> None:
        if self.directory.exists():
            # Damaged, or it would have been found; those who read it keep their open files.
            self.directory.rename(self._root / f".partial-{self._name}-{secrets.token_hex(4)}")
        partial.rename(self.directory)
        _sync(self._root)
        self._clean()

    def _clean(self) -> None:
        """Remove what killed processes left: of this dataset under its lock, of others where nobody holds theirs."""
        for partial in self._root.glob(".partial-*"):
            name = partial.name.split("-")[1]
            with contextlib.ExitStack() as locks:
                if name != self._name:
                    lock = locks.enter_context((self._root / f"{name}.lock").open("ab"))
                    try:
                        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    except OSError:
                        continue
                shutil.rmtree(partial, ignore_errors=True)

    def _check_room(self, size_bytes: int, files: int) -> None:
        disk = os.statvfs(self._root)
        free_bytes = disk.f_bavail * disk.f_frsize
        missing_bytes = size_bytes + _SPARE_BYTES - free_bytes
        if missing_bytes > 0:
            raise BadConfig(
                f"{self._local} has {_mib(free_bytes)} free, and the dataset takes {_mib(size_bytes)} "
                f"(of which {_mib(_SPARE_BYTES)} are to stay free)",
                next_step=f"Free {_mib(missing_bytes)} there, or name another disk.",
            )
        if disk.f_files and disk.f_favail < files + 8:
            raise BadConfig(f"{self._local} has no inodes left", next_step="Remove files there, or name another disk.")

    @contextlib.contextmanager
    def _locked(self, timeout_s: float) -> Iterator[None]:
        deadline_s = time.monotonic() + timeout_s
        # Never removed: somebody may be waiting for it by its inode.
        with (self._root / f"{self._name}.lock").open("ab") as lock:
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline_s:
                        raise BadConfig(
                            f"another job has been copying the same dataset to {self._root} for {timeout_s:g} s",
                            next_step="See what it is doing, or wait longer.",
                        ) from None
                    time.sleep(_POLL_S)
            yield

    def wait(self, timeout_s: float) -> Staged:
        """Wait for the leader."""
        started_s = time.monotonic()
        gone_since_s: float | None = None
        while time.monotonic() - started_s < timeout_s:
            report = self._read_report()
            if report is None and is_whole(self.directory, self._manifest):
                return Staged(
                    directory=self.directory,
                    dataset_hash=self._manifest.dataset_hash,
                    samples=self._manifest.train.samples,
                )
            if report is not None and isinstance(report.get("error"), dict):
                told = report["error"]
                raise BadConfig(f"local rank 0 could not stage: {told['message']}", next_step=str(told["next_step"]))
            if report is not None and not _is_alive(int(report["pid"])):
                gone_since_s = gone_since_s or time.monotonic()
                if time.monotonic() - gone_since_s > _GONE_S and self._read_report() == report:
                    raise BadConfig(
                        "local rank 0 died while it copied the dataset",
                        next_step="Its log says why; starting again repairs the copy.",
                    )
            else:
                gone_since_s = None
            time.sleep(_POLL_S)
        raise BadConfig(
            f"local rank 0 has not finished copying the dataset to {self._root} after {timeout_s:g} s",
            next_step="Wait longer, or look at what it is doing.",
        )

    def _read_report(self) -> dict[str, Any] | None:
        try:
            value = json.loads(self._report.read_text())
        except (OSError, ValueError):
            return None
        return value if isinstance(value, dict) else None


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    # A child that nobody has waited for yet answers to signals, and does nothing more.
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return True


@contextlib.contextmanager
def _writing(local: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise BadConfig(
                f"no space left in {local}: {error.strerror}",
                next_step="Free some there, or name another disk.",
            ) from error
        raise BadConfig(
            f"cannot write in {local}: {error.strerror or error}",
            next_step="Ask for permission there, or name another directory.",
        ) from error


def _sync(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _mib(size_bytes: int) -> str:
    return f"{-(-size_bytes // 2**20):,} MiB"

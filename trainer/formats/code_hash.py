"""Hash of the trainer's code, which tells whether ranks and nodes run the same one."""

import hashlib
from pathlib import Path

_TRAINER = Path(__file__).parents[1]
"""Directory of the package ``trainer``."""


def code_sha256(package: Path = _TRAINER) -> str:
    """Return the SHA-256 of all Python sources in a package, by default the trainer.

    It covers the contents of the files, and their paths inside the package.
    """
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        name = str(path.relative_to(package)).encode()
        digest.update(name + b"\0" + path.read_bytes())
    return digest.hexdigest()

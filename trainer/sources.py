"""Which version of a package runs here, told by its sources. No torch here."""

import hashlib
from pathlib import Path

HERE = Path(__file__).parent


def code_sha256(package: Path = HERE) -> str:
    """Over the sources below a package's directory; of this package unless told otherwise."""
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(str(path.relative_to(package)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()

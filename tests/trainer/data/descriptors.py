"""Open files of the test process, to find those that are not closed."""

from pathlib import Path


def open_descriptors() -> dict[str, str]:
    """Return the file of each open descriptor, by its number."""
    files = {}
    for link in list(Path("/proc/self/fd").iterdir()):
        # The directory itself was open while it was listed, and is closed now.
        if link.is_symlink():
            files[link.name] = str(link.readlink())
    return files

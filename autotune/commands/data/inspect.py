"""``autotune data inspect``."""


def inspect() -> None:
    """To be written."""

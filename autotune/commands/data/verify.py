"""``autotune data verify``."""


def verify() -> None:
    """To be written."""

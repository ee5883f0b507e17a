"""Next steps that error messages of several packages share."""


def install_step(*packages: str) -> str:
    """Return the next step if packages are missing.

    Args:
        packages: Names of the packages on PyPI.
    """
    return f"Install: python -m pip install {' '.join(packages)}"

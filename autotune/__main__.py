"""Entry point of ``python -m autotune``."""

from autotune.cli import main

main()

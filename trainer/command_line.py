"""Options of ``python -m trainer``, and their help."""

import argparse
import importlib.metadata
from pathlib import Path
from typing import NoReturn

from trainer.checkpoint.resume import AUTO, NEVER
from trainer.formats.documentation import documentation_path
from trainer.formats.errors import error_text

_EXAMPLES = """\
Examples:
  python -m trainer profiles/bert-mini-cpu.toml --out runs/first
  torchrun --nproc-per-node 8 -m trainer PROFILE --set train.max_steps=1000
"""


class _Parser(argparse.ArgumentParser):
    """Argument parser whose errors have the form of ``TrainerError`` on the console."""

    def error(self, message: str) -> NoReturn:
        """Print an error of usage with a next step, and exit with code 2."""
        self.exit(2, error_text(message, "See: python -m trainer -h"))


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the trainer's options."""
    parser = _Parser(
        usage="python -m trainer PROFILE [OPTIONS]",
        description="Train a masked-LM encoder from a profile.",
        epilog=f"{_EXAMPLES}\nDocs: {documentation_path('train.md')}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=False,
        allow_abbrev=False,
    )
    parser.add_argument(
        "profile",
        metavar="PROFILE",
        type=Path,
        help="Profile (TOML), as autotune tune writes it.",
    )
    parser.add_argument(
        "--data",
        type=Path,
        metavar="DIR",
        help="Dataset directory. Default: AUTOTUNE_DATA, else the profile's.",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="train.KEY=VALUE",
        help="Override a setting; repeatable.",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="Run directory. Default: runs/<UTC>-<model>.",
    )
    parser.add_argument(
        "--resume",
        default=AUTO,
        metavar=f"{AUTO}|PATH|{NEVER}",
        help=(
            "Run or checkpoint to resume; auto: the run in --out, or this job's after a"
            " requeue. Default: auto."
        ),
    )
    parser.add_argument(
        "--expect-profile-sha256",
        metavar="HASH",
        help="Fail with exit code 6 if the profile has another hash.",
    )
    parser.add_argument(
        "--version",
        action="version",
        version=f"trainer {_version()}",
        help="Show the version.",
    )
    parser.add_argument("-h", "--help", action="help", help="Show this help and exit.")
    return parser


def _version() -> str:
    """Return the version of the installed package."""
    try:
        return importlib.metadata.version("encoder-autotune")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"

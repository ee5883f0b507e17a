"""Words of the command line, before a parser sees them."""

from collections.abc import Sequence

_TAKE_PROFILE = ("workers", "network", "confirm", "baseline", "train")
"""Commands whose only argument is a profile, which may stand after ``--slurm``."""


def plain_arguments(arguments: Sequence[str]) -> tuple[str, ...]:
    """Give ``--slurm`` its default value if it has none. Pure.

    It has none at the end of a command line, before another option, or before the only
    profile. The parser has no options whose value may be left out.
    """
    if "--slurm" not in arguments:
        return tuple(arguments)
    from autotune.cluster.site_file import DEFAULT_SITE

    profiles: list[str] = []
    if arguments[0] in _TAKE_PROFILE:
        profiles = [word for word in arguments if word.endswith(".toml")]
    plain = list(arguments)
    end_of_options = plain.index("--") if "--" in plain else len(plain)
    for position in range(end_of_options):
        if plain[position] != "--slurm":
            continue
        is_last = position + 1 == len(plain)
        if (
            is_last
            or plain[position + 1].startswith("-")
            or profiles == [plain[position + 1]]
        ):
            plain[position] = f"--slurm={DEFAULT_SITE}"
    return tuple(plain)

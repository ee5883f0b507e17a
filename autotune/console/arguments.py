"""Words of the command line, before a parser sees them."""

from collections.abc import Sequence

_TAKE_PROFILE = ("workers", "network", "confirm", "baseline", "train")


def plain_arguments(arguments: Sequence[str]) -> tuple[str, ...]:
    """Give ``--slurm`` its default value if it has none. Pure.

    It has none at the end of a command line, before another option, or before the only
    profile. The parser has no options whose value may be left out.
    """
    if "--slurm" not in arguments:
        return tuple(arguments)
    from autotune.cluster.site_file import DEFAULT_SITE

    plain = list(arguments)
    files = (
        [word for word in plain if word.endswith(".toml")]
        if plain[0] in _TAKE_PROFILE
        else []
    )
    ended = plain.index("--") if "--" in plain else len(plain)
    for position, following in enumerate([*plain[1:], "-"][:ended]):
        if plain[position] == "--slurm" and (
            following.startswith("-") or files == [following]
        ):
            plain[position] = f"--slurm={DEFAULT_SITE}"
    return tuple(plain)

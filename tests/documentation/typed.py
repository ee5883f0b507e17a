"""Commands of a page, typed in order in a directory."""

import json
from collections.abc import Sequence
from pathlib import Path

from tests.documentation.blocks import ROOT, Command, commands_of
from tests.documentation.shell import Done, Shell
from tests.documentation.substitutions import substituted

TINY = {"model_type": "bert", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
        "intermediate_size": 128, "max_position_embeddings": 128}  # fmt: skip


def typed(page: str, directory: Path, commands: Sequence[Command] | None = None) -> list[tuple[Command, Done]]:
    """Type the commands of a page; each must end with 0."""
    shell = Shell(directory)
    done = []
    for command in commands_of(ROOT / page) if commands is None else commands:
        text, _ = substituted(page, words_of(command))
        if not text:
            continue
        one = shell.run(text)
        assert one.code == 0, f"{command.where}\nas: {text}\n{one.out[-2000:]}\n{one.said[-4000:]}"
        assert "Traceback" not in one.said
        done.append((command, one))
    return done


def words_of(command: Command) -> str:
    """Without its comment, and with everything else as it was typed."""
    return command.text.partition("  #")[0].strip()


def write_model(directory: Path) -> None:
    """A small model of its own, as its config.json."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(TINY))

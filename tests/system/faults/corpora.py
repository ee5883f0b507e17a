"""Raw data for fault loops, the same every time."""

import json
import random
from pathlib import Path


def write_raw(directory: Path, *, files: int = 6, lines: int = 4000) -> Path:
    """Text and JSON lines with repetitions, and some that cannot be used."""
    directory.mkdir(parents=True)
    rng = random.Random(0)
    words = [f"word{number}" for number in range(3000)]
    for number in range(files):
        texts = [" ".join(rng.choices(words, k=rng.randint(1, 60))) for _ in range(lines)]
        texts += rng.choices(texts, k=lines // 4)
        if number % 2:
            content = "".join(json.dumps({"text": text}) + "\n" for text in texts) + "no json\n"
            (directory / f"{number}.jsonl").write_text(content)
        else:
            (directory / f"{number}.txt").write_bytes("\n".join(texts).encode() + b"\nbad \xff utf-8\n")
    return directory


def content(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}

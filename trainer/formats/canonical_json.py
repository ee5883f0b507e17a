"""Canonical JSON: equal values have the same text, so that its hash identifies them.

Files keep hashes of profiles, configurations, datasets, checkpoints and trials that are
computed from it, so its form must never change. No torch here.
"""

import hashlib
import json


def canonical_json(value: object) -> bytes:
    """Return the canonical JSON of a value: sorted keys, no spaces, UTF-8.

    Raises:
        TypeError: If a part of the value, such as a date, has no form in JSON.
        ValueError: If a number is infinite or NaN, or if a text has half a surrogate
            pair.
    """
    return json.dumps(
        value,
        sort_keys=True,
        separators=(",", ":"),
        ensure_ascii=False,
        allow_nan=False,
    ).encode()


def canonical_sha256(value: object) -> str:
    """Return the SHA-256, in hexadecimal, of the canonical JSON of a value.

    Raises:
        TypeError: As ``canonical_json`` does.
        ValueError: As ``canonical_json`` does.
    """
    return hashlib.sha256(canonical_json(value)).hexdigest()

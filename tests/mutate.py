"""Random and mutated messages for readers of others' data, the same for the same generator."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from typing import Any

# What breaks readers: nesting, infinities, lone surrogates, bytes that are not UTF-8, controls.
WORDS = (
    *(
        b"[" * 5_000,
        b'{"a":' * 5_000,
        b"]",
        b"}",
        b"1" * 5_000,
        b"1e999",
        b"-1",
        b"NaN",
        b"null",
        b"true",
        b"1.5",
    ),
    *(
        b'"\\ud800"',
        b"\xff\xfe",
        b"\x00",
        b"\x1b]52;c;aGk=\x07",
        b"\xc2\x9b31m",
        b'"x"',
        b"{}",
        b"\r",
        b"\x85",
    ),
)
VALUES: tuple[Any, ...] = (
    *(
        None,
        True,
        -1,
        0,
        2**63,
        2**64,
        10**400,
        1.5,
        1e300,
        "",
        "x",
        "\udce9",
        "\x1b[2J",
        "x" * 100_000,
    ),
    *([], [[]], [None], {}, {"a": {}}, {"step": "x"}, [1, "x"]),
)


def mutated_lines(seeds: Sequence[bytes], count: int, rng: random.Random) -> Iterator[bytes]:
    """Yield that many mutated messages without line breaks."""
    for _ in range(count):
        yield mutate_message(rng.choice(seeds), rng).replace(b"\n", b" ")


def mutate_message(message: bytes, rng: random.Random) -> bytes:
    """Return the message with a field or bytes changed, cut or inserted; or random bytes."""
    how = rng.randrange(8)
    if how == 0:
        return rng.randbytes(rng.randrange(200))
    if how <= 4:
        return json.dumps(_change_value(json.loads(message), rng)).encode()
    data = bytearray(message)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(data) + 1)
        if how == 5:
            data[at : at + rng.randrange(20)] = b""
        elif how == 6:
            data[at : at + 1] = rng.randbytes(1)
        else:
            data[at:at] = rng.choice(WORDS)
    return bytes(data)


def _change_value(value: Any, chance: random.Random) -> Any:
    """Return JSON with one value somewhere replaced, dropped or added."""
    if not isinstance(value, dict | list) or not value or chance.random() < 0.2:
        return chance.choice(VALUES)
    changed = dict(value) if isinstance(value, dict) else list(value)
    key = (
        chance.choice(list(changed))
        if isinstance(changed, dict)
        else chance.randrange(len(changed))
    )
    if chance.random() < 0.1:
        del changed[key]
    else:
        changed[key] = _change_value(changed[key], chance)
    return changed

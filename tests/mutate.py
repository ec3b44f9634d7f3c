"""Random and mutated messages for readers of what others write. The same random generator gives the same ones."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from typing import Any

# What breaks readers: nesting, numbers that are none, lone surrogates, bytes that are no UTF-8,
# controls.
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


def lines(seeds: Sequence[bytes], count: int, chance: random.Random) -> Iterator[bytes]:
    """That many mutated messages, without line breaks."""
    for _ in range(count):
        yield one(chance.choice(seeds), chance).replace(b"\n", b" ")


def one(message: bytes, chance: random.Random) -> bytes:
    """The message with a field replaced, with bytes changed, cut or inserted; or random bytes."""
    how = chance.randrange(8)
    if how == 0:
        return chance.randbytes(chance.randrange(200))
    if how <= 4:
        return json.dumps(_changed(json.loads(message), chance)).encode()
    data = bytearray(message)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(data) + 1)
        if how == 5:
            data[at : at + chance.randrange(20)] = b""
        elif how == 6:
            data[at : at + 1] = chance.randbytes(1)
        else:
            data[at:at] = chance.choice(WORDS)
    return bytes(data)


def _changed(value: Any, chance: random.Random) -> Any:
    """JSON with one value somewhere in it replaced, dropped or added."""
    if not isinstance(value, dict | list) or not value or chance.random() < 0.2:
        return chance.choice(VALUES)
    found = dict(value) if isinstance(value, dict) else list(value)
    key = chance.choice(list(found)) if isinstance(found, dict) else chance.randrange(len(found))
    if chance.random() < 0.1:
        del found[key]
    else:
        found[key] = _changed(found[key], chance)
    return found

"""The rule by which items are held out, written again with the integers of Python."""

import hashlib
from collections.abc import Sequence

MASK = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15


def mix_bits(value: int) -> int:
    """Add the increment of splitmix64 to a value, and apply its finalizer."""
    value = (value + GOLDEN) & MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


def hash_text(text: str) -> int:
    """Return the first 64 bits of BLAKE2b."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def held_out_texts(texts: Sequence[str], share: float, seed: int = 0) -> list[bool]:
    """Return for each text whether it is held out, at least one and not all."""
    ranks = [mix_bits(hash_text(text) ^ mix_bits(seed)) for text in texts]
    limit = min(max(int(share * 2**64), min(ranks) + 1), max(ranks))
    return [rank < limit for rank in ranks]

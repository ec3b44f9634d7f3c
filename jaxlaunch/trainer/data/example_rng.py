"""The random numbers of one example: a function of the run's seed and of the example's position, and of nothing else.

Who reads an example, when, and after which others then makes no difference to it: a run that resumes at any step, on
any number of processes, sees the augmentations that it would have seen. Reading takes its numbers from a parameter
named `rng`, a numpy Generator, if it has one; otherwise the global generators of random, numpy and torch are seeded
before each example, and as a process has one of each, its examples are then read one at a time.
"""

from __future__ import annotations

import contextlib
import inspect
import random
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

TRAIN, EVAL = 0, 1  # what a position counts: the examples of training, or those of an evaluation
_global = threading.Lock()  # held while the global generators are one example's


def takes_rng(function: Callable[..., Any]) -> bool:
    """Whether `function` has a parameter named `rng`."""
    try:
        return "rng" in inspect.signature(function).parameters
    except (TypeError, ValueError):  # some of those written in C have no signature
        return False


def entropy(seed: int, purpose: int, position: int) -> np.random.SeedSequence:
    """What every generator of the example at `position` starts from; `purpose` is TRAIN or EVAL."""
    return np.random.SeedSequence((seed, purpose, position))


@contextlib.contextmanager
def seeded(start: np.random.SeedSequence) -> Iterator[None]:
    """Within it the global generators of random, numpy and, once it is imported, torch begin at `start`."""
    words = start.generate_state(4)
    with _global:
        random.seed(words.tobytes())
        np.random.seed(words)
        generator = _of_torch()
        if generator is not None:  # torch.manual_seed would also seed every device, which takes far longer
            generator.manual_seed(int(words[:2].view(np.uint64)[0]))
        yield


def state() -> tuple[Any, ...]:
    """Where the global generators are, to be taken within `seeded`; another process goes on from there by `goes_on`."""
    generator = _of_torch()
    return random.getstate(), np.random.get_state(), None if generator is None else generator.get_state().numpy()


@contextlib.contextmanager
def goes_on(found: tuple[Any, ...]) -> Iterator[None]:
    """Within it the global generators go on from the `state` found."""
    of_random, of_numpy, of_torch = found
    with _global:
        random.setstate(of_random)
        np.random.set_state(of_numpy)
        generator = _of_torch()
        if generator is not None and of_torch is not None:
            generator.set_state(sys.modules["torch"].from_numpy(of_torch))
        yield


def _of_torch() -> Any:
    torch = sys.modules.get("torch")
    return None if torch is None else vars(torch).get("default_generator")  # not there while it is imported

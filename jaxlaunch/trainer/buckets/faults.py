"""Failures of storage: whether an exception means that storage failed, or that what was asked is wrong; retries.

Storage that failed may be back at the next attempt (84); wrong data stay wrong (65). A right that is missing was never
given, as long as the run has not trained; after that it was there, and may be back.
"""

from __future__ import annotations

import contextlib
import errno
import http.client
import os
import re
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar
from urllib.error import URLError

from jaxlaunch import contract
from jaxlaunch.trainer.errors import DataError, StorageError

FULL = (errno.ENOSPC, errno.EDQUOT)
OF_A_DISK = (*FULL, errno.EIO, errno.ESTALE)  # what the system says of a disk that is full or broken
REFUSED = (errno.EROFS, errno.EACCES, errno.EPERM)
# A missing file stays missing, and so does a right to read it.
LASTING = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)
# Without an errno as well: `raise TimeoutError("no answer")`.
NETWORK = (TimeoutError, ConnectionError, URLError, http.client.HTTPException)
# Clients of storage whose exceptions need not be OSErrors. None is imported to find out.
CLIENTS = (
    *("aiobotocore", "aiohttp", "azure", "botocore", "fsspec", "gcsfs", "google", "grpc", "httpcore", "httpx"),
    *("huggingface_hub", "requests", "s3fs", "s3transfer", "urllib3"),
)
LOST = re.compile(
    "Timeout|TimedOut|Connect|Disconnect|Network|Transport|Protocol|Unavailable|Payload|Incomplete|ChunkedEncoding|"
    "Deadline|TooMany|SlowDown|Throttl|Retr(?:y|ies)|InternalServer|BadGateway|Transient"
)
BUSY = (408, 425, 429)  # statuses of HTTP below 500 that another attempt may not meet
UNAUTHORIZED = (401, 403)
LONGEST_PAUSE_S = 8.0

T = TypeVar("T")


def again(act: Callable[[], T]) -> T:
    """Return what `act` returns; call it again while it raises a StorageError, for as long as the agent allows.

    Raises the first error: those that follow may only be its consequences. A full disk is not waited for.
    """
    until = time.monotonic() + float(os.environ.get(contract.STORAGE_WAIT, 0.0))
    pause_s, first = 1.0, None
    while True:
        try:
            return act()
        except StorageError as error:
            first = first or error
            left_s = until - time.monotonic()
            if is_full(error) or left_s <= 0:
                raise first from first.__cause__
            pause_s = min(pause_s, left_s)
        print(f"{first}; trying again in {pause_s:.0f} s", flush=True)
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


@contextlib.contextmanager
def training() -> Iterator[None]:
    """Let this process and those that it starts know that the run trains."""
    is_first = contract.SAVED not in os.environ
    os.environ.setdefault(contract.SAVED, "0")
    try:
        yield
    finally:
        if is_first:
            del os.environ[contract.SAVED]


def has_trained() -> bool:
    """Return whether this run has trained, in an earlier attempt or in this one: its storage let it."""
    return contract.SAVED in os.environ


def is_full(error: BaseException) -> bool:
    """Return whether a disk has no room, as an error of ours says: waiting does not make any."""
    return any(os.strerror(number) in str(error) for number in FULL)


def unreadable(what: str, error: BaseException) -> DataError | StorageError:
    """Return the error that ends a run in which `error` was raised while `what` was read, in one sentence."""
    return kind_of(error)(f"{what}: {type(error).__name__}: {error}")


def kind_of(error: BaseException) -> type[DataError] | type[StorageError]:
    """Return the kind of error to end with: that of storage or that of the data."""
    return StorageError if is_storage(error) else DataError


def is_storage(error: BaseException) -> bool:
    """Return whether a disk or a network failed, so that another attempt may succeed.

    What `error` was raised from, or while handling, decides where it says nothing itself.
    """
    for link in _chain(error):
        if isinstance(link, LASTING):
            return isinstance(link, PermissionError) and has_trained()
        if (status := _status(link)) is not None:
            is_refused = status in UNAUTHORIZED or "expired" in str(link).lower()  # ExpiredToken of S3 has 400
            return status in BUSY or status >= 500 or (is_refused and has_trained())
        # A URLError may carry what happened: `file:///gone` is one around a FileNotFoundError.
        is_wrapper = isinstance(link, URLError) and isinstance(link.reason, BaseException)
        if isinstance(link, NETWORK) and not is_wrapper:
            return True
        if isinstance(link, OSError) and link.errno is not None and not _client_kinds(link.__cause__):
            return True  # a client's own error, which s3fs puts into an OSError, says more
        kinds = _client_kinds(link)
        if any(LOST.search(kind.__name__) for kind in kinds) or (kinds and has_trained()):
            return True
    return False


def is_from_store(error: BaseException) -> bool:
    """Return whether a disk, a network or a client of storage raised `error`, or what it came from: it is no bug."""
    return any(isinstance(link, OSError | http.client.HTTPException) or _client_kinds(link) for link in _chain(error))


def is_refusal(error: BaseException) -> bool:
    """Return whether a store will answer the same again: no right to it, no credentials, no such bucket."""
    return is_from_store(error) and not is_storage(error)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield `error` and what it was raised from, as a traceback does; `reason` is how urllib and urllib3 chain."""
    seen: list[BaseException] = []
    following: Any = error
    while isinstance(following, BaseException) and following not in seen:
        seen.append(following)
        yield following
        raised_from = following.__cause__ or (None if following.__suppress_context__ else following.__context__)
        reason = getattr(following, "reason", None)
        following = reason if isinstance(reason, BaseException) else raised_from


def _status(error: BaseException) -> int | None:
    """Return the HTTP status of a client's exception: urllib, requests, httpx, aiohttp, botocore, google."""
    if isinstance(error, OSError) and error.errno is not None:
        return None
    if type(error) is OSError and str(error).startswith("Forbidden: "):  # of gcsfs, which leaves the status out
        return 403
    response = getattr(error, "response", None)
    if isinstance(response, dict):  # botocore's ClientError
        response = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    codes = (getattr(error, "code", None), getattr(error, "status", None), getattr(response, "status_code", response))
    return next((int(code) for code in codes if isinstance(code, int) and 400 <= code < 600), None)


def _client_kinds(error: BaseException | None) -> list[type]:
    """Return those of the classes of an exception that a client of storage defines."""
    return [kind for kind in type(error).__mro__ if kind.__module__.partition(".")[0] in CLIENTS]

"""What an exception that was raised while storage was read or written tells: it failed, or what was asked is wrong.

Storage that failed may be back at the next attempt (84); wrong data stay wrong (65). A right that is missing was never
given, as long as the run has not trained; after that it was there, and may be back.
"""

from __future__ import annotations

import contextlib
import errno
import http.client
import os
import re
from collections.abc import Iterator
from typing import Any
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


@contextlib.contextmanager
def training() -> Iterator[None]:
    """Within it the run trains, as this process and those that it starts know."""
    is_first = contract.SAVED not in os.environ
    os.environ.setdefault(contract.SAVED, "0")
    try:
        yield
    finally:
        if is_first:
            del os.environ[contract.SAVED]


def has_trained() -> bool:
    """Whether this run has trained, in an earlier attempt or in this one: its storage let it."""
    return contract.SAVED in os.environ


def is_full(error: BaseException) -> bool:
    """Whether a disk has no room, as an error of ours says: waiting does not make any."""
    return any(os.strerror(number) in str(error) for number in FULL)


def unreadable(what: str, error: BaseException) -> DataError | StorageError:
    """The error that ends a run in which `error` was raised while `what` was read, in one sentence."""
    return kind_of(error)(f"{what}: {type(error).__name__}: {error}")


def kind_of(error: BaseException) -> type[DataError] | type[StorageError]:
    """Whose fault `error` is."""
    return StorageError if is_storage(error) else DataError


def is_storage(error: BaseException) -> bool:
    """Whether a disk or a network failed, so that another attempt may succeed.

    What `error` was raised from, or while handling, decides where it says nothing itself.
    """
    for each in _chain(error):
        if isinstance(each, LASTING):
            return isinstance(each, PermissionError) and has_trained()
        if (status := _status(each)) is not None:
            is_refused = status in UNAUTHORIZED or "expired" in str(each).lower()  # ExpiredToken of S3 has 400
            return status in BUSY or status >= 500 or (is_refused and has_trained())
        if isinstance(each, NETWORK) and not _is_reported_by_another(each):
            return True
        if isinstance(each, OSError) and each.errno is not None and not _is_client(each.__cause__):
            return True  # a client's own error, which s3fs puts into an OSError, says more
        if _is_lost_client(each) or (_is_client(each) and has_trained()):
            return True
    return False


def is_from_store(error: BaseException) -> bool:
    """Whether a disk, a network or a client of storage raised `error`, or what it came from: no bug, whatever it is."""
    return any(isinstance(each, OSError | http.client.HTTPException) or _is_client(each) for each in _chain(error))


def is_refusal(error: BaseException) -> bool:
    """Whether a store answered and will answer the same again: no right to it, no credentials, no such bucket."""
    return is_from_store(error) and not is_storage(error)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """`error`, and what it was raised from, as a traceback shows them; `reason` is how urllib and urllib3 chain."""
    seen: list[BaseException] = []
    following: Any = error
    while isinstance(following, BaseException) and following not in seen:
        seen.append(following)
        yield following
        raised_from = following.__cause__ or (None if following.__suppress_context__ else following.__context__)
        reason = getattr(following, "reason", None)
        following = reason if isinstance(reason, BaseException) else raised_from


def _is_reported_by_another(error: BaseException) -> bool:
    """Whether a URLError carries what happened: `file:///gone` is one around a FileNotFoundError."""
    return isinstance(error, URLError) and isinstance(error.reason, BaseException)


def _status(error: BaseException) -> int | None:
    """The HTTP status that an exception of a client carries: urllib, requests, httpx, aiohttp, botocore, google."""
    if isinstance(error, OSError) and error.errno is not None:
        return None
    if type(error) is OSError and str(error).startswith("Forbidden: "):  # of gcsfs, which leaves the status out
        return 403
    response = getattr(error, "response", None)
    if isinstance(response, dict):  # botocore's ClientError
        response = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    said = (getattr(error, "code", None), getattr(error, "status", None), getattr(response, "status_code", response))
    return next((int(each) for each in said if isinstance(each, int) and 400 <= each < 600), None)


def _is_lost_client(error: BaseException) -> bool:
    """Whether a storage client lost its server, by the name of the exception's class or of one above it."""
    return any(_is_client_s(each) and LOST.search(each.__name__) for each in _kinds(error))


def _is_client(error: BaseException | None) -> bool:
    return any(_is_client_s(each) for each in _kinds(error))


def _is_client_s(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in CLIENTS


def _kinds(error: BaseException | None) -> list[type]:
    return [each for each in type(error).__mro__ if not issubclass(BaseException, each)]

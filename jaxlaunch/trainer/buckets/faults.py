"""Classifies the errors of storage, and retries them.

After a storage failure another attempt may succeed (exit code 84), whereas wrong data stays wrong
(65). A missing permission counts as wrong data before the run has trained, because it was never
granted. Afterwards it counts as a storage failure, because the permission existed and may return.
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

FULL_DISK_ERRNOS = (errno.ENOSPC, errno.EDQUOT)
# Errors of the operating system for a disk that is full or broken.
DISK_ERRNOS = (*FULL_DISK_ERRNOS, errno.EIO, errno.ESTALE)
REFUSED_ERRNOS = (errno.EROFS, errno.EACCES, errno.EPERM)
# A missing file stays missing, and so does the permission to read it.
PERMANENT_ERRORS = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)
# These count even without an errno, as in `raise TimeoutError("no answer")`.
NETWORK_ERRORS = (TimeoutError, ConnectionError, URLError, http.client.HTTPException)
# Storage clients whose exceptions need not be OSErrors. They are recognized without importing them.
CLIENT_PACKAGES = (
    *("aiobotocore", "aiohttp", "azure", "botocore", "fsspec", "gcsfs", "google", "grpc"),
    *("httpcore", "httpx", "huggingface_hub", "requests", "s3fs", "s3transfer", "urllib3"),
)
TRANSIENT_NAMES = re.compile(
    "Timeout|TimedOut|Connect|Disconnect|Network|Transport|Protocol|Unavailable|Payload|Incomplete|"
    "ChunkedEncoding|Deadline|TooMany|SlowDown|Throttl|Retr(?:y|ies)|InternalServer|BadGateway|"
    "Transient"
)
# HTTP statuses below 500 that may not occur again.
RETRYABLE_STATUSES = (408, 425, 429)
UNAUTHORIZED_STATUSES = (401, 403)
MAX_PAUSE_S = 8.0

T = TypeVar("T")


def retry_storage(operation: Callable[[], T]) -> T:
    """Return the result of an operation, retrying it after a StorageError while the agent allows.

    Raises the first error, because later ones may be its consequences. A full disk is not retried.
    """
    deadline = time.monotonic() + float(os.environ.get(contract.STORAGE_WAIT, 0.0))
    pause_s, first_error = 1.0, None
    while True:
        try:
            return operation()
        except StorageError as error:
            first_error = first_error or error
            left_s = deadline - time.monotonic()
            if is_disk_full(error) or left_s <= 0:
                raise first_error from first_error.__cause__
            pause_s = min(pause_s, left_s)
        print(f"{first_error}; trying again in {pause_s:.0f} s", flush=True)
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, MAX_PAUSE_S)


@contextlib.contextmanager
def mark_training() -> Iterator[None]:
    """Record in the environment, for this process and its children, that the run trains."""
    is_first = contract.SAVED not in os.environ
    os.environ.setdefault(contract.SAVED, "0")
    try:
        yield
    finally:
        if is_first:
            del os.environ[contract.SAVED]


def has_trained() -> bool:
    """Return whether this run has trained, in this attempt or an earlier one."""
    return contract.SAVED in os.environ


def is_disk_full(error: BaseException) -> bool:
    """Return whether the message of an error says that a disk is full."""
    return any(os.strerror(number) in str(error) for number in FULL_DISK_ERRNOS)


def read_error(subject: str, error: BaseException) -> DataError | StorageError:
    """Return the error that ends a run if `error` was raised while the subject was read."""
    return error_class(error)(f"{subject}: {type(error).__name__}: {error}")


def error_class(error: BaseException) -> type[DataError] | type[StorageError]:
    """Return StorageError if storage failed, and DataError otherwise."""
    return StorageError if is_storage_failure(error) else DataError


def is_storage_failure(error: BaseException) -> bool:
    """Return whether a disk or a network failed, so that another attempt may succeed.

    If `error` itself is inconclusive, the exceptions that it was raised from or during decide.
    """
    for link in _exception_chain(error):
        if isinstance(link, PERMANENT_ERRORS):
            return isinstance(link, PermissionError) and has_trained()
        if (status := _http_status(link)) is not None:
            # S3's ExpiredToken has status 400.
            is_refused = status in UNAUTHORIZED_STATUSES or "expired" in str(link).lower()
            return status in RETRYABLE_STATUSES or status >= 500 or (is_refused and has_trained())
        # A URLError may wrap the cause: `file:///gone` raises one around a FileNotFoundError.
        is_wrapper = isinstance(link, URLError) and isinstance(link.reason, BaseException)
        if isinstance(link, NETWORK_ERRORS) and not is_wrapper:
            return True
        # s3fs wraps a client's own error, which says more, into an OSError.
        is_system_error = isinstance(link, OSError) and link.errno is not None
        if is_system_error and not _client_kinds(link.__cause__):
            return True
        kinds = _client_kinds(link)
        is_transient = any(TRANSIENT_NAMES.search(kind.__name__) for kind in kinds)
        if is_transient or (kinds and has_trained()):
            return True
    return False


def is_from_store(error: BaseException) -> bool:
    """Return whether `error` or one of its causes came from a disk, a network or a client."""
    kinds = (OSError, http.client.HTTPException)
    chain = _exception_chain(error)
    return any(isinstance(link, kinds) or _client_kinds(link) for link in chain)


def is_refusal(error: BaseException) -> bool:
    """Return whether a store refused a request, and would refuse it again.

    Examples are a missing permission, missing credentials, and a missing bucket.
    """
    return is_from_store(error) and not is_storage_failure(error)


def _exception_chain(error: BaseException) -> Iterator[BaseException]:
    """Yield `error` and its causes, as a traceback prints them.

    urllib and urllib3 store the cause in `reason`.
    """
    visited: list[BaseException] = []
    link: Any = error
    while isinstance(link, BaseException) and link not in visited:
        visited.append(link)
        yield link
        raised_from = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
        reason = getattr(link, "reason", None)
        link = reason if isinstance(reason, BaseException) else raised_from


def _http_status(error: BaseException) -> int | None:
    """Return the HTTP status of an exception of any of the supported clients."""
    if isinstance(error, OSError) and error.errno is not None:
        return None
    if type(error) is OSError and str(error).startswith("Forbidden: "):
        # gcsfs leaves out the status.
        return 403
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        # botocore's ClientError has a dict here.
        response = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    codes = [getattr(error, key, None) for key in ("code", "status")]
    codes.append(getattr(response, "status_code", response))
    return next((int(code) for code in codes if isinstance(code, int) and 400 <= code < 600), None)


def _client_kinds(error: BaseException | None) -> list[type]:
    """Return those classes in the bases of an exception that a storage client defines."""
    kinds = type(error).__mro__
    return [kind for kind in kinds if kind.__module__.partition(".")[0] in CLIENT_PACKAGES]

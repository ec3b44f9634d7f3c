import gzip
import http.client
import socket
import urllib.error
from typing import Any

import pytest
import urllib3
from PIL import UnidentifiedImageError

from jaxlaunch.trainer.buckets import faults
from jaxlaunch.trainer.errors import DataError, StorageError


def client(name: str, module: str, **attributes: Any) -> Exception:
    """An exception as a client that need not be installed raises it."""
    return type(name, (Exception,), {"__module__": module, **attributes})("said")


def raised(outer: Exception, inner: Exception, *, plainly: bool = False) -> Exception:
    """`outer` as it is raised from `inner`, or while that is handled."""
    try:
        try:
            raise inner
        except Exception as error:
            if plainly:
                raise outer  # noqa: B904
            raise outer from error
    except Exception as error:
        return error


def of_status(status: int) -> Exception:
    return urllib.error.HTTPError("https://h/x", status, "said", http.client.HTTPMessage(), None)


def boto(status: int, code: str = "said") -> Exception:
    """A store's answer, as botocore raises it."""
    answer = {"ResponseMetadata": {"HTTPStatusCode": status}}
    return type(
        "ClientError", (Exception,), {"__module__": "botocore.exceptions", "response": answer}
    )(code)


@pytest.mark.parametrize(
    "error",
    [
        TimeoutError("no answer"),
        ConnectionError("gone"),
        ConnectionResetError(),
        urllib.error.URLError("no route"),
        urllib.error.URLError(TimeoutError("no answer")),
        of_status(503),
        of_status(429),
        http.client.IncompleteRead(b"", 9),
        http.client.RemoteDisconnected("closed"),
        socket.gaierror(-3, "Temporary failure in name resolution"),
        OSError(5, "Input/output error"),
        OSError(116, "Stale file handle"),
        urllib3.exceptions.MaxRetryError(None, "/", None),
        urllib3.exceptions.ProtocolError("connection broken"),
        client("EndpointConnectionError", "botocore.exceptions"),
        boto(503),
        raised(OSError(5, "said"), boto(503)),
        raised(OSError(5, "said"), client("EndpointConnectionError", "botocore.exceptions")),
        client("ServiceUnavailable", "google.api_core.exceptions", code=503),
        client("ServerDisconnectedError", "aiohttp.client_exceptions"),
        client("ReadTimeout", "httpx"),
        raised(RuntimeError("cannot fetch"), TimeoutError("no answer")),
        raised(RuntimeError("cannot fetch"), ConnectionResetError(), plainly=True),
    ],
    ids=repr,
)
def test_a_network_or_a_disk_that_fails_is_storage_s_fault(error: Exception) -> None:
    assert faults.is_storage(error)
    found = faults.read_error("example 3 cannot be read", error)
    assert isinstance(found, StorageError) and str(found).startswith(
        f"example 3 cannot be read: {type(error).__name__}"
    )


@pytest.mark.parametrize(
    "error",
    [
        ValueError("bad JPEG"),
        FileNotFoundError(2, "gone"),
        PermissionError(13, "denied"),
        UnidentifiedImageError("cannot identify image file"),  # an OSError, but none of a disk
        OSError("image file is truncated"),
        gzip.BadGzipFile("not a gzipped file"),
        EOFError("ends too soon"),
        of_status(404),
        of_status(403),
        urllib.error.URLError(FileNotFoundError(2, "gone")),
        client("NoCredentialsError", "botocore.exceptions"),
        client("ConnectionFormatError", "mine"),
        raised(ValueError("bad JPEG"), KeyError("cache")),
    ],
    ids=repr,
)
def test_what_stays_as_it_is_is_the_data_s_fault(error: Exception) -> None:
    assert not faults.is_storage(error)
    assert isinstance(faults.read_error("example 3 cannot be read", error), DataError)


@pytest.mark.parametrize(
    "refusal",
    [
        PermissionError(13, "denied"),
        of_status(401),
        of_status(403),
        OSError("Forbidden: b/team/o\nForbidden"),  # of gcsfs
        boto(403),
        boto(400, "An error occurred (ExpiredToken)"),
        raised(OSError(5, "An error occurred (Unauthorized)"), boto(401)),
        client("RefreshError", "google.auth.exceptions"),
        client("NoCredentialsError", "botocore.exceptions"),
    ],
    ids=repr,
)
def test_a_right_that_a_run_had_and_lost_is_storage_s_fault(refusal: Exception) -> None:
    assert not faults.is_storage(refusal)
    with faults.mark_training():
        with faults.mark_training():
            assert faults.is_storage(refusal) and not faults.is_refusal(refusal)
            assert not faults.is_storage(FileNotFoundError(2, "gone")) and not faults.is_storage(
                of_status(404)
            )
        assert faults.has_trained()
    assert not faults.has_trained() and not faults.is_storage(refusal)

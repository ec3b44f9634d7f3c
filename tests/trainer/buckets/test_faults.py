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


def client_error(name: str, module: str, **attributes: Any) -> Exception:
    """An exception as a client that need not be installed raises it."""
    return type(name, (Exception,), {"__module__": module, **attributes})("said")


def chain_errors(outer: Exception, inner: Exception, *, plainly: bool = False) -> Exception:
    """`outer` as it is raised from `inner`, or while that is handled."""
    try:
        try:
            raise inner
        except Exception as error:
            if plainly:
                raise outer  # noqa: B904 (an error without a cause is the case)
            raise outer from error
    except Exception as error:
        return error


def http_error(status: int) -> Exception:
    return urllib.error.HTTPError("https://h/x", status, "said", http.client.HTTPMessage(), None)


def boto_error(status: int, code: str = "said") -> Exception:
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
        http_error(503),
        http_error(429),
        http.client.IncompleteRead(b"", 9),
        http.client.RemoteDisconnected("closed"),
        socket.gaierror(-3, "Temporary failure in name resolution"),
        OSError(5, "Input/output error"),
        OSError(116, "Stale file handle"),
        urllib3.exceptions.MaxRetryError(None, "/", None),
        urllib3.exceptions.ProtocolError("connection broken"),
        client_error("EndpointConnectionError", "botocore.exceptions"),
        boto_error(503),
        chain_errors(OSError(5, "said"), boto_error(503)),
        chain_errors(
            OSError(5, "said"), client_error("EndpointConnectionError", "botocore.exceptions")
        ),
        client_error("ServiceUnavailable", "google.api_core.exceptions", code=503),
        client_error("ServerDisconnectedError", "aiohttp.client_exceptions"),
        client_error("ReadTimeout", "httpx"),
        chain_errors(RuntimeError("cannot fetch"), TimeoutError("no answer")),
        chain_errors(RuntimeError("cannot fetch"), ConnectionResetError(), plainly=True),
    ],
    ids=repr,
)
def test_network_or_disk_failure_is_a_storage_error(error: Exception) -> None:
    assert faults.is_storage_failure(error)
    result = faults.read_error("example 3 cannot be read", error)
    assert isinstance(result, StorageError)
    assert str(result).startswith(f"example 3 cannot be read: {type(error).__name__}")


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
        http_error(404),
        http_error(403),
        urllib.error.URLError(FileNotFoundError(2, "gone")),
        client_error("NoCredentialsError", "botocore.exceptions"),
        client_error("ConnectionFormatError", "mine"),
        chain_errors(ValueError("bad JPEG"), KeyError("cache")),
    ],
    ids=repr,
)
def test_permanent_failure_is_a_data_error(error: Exception) -> None:
    assert not faults.is_storage_failure(error)
    assert isinstance(faults.read_error("example 3 cannot be read", error), DataError)


@pytest.mark.parametrize(
    "refusal",
    [
        PermissionError(13, "denied"),
        http_error(401),
        http_error(403),
        OSError("Forbidden: b/team/o\nForbidden"),  # of gcsfs
        boto_error(403),
        boto_error(400, "An error occurred (ExpiredToken)"),
        chain_errors(OSError(5, "An error occurred (Unauthorized)"), boto_error(401)),
        client_error("RefreshError", "google.auth.exceptions"),
        client_error("NoCredentialsError", "botocore.exceptions"),
    ],
    ids=repr,
)
def test_permission_lost_during_training_is_a_storage_error(refusal: Exception) -> None:
    assert not faults.is_storage_failure(refusal)
    with faults.mark_training():
        with faults.mark_training():
            assert faults.is_storage_failure(refusal) and not faults.is_refusal(refusal)
            assert not faults.is_storage_failure(FileNotFoundError(2, "gone"))
            assert not faults.is_storage_failure(http_error(404))
        assert faults.has_trained()
    assert not faults.has_trained() and not faults.is_storage_failure(refusal)

import gzip
import http.server
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tensorflow_datasets.image_classification import mnist

from jaxlaunch.trainer.errors import DataError
from jaxlaunch.trainer.sources import tfds
from jaxlaunch.trainer.sources.tfds import TfdsSplit

PREPARE = """
import sys
from jaxlaunch.trainer.sources.tfds import TfdsSplit
print("ready", flush=True)
sys.stdin.readline()
print(TfdsSplit("digits", "train", sys.argv[1]).fingerprint())
"""


@pytest.mark.slow
def test_concurrent_processes_prepare_a_dataset_once(tmp_path: Path) -> None:
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PREPARE, tmp_path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    for process in processes:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    result = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert result[0] == result[1] and result[0].startswith("tfds digits/1.0.0 train, 1437 examples")
    assert sorted(path.name for path in (tmp_path / "digits").iterdir()) == ["1.0.0"]


@pytest.mark.parametrize(
    ("name", "expected"), [("digts", "digits"), ("mnsit", "mnist"), ("cifra10", "cifar10")]
)
def test_misspelled_dataset_gets_suggestions(name: str, expected: str, tmp_path: Path) -> None:
    words = f"data.name = {name} is not a dataset; did you mean {expected}\\b"
    with pytest.raises(DataError, match=words):
        tfds.prepare_dataset(name, str(tmp_path))


def test_missing_network_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_address(*_: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", no_address)
    monkeypatch.setattr(tfds.urllib.request, "getproxies", dict)  # type: ignore[attr-defined]
    words = "^mnist is not prepared in .* and there is no network to download it"
    with pytest.raises(DataError, match=words):
        TfdsSplit("mnist", "train", str(tmp_path))


def test_unwritable_folder_is_reported() -> None:
    words = "digits is not prepared in /proc/none, which cannot be written"
    with pytest.raises(DataError, match=words):
        TfdsSplit("digits", "train", "/proc/none")


@pytest.fixture
def mirror(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A web server with a small MNIST in the original file format, in place of the real one."""
    rng = np.random.default_rng(0)
    files = {}
    for name, count in (("train", 12), ("t10k", 5)):
        files[f"/{name}-images-idx3-ubyte.gz"] = (
            bytes(16) + rng.integers(0, 256, (count, 28, 28), np.uint8).tobytes()
        )
        files[f"/{name}-labels-idx1-ubyte.gz"] = (
            bytes(8) + rng.integers(0, 10, count, np.uint8).tobytes()
        )

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = gzip.compress(files[self.path])
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever).start()
    monkeypatch.setattr(mnist.MNIST, "URL", f"http://127.0.0.1:{server.server_port}/")
    monkeypatch.setattr(mnist, "_TRAIN_EXAMPLES", 12)
    monkeypatch.setattr(mnist, "_TEST_EXAMPLES", 5)
    monkeypatch.setattr(tfds, "_require_network", lambda *_: None)
    yield
    server.shutdown()
    server.server_close()


def test_local_dataset_reports_no_download(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tfds.prepare_dataset("digits", str(tmp_path))
    message = capsys.readouterr()
    assert message.err.splitlines() == [f"preparing digits in {tmp_path}"] and message.out == ""


def test_mnist_is_prepared_without_tensorflow(tmp_path: Path, mirror: None) -> None:
    train, test = (TfdsSplit("mnist", split, str(tmp_path)) for split in ("train", "test"))
    assert (len(train), len(test)) == (12, 5)
    images = [train[i]["image"] for i in range(12)]
    assert images[0].shape == (28, 28, 1) and images[0].dtype == np.uint8
    rng = np.random.default_rng(0)
    values = rng.integers(0, 256, (12, 28, 28), np.uint8)
    assert {image.tobytes() for image in images} == {image.tobytes() for image in values}

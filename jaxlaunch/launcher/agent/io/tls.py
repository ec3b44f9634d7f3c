"""TLS between agents, for a gang whose Secret has certificates: both ends show one that the job's own authority signed.

No name is compared, since that authority has signed for this job alone. `link` sends and receives what is encrypted
here.
"""

from __future__ import annotations

import dataclasses
import functools
import ssl
from pathlib import Path

from jaxlaunch.contract import AUTHORITY, CERTIFICATE, CERTIFICATE_KEY

AT_ONCE = 65536  # bytes that are decrypted in one call


class NotTrusted(Exception):
    """The other end has no certificate of this job, or does not take this host's."""


@dataclasses.dataclass(frozen=True)
class Contexts:
    """How this host answers a connection, and how it makes one."""

    server: ssl.SSLContext
    client: ssl.SSLContext


@functools.cache
def contexts(folder: Path) -> Contexts:
    """The contexts by the files of a gang's Secret. Raises OSError, which includes ssl.SSLError for invalid files."""
    return Contexts(_context(ssl.PROTOCOL_TLS_SERVER, folder), _context(ssl.PROTOCOL_TLS_CLIENT, folder))


def _context(protocol: ssl._SSLMethod, folder: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(folder / AUTHORITY)
    context.load_cert_chain(folder / CERTIFICATE, folder / CERTIFICATE_KEY)
    return context


class Channel:
    """The encryption of one connection, without the connection itself."""

    def __init__(self, context: ssl.SSLContext, *, is_server: bool) -> None:
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._in, self._out, server_side=is_server)
        self._is_ready = False
        self._early = bytearray()  # what is to be sent once the handshake has ended

    def begin(self) -> bytes:
        """The first bytes to send: a client's greeting; a server has none."""
        self.opened(b"")
        return self.sealed(b"")

    def sealed(self, text: bytes) -> bytes:
        """The bytes to send next: those of the handshake, and once it has ended the encrypted `text`."""
        self._early += text
        if self._is_ready and self._early:
            self._tls.write(self._early)
            self._early.clear()
        return self._out.read()

    def opened(self, data: bytes) -> bytes:
        """The text of what was received. Afterwards `sealed` may have something to send. Raises NotTrusted."""
        self._in.write(data)
        text = bytearray()
        try:
            if not self._is_ready:
                self._tls.do_handshake()
                self._is_ready = True
            while more := self._tls.read(AT_ONCE):
                text += more
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLCertVerificationError as error:
            raise NotTrusted(f"its certificate is not of this job: {error.verify_message}") from None
        except ssl.SSLError as error:
            raise NotTrusted(f"TLS: {(error.reason or str(error)).lower().replace('_', ' ')}") from None
        return bytes(text)

"""The token of the cluster that a viewer brings: in the header Authorization, or in a cookie after a sign-in.

The server keeps none. A cookie holds the token encrypted by a key that ends with this process, so that it is of use to
nobody but this server; a browser sends it to every port of `localhost`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from cryptography.fernet import Fernet, InvalidToken

LONGEST = 16 * 1024  # characters of a token; those of clouds have up to four thousand
LONGEST_KEPT = 2800  # that a cookie has room for, encrypted
SIGNED_IN_S = 12 * 3600
COOKIE, SECURE_COOKIE = "jaxlaunch", "__Host-jaxlaunch"  # a browser takes the second over HTTPS alone
_TOKEN = re.compile(r"[A-Za-z0-9._~+/-]+=*")  # RFC 6750


class Refused(Exception):
    """There is no token, or none that can be sent on; the text is for the viewer, and repeats nothing of it."""


def checked(text: str) -> str:
    """A token without the white space around it. Raises Refused for what is none."""
    token = text.strip(" \t\r\n")
    if not token:
        raise Refused("Sign in to see your jobs.")
    if len(token) > LONGEST or not _TOKEN.fullmatch(token):
        raise Refused(
            f"This is not a token: it has more than {LONGEST} characters, or others than letters, digits and ._~+/-=."
        )
    return token


def of_headers(headers: Sequence[str]) -> str | None:
    """The token in the headers Authorization; None where there is none. Raises Refused."""
    if not headers:
        return None
    scheme, _, rest = headers[0].partition(" ")
    if len(headers) > 1 or scheme.lower() != "bearer":
        raise Refused("The header Authorization must be `Bearer TOKEN`, once.")
    return checked(rest)


class Cookies:
    """Puts tokens into cookies, and takes them out again."""

    def __init__(self) -> None:
        self._box = Fernet(Fernet.generate_key())

    def kept(self, token: str, *, is_secure: bool) -> str:
        """The header Set-Cookie for a token. Raises Refused for one that is too long for a cookie."""
        if len(token) > LONGEST_KEPT:
            raise Refused(
                f"This token has more than the {LONGEST_KEPT} characters that a cookie has room for: an authenticating"
                " proxy can send it as `Authorization: Bearer` instead."
            )
        return _cookie(self._box.encrypt(token.encode()).decode(), is_secure=is_secure)

    def token(self, headers: Sequence[str]) -> str | None:
        """The token in the headers Cookie; None where there is none. Raises Refused for one that is no longer valid."""
        found = _values(headers)
        sealed = found.get(SECURE_COOKIE) or found.get(COOKIE)
        if sealed is None:
            return None
        try:
            return self._box.decrypt(sealed.encode(), ttl=SIGNED_IN_S).decode()
        except (InvalidToken, UnicodeEncodeError):
            raise Refused("You are no longer signed in: sign in again.") from None


def forgotten() -> tuple[str, str]:
    """The headers Set-Cookie that end both cookies."""
    return _cookie("", is_secure=False) + "; Max-Age=0", _cookie("", is_secure=True) + "; Max-Age=0"


def _cookie(value: str, *, is_secure: bool) -> str:
    name = SECURE_COOKIE if is_secure else COOKIE
    return f"{name}={value}; Path=/; HttpOnly; SameSite=Strict" + "; Secure" * is_secure


def _values(headers: Sequence[str]) -> dict[str, str]:
    found = dict[str, str]()
    for header in headers:
        for part in header.split(";"):
            name, equals, value = part.strip().partition("=")
            if equals:
                found.setdefault(name, value)
    return found

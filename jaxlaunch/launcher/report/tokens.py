"""Tokens of the viewers of a dashboard in a cluster, in a header or encrypted in a cookie."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

from cryptography.fernet import Fernet, InvalidToken

# Tokens of cloud providers have up to four thousand characters.
MAX_TOKEN_CHARS = 16 * 1024
# The longest token that fits into a cookie after encryption.
MAX_COOKIE_CHARS = 2800
SESSION_S = 12 * 3600
# A browser accepts the second cookie over HTTPS only.
COOKIE, SECURE_COOKIE = "jaxlaunch", "__Host-jaxlaunch"
# RFC 6750.
_TOKEN = re.compile(r"[A-Za-z0-9._~+/-]+=*")


class BadTokenError(Exception):
    """The request has no valid token. The message is for the viewer, and does not contain it."""


def check_token(text: str) -> str:
    """Return a token without surrounding white space. Raises BadTokenError."""
    token = text.strip(" \t\r\n")
    if not token:
        raise BadTokenError("Sign in to see your jobs.")
    if len(token) > MAX_TOKEN_CHARS or not _TOKEN.fullmatch(token):
        limit = f"it has more than {MAX_TOKEN_CHARS} characters"
        raise BadTokenError(
            f"This is not a token: {limit}, or others than letters, digits and ._~+/-=."
        )
    return token


def bearer_token(headers: Sequence[str]) -> str | None:
    """Return the token in the Authorization headers, or None. Raises BadTokenError."""
    if not headers:
        return None
    scheme, _, credentials = headers[0].partition(" ")
    if len(headers) > 1 or scheme.lower() != "bearer":
        raise BadTokenError("The header Authorization must be `Bearer TOKEN`, once.")
    return check_token(credentials)


class Cookies:
    """Encrypts tokens for cookies, and decrypts them."""

    def __init__(self) -> None:
        self._cipher = Fernet(Fernet.generate_key())

    def seal_token(self, token: str, *, is_secure: bool) -> str:
        """Return the Set-Cookie header for a token. Raises BadTokenError if it is too long."""
        if len(token) > MAX_COOKIE_CHARS:
            limit = f"more than the {MAX_COOKIE_CHARS} characters that a cookie has room for"
            proxy = "an authenticating proxy can send it as `Authorization: Bearer` instead"
            raise BadTokenError(f"This token has {limit}: {proxy}.")
        return set_cookie(self._cipher.encrypt(token.encode()).decode(), is_secure=is_secure)

    def read_token(self, headers: Sequence[str]) -> str | None:
        """Return the token in the Cookie headers, or None. Raises BadTokenError."""
        cookies = dict[str, str]()
        for part in itertools.chain.from_iterable(header.split(";") for header in headers):
            name, equals, value = part.strip().partition("=")
            if equals:
                cookies.setdefault(name, value)
        sealed = cookies.get(SECURE_COOKIE) or cookies.get(COOKIE)
        if sealed is None:
            return None
        try:
            return self._cipher.decrypt(sealed.encode(), ttl=SESSION_S).decode()
        except (InvalidToken, UnicodeEncodeError):
            raise BadTokenError("You are no longer signed in: sign in again.") from None


def set_cookie(value: str, *, is_secure: bool) -> str:
    """Return the Set-Cookie header for a value."""
    name = SECURE_COOKIE if is_secure else COOKIE
    return f"{name}={value}; Path=/; HttpOnly; SameSite=Strict" + "; Secure" * is_secure

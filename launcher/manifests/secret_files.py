"""Which files of a folder hold credentials: by their names, and by what they hold. Pure.

Whoever may read ConfigMaps may read what a job ships, and a repository is often readable by fewer people than those.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import NamedTuple

from jaxlaunch.launcher.job import credentials

# Of programs that keep their credentials in files; in lower case.
_NAMES = (
    *(".env*", ".netrc", "_netrc", ".pypirc", ".git-credentials", ".pgpass", ".my.cnf", ".mylogin.cnf", ".s3cfg"),
    *(".boto", ".htpasswd", ".vault-token", ".dockercfg", ".dockerconfigjson", ".databrickscfg", ".passwd-s3fs"),
    *(
        ".modal.toml",
        "rclone.conf",
        "kaggle.json",
        "kubeconfig",
        "*.kubeconfig",
        "application_default_credentials.json",
    ),
    *("client_secret*.json", "id_rsa", "id_dsa", "id_ecdsa", "id_ed25519", "id_ecdsa_sk", "id_ed25519_sk"),
    *("*.ppk", "*.p12", "*.pfx", "*.jks", "*.keystore", "*.kdbx", "*.tfstate", "*.tfstate.*"),
    *("secrets.yaml", "secrets.yml", "secrets.json", "secrets.toml", "secrets.env"),
)
_PATHS = (
    *(".aws/credentials", ".docker/config.json", ".kube/config", ".gnupg/*", ".azure/*", ".config/gcloud/*"),
    *(".cargo/credentials", ".cargo/credentials.toml", ".gem/credentials", ".config/gh/hosts.yml"),
    *("huggingface/token", ".huggingface/token", "huggingface/stored_tokens", ".ssh/id_*"),
)
_PUBLIC = "*.pub"

# In a file a value may also stand for another: documentation and templates are full of them.
_STAND_IN = re.compile(
    r"example|xxxx|your|placeholder|dummy|redacted|change.?me|fake|sample|insert|\.\.\.|\*\*\*|1234567890|abcdefgh",
    re.I,
)
_STAND_INS = {"password", "passwd", "pass", "pw", "pwd", "secret", "token", "user", "username", "test", "foo", "bar"}
_STAND_INS |= {"mypassword", "mypass", "mysecret"}
_FORMATTED = re.compile(r"%(?![0-9A-Fa-f]{2})")  # %s of printf; a URL encodes what begins with a %
_SHORTEST_PASSWORD = 4  # http://a:b@host is of a test
_FEWEST_CHARACTERS = 6  # different ones, of a random value


class Sign(NamedTuple):
    """What in a file looks like a credential."""

    line: int
    what: str


def by_name(name: str) -> bool:
    """Whether a file of this name, with the folders above it, is where a program keeps credentials."""
    path = f"/{name.lower()}"
    if fnmatchcase(path, _PUBLIC):
        return False
    return any(fnmatchcase(path, f"*/{kept}") for kept in _PATHS) or any(
        fnmatchcase(path.rpartition("/")[2], kept) for kept in _NAMES
    )


def in_content(content: bytes) -> Sign | None:
    """The first credential in a file; None where there is none. Takes about 0.1 s for a MB."""
    text = content.decode("latin-1")
    for form in _FORMS:
        for found in form.pattern.finditer(text):
            if form.is_one(found):
                what = form.what or found["name"]
                return Sign(text.count("\n", 0, found.start()) + 1, what)
    return None


def _is_random(value: str) -> bool:
    return len(set(value)) >= _FEWEST_CHARACTERS and _STAND_IN.search(value) is None


def _is_token(found: re.Match[str]) -> bool:
    return _is_random(found["here"])


def _is_password(found: re.Match[str]) -> bool:
    password = found["here"]
    stands_in = password.lower() in _STAND_INS or _STAND_IN.search(password) or _FORMATTED.search(password)
    return len(password) >= _SHORTEST_PASSWORD and password != found["user"] and not stands_in


def _is_header(found: re.Match[str]) -> bool:
    """Whether it follows `Authorization`, or cannot be prose: `the basic examples/resnet50_imagenet.py`."""
    value = found["here"]
    classes = (str.isupper, str.islower, str.isdigit)
    encoded = not {"/", "."} & set(value) and all(any(map(one, value)) for one in classes)
    return _is_random(value) and (found["header"] is not None or encoded)


class _Form(NamedTuple):
    what: str  # empty: the name that the match has
    pattern: re.Pattern[str]  # `here`: the credential
    is_one: Callable[[re.Match[str]], bool] = _is_token


_SECRET_MANIFEST = (
    r"(?m)^kind:[ ]*Secret[ ]*$(?:\n(?!---).*){0,30}?\n(?:data|stringData):[ ]*\n"
    r"[ ]+[\w.-]+:[ ]*(?P<here>[^\s{<]\S{5,})"
)
_FORMS = (
    _Form(
        "a private key",
        re.compile(
            r"-----BEGIN [A-Z0-9 ]*PRIVATE KEY(?: BLOCK)?-----(?:\\[nr]|\s)+(?:[A-Za-z-]+: [^\n]*\s+)*"
            r"(?P<here>[A-Za-z0-9+/=]{16,})|(?P<putty>PuTTY-User-Key-File-\d)"
        ),
        lambda found: found["putty"] is not None or _is_token(found),
    ),
    _Form("a token", re.compile(rf"(?P<here>{credentials.TOKENS})")),
    _Form(
        "a URL with a password",
        re.compile(
            rf"{credentials.SCHEME}(?P<user>[^\s:/@\"'`<>{{}}$%,;()\[\]]*):(?P<here>[\w.!#^&+=~%-]+)@(?!sha\d+:)[\w-]"
        ),
        _is_password,
    ),
    _Form(
        "a token",
        re.compile(
            r"(?P<header>(?i:authorization)[^\n]{0,80}?)?\b(?i:bearer|basic)\s+(?=[\w.~+/-]*\d)(?P<here>[\w.~+/=-]{20,})"
        ),
        _is_header,
    ),
    _Form("", re.compile(credentials.NAMED)),
    _Form("a token", re.compile(r"(?m)^[^#;\n]*:_(?:authToken|auth|password)\s*=\s*(?P<here>[\w+/=-]{8,})")),
    _Form("a password", re.compile(r"(?m)^[ \t]*machine\s+\S+\s+login\s+\S+\s+password\s+(?P<here>[^\s<$]{6,})")),
    _Form("a kubeconfig's key", re.compile(r"\bclient-key-data:\s*(?P<here>[A-Za-z0-9+/=]{40,})")),
    _Form(
        "a registry's password", re.compile(r"\"auths\"\s*:\s*\{[^}]*\"auth\"\s*:\s*\"(?P<here>[A-Za-z0-9+/=]{8,})\"")
    ),
    _Form("a Secret's data", re.compile(_SECRET_MANIFEST)),
)

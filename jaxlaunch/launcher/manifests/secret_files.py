"""Files of a folder that hold credentials, by well-known names and by well-known forms of tokens. Pure.

Whoever may read ConfigMaps may read what a job ships, and a repository is often readable by fewer people than those.
"""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from typing import NamedTuple

from jaxlaunch.launcher.job import credentials

# Of programs that keep their credentials in files, in lower case; with the folder above where the name needs it.
_NAMES: tuple[str, ...] = (
    *(".env*", "*.env", ".netrc*", "_netrc", ".pypirc", ".git-credentials", ".pgpass", ".my.cnf", ".s3cfg", ".boto"),
    *(".htpasswd", ".dockercfg", ".databrickscfg", ".vault-token", ".vault[_-]pass*", "*.tfvars", "*.tfstate*"),
    *("id_rsa*", "id_dsa*", "id_ecdsa*", "id_ed25519*", "*.key", "*.p8", "*.ppk", "*.p12", "*.pfx", "*.jks"),
    "*.keytab",
    *("*.kdbx", "*.keystore", "kubeconfig", "*.kubeconfig", "kaggle.json", "rclone.conf", "client_secret*.json"),
    *(".dockerconfigjson", ".modal.toml", ".mylogin.cnf", ".passwd-s3fs"),
    *("application_default_credentials.json", "service[_-]account*.json", "credentials", "credentials.*"),
    *("*[._-]credentials.*", "secrets.*", "*[._-]secrets.*"),
    *(".aws/*", ".azure/*", ".docker/config.json", ".gnupg/*", ".kube/*", ".oci/*", ".ssh/id_*", ".config/gcloud/*"),
    *(".config/gh/hosts.yml", "huggingface/token", "huggingface/stored_tokens"),
)
# Programs and their documentation, whose names are like those of credentials.
_HARMLESS = (
    *("*.py", "*.pyi", "*.md", "*.rst", "*.ipynb", "*.sh", "*.go", "*.js", "*.jsx", "*.ts", "*.tsx", "*.html", "*.css"),
    *("*.c", "*.cc", "*.cpp", "*.cu", "*.h", "*.hpp", "*.rs", "*.java", "*.rb", "*.proto"),
)
_PUBLIC_KEY = "*.pub"

# In a file a value may also stand for another: documentation and templates are full of them.
_PLACEHOLDER = re.compile(
    r"example|xxxx|your|placeholder|dummy|redacted|change.?me|fake|sample|insert|\.\.\.|\*\*\*|1234567890|abcdefgh",
    re.IGNORECASE,
)
_PLACEHOLDER_PASSWORDS = frozenset(
    "password passwd pass pw pwd secret token user username test foo bar mypassword mypass mysecret".split()
)
# %s of printf: a URL encodes what begins with a %.
_FORMATTED = re.compile(r"%(?![0-9A-Fa-f]{2})")
_SHORTEST_PASSWORD = 4  # http://a:b@host is of a test
_FEWEST_CHARACTERS = 6  # different ones, of a random value

# What a form is called, empty for the name in the match -> the form, whose group `here` is the credential.
_FORMS: tuple[tuple[str, re.Pattern[str]], ...] = (
    (
        "a private key",
        re.compile(
            r"-----BEGIN [A-Z0-9 ]*PRIVATE KEY(?: BLOCK)?-----(?:\\[nr]|\s)+(?:[A-Za-z-]+: [^\n]*\s+)*"
            r"(?P<here>[A-Za-z0-9+/=]{16,})"
        ),
    ),
    ("a token", re.compile(rf"(?P<here>{credentials.TOKENS})")),
    (
        "a URL with a password",
        re.compile(
            rf"{credentials.SCHEME}(?P<user>[^\s:/@\"'`<>{{}}$%,;()\[\]]*):(?P<here>[\w.!#^&+=~%-]+)@(?!sha\d+:)[\w-]"
        ),
    ),
    (
        "a token",
        re.compile(r"(?i:authorization)[^\n]{0,80}?\b(?i:bearer|basic)\s+(?=[\w.~+/-]*\d)(?P<here>[\w.~+/=-]{20,})"),
    ),
    ("", re.compile(credentials.NAMED)),
    (
        "a token",
        re.compile(
            r"(?m)^(?:[^#;\n]*:_(?:authToken|auth|password)\s*=\s*|_(?:authToken|auth|password)=(?=\S*\d))"
            r"(?P<here>[\w+/=-]{8,})"
        ),
    ),
    # What well-known programs keep in files of any name: netrc, kubectl, docker, wandb.
    ("a password", re.compile(r"(?m)^[ \t]*machine\s+\S+\s+login\s+\S+\s+password\s+(?P<here>[^\s<$]{6,})")),
    ("a kubeconfig's key", re.compile(r"\bclient-key-data:\s*(?P<here>[A-Za-z0-9+/=]{40,})")),
    (
        "a registry's password",
        re.compile(r"\"auths\"\s*:\s*\{[^}]{0,500}\"auth\"\s*:\s*\"(?P<here>[A-Za-z0-9+/=]{8,})\""),
    ),
    ("a key of wandb", re.compile(r"\bwandb\.login\([^()]{0,200}?[\"'](?P<here>[0-9a-f]{40})[\"']")),
    (
        "a Secret's data",
        re.compile(
            r"(?m)^kind:[ ]*Secret[ ]*$(?:\n(?!---).*){0,30}?\n(?:data|stringData):[ ]*\n"
            r"[ ]+[\w.-]+:[ ]*(?P<here>[^\s{<]\S{5,})"
        ),
    ),
)


class Sign(NamedTuple):
    """What in a file looks like a credential."""

    line: int
    what: str


def by_name(name: str) -> bool:
    """Return whether a program keeps credentials in a file of this name, given with the folders above it."""
    path = f"/{name.lower()}"
    base_name = path.rpartition("/")[2]
    if fnmatchcase(base_name, _PUBLIC_KEY):
        return False
    # Not of a hidden file, such as .env.sh, nor in a folder of credentials.
    is_harmless = base_name[:1] != "." and any(fnmatchcase(base_name, pattern) for pattern in _HARMLESS)
    return any(
        fnmatchcase(path, f"*/{pattern}") if "/" in pattern else not is_harmless and fnmatchcase(base_name, pattern)
        for pattern in _NAMES
    )


def in_content(content: bytes) -> Sign | None:
    """Return the first credential in a file, None if there is none. Takes about 0.1 s for a MB."""
    text = content.decode("latin-1")
    for what, form in _FORMS:
        for match in form.finditer(text):
            value = match["here"]
            if _PLACEHOLDER.search(value):
                continue
            if "user" in form.groupindex:
                is_placeholder = value.lower() in _PLACEHOLDER_PASSWORDS or _FORMATTED.search(value) is not None
                is_secret = not is_placeholder and len(value) >= _SHORTEST_PASSWORD and value != match["user"]
            else:
                is_secret = len(set(value)) >= _FEWEST_CHARACTERS
            if is_secret:
                return Sign(text.count("\n", 0, match.start()) + 1, what or match["name"])
    return None

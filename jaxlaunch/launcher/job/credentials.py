"""Detection of credentials in values of a job and in names and contents of files. Pure.

A literal in a job is readable by everyone who can read the file, the pod or the run folder; a
Secret is not. The files that a job ships are readable by everyone who can read ConfigMaps. A value
counts as a credential if it has a known token format, or is assigned to a name that a well-known
program reads its key from; other variable names prove nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from jaxlaunch.launcher.errors import KeyPath

# Well-known token formats.
_TOKENS = (
    r"\b(?:sk-(?:ant-api\d+|proj|svcacct|admin|or-v1)-[\w-]{20,}|(?:sk-|[rs]k_(?:live|test)_)[A-Za-z0-9]{20,}"
    r"|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|gl(?:pat|dt|rt|cbt|ptt)-[\w-]{16,}|hf_[A-Za-z0-9]{20,}"
    r"|xox[abprs]-[\w-]{10,}|xapp-[\w-]{20,}|A[KS]IA[0-9A-Z]{16}\b|AIza[\w-]{30,}|ya29\.[\w-]{20,}|GOCSPX-[\w-]{20,}"
    r"|npm_[A-Za-z0-9]{36}|pypi-AgE[\w-]{50,}|dckr_pat_[\w-]{20,}|dapi[a-f0-9]{32}|hvs\.[\w-]{20,}"
    r"|dckr_oat_[\w-]{20,}|gsk_[A-Za-z0-9]{40,}|xai-[A-Za-z0-9]{60,}|glsa_\w{32,}|AGE-SECRET-KEY-1[0-9A-Z]{50,}"
    r"|r8_[A-Za-z0-9]{37}|SG\.[\w-]{16,}\.[\w-]{16,}|nvapi-[\w-]{40,}|wandb_v\d_\w{40,}|eyJ[\w-]{8,}\.eyJ[\w-]{8,}"
    r"|hooks\.slack\.com/services/T\w+/B\w+/\w{20,}|(?:Account|SharedAccess)Key=[A-Za-z0-9+/=]{40,})"
    r"|[?&](?:sig|X-Amz-Signature|X-Goog-Signature)=[\w%+/=-]{20,}"
)
# Keys without a recognizable format. They are found by the name from which a program reads them.
_NAMED_KEYS = (
    r"(?<![\w$.?&:-])(?P<name>(?i:wandb_api_key|comet_api_key|neptune_api_token|kaggle_key|npmAuthToken"
    r"|aws_?secret_?access_?key|aws_session_token|azure_storage_key))\\?[\"']?\]?\s{0,3}[:=]\s{0,3}\\?[\"']?"
    r"(?=[\w+/=~-]*\d)(?P<secret>[\w+/=~-]{16,})(?![\w+/=~.(\[-])"
)
# The separator of a URL that may contain a user. github://org:repo@commit contains none.
_SCHEME = r"(?<!github)://"
# A value that begins with one of these is a placeholder of a shell or a template.
_LITERAL = r"(?![$<{%*])"
_AUTHORIZATION = (
    rf"(?i:authorization[\"']?\s*[:=]\s*[\"']?(?:bearer|basic|token))\s+{_LITERAL}[\w.~+/=-]{{6,}}"
)
_CREDENTIAL = re.compile(
    rf"{_TOKENS}|{_NAMED_KEYS}|-----BEGIN [A-Z ]*PRIVATE "
    rf"KEY|{_SCHEME}[^/\s:@]*:{_LITERAL}[^/\s@]+@(?!sha\d+:)|{_AUTHORIZATION}"
    rf"|\A\s*(?i:bearer)\s+{_LITERAL}\S+\s*\Z|\b[Bb]earer\s+(?=[\w.~+/-]*\d)[\w.~+/=-]{{16,}}"
)
_PRIVATE_KEYS = {"env", "secrets", "command", "pod", "init", "args", "eval_args", "annotations"}


def has_credential(text: str, name: str = "") -> bool:
    """Return whether a text, or the value of a variable with this name, looks like a credential."""
    return _CREDENTIAL.search(text) is not None or (
        name != "" and re.search(_NAMED_KEYS, f"{name}={text}") is not None
    )


def is_private_path(path: KeyPath) -> bool:
    """Return whether values below this path must never be shown in messages."""
    return not _PRIVATE_KEYS.isdisjoint(path)


def walk_strings(value: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, str]]:
    """Yield every string in plain data with its path."""
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from walk_strings(item, (*path, key))


# Patterns of the lower-case names of files in which programs store credentials. Those whose name
# alone is ambiguous are in _FILE_PATHS, with their folder.
_FILE_NAMES: tuple[str, ...] = (
    *(".env*", "*.env", ".netrc*", "_netrc", ".pypirc", ".git-credentials", ".pgpass", ".my.cnf"),
    *(".s3cfg", ".boto", ".htpasswd", ".dockercfg", ".databrickscfg", ".vault-token"),
    *(".vault[_-]pass*", "*.tfvars", "*.tfstate*", "id_rsa*", "id_dsa*", "id_ecdsa*"),
    *("id_ed25519*", "*.key", "*.p8", "*.ppk", "*.p12", "*.pfx", "*.jks", "*.keytab", "*.kdbx"),
    *("*.keystore", "kubeconfig", "*.kubeconfig", "kaggle.json", "rclone.conf"),
    *("client_secret*.json", ".dockerconfigjson", ".modal.toml", ".mylogin.cnf", ".passwd-s3fs"),
    *("application_default_credentials.json", "service[_-]account*.json", "credentials"),
    *("credentials.*", "*[._-]credentials.*", "secrets.*", "*[._-]secrets.*"),
)
_FILE_PATHS: tuple[str, ...] = (
    *(".aws/*", ".azure/*", ".docker/config.json", ".gnupg/*", ".kube/*", ".oci/*", ".ssh/id_*"),
    *(".config/gcloud/*", ".config/gh/hosts.yml", "huggingface/token"),
    "huggingface/stored_tokens",
)
# Source code and documentation may be named after credentials or secrets without containing any.
_HARMLESS_SUFFIXES = {
    *("py", "pyi", "md", "rst", "ipynb", "sh", "go", "js", "jsx", "ts", "tsx", "html", "css", "c"),
    *("cc", "cpp", "cu", "h", "hpp", "rs", "java", "rb", "proto"),
}

# Documentation and templates contain placeholders instead of credentials.
_PLACEHOLDER = re.compile(
    r"example|xxxx|your|placeholder|dummy|redacted|change.?me|fake|sample|insert|\.\.\.|\*\*\*|1234567890|abcdefgh",
    re.IGNORECASE,
)
_PLACEHOLDER_PASSWORDS = {
    *("password", "passwd", "pass", "pw", "pwd", "secret", "token", "user", "username", "test"),
    *("foo", "bar", "mypassword", "mypass", "mysecret"),
}
# A printf conversion such as %s. In a URL, a % is followed by two hexadecimal digits.
_PRINTF_CONVERSION = re.compile(r"%(?![0-9A-Fa-f]{2})")
# Shorter passwords, as in http://a:b@host, are those of tests.
_MIN_PASSWORD_CHARS = 4
# A value with fewer different characters is not random.
_MIN_DISTINCT_CHARS = 6

# Pairs of a description, empty for the matched name, and a pattern whose group `secret` is
# the credential.
_FILE_PATTERNS: tuple[tuple[str, str], ...] = (
    (
        "a private key",
        r"-----BEGIN [A-Z0-9 ]*PRIVATE KEY(?: BLOCK)?-----(?:\\[nr]|\s)+(?:[A-Za-z-]+: [^\n]*\s+)*"
        r"(?P<secret>[A-Za-z0-9+/=]{16,})",
    ),
    ("a token", rf"(?P<secret>{_TOKENS})"),
    (
        "a URL with a password",
        rf"{_SCHEME}(?P<user>[^\s:/@\"'`<>{{}}$%,;()\[\]]*):(?P<secret>[\w.!#^&+=~%-]+)@(?!sha\d+:)[\w-]",
    ),
    (
        "a token",
        r"(?i:authorization)[^\n]{0,80}?\b(?i:bearer|basic)\s+(?=[\w.~+/-]*\d)(?P<secret>[\w.~+/=-]{20,})",
    ),
    ("", _NAMED_KEYS),
    (
        "a token",
        r"(?m)^(?:[^#;\n]*:_(?:authToken|auth|password)\s*=\s*|_(?:authToken|auth|password)=(?=\S*\d))"
        r"(?P<secret>[\w+/=-]{8,})",
    ),
    # Credentials of netrc, kubectl, docker and wandb, which may be in files with any name.
    ("a password", r"(?m)^[ \t]*machine\s+\S+\s+login\s+\S+\s+password\s+(?P<secret>[^\s<$]{6,})"),
    ("a kubeconfig's key", r"\bclient-key-data:\s*(?P<secret>[A-Za-z0-9+/=]{40,})"),
    (
        "a registry's password",
        r"\"auths\"\s*:\s*\{[^}]{0,500}\"auth\"\s*:\s*\"(?P<secret>[A-Za-z0-9+/=]{8,})\"",
    ),
    ("a key of wandb", r"\bwandb\.login\([^()]{0,200}?[\"'](?P<secret>[0-9a-f]{40})[\"']"),
    (
        "a Secret's data",
        r"(?m)^kind:[ ]*Secret[ ]*$(?:\n(?!---).*){0,30}?\n(?:data|stringData):[ ]*\n"
        r"[ ]+[\w.-]+:[ ]*(?P<secret>[^\s{<]\S{5,})",
    ),
)


# What stands for a credential in a text for others.
HIDDEN = "…"
# A whole private key, of which _FILE_PATTERNS has the beginning.
_PRIVATE_KEY = re.compile(
    r"-----BEGIN [A-Z0-9 ]*PRIVATE KEY(?: BLOCK)?-----(?:(?:\\[nr]|\s)+[A-Za-z-]+: [^\n]*)*"
    r"(?:(?:\\[nr]|\s)+[A-Za-z0-9+/=]{16,})*"
    r"(?:(?:\\[nr]|\s)+[A-Za-z0-9+/=]+(?=(?:\\[nr]|\s)+-----END))?"
)
# It begins where a word does: matches from within long words, such as base64, would take minutes.
_SECRET_NAME = (
    r"(?<![\w.-])[\w.-]*(?:token|secret|passw(?:or)?d|passphrase|api[_-]?key|auth[_-]?key"
    r"|private[_-]?key|secret[_-]?key|access[_-]?key|credentials?|pat)"
)
# Numbers and nulls, such as those of metrics, are not hidden. What follows an opening quote is
# hidden up to the closing one.
_SECRET_VALUE = (
    r"(?!(?:null|true|false|none|nan|[+-]?(?:infinity|inf|(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?))"
    r"(?:[\s\"'\\,;:)}\]%]|\.?$|\.\s)|[\[{])"
    r"(?P<secret>(?<=\")[^\s\"\\,}\]][^\"\\\n]*|(?<=')[^\s'\\,}\]][^'\\\n]*|[^\s\"'\\,}\]]+)"
)
# A value of a name such as HF_TOKEN or db.password, also in JSON inside of JSON.
_SECRET_SETTING = re.compile(
    rf"(?im)(?:{_SECRET_NAME}|\benv\.[\w.]+)\\*[\"']?\]?[ \t]*[:=][ \t]*\\*[\"']?{_SECRET_VALUE}"
)
# A value after an option such as --api-key: the next word of a command, or the next item of a list
# in JSON or YAML.
_SECRET_OPTION = re.compile(
    rf"(?im)(?=--?[a-z]){_SECRET_NAME}"
    rf"(?:[ \t]+|\\*[\"']?(?:,(?:\s|\\n)*|[ \t]*\n[ \t]*-[ \t]+))\\*[\"']?(?!-){_SECRET_VALUE}"
)
_HIDDEN_PATTERNS = tuple(re.compile(pattern) for _, pattern in _FILE_PATTERNS)


def redact_text(text: str, values: Iterable[str] = ()) -> str:
    """Return a text without what may be a credential, and without the given secret values.

    Other words may be hidden too: a reader of the text misses a word rather than sees a secret.
    """
    for value in values:
        if len(value) >= _MIN_PASSWORD_CHARS:
            text = text.replace(value, HIDDEN)
    text = _PRIVATE_KEY.sub(HIDDEN, text)
    for pattern in (*_HIDDEN_PATTERNS, _SECRET_SETTING, _SECRET_OPTION):
        text = pattern.sub(_hide_secret, text)
    return _CREDENTIAL.sub(HIDDEN, text)


def _hide_secret(match: re.Match[str]) -> str:
    begin, end = match.start("secret") - match.start(), match.end("secret") - match.start()
    return f"{match[0][:begin]}{HIDDEN}{match[0][end:]}"


class CredentialSign(NamedTuple):
    """A place in a file that looks like a credential."""

    line: int
    kind: str


def is_credential_file(name: str) -> bool:
    """Return whether a file with this name, including its folders, usually contains credentials."""
    path = f"/{name.lower()}"
    base_name = path.rpartition("/")[2]
    if base_name.endswith(".pub"):
        return False
    if any(fnmatchcase(path, f"*/{pattern}") for pattern in _FILE_PATHS):
        return True
    # Hidden files such as .env.sh, and files in a folder of credentials, are not exempt.
    is_hidden = base_name.startswith(".")
    is_harmless = not is_hidden and PurePosixPath(base_name).suffix[1:] in _HARMLESS_SUFFIXES
    return not is_harmless and any(fnmatchcase(base_name, pattern) for pattern in _FILE_NAMES)


def find_credential(content: bytes) -> CredentialSign | None:
    """Return the first credential in a file, or None. Takes about 0.1 s per MB."""
    text = content.decode("latin-1")
    for kind, pattern in _FILE_PATTERNS:
        for match in re.finditer(pattern, text):
            if not _PLACEHOLDER.search(match["secret"]) and _is_secret(match):
                return CredentialSign(text.count("\n", 0, match.start()) + 1, kind or match["name"])
    return None


def _is_secret(match: re.Match[str]) -> bool:
    value = match["secret"]
    if "user" not in match.re.groupindex:
        return len(set(value)) >= _MIN_DISTINCT_CHARS
    is_placeholder = value.lower() in _PLACEHOLDER_PASSWORDS or _PRINTF_CONVERSION.search(value)
    return not is_placeholder and len(value) >= _MIN_PASSWORD_CHARS and value != match["user"]

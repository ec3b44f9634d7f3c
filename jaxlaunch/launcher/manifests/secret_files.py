"""Which files of a folder hold credentials: by their names, and by what they hold. Pure.

Whoever may read ConfigMaps may read what a job ships, and a repository is often readable by fewer people than those.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from typing import NamedTuple

from jaxlaunch.launcher.job import credentials

# Of programs that keep their credentials in files; in lower case.
_NAMES: tuple[str, ...] = (
    *(".env*", "*.env", "*.env.local", ".netrc", "_netrc", ".npmrc", ".pypirc", ".git-credentials", ".pgpass"),
    *("pgpass.conf", ".my.cnf", ".mylogin.cnf", ".s3cfg", ".boto", ".htpasswd", ".dockercfg", ".dockerconfigjson"),
    *(".databrickscfg", ".passwd-s3fs", ".modal.toml", "rclone.conf", "kaggle.json", "kubeconfig", "*.kubeconfig"),
    *("auth.json", "local.settings.json", "*.publishsettings", "ngrok.yml", "settings-security.xml", ".comet.config"),
    *("application_default_credentials.json", "client_secret*.json", "service[_-]account*.json", "*-sa-key.json"),
    *(".vault-token", ".vault[_-]pass*", "*vault[_-]pass", "*vault[_-]password", "*vault[_-]pass*.txt"),
    *("*.tfvars", "*.tfvars.json", "*.tfstate", "*.tfstate.*", ".terraformrc", "terraform.rc", "*.keytab", "*.ovpn"),
    *("id_rsa", "id_dsa", "id_ecdsa", "id_ed25519", "id_ecdsa_sk", "id_ed25519_sk", "*.pem", "*.key", "*.p8", "*.pk8"),
    *("*.ppk", "*.p12", "*.pfx", "*.jks", "*.jceks", "*.keystore", "*.kdb", "*.kdbx", "*.agilekeychain", "secring.*"),
    *("password.txt", "passwords.txt", ".password", ".passwd", "*.password", "*.secret", ".secret", ".secrets"),
    *(
        "token.txt",
        "*api[_-]token.txt",
        "*access[_-]token.txt",
        "*api[_-]key.txt",
        "apikey.txt",
        "*hf[_-]token*",
        ".token",
    ),
    *("credentials", ".credentials"),
)
_NAMES += tuple(
    f"{name}.{ending}"
    for name in ("secrets", "*[._-]secrets", "secrets[._-]*", "credentials", "*[._-]credentials", "credentials[._-]*")
    for ending in ("yaml", "yml", "json", "toml", "ini", "txt", "cfg", "csv", "properties", "xml")
)
_PATHS = (
    *(".aws/*", ".docker/config.json", ".kube/*", ".gnupg/*", ".azure/*", ".oci/*", ".kaggle/*", ".config/gcloud/*"),
    *(".cargo/credentials", ".cargo/credentials.toml", ".gem/credentials", ".config/gh/hosts.yml", ".ngrok2/*"),
    *("huggingface/token", ".huggingface/token", "huggingface/stored_tokens", ".ssh/id_*", ".terraform.d/*.json"),
    *(".m2/settings.xml", ".dbt/profiles.yml", ".snowsql/config", ".config/wandb/settings", "containers/auth.json"),
)
_COPY = re.compile(r"(?P<of>.+?)(?:~|[._-](?:bak|backup|old|orig|save|saved|copy|sw[op]|tmp|[0-9]+))")
_PUBLIC_BLOCK = re.compile(r"-----BEGIN ((?:TRUSTED )?CERTIFICATE|PUBLIC KEY|DH PARAMETERS)-----[^-]*-----END \1-----")
_NPM_SECRET = re.compile(r"(?im)^[^#;\n]*(?:_auth|password|token|secret|key)\w*\s*=(?!\s*\$\{\w+\}\s*$)")
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


def by_name(name: str, content: bytes | None = None) -> bool:
    """Whether a program keeps credentials in a file of this name, with the folders above it, or of which it is a copy.

    One that holds no more than certificates, or npm's settings, is none where its content is given.
    """
    folder, _, last = f"/{name.lower()}".rpartition("/")
    return any(_is_kept(folder, one) and not _is_harmless(one, content) for one in _originals(last))


def _originals(name: str) -> Iterator[str]:
    """A file's name, and those that it may be a copy of: id_rsa of id_rsa.bak, and of an editor's .id_rsa.swp."""
    yield name
    while (copied := _COPY.fullmatch(name)) is not None:
        name = copied["of"]
        yield name
        yield name.removeprefix(".")


def _is_kept(folder: str, name: str) -> bool:
    if fnmatchcase(name, _PUBLIC):
        return False
    in_its_folder = any(fnmatchcase(f"{folder}/{name}", f"*/{kept}") for kept in _PATHS)
    return in_its_folder or any(fnmatchcase(name, kept) for kept in _NAMES)


def _is_harmless(name: str, content: bytes | None) -> bool:
    text = "" if content is None else content.decode("latin-1")
    if name.endswith(".pem"):
        rest, blocks = _PUBLIC_BLOCK.subn("", text)
        return blocks > 0 and "-----BEGIN" not in rest
    return name == ".npmrc" and content is not None and _NPM_SECRET.search(text) is None


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
# A literal in quotes that a program calls its key: `api_key="…"`. Shorter ones and those of one case are often names.
_ASSIGNED = (
    r"(?i)(?<![\w$])(?P<name>(?:\w{1,30}_)?(?:api_?key|api_?token|access_?token|auth_?token|secret_?key|client_?secret"
    r"|private_?token))\\?[\"']?\s{0,3}[:=]\s{0,3}\\?[\"'](?=[\w+/=.-]*\d[\w+/=.-]*\d)(?=[\w+/=.-]*[a-z])"
    r"(?P<here>[\w+/=.-]{20,200})\\?[\"']"
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
    _Form(
        "a key of wandb",
        re.compile(r"\bwandb\.login\([^()]{0,200}?[\"'](?P<here>[0-9a-f]{40}|wandb_\w{20,})[\"']"),
    ),
    _Form("", re.compile(_ASSIGNED)),
    _Form("a token", re.compile(r"(?m)^[^#;\n]*:_(?:authToken|auth|password)\s*=\s*(?P<here>[\w+/=-]{8,})")),
    _Form("a password", re.compile(r"(?m)^[ \t]*machine\s+\S+\s+login\s+\S+\s+password\s+(?P<here>[^\s<$]{6,})")),
    _Form("a kubeconfig's key", re.compile(r"\bclient-key-data:\s*(?P<here>[A-Za-z0-9+/=]{40,})")),
    _Form(
        "a registry's password", re.compile(r"\"auths\"\s*:\s*\{[^}]*\"auth\"\s*:\s*\"(?P<here>[A-Za-z0-9+/=]{8,})\"")
    ),
    _Form("a Secret's data", re.compile(_SECRET_MANIFEST)),
)

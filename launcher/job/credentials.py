"""What looks like a credential, and what of a job must never be repeated in a message.

A literal in a job is readable by everyone who can read the file, the pod or the run folder; a Secret is not.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from jaxlaunch.launcher.errors import KeyPath

# A name that is one of a credential. By whole words: MAX_TOKENS and TOKENIZERS_PARALLELISM hold none.
_SECRET_WORD = {"token", "secret", "credential", "credentials", "sshpass"}
_ITS_ENDS = ("apikey", "accesskey", "secretkey", "privatekey", "authtoken", "accesstoken", "clientsecret")
_KEY_BEFORE = {"api", "access", "private", "secret", "auth", "encryption", "account", "signing", "license", "storage"}
_PASSWORD = ("password", "passwd", "passphrase")  # ends of words: PGPASSWORD; short values too
_ITS_END = {"pass", "pwd"}  # after another word: DB_PASS, not PASS and PWD
_ENDS = (*_SECRET_WORD, *_ITS_ENDS, *_PASSWORD, *_ITS_END)
_PASSES = {"first", "second", "last", "one", "two", "single", "multi", "num", "forward", "backward"}  # over something
_POINTS_ELSEWHERE = {
    "file",
    "filename",
    "path",
    "dir",
    "name",
    "url",
    "id",
    "stdin",
    "env",
}  # TOKEN_FILE names where it is
_ASKS = {"use", "no", "with", "has", "allow", "require", "need", "max", "min", "num"}  # --use-auth-token is a switch
_OF_TEXT = {"pad", "eos", "bos", "unk", "mask", "sep", "cls", "image", "audio", "video", "special", "start", "end"}
_OF_TEXT |= {"stop", "blank", "decoder", "begin", "new", "word", "prefix", "suffix", "middle", "per"}  # EOS_TOKEN
_OF_TEXT |= {"next", "page", "continuation"}  # of a list that comes in parts
_OF_A_SERVICE = {"", "auth", "access", "api", "bearer", "hf", "hub"}  # --token, --hf-token; not --initializer-token
_SHORTEST = 8
_FEWEST_LETTERS = _FEWEST_DIGITS = 3  # of a value that nobody chose as a word

# A value whose form is that of a credential, wherever it is.
TOKENS = (
    r"\b(?:sk-(?:ant-api\d+|proj|svcacct|admin|or-v1)-[\w-]{20,}|(?:sk-|[rs]k_(?:live|test)_)[A-Za-z0-9]{20,}"
    r"|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}"
    r"|hf_[A-Za-z0-9]{20,}|xox[abprs]-[\w-]{10,}|xapp-[\w-]{20,}|A[KS]IA[0-9A-Z]{16}\b|AIza[\w-]{30,}"
    r"|ya29\.[\w-]{20,}|GOCSPX-[\w-]{20,}|npm_[A-Za-z0-9]{36}|pypi-AgE[\w-]{50,}|dckr_pat_[\w-]{20,}"
    r"|dapi[a-f0-9]{32}|hvs\.[\w-]{20,}|SG\.[\w-]{16,}\.[\w-]{16,}|gsk_[A-Za-z0-9]{40,}|nvapi-[\w-]{40,}"
    r"|r8_[A-Za-z0-9]{37}|AGE-SECRET-KEY-1[0-9A-Z]{50,}|eyJ[\w-]{8,}\.eyJ[\w-]{8,}"
    r"|hooks\.slack\.com/services/T\w+/B\w+/\w{20,}|AccountKey=[A-Za-z0-9+/=]{40,})"
    r"|[?&](?:sig|X-Amz-Signature|X-Goog-Signature)=[\w%+/=-]{20,}"
)
SCHEME = r"(?<!github)://"  # of a URL that may have a user: github://org:repo@commit has none
_LITERAL = r"(?![$<{%*])"  # what a shell or a template puts something else in place of is none
_WRITTEN_OUT = rf"{_LITERAL}(?!(?:~|\.\.?)?/)"  # nor is a path
_AUTHORIZATION = rf"(?i:authorization[\"']?\s*[:=]\s*[\"']?(?:bearer|basic|token))\s+{_LITERAL}[\w.~+/=-]{{6,}}"
_FORMS = re.compile(
    rf"{TOKENS}|-----BEGIN [A-Z ]*PRIVATE KEY|{SCHEME}[^/\s:@]*:{_LITERAL}[^/\s@]+@(?!sha\d+:)|{_AUTHORIZATION}"
    rf"|\A\s*(?i:bearer)\s+{_LITERAL}\S+\s*\Z|\b[Bb]earer\s+(?=[\w.~+/-]*\d)[\w.~+/=-]{{16,}}"
)
_ARGUMENT = re.compile(  # of a shell's script as of a list: --flag=value, --flag value, name=value
    r"(?<![\w$.-])(?:--?(?P<flag>[A-Za-z][\w.-]*)[=\s]\s*|(?P<name>[A-Za-z][\w.-]*)=)"
    r"(?P<quote>[\"']?)(?P<value>[^\s\"'`;|&()\[\]{}<>-][^\s\"'`;|&()\[\]{}<>]*+)(?![(\[])"
)
_FLAG = re.compile(r"--?([A-Za-z][\w.-]*)")
_PRIVATE_BLOCKS = {"env", "secrets", "command", "pod", "init", "args", "eval_args", "annotations"}


def in_value(text: str) -> bool:
    """Whether the text holds a credential of a well-known form."""
    return _FORMS.search(text) is not None


def in_variable(name: str, value: str) -> bool:
    """Whether a named value looks like one: by the value's form, or by the name and a value that could be."""
    if in_value(value):
        return True
    words = _words(name)
    if not words or not value or _is_switch(value) or value.startswith("$"):
        return False
    points = words[-1] in _POINTS_ELSEWHERE and words[-2:] != ["key", "id"]
    if any(word.endswith(_PASSWORD) for word in words):
        return not points
    if words[-1] in _ITS_END and len(words) > 1 and words[-2] not in _PASSES:
        return not _is_innocent(value)
    return _is_of_one(name) and not points and _could_be(value)


def in_argument(name: str, value: str) -> bool:
    """Whether an argument of a program looks like one. Programs name much after tokens and keys that is none:

    `--token-mixer attention`, `--password-policy strict`, `login(token=hf_token_value)`, `--api-key YOUR_API_KEY`.
    """
    if in_value(value):
        return True
    words = ["", *_words(name)]
    of_one = words[-1].endswith(_ENDS) or (words[-1] == "key" and words[-2] in _KEY_BEFORE)
    if not of_one or not re.match(_WRITTEN_OUT, value) or _is_reference(value) or not in_variable(name, value):
        return False
    if words[-1] != "token" or is_mixed(value):
        return True
    return words[-2] in _OF_A_SERVICE and re.fullmatch(r"[A-Za-z_.]+", value) is None


def is_mixed(value: str) -> bool:
    """Whether a value mixes letters and digits as a random one does, and a word with a version seldom."""
    digits, letters = sum(one.isdigit() for one in value), sum(one.isalpha() for one in value)
    return digits >= _FEWEST_DIGITS and letters >= _FEWEST_LETTERS


def _is_of_one(name: str) -> bool:
    """Whether a name is one of a credential: HF_TOKEN, and not PAD_TOKEN, which is one of a tokenizer."""
    words = _words(name)
    if not words or words[0] in _ASKS:
        return False
    pairs = list(zip(["", *words], words, strict=False))
    return any(
        (word in _SECRET_WORD and not (word == "token" and before in _OF_TEXT))
        or (word == "key" and before in _KEY_BEFORE)
        or word.endswith(_PASSWORD + _ITS_ENDS)
        for before, word in pairs
    )


def _is_reference(value: str) -> bool:
    """Whether it is a program's variable of that name, or what stands in for a value: cfg.password, YOUR_API_KEY."""
    return re.fullmatch(r"[A-Za-z_][A-Za-z_.]*", value) is not None and _is_of_one(value)


def _words(name: str) -> list[str]:
    return [word for word in re.split(r"[^a-z0-9]+", name.lower()) if word]


def _is_switch(value: str) -> bool:
    return re.fullmatch(r"true|false|yes|no|on|off|none|null", value, re.I) is not None


def _is_innocent(value: str) -> bool:
    """Whether it is a path, a file's name, a number, a truth, or a special token such as <|endoftext|>."""
    numbers = re.fullmatch(r"[./~].*|\S+\.(?:json|ya?ml|toml|ini|txt|pem)|[\d.,_+-]+|<.*>|\[.*\]|\$.*", value, re.S)
    return numbers is not None or _is_switch(value)


def _could_be(value: str) -> bool:
    return len(value) >= _SHORTEST and not _is_innocent(value)


def arguments(value: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, str]]:
    """Arguments of programs, in `command` and `args` lists anywhere, that give a credential: path, and flag or name."""
    for key, below in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from arguments(below, (*path, key))
        if key in ("command", "args") and isinstance(below, list):
            yield from (((*path, key, at), name) for at, name in _given(below))


def _given(given: list[Any]) -> Iterator[tuple[int, str]]:
    before = None
    for at, text in enumerate(given):
        if not isinstance(text, str):
            continue
        if before is not None and not text.startswith("-") and in_argument(before[1], text):
            yield at, before[0]
        before = _FLAG.fullmatch(text)
        for one in _ARGUMENT.finditer(text):
            name = one["flag"] or one["name"]
            if in_argument(name, one["value"].rstrip(",")):  # `password=None, user=me` of Python
                yield at, f"--{name}" if one["flag"] else name
                break


def is_private(path: KeyPath) -> bool:
    """Whether values below this path are never repeated, whatever they look like."""
    return not _PRIVATE_BLOCKS.isdisjoint(path)


def strings(value: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, str]]:
    """Every text in plain data, with its path."""
    if isinstance(value, dict):
        for key, below in value.items():
            yield from strings(below, (*path, key))
    elif isinstance(value, list):
        for index, below in enumerate(value):
            yield from strings(below, (*path, index))
    elif isinstance(value, str):
        yield path, value

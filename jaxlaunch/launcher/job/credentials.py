"""What has the form of a credential, and what of a job must never be repeated in a message.

A literal in a job is readable by everyone who can read the file, the pod or the run folder; a Secret is not. Only forms
count, and names that a program gives its own key: what else a variable is called says nothing of its value.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from jaxlaunch.launcher.errors import KeyPath

# Well-known forms of tokens, wherever they are.
TOKENS = (
    r"\b(?:sk-(?:ant-api\d+|proj|svcacct|admin|or-v1)-[\w-]{20,}|(?:sk-|[rs]k_(?:live|test)_)[A-Za-z0-9]{20,}"
    r"|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|gl(?:pat|dt|rt|cbt|ptt)-[\w-]{16,}|hf_[A-Za-z0-9]{20,}"
    r"|xox[abprs]-[\w-]{10,}|xapp-[\w-]{20,}|A[KS]IA[0-9A-Z]{16}\b|AIza[\w-]{30,}|ya29\.[\w-]{20,}|GOCSPX-[\w-]{20,}"
    r"|npm_[A-Za-z0-9]{36}|pypi-AgE[\w-]{50,}|dckr_pat_[\w-]{20,}|dapi[a-f0-9]{32}|hvs\.[\w-]{20,}"
    r"|dckr_oat_[\w-]{20,}|gsk_[A-Za-z0-9]{40,}|xai-[A-Za-z0-9]{60,}|glsa_\w{32,}|AGE-SECRET-KEY-1[0-9A-Z]{50,}"
    r"|r8_[A-Za-z0-9]{37}|SG\.[\w-]{16,}\.[\w-]{16,}|nvapi-[\w-]{40,}|wandb_v\d_\w{40,}|eyJ[\w-]{8,}\.eyJ[\w-]{8,}"
    r"|hooks\.slack\.com/services/T\w+/B\w+/\w{20,}|(?:Account|SharedAccess)Key=[A-Za-z0-9+/=]{40,})"
    r"|[?&](?:sig|X-Amz-Signature|X-Goog-Signature)=[\w%+/=-]{20,}"
)
# Keys without a form of their own, which stand beside the name that a program reads them from.
NAMED = (
    r"(?<![\w$.?&:-])(?P<name>(?i:wandb_api_key|comet_api_key|neptune_api_token|kaggle_key|npmAuthToken"
    r"|aws_?secret_?access_?key|aws_session_token|azure_storage_key))\\?[\"']?\]?\s{0,3}[:=]\s{0,3}\\?[\"']?"
    r"(?=[\w+/=~-]*\d)(?P<here>[\w+/=~-]{16,})(?![\w+/=~.(\[-])"
)
SCHEME = r"(?<!github)://"  # of a URL that may have a user: github://org:repo@commit has none
_LITERAL = r"(?![$<{%*])"  # what a shell or a template puts something else in place of is none
_AUTHORIZATION = rf"(?i:authorization[\"']?\s*[:=]\s*[\"']?(?:bearer|basic|token))\s+{_LITERAL}[\w.~+/=-]{{6,}}"
_FORMS = re.compile(
    rf"{TOKENS}|{NAMED}|-----BEGIN [A-Z ]*PRIVATE KEY|{SCHEME}[^/\s:@]*:{_LITERAL}[^/\s@]+@(?!sha\d+:)|{_AUTHORIZATION}"
    rf"|\A\s*(?i:bearer)\s+{_LITERAL}\S+\s*\Z|\b[Bb]earer\s+(?=[\w.~+/-]*\d)[\w.~+/=-]{{16,}}"
)
_PRIVATE_BLOCKS = {"env", "secrets", "command", "pod", "init", "args", "eval_args", "annotations"}


def in_value(text: str, name: str = "") -> bool:
    """Whether a text, or what a variable of this name holds, has a credential's form."""
    return _FORMS.search(text) is not None or (name != "" and re.search(NAMED, f"{name}={text}") is not None)


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

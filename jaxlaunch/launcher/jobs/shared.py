"""Whether a ConfigMap that is there already is the one that a job brings: its name is a digest that anyone can give."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from typing import Any

from jaxlaunch.launcher.kubernetes.labels import MANAGED_BY

_SHOWN = 12  # hexadecimal digits of a digest


def difference(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> str | None:
    """What is other about it, as the end of a sentence; None where pods get the wanted bytes, now and later."""
    has, wants = _contents(found), _contents(wanted)
    for name in sorted(has.keys() | wants.keys()):
        if name not in has:
            return f"it lacks {name}"
        if name not in wants:
            return f"it holds {name} too"
        if has[name] != wants[name]:
            return f"its {name} is not this job's ({_told(has[name])} in place of {_told(wants[name])})"
    if not found.get("immutable"):
        return "it is not immutable, so that anyone who may write ConfigMaps could exchange the code of running jobs"
    label = (found["metadata"].get("labels") or {}).get(MANAGED_BY)
    if label != wanted["metadata"]["labels"][MANAGED_BY]:
        return f"its label {MANAGED_BY} is {label or 'missing'}, so launcher did not make it"
    return None


def _contents(of: Mapping[str, Any]) -> dict[str, bytes]:
    """Name → bytes of every file that a pod would find."""
    text = {name: value.encode() for name, value in (of.get("data") or {}).items()}
    return text | {name: base64.b64decode(value) for name, value in (of.get("binaryData") or {}).items()}


def _told(content: bytes) -> str:
    return f"{len(content)} bytes, sha256 {hashlib.sha256(content).hexdigest()[:_SHOWN]}"

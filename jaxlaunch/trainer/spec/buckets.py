"""Names of buckets by the rules of their stores, checked before anything asks a store. Pure.

Source: cloud.google.com/storage/docs/buckets, "Bucket names"; docs.aws.amazon.com/AmazonS3/latest/userguide,
"General purpose bucket naming rules".
"""

from __future__ import annotations

import re

STORES = ("gs", "s3")  # the schemes of the object stores that weights and data are read from and checkpoints written to
_RULES = {
    "gs": (r"[^a-z0-9._-]", "lower-case letters, digits, dashes, dots and _"),
    "s3": (r"[^a-z0-9.-]", "lower-case letters, digits, dashes and dots"),
}
_SHORTEST, _LONGEST = 3, 63  # characters
_LONGEST_WITH_DOTS = {"gs": 222, "s3": _LONGEST}  # on Google's each part between dots has the other limit
_ADDRESS = re.compile(r"\d+\.\d+\.\d+\.\d+")
_ALMOST = re.compile(r"(?i)(gs|s3)(?::/?(?!/)|//)\S")  # gs:/bucket and gs//bucket would be names of folders


def fault(path: str) -> str | None:
    """What is wrong with a place, as the end of "KEY = PATH …", where it is a URL of a store, or meant to be one.

    None for a folder, for a right URL, and for one of another scheme.
    """
    scheme, is_url, rest = path.partition("://")
    if not is_url and (almost := _ALMOST.match(path)) is not None:
        return f"is not a URL: one begins with {almost[1].lower()}://"
    if not is_url or scheme.lower() not in STORES:
        return None
    if scheme not in STORES:
        return f"is not a URL of a bucket: write {scheme.lower()}:// in lower case"
    bucket = rest.partition("/")[0]
    if not bucket:
        return "is not a URL of a bucket: it has no name"
    wrong = _wrong(scheme, bucket)
    return None if wrong is None else f"is not a URL of a bucket: {wrong}"


def _wrong(scheme: str, bucket: str) -> str | None:
    forbidden, allowed = _RULES[scheme]
    longest = _LONGEST_WITH_DOTS[scheme] if "." in bucket else _LONGEST
    if (found := re.search(forbidden, bucket)) is not None:
        return f"its name contains {found[0]!r}, and names of {scheme}:// consist of {allowed}"
    if not _SHORTEST <= len(bucket) <= longest:
        return f"its name has {len(bucket)} characters, and names of {scheme}:// have {_SHORTEST} to {longest}"
    if not (bucket[0].isalnum() and bucket[-1].isalnum()):
        return "its name must begin and end with a letter or digit"
    if ".." in bucket or any(len(part) > _LONGEST for part in bucket.split(".")):
        return f"its name must have 1 to {_LONGEST} characters between dots"
    if _ADDRESS.fullmatch(bucket):
        return "its name has the form of an IP address"
    return None

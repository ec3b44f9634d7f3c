"""Lets Orbax keep arrays in s3://. Orbax 0.12 knows tensorstore's driver for it, and builds no path to it.

It takes three functions of Orbax's that decide on gs:// and answers for s3:// in them. Where a later Orbax has others,
`teach` raises, and the tests on the local bucket server fail.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from orbax.checkpoint._src.path import gcs_utils
from orbax.checkpoint._src.serialization import tensorstore_utils

S3 = "s3://"


def teach() -> None:
    """Makes Orbax build its storage specifications for s3:// too. Once or many times."""
    if gcs_utils.get_kvstore_for_gcs.__module__ == __name__:
        return  # taught already
    tensorstore_utils._normalize_path = _apart(tensorstore_utils._normalize_path, lambda path: path.rstrip("/"))
    tensorstore_utils._use_gcs_driver = _apart(tensorstore_utils._use_gcs_driver, lambda path: True)
    gcs_utils.get_kvstore_for_gcs = _apart(gcs_utils.get_kvstore_for_gcs, kvstore)


def _apart(theirs: Callable[[str], Any], ours: Callable[[str], Any]) -> Callable[[str], Any]:
    return lambda path: ours(path) if path.startswith(S3) else theirs(path)


def kvstore(url: str) -> dict[str, Any]:
    """tensorstore's specification of s3://bucket/name, at the endpoint and in the region of Amazon's own variables."""
    bucket, _, name = url.removeprefix(S3).partition("/")
    spec: dict[str, Any] = {"driver": "s3", "bucket": bucket, "path": name}
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    if endpoint:
        spec["endpoint"] = endpoint.rstrip("/")
        region = region or "us-east-1"  # a store of one's own has no regions, and the driver asks for one
    if os.environ.get("AWS_ACCESS_KEY_ID"):
        spec["aws_credentials"] = {"type": "environment"}  # the driver's search writes an error for each place it tries
    return spec | ({"aws_region": region} if region else {})

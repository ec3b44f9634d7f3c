from __future__ import annotations

from decimal import Decimal

import pytest

from jaxlaunch.launcher.kubernetes.resources import parse_quantity


@pytest.mark.parametrize(
    ("written", "number"),
    [
        ("8", 8),
        ("500m", Decimal("0.5")),
        ("32Gi", 34359738368),
        ("1.5T", 1500000000000),
        ("2k", 2000),
        ("1Ei", 2**60),
        ("1e12", 10**12),
        ("1E3", 1000),
        ("1E", 10**18),
        ("12.5e-1", Decimal("1.25")),
        (".5", Decimal("0.5")),
        ("-1", -1),
        ("9223372036854775807", 2**63 - 1),
        ("0.12345678901", Decimal("0.12345678901")),
    ],
)
def test_quantity_is_parsed_as_in_kubernetes(written: str, number: object) -> None:
    assert parse_quantity(written) == number


@pytest.mark.parametrize(
    "written",
    ["", "8GB", "Gi", "0x10", "8mi", "all", "NaN", "inf", "1_000", "1e999999", " 5", "٣", "."],
)
def test_invalid_quantity_is_rejected(written: str) -> None:
    with pytest.raises(ValueError):
        parse_quantity(written)

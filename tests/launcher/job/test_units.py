from decimal import Decimal

import pytest

from launcher import accelerators, credentials, duration, quantity
from launcher.accelerators import KNOWN


@pytest.mark.parametrize(
    ("written", "seconds"),
    [("90s", 90), ("10m", 600), ("1h30m", 5400), ("3d", 259200), ("1d2h3m4s", 93784), (45, 45), ("0h5m", 300)],
)
def test_a_duration_is_seconds(written: object, seconds: float) -> None:
    assert duration.seconds(written) == seconds
    assert duration.seconds(duration.text(seconds)) == seconds


@pytest.mark.parametrize(
    "written", ["", "10", "5m1h", "1.5h", "-3s", "3 s", "1w", "s", 0, -1, 1.5, True, None, [], "9999999d"]
)
def test_what_is_no_duration_is_refused(written: object) -> None:
    with pytest.raises(ValueError, match="not a duration"):
        duration.seconds(written)


@pytest.mark.parametrize(
    ("written", "amount"),
    [("8", 8), ("500m", Decimal("0.5")), ("32Gi", 34359738368), ("1.5T", 1500000000000), ("2k", 2000), ("1Ei", 2**60)],
)
def test_a_quantity_counts_as_kubernetes_counts(written: str, amount: object) -> None:
    assert quantity.amount(written) == amount


@pytest.mark.parametrize("written", ["", "8 Gi", "8GB", "8K", "-1", "1e3", "Gi", ".5", "1.", "0x10", "٣"])
def test_what_is_no_quantity_is_refused(written: str) -> None:
    with pytest.raises(ValueError, match="not a quantity"):
        quantity.amount(written)


@pytest.mark.parametrize("kind", [kind for kind, facts in KNOWN.items() if facts.platform == "tpu"])
def test_every_topology_offered_is_accepted_and_splits_into_hosts(kind: str) -> None:
    for topology in KNOWN[kind].topologies():
        sides = accelerators.sides_of(topology)
        assert sides is not None
        assert KNOWN[kind].accepts(topology)
        chips = 1
        for side in sides:
            chips *= side
        assert all(chips % per_host == 0 for per_host in accelerators.chips_per_host(kind, topology))


@pytest.mark.parametrize(
    ("kind", "topology", "made"),
    [
        ("v5p", "4x4x8", True),
        ("v5p", "8x8x12", True),
        ("v5p", "8x4x4", False),
        ("v5p", "4x4x6", False),
        ("v5p", "16x20x28", True),
        ("v5p", "16x24x24", False),
        ("v4", "1x1x1", False),
        ("7x", "1x1x1", True),
        ("v6e", "16x16", True),
        ("v6e", "16x32", False),
        ("v6e", "2x2x2", False),
        ("v6e", "0x4", False),
        ("v6e", "4X4", False),
    ],
)
def test_slices_are_those_that_are_made(kind: str, topology: str, made: bool) -> None:
    assert KNOWN[kind].accepts(topology) is made


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HF_TOKEN", "correct-horse"),
        ("WANDB_API_KEY", "0123456789abcdef"),
        ("AWS_SECRET_ACCESS_KEY", "wJalrXUtnFEMI/K7MDENG"),
        ("AWS_ACCESS_KEY_ID", "AKIAIOSFODNN7EXAMPLE"),
        ("DB_PASSWORD", "pw"),
        ("db-passwd", "hunter2"),
        ("ANY", "sk-ant-api03-abcdefghijklmnop-qrst"),
        ("GITHUB", "ghp_abcdefghijklmnopqrst0123"),
        ("URL", "https://user:word@host/path"),
        ("PEM", "-----BEGIN RSA PRIVATE KEY-----"),
        ("CLIENT_SECRET", "aaaaaaaa"),
    ],
)
def test_a_credential_is_recognized(name: str, value: str) -> None:
    assert credentials.in_variable(name, value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TOKENIZERS_PARALLELISM", "false"),
        ("MAX_TOKENS", "1000000000"),
        ("TOKEN_FILE", "/var/run/token-file"),
        ("GOOGLE_APPLICATION_CREDENTIALS", "/secrets/key.json"),
        ("PAD_TOKEN", "<|endoftext|>"),
        ("MASK_TOKEN_ID", "4321098765"),
        ("KEYBOARD_LAYOUT", "dvorak-programmer"),
        ("SECRET_NAME", "my-own-secret"),
        ("HF_TOKEN", ""),
        ("XLA_FLAGS", "--xla_gpu_enable_triton_gemm=false"),
        ("URL", "https://host:8080/path@v1"),
        ("DATA", "/data/sk-learn-digits-preprocessed-v2"),
        ("COMMIT", "9b752345f0c0ffee9b752345f0c0ffee9b752345"),
    ],
)
def test_what_only_resembles_a_credential_passes(name: str, value: str) -> None:
    assert not credentials.in_variable(name, value)

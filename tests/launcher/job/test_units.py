import pytest
from pydantic import TypeAdapter

from jaxlaunch.accelerators import ACCELERATORS, chips_per_host, parse_topology
from jaxlaunch.launcher.job import credentials, types
from jaxlaunch.launcher.job.types import Quantity
from jaxlaunch.launcher.wording import format_duration


@pytest.mark.parametrize(
    ("written", "seconds"),
    [
        ("90s", 90),
        ("10m", 600),
        ("1h30m", 5400),
        ("3d", 259200),
        ("1d2h3m4s", 93784),
        (45, 45),
        ("0h5m", 300),
    ],
)
def test_duration_is_parsed(written: object, seconds: float) -> None:
    assert types.parse_duration(written) == seconds
    assert types.parse_duration(format_duration(seconds)) == seconds


@pytest.mark.parametrize(
    "written",
    ["", "10", "5m1h", "1.5h", "-3s", "3 s", "1w", "s", 0, -1, 1.5, True, None, [], "9999999d"],
)
def test_invalid_duration_is_refused(written: object) -> None:
    with pytest.raises(ValueError, match="not a duration"):
        types.parse_duration(written)


@pytest.mark.parametrize(
    "written", ["", "8 Gi", "8GB", "8K", "-1", "1e3", "Gi", ".5", "1.", "0x10", "٣", "0", "0Gi"]
)
def test_invalid_quantity_is_refused(written: str) -> None:
    with pytest.raises(ValueError, match="not a quantity"):
        TypeAdapter(Quantity).validate_python(written)


@pytest.mark.parametrize(
    "kind", [kind for kind, facts in ACCELERATORS.items() if facts.platform == "tpu"]
)
def test_listed_topologies_are_accepted_and_split_into_hosts(kind: str) -> None:
    for topology in ACCELERATORS[kind].listed_topologies():
        sides = parse_topology(topology)
        assert sides is not None
        assert ACCELERATORS[kind].accepts_topology(topology)
        chips = 1
        for side in sides:
            chips *= side
        assert all(chips % per_host == 0 for per_host in chips_per_host(kind, topology))


@pytest.mark.parametrize(
    ("kind", "topology", "exists"),
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
def test_only_existing_slices_are_accepted(kind: str, topology: str, exists: bool) -> None:
    assert ACCELERATORS[kind].accepts_topology(topology) is exists


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("WANDB_API_KEY", "0123456789abcdef"),
        ("AWS_SECRET_ACCESS_KEY", "wJalrXUtnFEMI/K7MDENG"),
        ("aws_session_token", "IQoJb3JpZ2luX2VjEJ0123"),
        ("ANY", "sk-ant-api03-abcdefghijklmnop-qrst"),
        ("ANY", "ghp_abcdefghijklmnopqrst0123"),
        ("ANY", "https://user:word@host/path"),
        ("ANY", "-----BEGIN RSA PRIVATE KEY-----"),
        ("ANY", "redis://:pw@"),
        ("ANY", "redis://:pw@cache:6379/0"),
        ("ANY", "Bearer abc"),
        ("ANY", "x-team=a,Authorization=Basic dXNlcjpwdw=="),
        ("ANY", "https://b.example/k?sig=0123456789abcdef0123"),
        ("ANY", "ASIAIOSFODNN7EXAMPLE"),
        ("", "export WANDB_API_KEY=0123456789abcdef; python t.py"),
        ("", "login(token='hf_abcdefghijklmnopqrst0123')"),
    ],
)
def test_credential_is_recognized(name: str, value: str) -> None:
    assert credentials.has_credential(value, name)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TOKEN_MIXER", "attention_pool"),
        ("TOKENIZERS_PARALLELISM", "false"),
        ("MAX_TOKENS", "1000000000"),
        ("TOKEN_FILE", "/var/run/token-file"),
        ("SECRET_SAUCE", "tabasco-sauce"),
        ("PASSWORD_POLICY", "strict"),
        ("AUTH_TOKEN_COLUMN", "text_tokens"),
        ("API_KEY_ENV", "OPENAI_API_KEY_2026"),
        ("BACKWARD_PASS", "recompute"),
        ("EOS_TOKEN", "end_of_text"),
        ("WANDB_API_KEY", "$(KEY)"),
        ("WANDB_API_KEY", ""),
        ("URL", "https://host:8080/path@v1"),
        ("DATA", "/data/sk-learn-digits-preprocessed-v2"),
        ("COMMIT", "9b752345f0c0ffee9b752345f0c0ffee9b752345"),
        ("BROKER", "redis://:$(PW)@cache"),
        ("AUTH", "Bearer $TOKEN"),
        ("NOTE", "Bearer authentication is required"),
        ("URL", "http://[::1]:8080/a@b"),
        ("CATALOG", "github://org:repo@sha/precip/catalog.yml"),
        ("IMAGE", "docker-image://alpine:3.19.1@sha256:0123456789abcdef"),
        ("", 'prog --password "$PW" --token=$TOKEN --api-key "$(cat /s/key)"'),
        ("", "--token-mixer attention --token-routing=expert_choice --password-policy strict"),
    ],
)
def test_harmless_value_is_no_credential(name: str, value: str) -> None:
    assert not credentials.has_credential(value, name)

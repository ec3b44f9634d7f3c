import pytest
from pydantic import TypeAdapter

from jaxlaunch.accelerators import KNOWN, chips_per_host, sides_of
from jaxlaunch.launcher.errors import JobFaults
from jaxlaunch.launcher.job import credentials, load, units
from jaxlaunch.launcher.job.units import Quantity


@pytest.mark.parametrize(
    ("written", "seconds"),
    [("90s", 90), ("10m", 600), ("1h30m", 5400), ("3d", 259200), ("1d2h3m4s", 93784), (45, 45), ("0h5m", 300)],
)
def test_a_duration_is_seconds(written: object, seconds: float) -> None:
    assert units.seconds(written) == seconds
    assert units.seconds(units.text(seconds)) == seconds


@pytest.mark.parametrize(
    "written", ["", "10", "5m1h", "1.5h", "-3s", "3 s", "1w", "s", 0, -1, 1.5, True, None, [], "9999999d"]
)
def test_what_is_no_duration_is_refused(written: object) -> None:
    with pytest.raises(ValueError, match="not a duration"):
        units.seconds(written)


@pytest.mark.parametrize("written", ["", "8 Gi", "8GB", "8K", "-1", "1e3", "Gi", ".5", "1.", "0x10", "٣", "0", "0Gi"])
def test_what_a_job_may_not_write_as_a_quantity_is_refused(written: str) -> None:
    with pytest.raises(ValueError, match="not a quantity"):
        TypeAdapter(Quantity).validate_python(written)


@pytest.mark.parametrize("kind", [kind for kind, facts in KNOWN.items() if facts.platform == "tpu"])
def test_every_topology_offered_is_accepted_and_splits_into_hosts(kind: str) -> None:
    for topology in KNOWN[kind].topologies():
        sides = sides_of(topology)
        assert sides is not None
        assert KNOWN[kind].accepts(topology)
        chips = 1
        for side in sides:
            chips *= side
        assert all(chips % per_host == 0 for per_host in chips_per_host(kind, topology))


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
        ("PGPASSWORD", "pw"),
        ("MYSQL_PWD", "pw"),
        ("SMTP_PASS", "pw"),
        ("DB_PASS", "hunter2"),
        ("SSHPASS", "correct-horse"),
        ("dbPassword", "pw"),
        ("BROKER", "redis://:pw@"),
        ("BROKER", "redis://:pw@cache:6379/0"),
        ("AUTH", "Bearer abc"),
        ("HEADERS", "x-team=a,Authorization=Basic dXNlcjpwdw=="),
        ("authToken", "correct-horse"),
        ("AZURE_STORAGE_KEY", "0123456789abcdef"),
        ("URL", "https://b.example/k?sig=0123456789abcdef0123"),
        ("AWS", "ASIAIOSFODNN7EXAMPLE"),
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
        ("ALLOW_EMPTY_PASSWORD", "yes"),
        ("PASSWORD_FILE", "/secrets/pw"),
        ("PGPASSFILE", "/secrets/pgpass"),
        ("BACKWARD_PASS", "recompute"),
        ("SINGLE_PASS", "1"),
        ("COMPASS", "north-north-east"),
        ("PWD", "somewhere"),
        ("INIT_PWD", "/work"),
        ("EOS_TOKEN", "end_of_text"),
        ("USE_AUTH_TOKEN", "everywhere"),
        ("BROKER", "redis://:$(PW)@cache"),
        ("AUTH", "Bearer $TOKEN"),
        ("NOTE", "Bearer authentication is required"),
        ("URL", "http://[::1]:8080/a@b"),
        ("PROXY", "http://proxy.corp:3128"),
        ("CATALOG", "github://org:repo@sha/precip/catalog.yml"),
        ("IMAGE", "docker-image://alpine:3.19.1@sha256:0123456789abcdef"),
        ("OPENAI_API_KEY_FILE", "mounted-key"),
        ("GOOGLE_APPLICATION_CREDENTIALS", "service-account.json"),
    ],
)
def test_what_only_resembles_a_credential_passes(name: str, value: str) -> None:
    assert not credentials.in_variable(name, value)


@pytest.mark.parametrize(
    ("command", "named"),
    [
        (["prog", "--password", "pw"], {2: "--password"}),
        (["prog", "--token=correct-horse"], {1: "--token"}),
        (["prog", "-password=pw", "--api-key", "0123456789abcdef"], {1: "--password", 3: "--api-key"}),
        (["python", "train.py", "db.password=pw"], {2: "db.password"}),
        (["sh", "-c", "PGPASSWORD=pw psql -h db"], {2: "PGPASSWORD"}),
        (["sh", "-c", "x && prog --db-pass 'hunter2' | tee"], {2: "--db-pass"}),
        (["sh", "-c", "export WANDB_API_KEY=0123456789abcdef; python t.py"], {2: "WANDB_API_KEY"}),
        (["prog", "--password", "--verbose"], {}),
        (["prog", "--password-file", "/secrets/pw", "--password-stdin"], {}),
        (["prog", "--use-auth-token", "train.py", "--token", "none"], {}),
        (["prog", "--pad-token", "end_of_text", "--max-tokens", "1000000000", "--tokenizer=some/name"], {}),
        (["sh", "-c", 'prog --password "$PW" --token=$TOKEN --secret ${A_SECRET_NAME} --api-key "$(cat /s/key)"'], {}),
        (["python", "-c", "import getpass; password=getpass.getpass(); token=os.environ['TOKEN']"], {}),
        (["prog", "--token", "$(TOKEN)", "--password="], {}),
        (
            ["prog", "--prompt-token", "q7w2e9rtyu", "--hub-token=correct-horse"],
            {2: "--prompt-token", 3: "--hub-token"},
        ),
        (
            ["prog", "--hf_token", "hf_abcdefghijklmnopqrst0123", "--secret", "aaaaaaaa"],
            {2: "--hf_token", 4: "--secret"},
        ),
        (["python", "-c", "login(token='k7f2m9xqwert')"], {2: "token"}),
        (["python", "-c", "connect(db_password='hunter2', user=me)"], {2: "db_password"}),
        (["prog", "--moe-token-dispatcher-type", "alltoall", "--moe-token-drop-policy", "position"], {}),
        (
            [
                "prog",
                "--token-mixer",
                "attention",
                "--token-routing=expert_choice",
                "--token-dropping",
                "probabilistic",
            ],
            {},
        ),
        (["prog", "--initializer-token", "sculpture", "--placeholder_token=cat-statue", "--token", "attention"], {}),
        (["prog", "--eos-token", "end_of_text", "--num-tokens", "1000000000", "--tokenizer", "org/name-1234"], {}),
        (["prog", "--secret-sauce", "tabasco-sauce", "--password-policy", "strict", "--credential-type=workload"], {}),
        (["prog", "--password", "/secrets/pw", "--api-key=./key", "--db-pass", "~/.pw"], {}),
        (["prog", "--auth-token-path", "mounted/auth-token", "--key-dim", "eight-heads-of-128"], {}),
        (["prog", "--api-key-env", "OPENAI_API_KEY_2026", "--api-key", "YOUR_API_KEY", "--password", "<password>"], {}),
        (
            [
                "prog",
                "--password",
                "{{ .Values.pw }}",
                "--credentials",
                "service-account.json",
                "--token=%TOKEN_VALUE%",
            ],
            {},
        ),
        (
            [
                "python",
                "-c",
                "login(token=hf_token_value); connect(password=cfg.password, api_key=api_key, passwd=None, user=me)",
            ],
            {},
        ),
    ],
)
def test_a_credential_among_arguments_is_known_by_its_flag(command: list[str], named: dict[int, str]) -> None:
    paths = {("command", at): name for at, name in named.items()}
    assert dict(credentials.arguments({"command": command})) == paths
    pod = {"init": [{"name": "a", "args": command}]}
    assert [path for path, _ in credentials.arguments(pod)] == [("init", 0, "args", at) for at in named]


def test_keys_of_a_task_are_credentials_only_where_their_names_end_in_one() -> None:
    lines = """name: a
accelerator: {type: cpu}
train:
  task: "mine:Task"
  data: {source: torch, dataset: "mine:Data", args: {%s}}"""
    for pair in ("token_column: text_tokens", "token_mixer: attention", "secret_sauce: tabasco-sauce"):
        load.parse(lines % pair)
    for pair in ("api_token: k7f2m9xqwert", "client_secret: aaaaaaaa", "password: hunter2"):
        with pytest.raises(JobFaults, match="looks like a credential"):
            load.parse(lines % pair)

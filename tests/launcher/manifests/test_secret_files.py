"""Files that hold credentials, and files that only resemble them. All are made up."""

from __future__ import annotations

import pytest

from jaxlaunch.launcher.job import credentials

HEX = "7f3a9c51e0b84d26af19c7d2058e6b43"
TEXT = "kR7vQ2mXw9LzT4bNc8JdF1hPs6GyA3uE"
BODY = "MIIEvQIBADANBgkqhkiG9w0BAQEFAASCBKcwggSjAgEAAoIBAQDZ7f3a9c51"
BEGIN, END = "-----BEGIN {}" + "PRIVATE KEY-----\n", "\n-----END {}PRIVATE KEY-----\n"

BY_NAME = (
    *(
        *(".env", ".env.local", ".env.production", "app/.env", ".env.example", ".envrc", ".netrc"),
        *("_netrc", ".pypirc"),
    ),
    *(
        *(".git-credentials", ".pgpass", ".my.cnf", ".s3cfg", ".boto", ".htpasswd", ".vault-token"),
        ".databrickscfg",
    ),
    *(
        *("home/.aws/credentials", ".docker/config.json", ".kube/config", "kubeconfig"),
        *("prod.kubeconfig", ".dockercfg"),
    ),
    *(
        *("id_rsa", ".ssh/id_ed25519", ".ssh/id_work", "keys/ID_RSA", "a.ppk", "a.p12", "a.pfx"),
        *("server.jks", "a.kdbx"),
    ),
    *(
        "terraform.tfstate",
        "terraform.tfstate.backup",
        "client_secret_12.apps.json",
        "kaggle.json",
        "rclone.conf",
    ),
    *(
        "application_default_credentials.json",
        ".config/gcloud/access_tokens.db",
        ".cargo/credentials.toml",
    ),
    *(
        ".config/gh/hosts.yml",
        ".cache/huggingface/token",
        ".cache/huggingface/stored_tokens",
        ".gnupg/secring.gpg",
    ),
    *(
        ".streamlit/secrets.toml",
        "secrets.yaml",
        ".azure/accessTokens.json",
        ".aws/config",
        ".oci/oci_api_key",
    ),
    *(
        *(".vault_pass", ".vault_pass.txt", "terraform.tfvars", "prod.auto.tfvars", "id_rsa.bak"),
        *("id_rsa~", ".netrc.orig"),
    ),
    *(
        *("prod.env", "docker.env", "server.key", "AuthKey.p8", "service-account.json"),
        "secrets.prod.yaml",
    ),
    *(
        *("credentials.json", "google_credentials.json", "helm-secrets.yml", ".env.sh"),
        *(".aws/config.sh", ".modal.toml"),
    ),
    *("pull/.dockerconfigjson", "release.keystore"),
)
BY_CONTENT = {
    "key.pem": BEGIN.format("RSA ") + BODY + END.format("RSA "),
    "encrypted.pem": BEGIN.format("RSA ")
    + "Proc-Type: 4,ENCRYPTED\nDEK-Info: AES-256-CBC,7F\n\n"
    + BODY,
    "deploy_key": BEGIN.format("OPENSSH ") + BODY,
    "windows.pem": BEGIN.format("").replace("\n", "\r\n") + BODY,
    "key.asc": BEGIN.format("PGP ").replace("KEY-", "KEY BLOCK-") + "Version: GnuPG v2\n\n" + BODY,
    "service-account.json": '{"type": "service_account", "private_key": "'
    + BEGIN.format("").strip()
    + "\\n"
    + BODY
    + '"}',
    "config.ini": f"[default]\naws_secret_access_key = wJalrXUtnFEMI/K7MDENG/bPx{TEXT[:15]}\n",
    "key_id.txt": "AKIA" + "Q7ZKX2M9WVB4T6NC",
    "temporary.sh": "export AWS_ACCESS_KEY_ID=ASIA" + "Q7ZKX2M9WVB4T6NC",
    ".npmrc": f"//registry.example/:_authToken={HEX}\n",
    "old.npmrc": f"_auth={HEX}\n",
    "my-netrc": "machine api.wandb.ai\n  login user\n  password " + HEX,
    "kube.yaml": "users:\n- name: me\n  user:\n    client-key-data: "
    + "TFMwdExTMUNSVWRKVGlCU1UwRWdVRkpKVmtGVVJTQkxSVmt0TFMwdExR==",
    "docker.json": '{"auths": {"ghcr.io": {"auth": "dXNlcjpjb3JyZWN0aG9yc2U="}}}',
    "secret.yaml": "apiVersion: v1\nkind: Secret\nmetadata: {name: db}\ndata:\n  password: "
    "Y29ycmVjdGhvcnNl\n",
    "wandb_login.py": f'wandb.login(\n    relogin=True,\n    key="{HEX}7d2058e6",\n)\n',
    "groq.py": f"client = Groq(api_key='gsk_{TEXT}{TEXT[:20]}')\n",
    "replicate.py": f"token = 'r8_{TEXT}{TEXT[:5]}'\n",
    ".yarnrc.yml": f'npmAuthToken: "{HEX}"\n',
    "pip.conf": "[global]\nindex-url = https://me:correcthorse7@pypi.corp/simple\n",
    "train.py": f'login(token="hf_{TEXT}")\n',
    "openai.py": f'client = OpenAI(api_key="sk-proj-{TEXT}")\n',
    "ci.yml": f"env:\n  GH_TOKEN: ghp_{TEXT}\n",
    "slack.py": f'URL = "https://hooks.slack.com/services/T0{HEX[:7]}/B0{HEX[:7]}/{TEXT[:24]}"\n',
    "run.sh": f"#!/bin/sh\nexport WANDB_API_KEY={HEX}7d2058e6\npython train.py\n",
    "Dockerfile": f"FROM python\nENV NEPTUNE_API_TOKEN={TEXT}\n",
    "notebook.ipynb": '{"source": ["os.environ[\\"COMET_API_KEY\\"] = \\"' + TEXT + '\\"\\n"]}',
    "db.yaml": "url: postgres://trainer:k8S.pr0d!x@db.corp:5432/runs\n",
    "redis.toml": 'broker = "redis://:k8Spr0dx@cache:6379/0"\n',
    "curl.sh": f'curl -H "Authorization: Bearer {TEXT}" https://api.corp\n',
    "basic.md": "curl -H 'Authorization: Basic dXNlcjpjb3JyZWN0L2hvcnNl/7w=='\n",
    "lower.sh": f'curl -H "authorization: bearer {HEX}" https://api.corp\n',
    "encoded.py": 'url = "mysql://root:p%40ss%23w0rd@db.corp/runs"\n',
    "stripe.py": f'key = "sk_live_{TEXT}"\n',
    "jwt.txt": "eyJhbGciOiJIUzI1NiJ9" + ".eyJzdWIiOiJtZSJ9.c2lnbmF0dXJl",
    "tracking.py": f'wandb_v1 = "wandb_v1_{TEXT}{TEXT}"\n',
    "gitlab.yml": f"token: glrt-{TEXT[:20]}\n",
    "azure.env.txt": f"DefaultEndpointsProtocol=https;AccountName=a;AccountKey={TEXT}{HEX}==\n",
    "url.txt": f"https://b.s3.amazonaws.com/k?X-Amz-Date=2026&X-Amz-Signature={HEX}{HEX}\n",
}
INNOCENT = {
    "cert.pem": "-----BEGIN CERTIFICATE-----\n" + BODY + "\n-----END CERTIFICATE-----\n",
    "id_rsa.pub": "ssh-rsa AAAAB3NzaC1yc2EAAAADAQABAAABgQ me@host\n",
    ".ssh/known_hosts": "github.com ssh-ed25519 "
    "AAAAC3NzaC1lZDI1NTE5AAAAIOMqqnkVzrm0SdG6UOoqKLsabgH5C9okWi0dh2l9GKJl\n",
    "pem.py": 'if text.startswith("' + BEGIN.format("").strip() + '"):\n    raise ValueError\n',
    "docs/keys.md": BEGIN.format("RSA ") + "...\n" + END.format("RSA "),
    "README.md": "export HF_TOKEN=hf_xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx\nexport "
    "WANDB_API_KEY=<your key>\n",
    "docs/aws.md": "key: AKIAIOSFODNN7EXAMPLE\naws_secret_access_key = "
    "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY\n",
    "docs/db.md": "postgres://user:password@localhost/db, redis://:<password>@host, "
    "mysql://root:root@db\n",
    "db.py": 'url = f"postgresql://{user}:{password}@{host}/{name}"\n',
    "compose.yaml": "DATABASE_URL: postgres://app:${DB_PASSWORD}@db/app\nBROKER: "
    "redis://:$PW@cache\n",
    "urls.py": 'URLS = ["http://localhost:8080/path@v1", "https://host:443", '
    '"mailto:a@b.example"]\n',
    "minified.js": 'a="http://localhost:8000",b="me@corp.example"',
    "tokenizer_config.json": '{"pad_token": "<|endoftext|>", "eos_token": "<|im_end|>", '
    '"model_max_length": 131072}',
    "special_tokens_map.json": '{"bos_token": "<\uff5cbegin\u2581of\u2581sentence\uff5c>", '
    '"mask_token": "[MASK]"}',
    "vocab.json": '{"token": 30001, "secret": 1203, "password": 9999999999999999}',
    "model.py": "self.pad_token = tokenizer.pad_token_id_2026_11_22\nMAX_TOKENS = 1000000000000\n",
    "login.py": 'token = os.environ["HF_TOKEN"]\n'
    'api_key=get_secret("projects/1234567/secrets/k1")\n',
    "client.py": "_auth = HTTPBasicAuth2\n_password = read_password_1()\n",
    "args.py": 'parser.add_argument("--api-key", default=None)\npassword = getpass.getpass()\n',
    "k8s/secret-ref.yaml": "env:\n- name: HF_TOKEN\n  valueFrom: {secretKeyRef: {name: hub, "
    "key: token}}\n",
    "k8s/sealed.yaml": "kind: SealedSecret\nspec:\n  encryptedData:\n    a: AgBy3i4OJSWK\n",
    "helm/secret.yaml": "apiVersion: v1\nkind: Secret\ndata:\n  password: {{ .Values.pw | "
    "b64enc }}\n",
    "kube.md": "client-key-data: <base64>\nclient-certificate-data: " + BODY,
    "go.sum": "github.com/x/y v1.2.3 h1:Qz7mXw9LzT4bNc8JdF1hPs6GyA3uEkR7vQ2mXw9LzT4=\n",
    "poetry.lock": f'files = [{{file = "token-1.0.whl", hash = "sha256:{HEX}{HEX}"}}]\n',
    "commit.txt": f"{HEX}7d2058e6\n",
    ".npmrc": "registry=https://registry.example\n//registry.example/:_authToken=${NPM_TOKEN}\n",
    "calls.py": "api_key=os.environ['COHERE_API_KEY_2026_11']\n"
    "secret_key='correct-horse-battery-staple'\n",
    "credentials.py": "def load(): ...\n",
    "src/credentials.rs": "pub fn load() {}\n",
    "proto/secrets.proto": "message Secret {}\n",
    "gym.env.py": "class Env: ...\n",
    "train.old": "lr = 3e-4\n",
    "pip.conf": "[global]\nindex-url = https://pypi.corp/simple\n",
    ".docker/Dockerfile": "FROM python:3.11\nARG TOKEN\n",
    "docs/auth.md": "Use Bearer authentication: `Authorization: Bearer $TOKEN`. Basic "
    "authentication is deprecated.\n",
    "secrets.py": "import os\nTOKEN_FILE = '/var/run/secrets/token1234567890123'\n",
    "environment.yml": "dependencies: [python=3.11, jax]\n",
    "envs/cartpole.py": "class Env: ...\n",
    ".envs/cartpole.yaml": "steps: 1\n",
    "data.bin": bytes(range(256)).decode("latin-1") * 40,
    "image.ipynb": '{"image/png": "' + BODY * 30 + '"}',
    "sk.py": "from sklearn import sk_learn_wrapper as sk\nhf_transformers_compat = 1\n",
    "workflow.yaml": "token: ${{ secrets.GITHUB_TOKEN }}\npassword: ${{ "
    "secrets.DOCKERHUB_TOKEN_2026 }}\n",
    "formatted.py": 'a = "mysql://root:%s@localhost" % pw\nb = "mysql://%s:%-8s@db" % (user, pw)\n',
    "stand-ins.md": "redis://:{password}@h, redis://:<password>@h, redis://:$PW@h, "
    "redis://:****@h, http://a:b@host/\n",
    "smb.py": "open('smb://myuser:mypassword@myserver.corp/share')\n",
    "fsspec.py": "'github://org:repo@sha/precip/catalog.yml'\n",
    "bake.hcl": f'contexts = {{ base = "docker-image://alpine:3.19.1@sha256:{HEX}{HEX}" }}\n',
    "docs/start.md": "see the basic examples/resnet50_imagenet.py, or basic "
    "transformer-decoder-only-12-layers\n",
    "docs/bearers.md": "the bearer services/tokens_v2.example_service, Basic "
    "tests/test_train_step_3.py\n",
    "RECORD": "websocket/_cookiejar.py,sha256=sk_bJkC1VTNz9STPygp9WigFOc4yKFXbXJzz7vnNA7c,2346\n",
    "list.json": f'{{"nextPageToken": "a", "next_page_token": "{TEXT}", "continuation-token": '
    f'"{HEX}"}}\n',
    "storage.tf": 'resource "x" "y" { secret_id = var.secret_name_2026_11_22 }\n',
}


def find_sign(name: str, content: str) -> credentials.CredentialSign | None:
    return credentials.find_credential(content.encode("utf-8"))


@pytest.mark.parametrize("name", BY_NAME)
def test_credential_file_is_recognized_by_name(name: str) -> None:
    assert credentials.is_credential_file(name)


@pytest.mark.parametrize("name", BY_CONTENT)
def test_credential_file_is_recognized_by_content(name: str) -> None:
    sign = find_sign(name, BY_CONTENT[name])
    assert sign is not None and 1 <= sign.line <= BY_CONTENT[name].count("\n") + 1
    assert HEX not in sign.kind and TEXT not in sign.kind


@pytest.mark.parametrize("name", INNOCENT)
def test_harmless_file_is_not_recognized(name: str) -> None:
    assert not credentials.is_credential_file(name) and find_sign(name, INNOCENT[name]) is None


@pytest.mark.parametrize(
    "text",
    [
        *("\n", " ", "a", "password=", "x://", "Bearer 1", "Authorization "),
        *("authorization: basic ", "/+", "-", "api_key=", "-----BEGIN CERTIFICATE-----"),
        *("machine ", "kind: Secret\n", "wandb.login(", '"auths":{'),
    ],
)
def test_search_takes_linear_time(text: str) -> None:
    credentials.find_credential(text.encode() * 30_000)
    credentials.is_credential_file(text * 30_000)


def test_line_of_credential() -> None:
    assert find_sign("a", f"\n\nhf_{TEXT}") == credentials.CredentialSign(3, "a token")
    expected = credentials.CredentialSign(2, "WANDB_API_KEY")
    assert find_sign("run.sh", f"x\nexport WANDB_API_KEY={HEX}") == expected

from __future__ import annotations

from pathlib import Path

from jaxlaunch import contract
from jaxlaunch.launcher.agent.gang import config


def test_code_digest_covers_names_and_contents_of_python_files(tmp_path: Path) -> None:
    environ = {contract.CODE_ROOT: str(tmp_path)}
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "a.py").write_text("x = 1")
    first = config.describe_versions({"python": "3.11.2", "jax": None}, environ)
    assert first["python"] == "3.11.2"
    assert "jax" not in first
    assert len(first["code"]) == config.DIGEST_DIGITS
    for other in ("runs", ".git", "__pycache__"):
        (tmp_path / other).mkdir()
        (tmp_path / other / "b.py").write_text("y")
    (tmp_path / "data.txt").write_text("z")
    assert config.code_digest(environ) == {"code": first["code"]}
    (tmp_path / "pkg" / "a.py").write_text("x = 2")
    changed = config.code_digest(environ)
    (tmp_path / "pkg" / "a.py").rename(tmp_path / "pkg" / "b.py")
    assert len({first["code"], changed["code"], config.code_digest(environ)["code"]}) == 3
    (tmp_path / "pkg" / "large.py").write_bytes(b"#" * (17 << 20))
    assert config.code_digest(environ) == {} == config.code_digest({})

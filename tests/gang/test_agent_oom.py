"""The kernel's own count of what it killed for want of memory, in both of its forms."""

from pathlib import Path

import pytest

from launcher.agent import oom

V1 = "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n"
V2 = "low 0\nhigh 0\nmax 31\noom 4\noom_kill 3\noom_group_kill 0\n"


@pytest.mark.parametrize(("text", "kills"), [(V1, 2), (V2, 3), ("oom_kill_disable 0\nunder_oom 0\n", 0), (None, 0)])
def test_the_count_is_read_where_there_is_one(
    text: str | None, kills: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if text is not None:
        (tmp_path / "count").write_text(text)
    monkeypatch.setattr(oom, "FILES", (str(tmp_path / "absent"), str(tmp_path / "count")))
    assert oom.kills() == kills

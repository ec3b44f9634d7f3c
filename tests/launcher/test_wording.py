"""How messages write what they say."""

from __future__ import annotations

import pytest

from jaxlaunch.launcher.wording import placed


@pytest.mark.parametrize(
    ("advice", "said"),
    [
        ("see `launcher explain lm`.", "see `launcher explain -n team lm`."),
        ("launcher logs lm --previous shows how", "launcher logs -n team lm --previous shows how"),
        ("`launcher list` shows the jobs", "`launcher list -n team` shows the jobs"),
        ("kubectl describe pod lm-w-0-0", "kubectl -n team describe pod lm-w-0-0"),
        ("set one of `kubectl get localqueues`", "set one of `kubectl -n team get localqueues`"),
        ("set one of `kubectl get priorityclasses`", None),
        ("kubectl -n jobset-system get pods; `launcher doctor` checks it too.", None),
        ("kubectl uncordon them; `launcher submit` of the same job resumes it.", None),
        ("`kubectl get namespace team -o yaml` says", None),
    ],
)
def test_advice_carries_the_namespace(advice: str, said: str | None) -> None:
    assert placed(advice, "team") == (said or advice)
    assert placed(placed(advice, "team"), "team") == (said or advice)

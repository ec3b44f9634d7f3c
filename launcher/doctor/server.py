"""The API server: its version, and whether its clock and ours agree. Pure."""

from __future__ import annotations

from datetime import datetime

from launcher.finding import Finding, clusters, ok, warn

SKEW_S = 30  # of clocks; beyond, ages and events mislead
TOKENS_S = 300  # beyond, tokens and certificates are taken for not yet or no longer valid


def ready(version: str, server: str, is_ready: bool) -> Finding:
    if is_ready:
        return ok(f"Kubernetes {version} at {server}")
    return clusters(
        f"Kubernetes {version} calls itself not ready", "calls may fail.", "its owner asks /readyz?verbose."
    )


def clock(before: datetime, there: datetime, after: datetime) -> Finding:
    """The server's time, which it tells to the second, against ours before and after it was asked."""
    skew_s = max((before - there).total_seconds() - 1, (there - after).total_seconds(), 0.0)
    if skew_s <= SKEW_S:
        return ok("this machine's clock and the server's agree")
    why = "tokens and certificates are judged by it." if skew_s > TOKENS_S else "ages and events are misread."
    what = f"this machine's clock and the server's are {skew_s:.0f} s apart"
    return warn(what, why, "set the clock: timedatectl set-ntp true")

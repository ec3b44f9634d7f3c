"""The API server: its version, readiness and clock. Pure."""

from __future__ import annotations

from datetime import datetime

from jaxlaunch.launcher.diagnose.doctor.finding import ASK_ADMIN, Finding, fail_admin, ok, warn
from jaxlaunch.launcher.kubernetes.objects import SKEW_S, ahead_s

TOKENS_S = 300  # beyond, tokens and certificates count as expired or not yet valid


def ready(version: str, server: str, is_ready: bool) -> Finding:
    """Its version, and whether /readyz says ok."""
    if is_ready:
        return ok("Kubernetes {version} at {server}", version=version, server=server)
    fix = f"{ASK_ADMIN} check /readyz?verbose."
    what = "the API server (Kubernetes {version}) is not ready"
    return fail_admin(what, "requests may fail.", fix, version=version)


def clock(before: datetime, there: datetime, after: datetime) -> Finding:
    """The server's time, which it gives to the second, against the time here before and after the request."""
    skew_s = abs(ahead_s(before, there, after))
    if skew_s <= SKEW_S:
        return ok("this machine's clock and the server's agree")
    why = "tokens and certificates may be rejected." if skew_s > TOKENS_S else "ages of objects and events are wrong."
    what = "this machine's clock and the server's are {skew:.0f} s apart"
    return warn(what, why, "set the clock: timedatectl set-ntp true", skew=float(skew_s))

"""NetworkPolicies: whether the hosts of a job reach each other. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from jaxlaunch.launcher.diagnose.doctor.controllers import matches
from jaxlaunch.launcher.diagnose.doctor.finding import Finding, Findings, fail, ok, unknown
from jaxlaunch.launcher.kubernetes.objects import Obj

_Direction = Literal["Ingress", "Egress"]
_WORDS: Mapping[_Direction, tuple[str, str, str]] = {
    "Ingress": ("ingress", "from", "none admits connections from the job's other hosts"),
    "Egress": ("egress", "to", "none allows connections to the job's other hosts"),
}


def gang(
    policies: Sequence[Obj], pod_labels: Mapping[str, str], namespace_labels: Mapping[str, str] | None, has_own: bool
) -> Findings:
    """Whether the policies of the namespace let the job's pods connect to each other; `has_own`: the job brings one.

    Without a policy that selects a pod, everything is allowed; with some, what one of them allows.
    """
    judged = [_judged(way, policies, pod_labels, namespace_labels, has_own) for way in _WORDS]
    found = [one for one in judged if one is not None]
    yield from found
    if not found:
        yield ok("no NetworkPolicy of the namespace keeps the hosts from each other")


def _judged(
    way: _Direction,
    policies: Sequence[Obj],
    pod_labels: Mapping[str, str],
    namespace_labels: Mapping[str, str] | None,
    has_own: bool,
) -> Finding | None:
    """What is wrong with one direction; None when nothing is."""
    barring = [one for one in policies if way in _types(one) and matches(_selector(one), pod_labels)]
    if not barring:
        return None
    word, key, lacking = _WORDS[way]
    limited = [  # whether each rule that reaches the other hosts is of some ports only
        bool(rule.get("ports"))
        for policy in barring
        for rule in policy["spec"].get(word) or ()
        if _reaches(rule.get(key), pod_labels, namespace_labels)
    ]
    if limited and not all(limited):
        return None
    names = ", ".join(sorted(one["metadata"]["name"] for one in barring))
    if limited:
        why = "JAX's coordinator listens on another port in each attempt."
        return unknown("NetworkPolicy {names} limits the ports between the job's hosts", why, names=names)
    what = "NetworkPolicy {names} denies {word} of the job's pods, and " + lacking
    why = "the hosts wait for each other at the rendezvous until it times out."
    fix = "add a NetworkPolicy that allows it between pods of one JobSet, or ask the namespace's administrator."
    if way == "Ingress" and not has_own:
        fix = "leave out `network_policy: false`: the job's own policy admits its hosts."
    return fail(what, why, fix, names=names, word=word)


def _types(policy: Obj) -> Sequence[str]:
    """What it is about; by default ingress, and egress where it has such rules."""
    spec = policy["spec"]
    return spec.get("policyTypes") or ["Ingress", *(["Egress"] if spec.get("egress") else [])]


def _selector(policy: Obj) -> Obj:
    return policy["spec"].get("podSelector") or {}


def _reaches(
    peers: Sequence[Obj] | None, pod_labels: Mapping[str, str], namespace_labels: Mapping[str, str] | None
) -> bool:
    """Whether one of these peers is the job's own pods; no peers are all."""
    return not peers or any(_is_own(peer, pod_labels, namespace_labels) for peer in peers)


def _is_own(peer: Obj, pod_labels: Mapping[str, str], namespace_labels: Mapping[str, str] | None) -> bool:
    """A block of addresses may hold the pods', which are not known yet: it counts as one that does."""
    if "ipBlock" in peer:
        return True
    where = peer.get("namespaceSelector")
    is_here = where is None or namespace_labels is None or matches(where, namespace_labels)
    return is_here and matches(peer.get("podSelector") or {}, pod_labels)

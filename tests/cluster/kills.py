"""Loses hosts of a gang on the tests' cluster at random moments, and judges how it ends.

`python -m tests.cluster.kills --seed 1 --count 30`: three hosts train the digits job, in every second run with a spare,
and lose a process, an agent, or a pod (deleted with force, or evicted as by a drain), from the first seconds on and
three times at most. Each run must end at its last step, with the losses of a run that lost nothing, to the bit. For
each run there is a line of JSON: what was lost, when, and what is `wrong`, which is empty when all is right.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from benchmarks import lost_hosts
from tests.cluster import preparations
from tests.cluster.access import Access
from tests.cluster.gangs import Gang, Place, place
from tests.cluster.harness import build, cluster, image, places
from tests.cluster.test_recovery import SAVED, losses, of_hosts
from tests.compiled import QUICK_COMPILES

KILLS = 3  # of a run at most: Kubernetes makes the pod of a host again 10 s after its first loss, then 20 s
LONGEST_S = 12.0  # between two
STEPS = 600
STRIKES = {
    "process": lost_hosts.process,
    "agent": lost_hosts.agent,
    "pod deleted": lost_hosts.deleted,
    "drained": lost_hosts.drained,
}


def begun(here: Place, name: str, **keys: Any) -> Gang:
    return here.start(
        name, SAVED, env={**QUICK_COMPILES, "HOLD": "/checkpoints/none"}, **of_hosts(STEPS, lr=1e-3), **keys
    )


def struck(here: Place, gang: Gang, draw: random.Random) -> list[str]:
    """What it loses until it has ended, each with the seconds since it was submitted."""
    found, submitted = list[str](), time.monotonic()
    while len(found) < KILLS and not gang.status.get("terminalState"):
        time.sleep(draw.uniform(0.0, LONGEST_S))
        there = [pod for pod in gang.pods if _runs(pod)]
        name, number = draw.choice(list(STRIKES)), draw.random()
        if not there:
            continue
        pod = there[int(number * len(there))]
        with suppress(StopIteration, ValueError, OSError):  # its container has no such process yet, or no longer
            STRIKES[name](here, gang, pod)
            found.append(f"{name} of host {lost_hosts.index(pod)} at {time.monotonic() - submitted:.1f} s")
    return found


def _runs(pod: Any) -> bool:
    """Whether its container runs and it is not deleted yet."""
    states = [one["state"] for one in pod["status"].get("containerStatuses", ())]
    return "deletionTimestamp" not in pod["metadata"] and any("running" in state for state in states)


def judged(here: Place, folder: Any, number: int, seed: int, undisturbed: dict[int, float]) -> dict[str, Any]:
    """A run that loses hosts, and what is wrong with how it ended."""
    draw, name = random.Random(f"{seed}-{number}"), f"kills-{number}"
    gang = begun(here, name, **(lost_hosts.SPARE if number % 2 else lost_hosts.ALONE))
    lost = struck(here, gang, draw)
    wrong = [] if (state := gang.ended()) == "Completed" else [f"it is {state}: {gang.status}"]
    found = losses(folder, name) if not wrong else {}
    wrong += [f"{len(found)} of {STEPS} steps"] if not wrong and len(found) != STEPS else []
    wrong += ["its losses are others"] if not wrong and found != undisturbed else []
    return {"run": name, "lost": lost, "restarts": gang.counters, "wrong": wrong}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=30, help="losses, at the least")
    parser.add_argument("--together", type=int, default=2, help="runs at a time")
    given = parser.parse_args()
    with cluster.used():
        access = Access(places.ADMIN, build.home() / "kubectl", is_ours=True)
        image.load()
        with place(access, image.IMAGE) as here, ThreadPoolExecutor(given.together) as pool:
            folder = preparations.make_claim(here.access, here.namespace, size="10Gi")
            assert begun(here, "nothing", **lost_hosts.WHOLE).ended() == "Completed"
            undisturbed, runs = losses(folder, "nothing"), list[dict[str, Any]]()
            for first in itertools.count(0, given.together):
                numbers = range(first, first + given.together)
                for one in pool.map(lambda number: judged(here, folder, number, given.seed, undisturbed), numbers):
                    runs.append(one)
                    print(json.dumps(one), flush=True)
                if sum(len(one["lost"]) for one in runs) >= given.count:
                    break
    wrong = [one["run"] for one in runs if one["wrong"]]
    print(f"{sum(len(one['lost']) for one in runs)} losses in {len(runs)} runs; wrong: {', '.join(wrong) or 'none'}")
    return bool(wrong)


if __name__ == "__main__":
    raise SystemExit(main())

"""The small pure parts of the agent: progress and budgets, the clock, the history, stacks, metrics, the rendezvous."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from typing import Any

import pytest

from launcher.agent import environment, metrics, stacks
from launcher.agent.clock import Clock, ratio
from launcher.agent.config import Config
from launcher.agent.history import Record, fruitless_generations, next_move, restarts_by_cause
from launcher.agent.progress import Progress, Status, budgets
from launcher.agent.rendezvous import Hello, names, refusal
from launcher.agent.verdict import of_code
from trainer import contract
from trainer.contract import AgentJob

# --- progress ---------------------------------------------------------------------------------------------------------

DEFAULTS = budgets({})


def progress(*lines: tuple[float, dict[str, Any]], phase: str | None = None) -> Progress:
    made = Progress(0.0, phase)
    for now, line in lines:
        made.take(line, now)
    return made


def test_a_program_that_never_reports_never_hangs() -> None:
    assert not progress().overdue(DEFAULTS, 1e9)
    assert not progress((1.0, {"hello": "site"})).overdue(DEFAULTS, 1e9)


def test_a_phase_has_its_budget_and_a_job_may_set_it() -> None:
    reading = progress((10.0, {"phase": "data", "step": 3}))
    assert not reading.overdue(DEFAULTS, 609.0) and reading.overdue(DEFAULTS, 611.0)
    assert reading.overdue(budgets({"data": 5.0}), 16.0)
    assert not reading.overdue(budgets({"data": None}), 1e9)


def test_the_step_budget_is_learned_and_never_below_a_minute() -> None:
    quick = progress(*((float(step), {"phase": "step", "step": step}) for step in range(10)))
    assert quick.limit_s(DEFAULTS) == 60.0
    slow = progress(*((20.0 * step, {"phase": "step", "step": step}) for step in range(10)))
    assert slow.limit_s(DEFAULTS) == 200.0
    assert slow.limit_s(budgets({"step": 5.0})) == 5.0
    many_at_once = progress(*((20.0 * number, {"phase": "step", "step": 100 * number}) for number in range(10)))
    assert many_at_once.limit_s(DEFAULTS) == 200.0


def test_the_first_steps_may_take_as_long_as_a_compile() -> None:
    assert progress((0.0, {"phase": "step", "step": 0})).limit_s(DEFAULTS) == 1800.0


def test_a_save_between_two_steps_is_no_steps_time() -> None:
    lines = [(float(step), {"phase": "step", "step": step}) for step in range(5)]
    lines += [(5.0, {"phase": "save", "step": 5}), (900.0, {"phase": "step", "step": 5})]
    assert progress(*lines).limit_s(DEFAULTS) == 60.0


def test_a_repeated_line_is_no_progress() -> None:
    stuck = progress(*((float(second), {"phase": "data", "step": 3}) for second in range(700)))
    assert stuck.overdue(DEFAULTS, 700.0)


def test_committed_steps_only_grow() -> None:
    of = progress((0.0, {"committed": 20}), (1.0, {"committed": 10}))
    assert (of.status.committed, of.status.step) == (20, None)


# --- clock ------------------------------------------------------------------------------------------------------------


def test_every_second_has_one_cause_and_uncommitted_steps_are_lost_when_an_attempt_dies() -> None:
    clock = Clock(0.0)
    clock.enter("init", 10.0)
    clock.enter("step", 15.0)
    for step in range(1, 11):
        clock.reached(step, 15.0 + step)
    clock.committed(6)
    clock.enter("data", 25.0)
    clock.died(27.0)
    seconds = clock.seconds(30.0)
    assert sum(seconds.values()) == pytest.approx(30.0)
    assert (seconds["rendezvous"], seconds["init"], seconds["data"], seconds["down"]) == (10.0, 5.0, 2.0, 3.0)
    assert (seconds["step"], seconds["lost_work"]) == (6.0, 4.0)


def test_what_earlier_generations_committed_is_not_lost_again() -> None:
    clock = Clock(0.0)
    clock.carry({"step": 100.0, "down": 7.0})
    clock.enter("step", 1.0)
    clock.died(3.0)
    seconds = clock.seconds(3.0)
    assert (seconds["step"], seconds["lost_work"], seconds["down"]) == (100.0, 2.0, 7.0)


def test_a_finished_attempt_loses_nothing() -> None:
    clock = Clock(0.0)
    clock.enter("step", 0.0)
    clock.enter("done", 5.0)
    clock.ended(5.0)
    assert clock.seconds(5.0)["lost_work"] == 0.0
    assert ratio(clock.seconds(5.0)) == 1.0


def test_without_a_step_there_is_no_goodput() -> None:
    assert ratio(Clock(0.0).seconds(9.0)) is None


# --- history ----------------------------------------------------------------------------------------------------------


def record(attempt: int, code: int = contract.CRASH, committed: int | None = None, generation: int = 0) -> Record:
    verdict = of_code(code, f"error {attempt}", rank=1)
    return Record(
        "u", generation, attempt, verdict.cause, 1, committed, committed, {}, verdict.to_json(), attempt, attempt
    )


@pytest.mark.parametrize(
    ("records", "budget", "again", "code", "message"),
    [
        ([record(1)], 3, True, 83, "error 1"),
        ([record(1)], 0, False, 83, "error 1"),
        ([record(1), record(2), record(3)], 3, True, 83, "error 3"),
        ([record(1), record(2), record(3), record(4)], 3, False, 83, "error 1"),
        ([record(1), record(2), record(3, committed=10), record(4), record(5)], 3, True, 83, "error 5"),
        ([record(1, committed=10), record(2, committed=10), record(3)], 2, False, 83, "error 1"),
        ([record(1, contract.HANG), record(2)], 1, False, 82, "error 1"),
        ([record(1, contract.NOT_FINITE)], 3, False, 76, "error 1"),
        ([record(1, contract.PREEMPTED)], 3, False, 80, "error 1"),
        ([record(1, contract.DONE)], 3, False, 0, "error 1"),
        ([record(1, 137)], 3, True, 137, "error 1"),
        ([record(1), record(2, generation=1)], 1, True, 83, "error 2"),
        ([record(1), record(2, generation=1), record(3, generation=1)], 1, False, 83, "error 1"),
        ([record(1), record(2, generation=1), record(3, generation=2)], 0, False, 79, "the first error was: error 1"),
        ([record(1, committed=5), record(2, generation=1), record(3, generation=2)], 0, False, 83, "error 1"),
        ([record(1), record(2, generation=1), record(3, 5, 7, generation=2)], 0, False, 5, "error 3"),
        (
            [record(1), record(2, contract.PREEMPTED, generation=1), record(3, generation=2)],
            0,
            False,
            83,
            "error 1",
        ),
    ],
)
def test_what_follows_an_attempt(records: list[Record], budget: int, again: bool, code: int, message: str) -> None:
    move = next_move(records, budget, everyone_lives=True)
    assert (move.again, move.verdict.code) == (again, code)
    assert message in move.verdict.message


def test_without_every_agent_nothing_starts_in_place() -> None:
    assert not next_move([record(1, contract.LOST)], 3, everyone_lives=False).again


def test_generations_that_were_stopped_do_not_count_as_fruitless() -> None:
    stopped = [record(index, contract.PREEMPTED, generation=index) for index in range(9)]
    assert fruitless_generations(stopped) == 0


def test_every_end_but_the_last_was_a_restart() -> None:
    assert restarts_by_cause([record(1), record(2), record(3, 137), record(4, 0)]) == {"crash": 2, "killed": 1}


# --- stacks -----------------------------------------------------------------------------------------------------------

DUMP = """Thread 0x00007f01 (most recent call first):
  File "/lib/python3/threading.py", line 320 in wait
  File "/lib/python3/queue.py", line 171 in get

Current thread 0x00007f02 (most recent call first):
  File "/home/me/tasks.py", line 12 in read
  File "/home/me/train.py", line 99 in <module>
"""


def test_the_main_threads_innermost_frame_comes_last() -> None:
    assert [str(frame) for frame in stacks.innermost(DUMP)] == ["wait (threading.py:320)", "read (tasks.py:12)"]
    assert stacks.innermost("") == []


def dump(*frames: tuple[str, str]) -> str:
    heads = (f'Thread 0x0 (most recent call first):\n  File "{file}", line 1 in {name}\n' for file, name in frames)
    return "\n".join(heads)


IN_JAX = ("/lib/jax/_src/array.py", "_value")


@pytest.mark.parametrize(
    ("of", "culprit"),
    [
        ({0: dump(IN_JAX), 1: dump(IN_JAX), 2: dump(("/me/a.py", "f"))}, 2),
        ({0: dump(IN_JAX), 1: "", 2: dump(("/me/a.py", "f"))}, 1),
        ({0: dump(("/me/a.py", "f")), 1: dump(("/me/b.py", "g")), 2: dump(("/me/a.py", "f"))}, 1),
        ({0: dump(IN_JAX), 1: dump(("/me/a.py", "callback"), IN_JAX), 2: dump(IN_JAX)}, 1),
        ({0: dump(IN_JAX), 1: dump(IN_JAX), 2: dump(IN_JAX)}, 0),
    ],
)
def test_the_suspect_is_the_rank_that_the_others_wait_for(of: dict[int, str], culprit: int) -> None:
    statuses = dict.fromkeys(of, Status(phase="step", step=5, stepped=True))
    assert stacks.suspect(statuses, of, first=0) == culprit


def test_the_rank_furthest_behind_is_suspected_when_the_stacks_tell_nothing() -> None:
    ahead, behind = (Status(phase="step", step=step, stepped=True) for step in (6, 5))
    assert stacks.suspect({0: ahead, 1: behind}, dict.fromkeys((0, 1), dump(IN_JAX)), first=0) == 1


# --- metrics ----------------------------------------------------------------------------------------------------------


def test_every_row_of_the_agent_is_there_before_anything_is_known() -> None:
    text = metrics.own(0, {}, {3: Progress(0.0)}, DEFAULTS, 0.0, {"in_use": None, "limit": None}, 1.0)
    for row in contract.PROMETHEUS:
        if row.by == "agent":
            assert f"# TYPE {row.name} {row.type}" in text
            assert any(line.startswith((f"{row.name} ", f"{row.name}{{")) for line in text.splitlines()), row.name


def test_texts_are_merged_so_that_a_metric_appears_once() -> None:
    texts = [f'# HELP a Help.\n# TYPE a gauge\na{{rank="{rank}"}} {rank}\n' for rank in (0, 1)]
    assert metrics.merge(texts) == '# HELP a Help.\n# TYPE a gauge\na{rank="0"} 0\na{rank="1"} 1\n'


def test_a_histograms_samples_stay_with_it() -> None:
    text = '# HELP h Help.\n# TYPE h histogram\nh_bucket{le="+Inf"} 1\nh_sum 2\nh_count 1\n'
    assert metrics.merge([text, "# HELP b B.\n# TYPE b gauge\nb 1\n"]).startswith(text)


# --- rendezvous -------------------------------------------------------------------------------------------------------

LEADER = Hello(
    0, "u", 2, "pod-0", "a", "node-7", {"python": "3.11.7", "jax": "0.10.2", "agent": "1"}, "f" * 64, 1, 9400
)


def hello(host: int, **changes: Any) -> Hello:
    return dataclasses.replace(LEADER, host=host, pod=f"pod-{host}", hostname=f"h{host}", **changes)


@pytest.mark.parametrize(
    ("comes", "words", "ends_gang", "may_retry"),
    [
        (hello(1, generation=1), "stranger: it has uid u generation 1, this gang uid u generation 2", False, True),
        (hello(1, uid="v"), "uid v", False, True),
        (hello(4), "not below the number of hosts, 4", False, False),
        (hello(2), "host 2 (old on node-7, pod pod-old) is here already: two hosts have one index", False, False),
        (
            hello(1, versions=LEADER.versions | {"jax": "0.11.2"}),
            "host 1 has jax 0.11.2, host 0 has 0.10.2",
            True,
            False,
        ),
        (hello(1, versions=LEADER.versions | {"jax": None}), "host 1 has jax none, host 0 has 0.10.2", True, False),
        (hello(1, spec="e" * 64), "spec eeeeeeeeeeee, host 0 has ffffffffffff", True, False),
        (hello(1, fault="TPU_WORKER_ID = 3 but JOB_COMPLETION_INDEX = 1"), "TPU_WORKER_ID = 3", True, False),
    ],
)
def test_who_does_not_belong_is_refused_by_name_and_value(
    comes: Hello, words: str, ends_gang: bool, may_retry: bool
) -> None:
    present = {2: dataclasses.replace(hello(2), pod="pod-old", hostname="old")}
    why = refusal(comes, LEADER, present, hosts=4)
    assert why is not None and words in why.message and f"host {comes.host}" in why.message
    assert (why.ends_gang, why.may_retry) == (ends_gang, may_retry)
    assert why.code == (contract.BAD_SPEC if ends_gang else contract.LOST)


def test_the_same_pod_may_say_hello_again() -> None:
    assert refusal(hello(2), LEADER, {2: hello(2)}, hosts=4) is None


def test_missing_hosts_are_named_and_a_long_list_is_cut() -> None:
    assert names([3]) == "host 3"
    assert names([2, 5]) == "hosts 2, 5"
    assert names(list(range(30))).endswith("19 and 10 more")


# --- environment ------------------------------------------------------------------------------------------------------


def config(**fields: Any) -> Config:
    return Config(("lead", 1), 2, 1, "u", 0, "pod", AgentJob("t", **fields), "spec")


@pytest.mark.parametrize(
    ("fields", "rank", "expected"),
    [
        ({"devices_per_process": 4}, 1, {"JAX_NUM_CPU_DEVICES": "4", "JAX_PLATFORMS": "cpu", "JAX_PROCESS_ID": "1"}),
        ({"platform": "cuda", "devices_per_process": 8}, 1, {"JAX_LOCAL_DEVICE_IDS": None, "JAX_PLATFORMS": None}),
        (
            {"platform": "cuda", "processes_per_host": 4, "devices_per_process": 2},
            7,
            {"JAX_LOCAL_DEVICE_IDS": "6,7", "JAX_NUM_PROCESSES": "8", "JAX_PROCESS_ID": "7"},
        ),
        ({"budgets_s": {"rendezvous": 42.5}}, 1, {"JAXLAUNCH_INIT_TIMEOUT": "42", "PYTHONPATH": "/site:/code"}),
    ],
)
def test_a_rank_finds_its_place_in_its_environment(
    fields: dict[str, Any], rank: int, expected: dict[str, str | None]
) -> None:
    found = environment.of_rank(config(**fields), {"PYTHONPATH": "/code"}, rank, "/site")
    assert {name: found.get(name) for name in expected} == expected


@pytest.mark.parametrize(
    ("platform", "base", "level"),
    [
        ("cuda", {contract.TRAIN_SPEC: "{}"}, "O1"),
        ("cuda", {contract.TRAIN_SPEC: "{}", "JAX_OPTIMIZATION_LEVEL": "O0"}, "O0"),
        ("cuda", {}, None),
        ("cpu", {contract.TRAIN_SPEC: "{}"}, None),
        ("tpu", {contract.TRAIN_SPEC: "{}"}, None),
    ],
)
def test_xla_is_told_what_suits_the_accelerator_of_a_train_block(
    platform: str, base: dict[str, str], level: str | None
) -> None:
    assert environment.of_rank(config(platform=platform), base, 0, "/site").get("JAX_OPTIMIZATION_LEVEL") == level


FAULTS = """
import resource, jax, jax.numpy as jnp
step = jax.jit(lambda x: (x @ x.T) @ x)  # by way of 64 MiB
x = jnp.ones((4096, 16))
def faults():
    step(x).block_until_ready()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
print(min(-faults() + faults() for _ in range(4)))
"""


def test_the_memory_of_a_step_on_cpu_devices_is_kept_for_the_next_one() -> None:
    def faults(base: dict[str, str]) -> int:
        environ = environment.of_rank(config(), {**os.environ, **base}, 0, "/site")
        return int(subprocess.check_output([sys.executable, "-c", FAULTS], env=environ))

    assert faults({contract.TRAIN_SPEC: "{}"}) < 0.1 * faults({})


@pytest.mark.parametrize("name", ["XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"])
def test_a_share_of_the_memory_that_the_job_sets_is_the_only_one(name: str) -> None:
    found = environment.of_rank(config(platform="cuda"), {contract.TRAIN_SPEC: "{}", name: "0.5"}, 0, "/site")
    assert {key: value for key, value in found.items() if key.endswith("MEM_FRACTION")} == {name: "0.5"}


def test_what_the_job_says_of_jaxs_devices_wins() -> None:
    base = {"JAX_PLATFORMS": "cuda", "JAX_NUM_CPU_DEVICES": "1"}
    found = environment.of_rank(config(devices_per_process=4), base, 1, "/site")
    assert found.items() >= base.items()

"""Whole runs over a broker that dies, a learner that is killed, workers that freeze: the ledger stays exact."""

from __future__ import annotations

import os
import signal
import time
from functools import partial

from command import Command, Run
from remote import JOIN, NUMBERED, carrier, exact, machines, numbers, steps, train

from troupe import broker


def played(run: Run, enough: int) -> bool:
    return steps(run) > enough


def merged(run: Run, since: int = 0) -> dict[str, list[int]]:
    """worker -> its messages that were merged, after the line `since`: all environments tell the same."""
    found = {}
    for worker, environments in numbers(run.lines("episodes")[since:]).items():
        [found[worker], *others] = environments.values()
        assert len(others) == 7 and all(other == found[worker] for other in others), worker
    return found


def test_a_broker_that_is_killed_costs_a_run_nothing(command: Command, node: broker.Node) -> None:
    """T12: a worker here and one on a joined machine; every message of both is merged once, in its order."""
    learner = train(command, "struck", **NUMBERED, workers=1, until="steps=40000")
    guest = command(*JOIN, "--run=struck")
    learner.until(lambda: machines(learner, "joined") and len(numbers(learner.lines("episodes"))) == 2)
    for _ in range(2):
        enough = steps(learner) + 50 * 8 * 8
        node.kill()
        learner.until(lambda: "no broker answers" in carrier(learner)["trouble"])
        node.restart()
        opened = time.monotonic()
        learner.until(partial(played, learner, enough))
        assert time.monotonic() - opened < 10.0 + 5.0, "back after at most 10 s, and a few to play"
    assert learner.wait(90) == 0, learner.said()
    assert guest.wait() == 0, guest.said()
    ledger, figures = exact(learner), carrier(learner)
    assert ledger["rejected"] == figures["lost"] == figures["stale"] == figures["corrupted"] == figures["poisoned"] == 0
    for worker, messages in (found := merged(learner)).items():
        assert messages == list(range(1, len(messages) + 1)), worker
    assert sum(map(len, found.values())) == ledger["messages"] and len(found) == 2


def test_a_killed_learner_is_followed_by_one_that_counts_on(command: Command, node: broker.Node) -> None:
    """T18: what was acknowledged and not saved is counted as lost, what was not acknowledged is merged again."""
    options = {**NUMBERED, "checkpoint_every_s": 1.5, "until": "steps=40000"}
    learner = train(command, "followed", **options)
    guest = command(*JOIN, "--run=followed")
    learner.until(lambda: steps(learner))
    before = len(learner.lines("checkpoint"))
    learner.until(lambda: len(learner.lines("checkpoint")) > before)
    since = steps(learner)
    learner.until(lambda: steps(learner) > since)  # so that there is something to lose
    os.kill(learner.process.pid, signal.SIGKILL)
    learner.wait()
    learner.assert_nothing_is_left()
    told = len(learner.lines("episodes"))
    second = command("resume", "followed", "--quiet", run="followed")
    assert second.wait(90) == 0, second.said()
    assert guest.wait() == 0, guest.said()
    start = second.lines("start")[-1]
    saved = start["steps"] // (50 * 8)  # messages of the one worker that are in the checkpoint
    assert saved > 0 and start["life"] == 1
    [messages] = merged(second, told).values()
    ledger, figures = exact(second), carrier(second)
    assert messages == list(range(messages[0], messages[0] + len(messages))), "none is left out, none comes twice"
    assert messages[0] > saved
    assert figures["lost"] == messages[0] - 1 - saved, "merged by the one that was killed after it saved last"
    assert ledger["messages"] == saved + len(messages) and ledger["rejected"] == 0
    assert second.lines("end")[-1]["steps"] == ledger["trained"] * 50 * 8


def test_a_frozen_machine_that_returns_is_refused_what_is_too_old_and_plays_on(command: Command) -> None:
    """T32: its weights are older than --max-lag allows when it wakes up; a frozen worker of ours is replaced."""
    learner = train(
        command, "frozen", **NUMBERED, workers=1, until="minutes=1", max_lag=20, step_timeout_s=2.0,
    )  # fmt: skip
    guest = command(*JOIN, "--run=frozen")
    learner.until(lambda: len(numbers(learner.lines("episodes"))) == 2)
    frozen = list(guest.alive())
    for pid in frozen:
        os.kill(pid, signal.SIGSTOP)
    begun = learner.lines("progress")[-1]["version"]
    learner.until(lambda: learner.lines("progress")[-1]["version"] > begun + 40)
    for pid in frozen:
        os.kill(pid, signal.SIGCONT)
    learner.until(lambda: learner.lines("rejected"))
    before = len(learner.lines("episodes"))
    learner.until(lambda: len(merged(learner, before)) == 2)  # both play on
    mine = learner.parts("started")[-1]
    [actor] = [line["pid"] for line in learner.parts("started") if str(line["part"]).startswith("actor")]
    os.kill(int(actor), signal.SIGSTOP)
    learner.until(lambda: any("no sign of life" in str(line["cause"]) for line in learner.parts("lost")))
    assert mine
    learner.until(lambda: learner.parts("replaced"))
    before = len(learner.lines("episodes"))
    learner.until(lambda: len(merged(learner, before)) == 2)
    learner.signal(signal.SIGINT)
    assert learner.wait() == 130
    refused = learner.lines("rejected")
    ledger, figures = exact(learner), carrier(learner)
    assert ledger["rejected"] == len(refused) and figures["lost"] == 0
    assert all("--max-lag wants" in str(line["why"]) for line in refused)

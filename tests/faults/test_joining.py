"""Machines that join a run over a broker: they come, go, are killed and return, and the learner's books stay exact."""

from __future__ import annotations

import os
import signal

import pytest
from command import Command
from remote import OPTIONS, machines, steps, train

from troupe import broker

SENTENCE_S = 20.0  # from the command to what is wrong, the start-up included


def test_machines_come_and_go_and_the_run_goes_on(command: Command) -> None:
    """T1 and T2 over a broker: nobody plays here; one machine joins, is killed whole, another one takes its place."""
    learner = train(command, "coming", until="steps=40000", env_delay_ms=5)  # 12 s of two workers
    first = command("join", "--workers=2", "--once", "--run=coming")
    learner.until(lambda: steps(learner) > 0)
    assert len(machines(learner, "joined")) == 1
    os.killpg(first.process.pid, signal.SIGKILL)
    first.wait()
    first.assert_nothing_is_left()
    second = command("join", "--workers=2", "--once", "--run=coming")
    assert learner.wait(180) == 0, learner.said()
    assert second.wait() == 0, second.said()
    assert "is done" in second.said()
    assert len(machines(learner, "joined")) == 2
    left = [line for line in learner.lines("machine") if line["what"] == "left"]
    assert not left or left[-1]["steps"] > 0
    ledger = learner.lines("end")[-1]["ledger"]
    assert ledger["messages"] == ledger["trained"] + ledger["rejected"] and ledger["rejected"] == 0


def test_two_runs_with_different_environments_share_a_broker_and_nothing_else(command: Command) -> None:
    runs = {name: train(command, name, env, until="steps=5000") for name, env in
            (("poles", "CartPole-v1"), ("hills", "MountainCar-v0"))}  # fmt: skip
    guests = [command("join", "--workers=1", "--once", f"--run={name}") for name in runs]
    for run in runs.values():
        assert run.wait(120) == 0, run.said()
        ledger = run.lines("end")[-1]["ledger"]
        assert ledger["rejected"] == 0 and ledger["trained"] == ledger["messages"] > 0
    for guest in guests:
        assert guest.wait() == 0, guest.said()


def test_a_second_learner_is_refused_unless_it_shares_the_queue(command: Command) -> None:
    first = train(command, "led", workers=1)
    first.until(lambda: steps(first) > 0)
    second = train(command, "led", home="another machine")
    assert second.wait(SENTENCE_S) == 2
    assert "the run 'led' is taken" in second.said() and not second.path.exists()
    again = train(command, "other", home="another machine", share="led", until="steps=5000")
    assert again.wait(60) == 0, again.said()  # it learned from what the first one's worker played
    first.signal(signal.SIGINT)
    assert first.wait() == 130


def test_who_cannot_play_what_is_asked_says_so_in_a_sentence_on_both_sides(command: Command) -> None:
    learner = train(command, "own", "fault_envs:Walk", workers=1)
    learner.until(lambda: steps(learner) > 0)
    guest = command("join", "--workers=1", "--once", "--run=own")
    assert guest.wait(SENTENCE_S) == 2
    assert "allow it with --allow fault_envs" in guest.said() and "Traceback" not in guest.said()
    learner.until(lambda: machines(learner, "refused"))
    learner.signal(signal.SIGTERM)
    assert learner.wait() == 143


def test_who_joins_before_any_learner_waits_and_says_so(command: Command) -> None:
    guest = command("join", "--workers=1", "--once", "--run=later")
    guest.until(lambda: "waits for a learner of run later" in guest.said())
    learner = train(command, "later", until="steps=3000")
    assert learner.wait(90) == 0, learner.said()
    assert guest.wait() == 0, guest.said()


@pytest.mark.parametrize(
    ("address", "sentence"),
    [
        ("amqp://troupe:wrong@127.0.0.1:{node.port}/", "refuses the user 'troupe' or the password"),
        ("amqp://127.0.0.1:1/", "no broker answers there"),
        ("amqp://no-such-host.invalid/", "there is no host of that name"),
        ("{node.address}nowhere", "the broker has no virtual host 'nowhere'"),
        ("amqp://bea:wrong@127.0.0.1:{node.port}/", "the user 'bea' may not use the virtual host '/'"),
        ("amqp://cleo:wrong@127.0.0.1:{node.port}/", "the user 'cleo' has no permission there"),
        ("{node.tls_address}", "its certificate is not trusted"),
        ("amqp://127.0.0.1:{tls_port}/", "what answers there does not speak AMQP"),
        ("http://127.0.0.1/", "'http'"),
    ],
)
def test_a_broker_that_cannot_be_used_is_told_in_one_sentence(
    command: Command, node: broker.Node, users: None, address: str, sentence: str
) -> None:
    assert node.tls_address
    there = address.format(node=node, tls_port=node.tls_address.rstrip("/").rpartition(":")[2])
    both = [
        command("join", there, "--workers=1", "--once"),
        command("train", "CartPole-v1", "--quiet", f"--via={there}", "--name=refused", run="refused", **OPTIONS),
    ]
    for run in both:
        assert run.wait(SENTENCE_S) in (1, 2), run.said()
        told = [line for line in run.said().splitlines() if line.startswith("troupe: ")]
        assert len(told) == 1 and sentence in told[0], run.said()
        assert "Traceback" not in run.said() and "wrong" not in run.said()
        assert not run.path.exists()


@pytest.fixture(scope="session")
def users(session_node: broker.Node) -> None:
    """bea may do nothing on the broker, cleo only what is not a run's."""
    if not session_node.running():
        session_node.restart()
    for user in ("bea", "cleo"):
        session_node.control("add_user", user, "wrong")
    session_node.control("set_permissions", "cleo", "^other", ".*", ".*")

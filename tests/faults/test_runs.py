"""Whole runs of the `troupe` command whose environments, workers or owners fail (T3 to T7, quick form)."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from command import Run

from troupe.rundir import RunDir
from troupe.types import Json

STOPPED_S = 10.0  # from a first signal to the end
FORCED_S = 2.0  # from a second one
REPLACED_S = 3.0  # from a worker's loss to its successor's readiness
TOLD_S = 15.0  # from the command to the sentence that says what cannot work, the start-up included
STEP_TIMEOUT_S = 2.0


Start = Callable[..., Run]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start `troupe train ENV ...`; whatever is left of it at the end of the test is a failure of the test."""
    begun: list[Run] = []
    shared_memory = set(os.listdir("/dev/shm"))

    def make(env: str, *words: str, command: str = "train", **options: object) -> Run:
        given = {
            "scheme": "actor-learner", "via": "shared", "workers": 2, "envs": 8, "backend": "gymnasium",
            "eval_episodes": 2, "step_timeout_s": 10.0, "name": "run",
        }  # fmt: skip
        if command == "resume":
            given = {}
        given |= options
        texts = [f"--{key.replace('_', '-')}={value}" for key, value in given.items()]
        begun.append(Run(tmp_path, [command, env, "--quiet", *texts, *words]))
        return begun[-1]

    yield make
    for run in begun:
        run.end()
    for run in begun:
        run.assert_nothing_is_left()
    assert set(os.listdir("/dev/shm")) <= shared_memory


# An environment that ends its process (T3) ---------------------------------------------------------------------------

DEATHS = {
    "raise": "fault_envs:Scheduled raised in step: ValueError: the pole is gone",
    "exit": "SystemExit: 3",
    "_exit": "exit code 4",
    "segfault": "killed by SIGSEGV",
}


def test_a_worker_whose_environment_kills_it_is_replaced_and_the_cause_is_named(start: Start, tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    notes.mkdir()
    run = start(
        "fault_envs:Scheduled", env_options=f"plan={'+'.join(DEATHS)},notes={notes}", until="minutes=0.1",
        rollout_steps=32, minibatch=128, epochs=1,
    )  # fmt: skip
    assert run.wait() == 0, run.said()
    assert run.lines("end")[-1]["reason"] == "limit", "it reached its goal"
    guilty = {int(note.read_text().split()[0]): note.name.partition("-")[2] for note in notes.iterdir()}
    assert sorted(guilty.values()) == sorted(DEATHS), "each of the faults happened"
    lost = run.parts("lost")
    assert {line["pid"] for line in lost} == set(guilty), "they and nobody else were lost"
    assert len(lost) == len(guilty)
    for line in lost:
        assert line["part"].startswith("actor-")
        assert DEATHS[guilty[line["pid"]]] in line["cause"], line["cause"]
        if guilty[line["pid"]] == "raise":
            assert "Traceback" in line["traceback"] and "in raising" in line["traceback"], "the worker's own"
    assert len(run.parts("replaced")) == len(lost), "each was replaced"
    assert not run.parts("given_up")
    ledger = run.lines("end")[-1]["ledger"]
    assert ledger["messages"] == ledger["trained"] and ledger["rejected"] == 0
    assert "Traceback" not in run.said()


# An environment that cannot work (T4) --------------------------------------------------------------------------------


@pytest.mark.parametrize(("scheme", "workers"), [("actor-learner", 1), ("actor-learner", 2), ("local", 1)])
def test_a_crash_loop_is_told_in_one_sentence_and_never_hangs(start: Start, scheme: str, workers: int) -> None:
    run = start("fault_envs:Always", env_options="fault=raise,where=reset", scheme=scheme, workers=workers)
    assert run.wait() == 2, run.said()
    assert time.monotonic() - run.began < TOLD_S
    assert run.said() == "troupe: fault_envs:Always raised in reset: ValueError: the pole is gone\n"


@pytest.mark.parametrize(("fault", "cause"), [("segfault", "killed by SIGSEGV"), ("hang", "no sign of life for")])
def test_workers_that_never_get_to_a_step_end_the_run(start: Start, fault: str, cause: str) -> None:
    run = start("fault_envs:Always", env_options=f"fault={fault},where=reset", step_timeout_s=1.0)
    assert run.wait() == 2, run.said()
    assert time.monotonic() - run.began < TOLD_S + 4 * (1.0 + 1.0)
    (sentence,) = run.said().splitlines()
    assert sentence.startswith("troupe: no worker ever got to play a step: ") and cause in sentence


def test_an_environment_that_ends_the_process_it_lives_in_is_told_in_one_sentence(start: Start) -> None:
    run = start("fault_envs:Always", env_options="fault=exit,where=step", scheme="local", workers=1)
    assert run.wait() == 2, run.said()
    assert run.said() == "troupe: fault_envs:Always raised in step: SystemExit: 3\n"


# An environment that hangs (T5) --------------------------------------------------------------------------------------


def test_a_worker_whose_environment_hangs_is_noticed_in_time_and_replaced(start: Start, tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    notes.mkdir()
    run = start(
        "fault_envs:Scheduled", env_options=f"plan=hang,notes={notes}", until="minutes=0.1",
        step_timeout_s=STEP_TIMEOUT_S, rollout_steps=32, minibatch=128, epochs=1,
    )  # fmt: skip
    run.until(lambda: (notes / "0-hang").exists() and (notes / "0-hang").read_text())
    assert run.wait() == 0, run.said()
    pid, since_s = (notes / "0-hang").read_text().split()
    (lost,) = run.parts("lost")
    assert lost["pid"] == int(pid) and "no sign of life" in lost["cause"] and "phase play" in lost["cause"]
    assert STEP_TIMEOUT_S <= lost["at_s"] - float(since_s) <= STEP_TIMEOUT_S + 1.0 + 0.5, "at its timeout and 1 s"
    (ready,) = [line for line in run.parts("ready") if line["part"] == lost["part"] and line["incarnation"] == 1]
    assert 0 < ready["at_s"] - lost["at_s"] <= REPLACED_S


@pytest.mark.parametrize(("via", "where"), [("shared", "step"), ("memory", "reset")])
def test_an_environment_that_hangs_in_the_main_process_ends_it_with_one_sentence(
    start: Start, via: str, where: str
) -> None:
    options = {"env_options": f"fault=hang,where={where}", "scheme": "local", "workers": 1, "via": via}
    run = start("fault_envs:Always", step_timeout_s=STEP_TIMEOUT_S, **options)
    assert run.wait() == 2, run.said()
    (sentence,) = run.said().splitlines()
    assert sentence.startswith(f"troupe: fault_envs:Always did not return from {where} within 2 s"), sentence
    assert "--step-timeout-s" in sentence, "what to do if it is only slow"


# A killed owner (T6) -------------------------------------------------------------------------------------------------


def test_a_killed_owner_leaves_nothing_and_its_run_goes_on(start: Start) -> None:
    """At instants from the start-up to the midst of training; each of them goes on with the run of the one before."""
    options = {"until": "steps=10000000", "checkpoint_every_s": 0.2}
    for instant_s in (0.2, 1.0, 1.8, 2.6):
        run = start("fault_envs:Brood", **options)
        time.sleep(instant_s)
        run.process.kill()
        run.wait()
        run.assert_nothing_is_left()
    steps = 0
    for _ in range(2):
        run = start("fault_envs:Brood", **options)
        folder = RunDir(run.path).checkpoints
        run.until(lambda run=run: sum("sleep" in command for command in run.alive().values()) >= 4)  # type: ignore[misc]
        already = folder.names()
        run.until(lambda folder=folder, already=already: folder.names()[:1] != already[:1])  # type: ignore[misc]
        run.process.kill()
        run.wait()
        run.assert_nothing_is_left()
        saved = folder.load_latest()
        assert saved is not None and not saved.skipped and saved.steps > steps
        steps = saved.steps
    run = start("run", command="resume", until=f"steps={steps + 2000}")
    assert run.wait() == 0, run.said()
    ended = run.lines("end")[-1]
    assert ended["steps"] >= steps + 2000
    assert f"resumed at {steps:,} steps" in str(run.lines("event"))


# Signals to the whole group (T7) -------------------------------------------------------------------------------------

CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}


def training(run: Run) -> bool:
    return any(line["steps"] > 0 for line in run.lines("episodes"))


@pytest.mark.parametrize("number", sorted(CODES))
@pytest.mark.parametrize("scheme", ["local", "actor-learner"])
def test_a_signal_saves_a_checkpoint_and_ends_the_run(start: Start, scheme: str, number: signal.Signals) -> None:
    workers = 1 if scheme == "local" else 2
    env = "fault_envs:Walk" if scheme == "local" else "fault_envs:Brood"  # in local its children are its own affair
    run = start(env, scheme=scheme, workers=workers, until="steps=100000000")
    run.until(lambda: training(run))
    run.signal(number)
    assert run.wait(STOPPED_S) == CODES[number], run.said()
    run.assert_nothing_is_left()
    saved = RunDir(run.path).load_latest()
    assert saved is not None and not saved.skipped
    ended = run.lines("end")[-1]
    assert saved.steps == ended["steps"] > 0, "what was saved is all that was learned"
    assert ended["reason"] == f"interrupted by {signal.Signals(number).name}"
    assert "Traceback" not in run.said()


@pytest.mark.parametrize("number", sorted(CODES))
def test_a_second_signal_ends_it_at_once(start: Start, number: signal.Signals) -> None:
    """The main process is held up in a step, so that the first signal cannot be heeded."""
    run = start(
        "fault_envs:Always", env_options="fault=hang,where=step", scheme="local", workers=1, step_timeout_s=60,
    )  # fmt: skip
    run.until(lambda: (run.path / "metrics.jsonl").exists())
    time.sleep(0.3)
    run.signal(number)
    time.sleep(0.2)
    assert run.process.poll() is None
    second = time.monotonic()
    run.signal(number)
    assert run.wait(FORCED_S) == CODES[number], run.said()
    assert time.monotonic() - second <= FORCED_S
    run.assert_nothing_is_left()


def test_a_first_signal_that_cannot_be_heeded_ends_it_in_time(start: Start) -> None:
    run = start(
        "fault_envs:Always", env_options="fault=hang,where=step", scheme="local", workers=1, step_timeout_s=60,
    )  # fmt: skip
    run.until(lambda: (run.path / "metrics.jsonl").exists())
    time.sleep(0.3)
    run.signal(signal.SIGTERM)
    assert run.wait(STOPPED_S) == 143, run.said()


@pytest.mark.parametrize("number", sorted(CODES))
@pytest.mark.parametrize("instant_s", [0.15, 0.8, 1.6])
def test_a_signal_while_it_starts_ends_it_and_leaves_nothing(
    start: Start, number: signal.Signals, instant_s: float
) -> None:
    run = start("fault_envs:Brood", until="steps=100000000")
    time.sleep(instant_s)
    run.signal(number)
    assert run.wait(STOPPED_S) in (CODES[number], -number), run.said()  # before Python has begun, the signal itself
    run.assert_nothing_is_left()
    assert "Traceback" not in run.said() or instant_s < 0.5, "before the command itself is imported, Python's own words"


# Workers that are killed, again and again ----------------------------------------------------------------------------


def test_killed_workers_are_replaced_in_time_and_training_reaches_its_goal(start: Start) -> None:
    run = start(
        "CartPole-v1", backend="auto", envs=32, until="solved,minutes=1.5", eval_episodes=100, solved_at=475,
        eval_every_s=9, eval_from=1000,
    )  # fmt: skip
    run.until(lambda: training(run))
    killed: list[int] = []
    while len(killed) < 4:
        newest = {line["part"]: line["pid"] for line in run.parts("ready") if line["part"].startswith("actor")}
        victim = newest[sorted(newest)[len(killed) % 2]]
        os.kill(victim, signal.SIGKILL)
        killed.append(victim)
        time.sleep(2.0)
        assert run.process.poll() is None, run.said()
    assert run.wait(100) == 0, run.said()
    lost = run.parts("lost")
    assert [line["pid"] for line in lost] == killed
    assert {line["cause"] for line in lost} == {"killed by SIGKILL"}
    for line in lost:
        (ready,) = successors(run, line)
        assert 0 < ready["at_s"] - line["at_s"] <= REPLACED_S
    assert run.lines("solved"), "on the reference environment"
    ledger = run.lines("end")[-1]["ledger"]
    assert ledger["messages"] == ledger["trained"] + ledger["rejected"] and ledger["rejected"] == 0


LEARNERS = {  # the schemes whose workers learn, with the parts of each that are killed in turn
    "locked": ["worker-0", "worker-1"],
    "hogwild": ["worker-0", "worker-1"],
    "all-reduce": ["worker-0", "worker-1"],
    "parameter-server": ["server-0", "worker-1", "server-1", "worker-0"],
}


@pytest.mark.parametrize("scheme", sorted(LEARNERS))
def test_whoever_is_killed_the_others_go_on_and_the_goal_is_reached(scheme: str, start: Start) -> None:
    """Also whoever held the lock, was in the middle of a step on the shared vector, or owned a slice of it (T1, T8)."""
    shards = {"shards": 2} if scheme == "parameter-server" else {}
    run = start(
        "fault_envs:Walk", algo="a3c", scheme=scheme, workers=2, until="score=45,minutes=1.5", eval_episodes=20,
        eval_every_s=7, eval_from=1000, **shards,
    )  # fmt: skip
    run.until(lambda: training(run))
    killed: list[int] = []
    for name in (LEARNERS[scheme] * 2)[:4]:
        newest = {line["part"]: line["pid"] for line in run.parts("ready")}
        os.kill(newest[name], signal.SIGKILL)
        killed.append(newest[name])
        run.until(lambda: len(run.parts("lost")) == len(killed))
        lost = run.parts("lost")[-1]
        run.until(lambda lost=lost: successors(run, lost))  # type: ignore[misc]
        steps = run.lines("progress")[-1]["steps"]
        run.until(lambda steps=steps: run.lines("progress")[-1]["steps"] > steps)  # type: ignore[misc]
    assert run.wait(100) == 0, run.said()
    assert [line["pid"] for line in run.parts("lost")] == killed
    for line in run.parts("lost"):
        (ready,) = successors(run, line)
        assert line["cause"] == "killed by SIGKILL"
        assert 0 < ready["at_s"] - line["at_s"] <= REPLACED_S
    ended = run.lines("end")[-1]
    assert ended["reason"] == "solved"
    assert ended["ledger"]["messages"] == ended["ledger"]["trained"], "what was lost with a worker was never counted"


def successors(run: Run, lost: dict[str, Json]) -> list[dict[str, Json]]:
    """The next incarnation of a part that was lost, once it is ready."""
    after = lost["part"], lost["incarnation"] + 1
    return [line for line in run.parts("ready") if (line["part"], line["incarnation"]) == after]

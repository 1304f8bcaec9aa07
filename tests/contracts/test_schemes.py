"""What every scheme promises over every transport: the weights that `local` gives, exact books, and nothing left."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest

from troupe import api
from troupe.algos import ALGORITHMS
from troupe.books import PARTS, Books
from troupe.broker import Node
from troupe.checkpoints import Checkpoint
from troupe.errors import ConfigError
from troupe.goal import Goal
from troupe.journal import Journal
from troupe.resolve import check_pairs, hyper_class, presets, resolve
from troupe.roles.cargo import RolloutShape, pack_rollout
from troupe.roles.learner import learner
from troupe.schemes import SCHEMES
from troupe.schemes.exchange import apply_here
from troupe.transports import TRANSPORTS
from troupe.transports.memory import MemoryHub
from troupe.types import Json, Message, Rollout, State

ENV = "CartPole-v1"
SMALL = {  # where the algorithm has the option
    "rollout_steps": 32, "minibatch": 128, "epochs": 2, "passes": 2,
    "batch": 32, "learning_starts": 300, "train_every": 16.0, "target_every": 50, "replay_size": 2000,
    "round_episodes": 10, "gradients": 4,
}  # fmt: skip
STEPS = 4000  # environment steps: episodes end, the step size falls, many rollouts cross the cut
CUT = sorted(set(SCHEMES) - {"local"})
GONE_S = 2.0


def allowed(algo: str, scheme: str, via: str, workers: int) -> bool:
    """Whether `troupe train` takes them together, asked of what it asks itself."""
    try:
        check_pairs(resolve({"env": ENV, "algo": algo, "scheme": scheme, "via": via, "workers": workers, "envs": 8}))
    except ConfigError:
        return False
    return True


def some_algorithm(scheme: str) -> str:
    """PPO where the scheme has it, since that makes the most of a rollout."""
    return "ppo" if allowed("ppo", scheme, "shared", 1) else "a3c"


@pytest.fixture(autouse=True)
def runs(tmp_path: Path, node: Node, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The runs folder; and a broker, for the transport that needs one."""
    monkeypatch.setenv("TROUPE_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("TROUPE_BROKER", node.address)
    return tmp_path / "runs"


def train(name: str, algo: str, **options: Any) -> Checkpoint:
    """A short run, and its last checkpoint."""
    own = {field.name for field in msgspec.structs.fields(hyper_class(algo))}
    small = {key: value for key, value in SMALL.items() if key in own}
    common = {"envs": 8, "workers": 1, "eval_episodes": 2, "until": f"steps={STEPS}"}
    outcome = api.train(ENV, name=name, algo=algo, **{**small, **common, **options})
    assert outcome.exit_code == 0
    return api.load(name, which="latest").checkpoint


def lines(runs: Path, name: str, kind: str) -> list[dict[str, Json]]:
    return [line for line in Journal.read(runs / name / "metrics.jsonl") if line["kind"] == kind]


def assert_same(got: Checkpoint, expected: Checkpoint, *, learned_there: bool = True) -> None:
    """All that learning made: weights, moments, counters, the window of returns, and, where the main process is who
    learned, what it remembers and its random streams."""
    assert np.array_equal(got.weights, expected.weights), "weights"
    assert got.weights.any()
    assert (got.steps, got.version) == (expected.steps, expected.version)
    for part in ("parameters", "algorithm") if learned_there else ("parameters",):
        mine, theirs = learned(got.state.get(part)), learned(expected.state.get(part))
        assert mine.values == theirs.values, part
        assert set(mine.arrays) == set(theirs.arrays)
        for name, array in theirs.arrays.items():
            assert np.array_equal(mine.arrays[name], array), f"{part} {name}"
    mine, theirs = got.state.get("books"), expected.state.get("books")
    for name in ("steps", "episodes", "window"):
        assert mine.values[name] == theirs.values[name], name


def learned(state: State) -> State:
    """All but what a worker that plays keeps of its open episodes: that is not sent before it is worth it."""
    values = {name: value for name, value in state.values.items() if name != "sieve"}
    return State({name: a for name, a in state.arrays.items() if not name.startswith("sieve/")}, values)


@cache
def local(algo: str, backend: str) -> Checkpoint:
    """What all are compared with; one run for all of them."""
    made = train("local", algo, scheme="local", via="memory", backend=backend)
    assert made.version > 10 and made.state.get("books").values["episodes"] > 20
    return made


def one_worker_alone() -> Iterator[tuple[str, str, str, dict[str, Any]]]:
    """Scheme, algorithm, back end, options: every pair there is; the second back end once a scheme, and without
    processes, which know nothing of it."""
    for scheme in CUT:
        for algo in sorted(ALGORITHMS):
            if allowed(algo, scheme, "memory", 1):
                for backend in ("gymnasium", "envpool") if algo == some_algorithm(scheme) else ("gymnasium",):
                    yield scheme, algo, backend, {}
        if scheme == "parameter-server":
            yield scheme, "dqn", "gymnasium", {"shards": 4}
            yield scheme, "a3c", "envpool", {"shards": 4, "optimiser": "rmsprop"}


@pytest.mark.parametrize(("scheme", "algo", "backend", "options"), list(one_worker_alone()))
def test_one_worker_without_overlap_gives_the_weights_of_local_bit_for_bit(
    scheme: str, algo: str, backend: str, options: dict[str, Any]
) -> None:
    expected = local(algo, backend)
    if "optimiser" in options:
        expected = train("local", algo, scheme="local", via="memory", backend=backend, optimiser=options["optimiser"])
    carriers = [via for via in TRANSPORTS if allowed(algo, scheme, via, 1)]
    assert len(carriers) == (3 if scheme == "actor-learner" else 2), "memory and shared; messages go over a broker too"
    for via in carriers if backend == "gymnasium" else ("memory",):
        cut = train(via, algo, scheme=scheme, via=via, backend=backend, overlap=False, **options)
        assert_same(cut, expected, learned_there=not SCHEMES[scheme]().shares_vector)


def test_every_pair_is_compared_with_local_or_refused() -> None:
    compared = {(scheme, algo) for scheme, algo, _, _ in one_worker_alone()}
    refused = {("hogwild", "ppo"), ("locked", "ppo"), ("parameter-server", "ppo")}
    refused |= {(scheme, "elite") for scheme in CUT if SCHEMES[scheme]().shares_vector}
    assert compared == {(scheme, algo) for scheme in CUT for algo in ALGORITHMS} - refused


def test_local_is_the_same_whatever_carries_its_evaluations() -> None:
    assert_same(train("a", "ppo", scheme="local", via="shared"), train("b", "ppo", scheme="local", via="memory"))


PROCESSES = {  # beside the main one, with two workers: the evaluator, and who started them
    "actor-learner": 4, "locked": 4, "hogwild": 4, "all-reduce": 4, "parameter-server": 6,
}  # fmt: skip
TWO_WORKERS = [
    (scheme, via)
    for scheme in CUT
    for via in sorted(TRANSPORTS)
    if allowed(some_algorithm(scheme), scheme, via, 2)
]  # fmt: skip


@pytest.mark.parametrize(("scheme", "via"), TWO_WORKERS)
def test_the_ledger_is_exact_the_lag_is_reported_and_nothing_is_left(scheme: str, via: str, runs: Path) -> None:
    shared_memory = set(os.listdir("/dev/shm"))
    before = descendants()
    with watched() as seen:
        algo, options = some_algorithm(scheme), {"shards": 2} if scheme == "parameter-server" else {}
        last = train(
            "run", algo, scheme=scheme, via=via, workers=2, backend="gymnasium", until="minutes=0.04", **options
        )
    assert seen.looks > 10 and not seen.listening, "no process of a run listens anywhere but on this machine (T29)"
    assert bool(seen.on_loopback) == (scheme == "all-reduce"), "and on it only where workers meet"
    assert seen.processes == (0 if via == "memory" else PROCESSES[scheme])
    ended = lines(runs, "run", "end")[-1]
    books = last.state.get("books").values
    ledger = ended["ledger"]
    assert ledger == books["ledger"]
    assert ledger["messages"] == ledger["trained"] + ledger["rejected"]
    assert ledger["rejected"] == 0
    assert ledger["messages"] == books["steps"] // (4 * 32), "a rollout a message, no step twice, none lost"
    role = "worker" if SCHEMES[scheme]().shares_vector else "actor"
    assert set(books["contributed"]) == {f"{role}-0", f"{role}-1"}
    assert sum(books["contributed"].values()) == books["steps"] == ended["steps"] == last.steps
    told = sum(len(line["returns"]) for line in lines(runs, "run", "episodes"))
    assert told == books["episodes"] > 0
    progress = lines(runs, "run", "progress")[-1]
    assert sum(worker.get("steps", 0) for worker in progress["workers"].values()) == progress["steps"]
    assert progress["lag_median"] >= 0 and progress["lag_p95"] >= progress["lag_median"]
    for worker in progress["workers"].values():
        assert sum(worker[part] for part in PARTS) == pytest.approx(1, abs=1e-3)
    assert ended["version"] == last.version == last.state.get("parameters").arrays["moment.step"][0] > 5
    deadline = time.monotonic() + GONE_S
    while (left := descendants() - before) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left
    assert set(os.listdir("/dev/shm")) <= shared_memory
    assert not (runs / "run" / "stage").exists()


@pytest.mark.parametrize("via", sorted(TRANSPORTS))
def test_of_sifted_episodes_every_step_and_every_episode_is_in_the_books(via: str, runs: Path) -> None:
    last = train("run", "elite", scheme="actor-learner", via=via, workers=2, backend="gymnasium", until="minutes=0.04")
    ended, books = lines(runs, "run", "end")[-1], last.state.get("books").values
    assert ended["ledger"] == books["ledger"] and ended["ledger"]["rejected"] == 0
    assert 10 < ended["ledger"]["messages"] == ended["ledger"]["trained"]
    assert set(books["contributed"]) == {"actor-0", "actor-1"}
    assert sum(books["contributed"].values()) == books["steps"] == last.steps
    told = lines(runs, "run", "episodes")
    assert sum(len(line["returns"]) for line in told) == books["episodes"] > 100
    in_episodes = sum(sum(line["lengths"]) for line in told)
    open_steps = books["steps"] - in_episodes  # of episodes that had not ended when the last message left
    assert 0 <= open_steps <= 8 * 500, "CartPole ends an episode after 500 steps"
    assert last.version > 5 and lines(runs, "run", "progress")[-1]["metrics"]["elite_from"] > 0


@pytest.mark.parametrize("scheme", ["actor-learner"])
def test_the_lag_is_nothing_without_overlap_and_bounded_with_it(scheme: str, runs: Path) -> None:
    own = {"epochs": 2, "minibatch": 128}  # 8 environments, 32 steps: 2 x 2 gradients a rollout
    train("off", "ppo", scheme=scheme, via="shared", overlap=False, until="minutes=0.04", **own)
    assert lines(runs, "off", "progress")[-1]["lag_p95"] == 0
    train("on", "ppo", scheme=scheme, via="shared", overlap=True, until="minutes=0.04", **own)
    assert lines(runs, "on", "progress")[-1]["lag_median"] == 4, "one rollout behind, never more"
    assert lines(runs, "on", "progress")[-1]["lag_p95"] == 4


# What is refused -----------------------------------------------------------------------------------------------------

SHAPE = RolloutShape(steps=2, batch=3, observation=(4,), observation_dtype="float32", action=())


def rollout(**changes: Any) -> Rollout:
    zeros, no = np.zeros((2, 3), np.float32), np.zeros((2, 3), bool)
    parts: dict[str, Any] = {
        "observations": np.zeros((3, 3, 4), np.float32), "actions": np.zeros((2, 3), np.int64), "log_probs": zeros,
        "rewards": zeros, "terminated": no, "truncated": no, "valid": ~no,
        "final_index": np.zeros((0, 2), np.int64), "final_observations": np.zeros((0, 4), np.float32), "version": 0,
    }  # fmt: skip
    return Rollout(**{**parts, **changes})


class Pages:
    """A journal that is only remembered."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Json]] = []

    def write(self, kind: str, **fields: Json) -> None:
        self.lines.append({"kind": kind, **fields})


class Pupil:
    """An algorithm that only counts what it is given."""

    def __init__(self) -> None:
        from torch import nn

        from troupe.parameters import Parameters

        self.network = nn.Linear(1, 1)
        self.parameters = Parameters(self.network)
        self.remembered: list[Rollout] = []
        self.remember = self.remembered.append
        self.off_policy = False

    def anneal(self, progress: float) -> None: ...

    def batches(self) -> Iterator[object]:
        return iter(())


BAD: dict[str, tuple[Rollout, str]] = {
    "shape": (rollout(actions=np.zeros((2, 4), np.int64)), "actions"),
    "nan": (rollout(rewards=np.array([[0, np.nan, 0]] * 2, np.float32)), "rewards"),
    "infinite": (rollout(observations=np.full((3, 3, 4), np.inf, np.float32)), "observations"),
    "index": (rollout(final_index=np.array([[2, 0]]), final_observations=np.zeros((1, 4), np.float32)), "final_index"),
    "dtype": (rollout(observations=np.zeros((3, 3, 4), np.uint8)), "observations"),
}


def test_a_learner_refuses_what_was_not_agreed_names_it_and_counts_it() -> None:
    hub, pages, pupil = MemoryHub(), Pages(), Pupil()
    books = Books(pages, Goal(steps=100), 100)
    worker = hub.mailbox("actor-0")
    loop = learner(pupil, apply_here, hub.mailbox("learner"), books, run="this", shape=SHAPE)  # type: ignore[arg-type]
    sent = [*(bad for bad, _ in BAD.values()), rollout(), rollout()]
    for number, each in enumerate(sent, 1):
        run = "another" if number == len(sent) else "this"
        packed = pack_rollout(each, run=run, sender="actor-0", incarnation=0, sequence=number, meta={})
        worker.send("learner", packed, 1.0)
        next(loop)
    worker.send("learner", Message("rollout", "this", "actor-0", sequence=len(sent) + 1), 1.0)
    next(loop)
    assert len(pupil.remembered) == 1, "the one sound rollout of this run"
    assert books.ledger == {"messages": 8, "trained": 1, "rejected": 7}
    assert books.steps == books.contributed["actor-0"] == 6
    refused = [line for line in pages.lines if line["kind"] == "rejected"]
    named = [field for _, field in BAD.values()]
    assert [line["sequence"] for line in refused] == [1, 2, 3, 4, 5, 7, 8]
    for line, field in zip(refused, named, strict=False):
        assert field in line["why"] and line["worker"] == "actor-0"
    assert "another" in refused[5]["why"]


def test_every_preset_names_a_scheme_and_an_algorithm_that_are_there() -> None:
    for env, table in presets().items():
        assert table.get("scheme", "local") in SCHEMES and table.get("algo", "ppo") in ALGORITHMS, env
        assert {key for key, value in table.items() if isinstance(value, dict)} <= set(ALGORITHMS), env
        json.dumps(table)


# What a run leaves, and what it opens --------------------------------------------------------------------------------


BROKER = ("beam.smp", "epmd")  # the session's own broker: it is there before any run, and after


def family() -> list[psutil.Process]:
    """This process and all that descend from it, but for the broker and what that starts."""
    own, found = psutil.Process(), []
    for child in own.children():
        with suppress(psutil.NoSuchProcess):
            if child.name() not in BROKER:
                found += [child, *child.children(recursive=True)]
    return [own, *found]


def descendants() -> set[int]:
    return {process.pid for process in family()[1:]}


class Watch:
    """What was seen of this process and its descendants while a run ran."""

    def __init__(self) -> None:
        self.looks = 0
        self.processes = 0
        self.listening: list[str] = []  # to other machines
        self.on_loopback: list[str] = []

    def look(self) -> None:
        seen = family()
        self.processes = max(self.processes, len(seen) - 1)
        for process in seen:
            try:
                for connection in process.net_connections("inet"):
                    local = connection.laddr
                    if connection.status == psutil.CONN_LISTEN:
                        where = self.on_loopback if local.ip.startswith(("127.", "::1")) else self.listening
                        where.append(f"{process.name()} {local}")
            except psutil.Error:
                continue
        self.looks += 1


@contextmanager
def watched() -> Iterator[Watch]:
    watch, stop = Watch(), threading.Event()

    def run() -> None:
        while not stop.wait(0.05):
            watch.look()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield watch
    finally:
        stop.set()
        thread.join()

"""The commons: counters that nobody loses, a lock that no dead process holds, one vector that all step."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import nn

from troupe.commons import Commons, CommonsLock, SharedVector
from troupe.parameters import Parameters

ROUNDS = 10_000
FREED_S = 1.0  # from the death of a lock's holder to the next one


def parameters(seed: int = 1) -> Parameters:
    torch.manual_seed(seed)
    return Parameters(nn.Linear(30, 5))


@pytest.fixture
def commons() -> Iterator[Commons]:
    made = Commons.create(parameters(), seats=2)
    yield made
    made.close()


# Counters ------------------------------------------------------------------------------------------------------------


def test_the_vector_and_its_moments_move_in_as_they_are_and_the_module_sees_them() -> None:
    torch.manual_seed(1)
    module = nn.Linear(30, 5)
    own = Parameters(module)
    own.learning_rate = 0.1
    own.gradient.normal_()
    own.apply()
    before, moments = own.weights(), {name: own.moments[name].clone() for name in own.optimise.moments}
    commons = Commons.create(own, seats=3, steps=7)
    assert np.array_equal(commons.vector.numpy(), before) and before.any()
    assert (commons.version(), commons.steps()) == (1, 7)
    assert set(moments) == set(commons.moments)
    for name, moment in moments.items():
        assert torch.equal(commons.moments[name], moment) and moment.any()
    commons.vector.fill_(2.0)
    assert (module.weight == 2.0).all() and (module.bias == 2.0).all()


def test_another_process_of_the_same_memory_sees_what_every_seat_counted(commons: Commons) -> None:
    attached = Commons(os.dup(commons.fd), commons.spec)
    assert not attached.begun and attached.lives() == (0, 0)
    commons.begin(5.0)
    assert attached.begun and 5.0 <= attached.seconds() < 60.0
    for rank in range(2):
        seat = attached.seat(rank)
        seat.sit(rank)
        seat.played(100)
        seat.applied()
        seat.applied()
    assert (commons.steps(), commons.version(), commons.lives()) == (200, 4, (1, 2))
    attached.close()


def test_a_successor_takes_over_what_was_reported_and_nothing_else(commons: Commons) -> None:
    first, other = commons.seat(0), commons.seat(1)
    first.sit(0)
    other.sit(0)
    first.played(100)
    first.reported()
    first.applied()
    other.played(10)
    first.played(50)  # and it is killed before it reports them
    assert commons.steps() == 160
    successor = commons.seat(0)
    successor.sit(1)
    assert commons.steps() == 110, "they are played again, so that the budget of the books is reached"
    assert commons.version() == 1, "what it had changed in the vector stays counted"
    successor.played(30)
    successor.reported()
    assert commons.steps() == 140 and commons.lives() == (2, 1)


def test_where_nobody_will_come_the_house_forgets_what_was_not_reported(commons: Commons) -> None:
    seat = commons.seat(0)
    seat.sit(0)
    seat.played(64)
    seat.reported()
    seat.played(64)
    commons.seat(0).forget()
    assert commons.steps() == 64


def test_a_meeting_is_the_highest_that_anybody_calls_for(commons: Commons) -> None:
    assert commons.meeting() == 0
    commons.seat(0).ready_for(3)
    assert commons.meeting() == 3 and not commons.all_at(3)
    commons.seat(1).ready_for(3)
    assert commons.all_at(3) and not commons.all_at(0)


# One vector ----------------------------------------------------------------------------------------------------------


def test_steps_on_the_shared_vector_are_those_of_an_owner_bit_for_bit() -> None:
    alone, house, mine = parameters(), parameters(), parameters()
    shared = SharedVector(Commons.create(house, seats=1).seat(0))
    shared.adopt(mine, 0)
    rng = np.random.default_rng(1)
    for version in range(20):
        gradient = torch.from_numpy(rng.normal(size=len(alone.vector)).astype(np.float32))
        for each in (alone, mine):
            each.learning_rate = 0.01 * 0.9**version
            each.gradient.copy_(gradient)
        alone.apply()
        shared.step(mine, shared.commons.version())
    assert shared.commons.version() == alone.version == 20
    assert torch.equal(house.vector, alone.vector)
    assert all(torch.equal(house.moments[name], alone.moments[name]) for name in house.optimise.moments)
    assert not torch.equal(mine.vector, alone.vector), "its own weights stay as they are until it adopts the shared"
    shared.adopt(mine, 20)
    assert torch.equal(mine.vector, alone.vector) and mine.version == 20


# The lock ------------------------------------------------------------------------------------------------------------

WORKER = """
import json, os, sys
import torch
torch.set_num_threads(1)
from contextlib import nullcontext
from troupe.commons import Commons, CommonsLock
commons = Commons(int(sys.argv[1]), json.loads(sys.argv[2]))
rounds, how = int(sys.argv[3]), sys.argv[4]
lock = CommonsLock(commons)
word = commons.vector.numpy()  # read, then written: two that do it at once lose one
os.write(1, b"r")
os.read(0, 1)  # all begin together
if how == "hold":
    with lock:
        os.write(1, b"h")
        os.read(0, 1)
with lock if how == "lock" else nullcontext():
    pass
for _ in range(rounds):
    with lock if how == "lock" else nullcontext():
        word[0] = word[0] + 1
"""

Spawn = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def spawn(commons: Commons) -> Iterator[Spawn]:
    """Another process with the commons, at the line where it begins."""
    begun: list[subprocess.Popen[bytes]] = []

    def make(how: str, rounds: int = ROUNDS) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", WORKER, str(commons.fd), json.dumps(commons.spec), str(rounds), how]
        begun.append(subprocess.Popen(command, pass_fds=[commons.fd], stdin=subprocess.PIPE, stdout=subprocess.PIPE))
        return begun[-1]

    yield make
    for process in begun:
        process.kill()
        process.communicate()


def heard(process: subprocess.Popen[bytes]) -> bytes:
    assert process.stdout is not None
    return os.read(process.stdout.fileno(), 1)


def go(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    os.write(process.stdin.fileno(), b"g")


def race(commons: Commons, spawn: Spawn, how: str) -> int:
    commons.vector.zero_()
    both = [spawn(how) for _ in range(2)]
    assert [heard(process) for process in both] == [b"r", b"r"]
    for process in both:
        go(process)
    for process in both:
        assert process.wait(60) == 0
    return int(commons.vector[0])


def test_two_processes_never_hold_the_lock_at_once(commons: Commons, spawn: Spawn) -> None:
    assert race(commons, spawn, "lock") == 2 * ROUNDS


def test_the_test_above_would_see_a_lock_that_does_not_exclude(commons: Commons, spawn: Spawn) -> None:
    assert any(race(commons, spawn, "none") < 2 * ROUNDS for _ in range(5))


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_a_holder_that_is_killed_lets_go_at_once(commons: Commons, spawn: Spawn, end: signal.Signals) -> None:
    holder, waits = spawn("hold"), []
    assert heard(holder) == b"r"
    go(holder)
    assert heard(holder) == b"h"

    def on_wait() -> None:
        waits.append(time.monotonic())
        if len(waits) == 3:  # we do wait, and are alive meanwhile
            holder.send_signal(end)

    begin = time.monotonic()
    lock = CommonsLock(commons, on_wait)
    with lock:
        assert time.monotonic() - begin < FREED_S
    assert len(waits) >= 3 and 0 < lock.waited_s < FREED_S


def test_who_waits_for_a_frozen_holder_can_be_told_to_stop(commons: Commons, spawn: Spawn) -> None:
    holder = spawn("hold")
    assert heard(holder) == b"r"
    go(holder)
    assert heard(holder) == b"h"
    holder.send_signal(signal.SIGSTOP)
    begin = time.monotonic()

    def on_wait() -> None:
        if time.monotonic() - begin > 0.1:
            raise InterruptedError("the run is stopping")

    with pytest.raises(InterruptedError), CommonsLock(commons, on_wait):
        pytest.fail("it is held")
    holder.send_signal(signal.SIGCONT)
    go(holder)
    with CommonsLock(commons):  # and all is well once the holder goes on
        pass


def test_nothing_of_it_has_a_name() -> None:
    before = set(os.listdir("/dev/shm"))
    fds = len(os.listdir("/proc/self/fd"))
    made = Commons.create(parameters(), seats=2)
    assert set(os.listdir("/dev/shm")) == before
    made.close()
    del made  # the memory goes with the last tensor in it
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == fds

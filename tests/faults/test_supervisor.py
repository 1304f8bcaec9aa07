"""Deaths, hangs, crash loops and a killed parent: causes are named, others go on, nothing is left (T3-T6, T9, T10)."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from troupe.errors import TroupeError
from troupe.forkserver import MAX_FDS
from troupe.pulse import Phase, Pulse
from troupe.schemes.parameter_server import MOST_WORKERS
from troupe.supervisor import Event, Part, Supervisor
from troupe.transports.shared import SharedHub

HERE = Path(__file__)
SOURCE = HERE.parents[2] / "src"
GONE_S = 2.0  # from the parent's death to the last descendant's
PATIENCE_S = 20.0  # for what should happen in milliseconds, on a machine that may be busy


# What the parts of these tests do; they run in the children.


def beating(payload: dict[str, Any], fds: list[int]) -> None:
    """A healthy part: beats until the pipe in fds[1] is closed by the test."""
    pulse = Pulse.attach(fds[0])
    poll = select.poll()
    poll.register(fds[1], select.POLLIN)
    while not poll.poll(20):
        pulse.beat(Phase.PLAY)
        pulse.add_steps(payload.get("steps", 1))


def ending(payload: dict[str, Any], fds: list[int]) -> None:
    """Ends in the way that the payload says, in its first incarnation; then it is healthy."""
    if not payload["incarnation"] or payload.get("always"):
        pulse = Pulse.attach(fds[0])
        if not payload.get("silent"):
            pulse.beat(Phase.PLAY)
        if payload["how"] == "done":
            pulse.beat(Phase.DONE)
            return
        ENDS[payload["how"]](payload["incarnation"])
    beating(payload, fds)


def raising(incarnation: int) -> None:
    print("on standard output")
    raise ValueError(f"no such action: {incarnation}")


def looping(_: int) -> None:
    while True:
        pass


def chattering(_: int) -> None:
    for _ in range(300):
        print("x" * 10_000, flush=True)


ENDS: dict[str, Callable[[int], object]] = {
    "exception": raising,
    "sys.exit": lambda _: sys.exit(3),
    "os._exit": lambda _: os._exit(4),
    "zero": lambda _: os._exit(0),
    "segfault": lambda _: ctypes.string_at(0),
    "SIGKILL": lambda _: os.kill(os.getpid(), signal.SIGKILL),
    "loop": looping,
    "stop": lambda _: os.kill(os.getpid(), signal.SIGSTOP),
    "chatty": chattering,
}


def breeding(payload: dict[str, Any], fds: list[int]) -> None:
    """Has children of its own, one of them in a session of its own, and then beats."""
    subprocess.Popen(["sleep", "1000"])
    if payload.get("sessions", True):
        subprocess.Popen(["sleep", "1000"], start_new_session=True)
    if payload.get("dies"):
        os._exit(1)
    beating(payload, fds)


def listing(payload: dict[str, Any], fds: list[int]) -> None:
    """Writes down which descriptors it has, and that it ignores the terminal's signals."""
    names = {fd: os.readlink(f"/proc/self/fd/{fd}") for fd in map(int, os.listdir("/proc/self/fd")) if fd_open(fd)}
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.raise_signal(number)  # survived
    with subprocess.Popen(["sleep", "1000"]) as own:  # an environment's own program, which it may terminate
        own.terminate()
        ignores = own.wait(PATIENCE_S) == -signal.SIGTERM
    session = os.getsid(0) == os.getpgid(0) == os.getpid()
    threads = os.environ["OMP_NUM_THREADS"]
    Path(payload["to"]).write_text(f"{sorted(names)} {sorted(fds)} {ignores} {session} {threads}")
    beating(payload, fds)


def fd_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


# The other side.


class Troop:
    """A supervisor, what it said, and the parts' pulses and pipe."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.folder = folder
        self.events: list[Event] = []
        self._heard = threading.Condition()
        self._reader, self._writer = os.pipe()
        self.pulses: dict[str, Pulse] = {}
        self._closed = False
        defaults: dict[str, Any] = {"step_timeout_s": 30.0, "preload": (HERE.stem,), "backoff_s": (0.0, 0.0)}
        self.supervisor = Supervisor(self._hear, **(defaults | options))

    def _hear(self, event: Event) -> None:
        with self._heard:
            self.events.append(event)
            self._heard.notify_all()

    def start(self, name: str, entry: str, *, essential: bool = False, copies: int = 1, **payload: Any) -> None:
        self.pulses[name] = Pulse.create()
        self.supervisor.start(
            Part(
                name=name,
                entry=f"{HERE.stem}:{entry}",
                payload=payload,
                fds=[self._reader] * copies,
                pulse=self.pulses[name],
                log_path=self.folder / f"{name}.log",
                essential=essential,
            )
        )

    def of(self, name: str, kind: str) -> list[Event]:
        return [event for event in self.events if event.part == name and event.kind == kind]

    def wait(self, name: str, kind: str, count: int = 1, timeout_s: float = PATIENCE_S) -> Event:
        """The `count`-th event of that kind."""
        with self._heard:
            assert self._heard.wait_for(lambda: len(self.of(name, kind)) >= count, timeout_s), self.events
            return self.of(name, kind)[count - 1]

    def close_once(self) -> list[str]:
        """Stop everything; the names of the parts that had to be killed."""
        if self._closed:
            return []
        self._closed = True
        left = self.supervisor.stop(PATIENCE_S / 4, lambda: os.close(self._writer))
        os.close(self._reader)
        for pulse in self.pulses.values():
            pulse.close()
        return left


@pytest.fixture
def troop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Troop]]:
    monkeypatch.syspath_prepend(str(HERE.parent))
    made: list[Troop] = []

    def make(**options: Any) -> Troop:
        made.append(Troop(tmp_path, **options))
        return made[-1]

    before = os.listdir("/proc/self/fd"), threading.active_count(), sorted(os.listdir("/dev/shm"))
    yield make
    for one in made:
        one.close_once()
    after = os.listdir("/proc/self/fd"), threading.active_count(), sorted(os.listdir("/dev/shm"))
    assert len(after[0]) == len(before[0])
    assert after[1:] == before[1:]
    assert zombies() == []


def status_of(pid: int) -> list[str]:
    """State, parent and so on; empty where there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def zombies() -> list[int]:
    mine = str(os.getpid())
    return [p for p in map(int, filter(str.isdigit, os.listdir("/proc"))) if status_of(p)[:2] == ["Z", mine]]


def marked(mark: str) -> list[int]:
    """The live processes that have `mark` in their environment, which descendants inherit."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):
            if mark.encode() in Path(f"/proc/{pid}/environ").read_bytes() and status_of(int(pid))[:1] not in (
                [],
                ["Z"],
            ):
                found.append(int(pid))
    return [pid for pid in found if pid != os.getpid()]


def all_gone(mark: str, timeout_s: float, which: Callable[[int], bool] = lambda _: True) -> bool:
    deadline = time.monotonic() + timeout_s
    while any(map(which, marked(mark))):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)  # between two looks at /proc, which cannot be waited for
    return True


CAUSES = {
    "exception": "exit code 1: ValueError: no such action: 0",
    "sys.exit": "exit code 3",
    "os._exit": "exit code 4",
    "zero": "exit code 0, before the run was over",
    "segfault": "killed by SIGSEGV",
    "SIGKILL": "killed by SIGKILL",
}


def test_every_cause_of_death_is_named_and_only_that_part_is_replaced(troop: Callable[..., Troop]) -> None:
    """T3, with one part that stays healthy."""
    it = troop()
    it.start("healthy", "beating")
    for how in CAUSES:
        it.start(how, "ending", how=how)
    for how, cause in CAUSES.items():
        lost = it.wait(how, "lost")
        assert (lost.cause, lost.incarnation) == (cause, 0)
        assert it.wait(how, "replaced").incarnation == 1
    it.supervisor.wait_ready(PATIENCE_S)
    told = it.of("exception", "lost")[0].traceback
    assert "on standard output" in told
    assert 'raise ValueError(f"no such action' in told
    assert "in ending" in it.of("segfault", "lost")[0].traceback, "faulthandler tells where"
    assert it.of("healthy", "lost") == []
    assert len(it.supervisor.pids()) == len(CAUSES) + 1
    assert it.close_once() == []


def test_a_crash_loop_backs_off_and_is_given_up_with_its_traceback_while_others_run(
    troop: Callable[..., Troop],
) -> None:
    """T4, with shorter waits."""
    it = troop(backoff_s=(0.1, 0.4), give_up_after=6)
    it.start("healthy", "beating")
    it.start("looping", "ending", how="exception", always=True)
    given_up = it.wait("looping", "given_up")
    assert given_up.cause == "exit code 1: ValueError: no such action: 5"
    assert "Traceback" in given_up.traceback
    lost = it.of("looping", "lost")
    started = [it.of("looping", "started")[0], *it.of("looping", "replaced")]
    assert len(lost) == len(started) == 6
    waits = [b.at_s - a.at_s for a, b in zip(lost, started[1:], strict=False)]
    assert waits[0] < 0.1
    for waited, expected in zip(waits[1:], (0.1, 0.2, 0.4, 0.4), strict=True):
        assert expected <= waited + 0.01 < expected + 1.0
    assert it.of("healthy", "lost") == []
    it.supervisor.check()  # not essential: the run goes on
    steps = it.pulses["healthy"].read().steps
    it.wait("healthy", "ready")
    deadline = time.monotonic() + PATIENCE_S
    while it.pulses["healthy"].read().steps == steps:
        assert time.monotonic() < deadline


def test_an_essential_part_given_up_ends_the_run_with_the_real_error(troop: Callable[..., Troop]) -> None:
    it = troop(give_up_after=2)
    it.start("hub", "ending", how="exception", always=True, silent=True, essential=True)
    with pytest.raises(TroupeError, match="hub was lost 2 times in a row: exit code 1: ValueError: no such action"):
        it.supervisor.wait_ready(PATIENCE_S)


def test_productive_lives_make_earlier_failures_forgotten(troop: Callable[..., Troop]) -> None:
    it = troop(give_up_after=3)
    it.start("w", "beating", steps=10_000)
    for count in range(1, 6):
        it.wait("w", "ready", count)
        deadline = time.monotonic() + PATIENCE_S
        while it.pulses["w"].read().steps < 20_000 * count:
            assert time.monotonic() < deadline
        os.kill(it.supervisor.pids()["w"], signal.SIGKILL)
        it.wait("w", "lost", count)
    it.wait("w", "ready", 6)
    assert it.of("w", "given_up") == []


@pytest.mark.parametrize("how", ["loop", "stop"])
def test_a_hung_part_is_killed_and_replaced(troop: Callable[..., Troop], how: str) -> None:
    """T5: an endless loop, and a process that was stopped."""
    it = troop(step_timeout_s=0.2)
    it.start("healthy", "beating")
    it.start("hung", "ending", how=how)
    ready = it.wait("hung", "ready")
    lost = it.wait("hung", "lost")
    assert lost.cause == "no sign of life for 1 s (phase play)"
    assert 1.0 < lost.at_s - ready.at_s < 4.0
    it.wait("hung", "ready", 2)
    assert it.of("healthy", "lost") == []


def test_a_part_that_never_beats_is_killed_after_the_start_timeout(troop: Callable[..., Troop]) -> None:
    it = troop(start_timeout_s=1.0)
    it.start("mute", "ending", how="loop", silent=True)
    assert "no sign of life for 1 s (phase start)" in it.wait("mute", "lost").cause
    it.wait("mute", "ready")


def test_not_starting_in_time_is_an_error_that_names_the_part(troop: Callable[..., Troop]) -> None:
    it = troop()
    it.start("mute", "ending", how="loop", silent=True)
    it.wait("mute", "started")
    with pytest.raises(TroupeError, match="mute: no sign of life yet"):
        it.supervisor.wait_ready(0.2)
    assert it.supervisor.stop(0.2) == ["mute"]
    assert it.of("mute", "killed")


def test_what_cannot_be_asked_for_ends_the_wait_at_once_with_the_reason(troop: Callable[..., Troop]) -> None:
    """Nobody watches the parts any more by then: without being told, the owner would wait for the whole timeout."""
    it = troop()
    it.start("greedy", "beating", copies=MAX_FDS)
    begin = time.monotonic()
    with pytest.raises(TroupeError, match=f"over the limit of .* and {MAX_FDS}"):
        it.supervisor.wait_ready(PATIENCE_S)
    assert time.monotonic() - begin < PATIENCE_S / 2
    assert it.supervisor.stop(1.0) == []


def test_a_server_of_the_most_workers_can_be_handed_all_their_links() -> None:
    hub, pulse_commons_replay_and_log = SharedHub(1 << 10, {"weights": 1 << 10}, down_bytes=64), 4
    for rank in range(MOST_WORKERS):
        hub.connect(f"worker-{rank}")
    to_the_books = 4
    assert len(hub.lend().fds) + to_the_books + pulse_commons_replay_and_log <= MAX_FDS
    hub.close()


def test_a_part_whose_work_is_done_is_not_replaced(troop: Callable[..., Troop]) -> None:
    it = troop()
    it.start("short", "ending", how="done")
    it.wait("short", "finished")
    it.supervisor.wait_ready(PATIENCE_S)
    assert it.of("short", "lost") == []


def test_fifty_restarts_leave_nothing_behind(troop: Callable[..., Troop]) -> None:
    """T9, quick: descriptors here and in the fork server, threads, zombies, /dev/shm."""
    it = troop(give_up_after=1000)
    it.start("w", "beating")

    def traces() -> tuple[int, int, int, list[str]]:
        server = it.supervisor.server_pid()
        threads = len(os.listdir("/proc/self/task"))
        return len(os.listdir("/proc/self/fd")), len(os.listdir(f"/proc/{server}/fd")), threads, os.listdir("/dev/shm")

    it.wait("w", "ready")
    before = traces()
    for count in range(1, 51):
        os.kill(it.supervisor.pids()["w"], signal.SIGKILL)
        it.wait("w", "ready", count + 1)
    assert traces() == before
    assert zombies() == []
    server = it.supervisor.server_pid()
    children = [p for p in map(int, filter(str.isdigit, os.listdir("/proc"))) if status_of(p)[1:2] == [str(server)]]
    assert children == [it.supervisor.pids()["w"]]
    assert sorted(path.name for path in it.folder.iterdir()) == ["w.log", "w.log.previous"]


def test_a_child_has_its_own_descriptors_only_and_ignores_the_terminal(troop: Callable[..., Troop]) -> None:
    it = troop()
    it.start("first", "beating")
    it.wait("first", "ready")
    it.start("second", "listing", to=str(it.folder / "fds"))
    it.wait("second", "ready")
    listed, own, ignores, session, threads = (
        (it.folder / "fds").read_text().replace("] [", "]|[").replace("] ", "]|").replace("True ", "True|").split("|")
    )
    numbers = [int(n) for n in listed.strip("[]").split(",")]
    assert numbers == [0, 1, 2, *(int(n) for n in own.strip("[]").split(","))]
    assert (ignores, session, threads) == ("True", "True", "1")


def test_children_of_a_part_that_dies_die_with_it(troop: Callable[..., Troop], monkeypatch: pytest.MonkeyPatch) -> None:
    mark = f"mark-{uuid.uuid4()}"
    monkeypatch.setenv("TROUPE_TEST_MARK", mark)
    it = troop(give_up_after=1)
    it.start("w", "breeding", dies=True)
    it.wait("w", "given_up")
    assert all_gone(mark, GONE_S, lambda pid: status_of(pid)[2:3] != [str(pid)] and pid != it.supervisor.server_pid())
    it.close_once()
    assert all_gone(mark, GONE_S), "those in sessions of their own went with the fork server"


def test_when_the_fork_server_dies_it_is_started_again_with_all_its_parts(
    troop: Callable[..., Troop], monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = f"mark-{uuid.uuid4()}"
    monkeypatch.setenv("TROUPE_TEST_MARK", mark)
    it = troop(give_up_after=1)
    names = ["a", "b", "c"]
    for name in names:
        it.start(name, "breeding", sessions=False)
    it.supervisor.wait_ready(PATIENCE_S)
    old = it.supervisor.pids()
    descendants = marked(mark)
    assert len(descendants) == 1 + 3 + 3
    os.kill(it.supervisor.server_pid(), signal.SIGKILL)
    for name in names:
        assert it.wait(name, "lost").cause == "the fork server died"
        assert it.wait(name, "ready", 2).incarnation == 1
    assert not set(old.values()) & set(it.supervisor.pids().values())
    assert all_gone(mark, GONE_S, lambda pid: pid in descendants)
    assert it.of("", "server_lost")


def test_forking_with_threads_is_refused_with_a_clear_sentence(
    troop: Callable[..., Troop], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """T10."""
    (tmp_path / "threaded_module.py").write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    it = troop(preload=("threaded_module",))
    it.start("w", "beating", essential=True)
    given_up = it.wait("w", "given_up")
    assert "the fork server has 2 threads" in given_up.cause
    assert "take it out of `preload`" in given_up.cause
    with pytest.raises(TroupeError, match="2 threads"):
        it.supervisor.check()


def test_a_preload_that_fails_is_told_with_its_traceback(troop: Callable[..., Troop]) -> None:
    it = troop(preload=("no_such_module_at_all",))
    it.start("w", "beating")
    with pytest.raises(TroupeError, match="No module named 'no_such_module_at_all'"):
        it.supervisor.wait_ready(PATIENCE_S)


def test_a_chatty_part_does_not_fill_the_disk(troop: Callable[..., Troop]) -> None:
    it = troop()
    it.start("w", "ending", how="chatty")
    it.wait("w", "ready")
    log = it.folder / "w.log"
    deadline = time.monotonic() + PATIENCE_S
    while it.pulses["w"].read().steps < 10 or log.stat().st_size > 1 << 20:
        assert time.monotonic() < deadline
    assert log.stat().st_size <= 1 << 20


DRIVER = """
import os, sys, time
from pathlib import Path
sys.path[:0] = [{source!r}, {here!r}]
from troupe.pulse import Pulse
from troupe.supervisor import Part, Supervisor
reader, writer = os.pipe()
print("begun", flush=True)
supervisor = Supervisor(lambda event: print(event.kind, event.part, flush=True), preload=["{module}"])
for name in ("a", "b"):
    supervisor.start(Part(name, "{module}:breeding", {{}}, [reader], Pulse.create(), Path({folder!r}) / name))
time.sleep(1000)
"""


@pytest.mark.parametrize(
    ("line", "delay_s"),
    [
        ("begun", 0.0),
        ("begun", 0.03),
        ("begun", 0.1),
        ("started a", 0.0),
        ("started b", 0.0),
        ("started b", 0.005),
        ("ready a", 0.0),
        ("ready b", 0.05),
    ],
)
def test_when_the_parent_is_killed_every_descendant_is_gone_in_two_seconds(
    tmp_path: Path, line: str, delay_s: float
) -> None:
    """T6, quick: at each stage of the start, with children that have children, also in sessions of their own."""
    mark = f"mark-{uuid.uuid4()}"
    script = DRIVER.format(source=str(SOURCE), here=str(HERE.parent), module=HERE.stem, folder=str(tmp_path))
    driver = subprocess.Popen(
        [sys.executable, "-c", script],
        env=os.environ | {"TROUPE_TEST_MARK": mark},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert driver.stdout is not None
    with driver.stdout:
        for said in driver.stdout:
            if said.strip() == line:
                break
        time.sleep(delay_s)  # the instant of the fault, not a wait for anything
        driver.kill()
        driver.wait(PATIENCE_S)
        assert all_gone(mark, GONE_S), [Path(f"/proc/{p}/cmdline").read_bytes() for p in marked(mark)]

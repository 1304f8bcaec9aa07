"""Keeps worker processes alive: starts them from a fork server, notices death and hanging, replaces, gives up."""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from troupe.deaths import cause, kill_group_and_wait
from troupe.errors import TroupeError
from troupe.forkserver import ForkServer
from troupe.forkwire import Exited, Ready, Refused, Report, Started
from troupe.pulse import Beat, Phase, Pulse

_POLL_S: Final = 0.05
_LATE_S: Final = 1.0  # on top of step_timeout_s, so that a step that takes just as long as allowed passes
_FROZEN_S: Final = 2.0  # a gap between two polls that says we were stopped, and so perhaps the workers with us
_SHORT_S: Final = 10.0  # a life too short to restart at once again
_HEALTHY_S: Final = 30.0  # a life, or
_HEALTHY_STEPS: Final = 10_000  # environment steps in a life, after which earlier failures are forgotten
_KILL_S: Final = 5.0  # a fork server that does not report a death within this is replaced
_SERVER_TRIES: Final = 3
_LOG_BYTES: Final = 1 << 20  # of one incarnation; cut to nothing above it, for the end is what is needed
_TAIL_BYTES: Final = 8192
_NAMED: Final = 4  # parts that one sentence names

EventKind = Literal["started", "ready", "lost", "replaced", "given_up", "finished", "killed", "server_lost"]


@dataclass(frozen=True, slots=True)
class Part:
    """A process to be kept alive.

    `entry` ("package.module:function") is called with (payload, fds): the payload has "incarnation" added, and fds[0]
    is the pulse's descriptor, followed by `fds`. It beats the pulse at least once every `step_timeout_s`, and ends
    with `Phase.DONE` where it returns before it is asked to.
    """

    name: str
    entry: str
    payload: dict[str, Any]
    fds: Sequence[int]
    pulse: Pulse
    log_path: Path
    essential: bool = False  # without it the run cannot go on: `check` raises once it is given up
    nice: int = 0


@dataclass(frozen=True, slots=True)
class Event:
    """Something a user may want to know about a part.

    started: forked for the first time; replaced: forked again; ready: first beat of an incarnation; lost: died or
    was killed as hung; given_up: lost too often; finished: ended as it should; killed: did not stop when asked to;
    server_lost: the fork server died, and all parts with it.
    """

    kind: EventKind
    part: str
    pid: int = 0
    incarnation: int = 0
    cause: str = ""
    traceback: str = ""  # the end of the part's own log
    at_s: float = field(default_factory=time.monotonic)


@dataclass(slots=True)
class _Life:
    """A part, and its present incarnation."""

    part: Part
    state: Literal["due", "asked", "running", "ended"] = "due"
    incarnation: int = 0
    due_s: float = 0.0
    since_s: float = 0.0  # asked, then started
    pid: int = 0
    beaten: bool = False
    steps: int = 0  # of the pulse when this incarnation started
    failures: int = 0  # in a row
    killed_s: float = 0.0  # 0: not by us
    cause: str = ""  # why we killed it, or what it died of
    log_fd: int = -1


class Supervisor:
    """Owns one thread, which calls `on_event`; the other methods are for the thread that made it."""

    def __init__(
        self,
        on_event: Callable[[Event], None] = lambda event: None,
        *,
        step_timeout_s: float = 60.0,
        start_timeout_s: float = 60.0,
        backoff_s: tuple[float, float] = (0.1, 30.0),
        give_up_after: int = 10,
        preload: Sequence[str] = (),
    ) -> None:
        self._on_event = on_event
        self._step_timeout_s, self._start_timeout_s = step_timeout_s, start_timeout_s
        self._backoff_s, self._give_up_after = backoff_s, give_up_after
        self._preload = tuple(preload)
        self._lives: dict[str, _Life] = {}
        self._events: list[Event] = []
        self._failure: TroupeError | None = None
        self._server: ForkServer | None = None
        self._server_ready = False
        self._server_failures = 0
        self._server_since_s = 0.0
        self._polled_s = self._thawed_s = time.monotonic()
        self._stopping = self._ending = False
        self._changed = threading.Condition()  # guards everything above
        self._thread = threading.Thread(target=self._run, name="troupe-supervisor", daemon=True)
        self._thread.start()

    def listen(self, on_event: Callable[[Event], None], *, step_timeout_s: float) -> None:
        """Set what was not known yet when this was made early, before any part is started."""
        with self._changed:
            self._on_event, self._step_timeout_s = on_event, step_timeout_s

    def start(self, part: Part) -> None:
        """Have `part` running from now on."""
        with self._changed:
            if part.name in self._lives:
                raise ValueError(f"a part named {part.name!r} is there already")
            part.log_path.parent.mkdir(parents=True, exist_ok=True)
            self._lives[part.name] = _Life(part)

    def wait_ready(self, timeout_s: float) -> None:
        """Until every part has beaten once; TroupeError where that does not happen."""
        with self._changed:
            self._changed.wait_for(lambda: self._failure or not self._missing(), timeout_s)
            self.check()
            if missing := self._missing():
                causes = [f"{life.part.name}: {life.cause or 'no sign of life yet'}" for life in missing]
                told = f"{len(causes)} did not: {'; '.join(causes[:_NAMED])}"
                raise TroupeError(f"not all workers started within {timeout_s:g} s ({told}); see their logs")

    def check(self) -> None:
        """Raise what ended the run, if anything did."""
        if self._failure is not None:
            raise self._failure

    def fail(self, error: TroupeError) -> None:
        """End the run: `check` and `wait_ready` raise `error` from now on, unless something else came before it."""
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    def pids(self) -> dict[str, int]:
        """The processes that run now."""
        with self._changed:
            return {name: life.pid for name, life in self._lives.items() if life.state == "running"}

    def server_pid(self) -> int:
        """The fork server's process; 0 between two."""
        return server.pid if (server := self._server) else 0

    def stop(self, timeout_s: float, ask: Callable[[], None] = lambda: None) -> list[str]:
        """Call `ask`, which tells the parts to end; wait for that, then kill what is left, whose names it returns."""
        with self._changed:
            self._stopping = True
        ask()
        with self._changed:
            self._changed.wait_for(lambda: not self._alive(), timeout_s)
            left = [life.part.name for life in self._alive()]
            self._ending = True
        if self._thread is not threading.current_thread():
            self._thread.join()
        return left

    # The thread's own, from here on.

    def _run(self) -> None:
        try:
            while not self._ending:
                self._poll()
        except TroupeError as e:  # nobody is watched from here: whoever waits for us must hear of it
            self.fail(e)
        self._close()
        self._deliver()

    def _poll(self) -> None:
        """One look at everything; waits up to 50 ms for something to happen."""
        if self._server is None and self._failure is None:
            self._server = ForkServer(self._preload)  # by this thread: it dies with the one that started it
            self._server_ready, self._server_since_s = False, time.monotonic()
        reports: list[Report] = []
        if self._server is None:
            time.sleep(_POLL_S)  # nothing to wait for: the run has failed, and its owner has yet to stop us
        else:
            reports = self._server.reports(_POLL_S)
        with self._changed:
            now = time.monotonic()
            if now - self._polled_s > _FROZEN_S:
                self._thawed_s = now
            self._polled_s = now
            for report in reports:
                self._hear(report, now)
            if self._server is not None and not self._server.alive:
                self._server_lost("the fork server died", now)
            for life in self._lives.values():
                self._look_at(life, now)
            self._changed.notify_all()
        self._deliver()

    def _deliver(self) -> None:
        events, self._events = self._events, []
        for event in events:
            try:
                self._on_event(event)
            except Exception:  # whoever listens must not stop us from keeping the others alive
                traceback.print_exc(file=sys.stderr)

    def _hear(self, report: Report, now: float) -> None:
        if isinstance(report, Ready):
            self._server_ready, self._server_failures = True, 0
            return
        if isinstance(report, Refused) and not report.name:
            self._fail(f"worker processes cannot be started: {report.reason}")
            return
        life = self._lives[report.name]
        if isinstance(report, Started):
            life.state, life.pid, life.since_s = "running", report.pid, now
            self._tell("replaced" if life.incarnation else "started", life)
        elif isinstance(report, Refused):
            self._lost(life, report.reason, now, final=report.final)
        elif report.pid == life.pid:
            self._exited(life, report, now)

    def _look_at(self, life: _Life, now: float) -> None:
        if life.state == "due" and now >= life.due_s and self._server_ready and not self._stopping:
            self._fork(life, now)
        elif life.state == "asked" and now - max(life.since_s, self._thawed_s) > self._start_timeout_s:
            self._server_lost(f"the fork server did not answer for {self._start_timeout_s:.0f} s", now)
        elif life.state == "running":
            self._look_at_running(life, now)

    def _look_at_running(self, life: _Life, now: float) -> None:
        if os.fstat(life.log_fd).st_size > _LOG_BYTES:
            os.ftruncate(life.log_fd, 0)
        if life.killed_s:
            if now - max(life.killed_s, self._thawed_s) > _KILL_S:
                self._server_lost("the fork server does not report deaths", now)
            return
        beat = self._beat(life)
        if now - life.since_s > _HEALTHY_S or beat.steps - life.steps >= _HEALTHY_STEPS:
            life.failures = 0
        # A beat from before we were frozen says nothing: the worker may have been frozen with us.
        silent_s = now - max(beat.at_s, life.since_s, self._thawed_s)
        if silent_s > (self._step_timeout_s + _LATE_S if life.beaten else self._start_timeout_s):
            life.killed_s = now
            life.cause = f"no sign of life for {silent_s:.0f} s (phase {beat.phase.name.lower()})"
            assert self._server is not None
            self._server.kill(life.pid)

    def _beat(self, life: _Life) -> Beat:
        """What the part said last; the first time that it says anything, it is ready."""
        beat = life.part.pulse.read()
        if beat.at_s and not life.beaten:
            life.beaten = True
            self._tell("ready", life)
        return beat

    def _fork(self, life: _Life, now: float) -> None:
        part = life.part
        part.pulse.rest()
        with suppress(FileNotFoundError):
            part.log_path.replace(part.log_path.with_suffix(part.log_path.suffix + ".previous"))
        life.log_fd = os.open(part.log_path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        life.state, life.since_s, life.killed_s, life.beaten = "asked", now, 0.0, False
        life.steps = part.pulse.read().steps
        payload = part.payload | {"incarnation": life.incarnation}
        assert self._server is not None
        if not self._server.fork(part.name, part.entry, payload, (part.pulse.fd, *part.fds), life.log_fd, part.nice):
            self._close_log(life)
            life.state = "due"

    def _exited(self, life: _Life, report: Exited, now: float) -> None:
        beat = self._beat(life)
        if report.code == 0 and report.signal == 0 and (self._stopping or beat.phase == Phase.DONE):
            life.state = "ended"
            self._tell("finished", life)
            self._close_log(life)
        else:
            self._lost(life, life.cause if life.killed_s else cause(report, self._tail(life)), now)

    def _lost(self, life: _Life, cause: str, now: float, *, final: bool = False) -> None:
        """The present incarnation is dead: what next?"""
        life.cause = cause
        tail = self._tail(life)
        self._tell("lost", life, tail)
        self._close_log(life)
        lived_s = now - life.since_s if life.pid else 0.0
        steps = life.part.pulse.read().steps - life.steps
        life.failures = 1 if lived_s > _HEALTHY_S or steps >= _HEALTHY_STEPS else life.failures + 1
        if self._stopping:
            life.state = "ended"
        elif final or life.failures >= self._give_up_after:
            life.state = "ended"
            self._tell("given_up", life, tail)
            if life.part.essential:
                self._fail(f"{life.part.name} was lost {life.failures} times in a row: {cause}\n{tail}".rstrip())
        else:
            first_s, longest_s = self._backoff_s
            wait_s = min(longest_s, first_s * 2.0 ** (life.failures - 2))
            again_at_once = life.failures == 1 or (lived_s > _SHORT_S and steps > 0)
            life.state, life.due_s = "due", now if again_at_once else now + wait_s
            life.incarnation += 1
        life.pid = 0

    def _server_lost(self, cause: str, now: float) -> None:
        """Start another one at the next poll; no incarnation of a part is left when this returns."""
        if self._server is None:
            return
        self._server.close(timeout_s=0.0 if self._server.alive else _KILL_S)
        self._server, was_ready = None, self._server_ready
        self._server_ready = False
        self._server_failures += 1
        self._events.append(Event("server_lost", "", cause=cause))
        for life in self._lives.values():
            if life.state == "running":
                kill_group_and_wait(life.pid, _KILL_S)
            if life.state in ("running", "asked"):
                self._tell("lost", life, self._tail(life), cause=cause)  # not the part's own failure: not counted
                self._close_log(life)
                life.state, life.due_s, life.pid = "ended" if self._stopping else "due", now, 0
                life.incarnation += 1
        if not was_ready and self._server_failures >= _SERVER_TRIES:
            self._fail(f"worker processes cannot be started: {cause} {self._server_failures} times while it imported")

    def _fail(self, sentence: str) -> None:
        self._failure = self._failure or TroupeError(sentence)

    def _close(self) -> None:
        """Whatever runs now is killed."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for life in self._lives.values():
            if life.state in ("running", "asked"):
                if life.pid:
                    kill_group_and_wait(life.pid, _KILL_S)
                self._tell("killed", life, self._tail(life), cause="it did not end when it was asked to")
                self._close_log(life)
            life.state = "ended"

    def _alive(self) -> list[_Life]:
        return [life for life in self._lives.values() if life.state in ("running", "asked")]

    def _missing(self) -> list[_Life]:
        return [life for life in self._lives.values() if not (life.beaten and life.state in ("running", "ended"))]

    def _tell(self, kind: EventKind, life: _Life, tail: str = "", cause: str | None = None) -> None:
        told = (life.cause if kind in ("lost", "given_up") else "") if cause is None else cause
        self._events.append(Event(kind, life.part.name, life.pid, life.incarnation, told, tail))

    def _tail(self, life: _Life) -> str:
        if life.log_fd < 0:
            return ""
        size = os.fstat(life.log_fd).st_size
        return os.pread(life.log_fd, _TAIL_BYTES, max(0, size - _TAIL_BYTES)).decode(errors="replace").strip("\0")

    def _close_log(self, life: _Life) -> None:
        if life.log_fd >= 0:
            os.close(life.log_fd)
            life.log_fd = -1

"""How the parts of a scheme come to life: in processes that are kept alive, or one after another in this one."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Protocol

from troupe.build import env_spec
from troupe.envs import envpool_has
from troupe.errors import EnvironmentFault, TroupeError
from troupe.parts import EVALUATOR, LIVES, MEMORY_MESSAGES, PLAYERS, Stage, perform
from troupe.ports import Mailbox
from troupe.pulse import Pulse
from troupe.roles.cargo import Cargo
from troupe.schemes.scheme import Part
from troupe.supervisor import Event, Supervisor
from troupe.supervisor import Part as Process
from troupe.transports.memory import MemoryHub
from troupe.transports.shared import SharedHub
from troupe.warmup import preloads

NEVER_PLAYED: Final = 4  # losses of each worker, without one step by any, after which trying again is no use
_SPIN_S: Final = 500e-6  # what a server takes to answer, where each process has a core
_SMALL: Final = 1 << 12  # bytes of a ring that nothing of size passes
_REPORTS: Final = 1 << 20  # bytes that the reports of one worker may wait in


class Cast(Protocol):
    """The parts beside the main process, and the mailboxes it has towards them."""

    @property
    def learner(self) -> Mailbox:
        """Experience and reports arrive here, weights are published here."""

    @property
    def desk(self) -> Mailbox:
        """Candidates are published here, evaluations arrive here."""

    def wait_ready(self, timeout_s: float) -> None:
        """Until everyone is in place."""

    def turn(self) -> None:
        """Once per turn of the main process. Raises what a part that cannot go on died of."""

    def stop(self, timeout_s: float) -> None:
        """Everyone ends; nothing is left."""


class Link(Protocol):
    """What a part is handed to reach a hub."""

    @property
    def spec(self) -> Mapping[str, Any]:
        """Plain values."""

    @property
    def fds(self) -> tuple[int, ...]:
        """Descriptors of this machine, where it takes some."""


class Hub(Protocol):
    """Where parts send, whatever carries their messages."""

    def mailbox(self) -> Mailbox:
        """This side's."""

    def connect(self, name: str) -> Link:
        """For the part `name`."""

    def stop(self) -> None:
        """Tell every part to end."""

    def close(self) -> None: ...


class ProcessCast:
    """Every part in a process of its own, replaced when it dies or hangs."""

    def __init__(
        self,
        stage: Stage,
        parts: list[Part],
        *,
        logs: Path,
        topics: dict[str, int],
        shape: Cargo,
        weights_bytes: int,
        on_event: Callable[[Event], None],
        supervisor: Supervisor | None = None,
        learner: Hub | None = None,
    ) -> None:
        """`learner`: where experience arrives, unless that is memory of this machine."""
        self._stage, self._logs = stage, logs
        up_bytes = shape.nbytes() * 5 // 4 if any(part.role == "actor" for part in parts) else _REPORTS
        here = learner or SharedHub(up_bytes if parts else _SMALL, topics, down_bytes=_SMALL)
        desk = SharedHub(weights_bytes * 2, {"candidate": weights_bytes}, down_bytes=_SMALL, name="desk")
        self._servers: dict[str, SharedHub] = {}
        spin_s = _SPIN_S if len(parts) <= (os.cpu_count() or 1) else 0.0
        for part in parts:
            if part.role == "server":  # two gradients of each worker may wait; it answers with one slot of weights
                sizes, room = {"weights": weights_bytes}, 2 * weights_bytes
                self._servers[part.name] = SharedHub(room, sizes, down_bytes=_SMALL, name=part.name, spin_s=spin_s)
        self._hubs: dict[str, Hub] = {"learner": here, "desk": desk, **self._servers}
        self.learner, self.desk = here.mailbox(), desk.mailbox()
        self.supervisor = supervisor or Supervisor(preload=preloads(envpool=envpool_has(env_spec(stage.config))))
        self._on_event = on_event
        self._losses: Counter[str] = Counter()
        self._given_up: set[str] = set()
        self._players: dict[str, Pulse] = {}
        self.supervisor.listen(self._hear, step_timeout_s=stage.config.step_timeout_s)
        self._pulses: list[Pulse] = []
        players = [part for part in parts if part.role in PLAYERS]
        for part in sorted(parts, key=lambda part: part.role == "server"):  # a server is lent links that are there
            self._start(part, essential=part.essential or players == [part])
        self._start(EVALUATOR, essential=True)

    def _start(self, part: Part, *, essential: bool) -> None:
        stage, pulse = self._stage, Pulse.create()
        self._pulses.append(pulse)
        if part.role in PLAYERS:
            self._players[part.name] = pulse
        links = [self._hubs[hub].connect(part.name) for hub in self._towards(part)]
        hub = self._servers[part.name].lend() if part.name in self._servers else None
        memory = [region.fd for region in (stage.commons, stage.replay) if region is not None]
        payload = {
            "role": part.role, "rank": part.rank, "at": part.at, "stage": stage.plain(),
            "links": [dict(link.spec) for link in links], "hub": hub.spec if hub else None,
        }  # fmt: skip
        fds = [*memory, *(fd for link in links for fd in link.fds), *(hub.fds if hub else ())]
        log = self._logs / f"{part.name}.log"
        self.supervisor.start(Process(part.name, "troupe.parts:enter", payload, fds, pulse, log, essential=essential))

    def _towards(self, part: Part) -> list[str]:
        """The hubs that a part has a mailbox towards; where it is told to stop comes first."""
        if part is EVALUATOR:
            return ["desk"]
        return ["learner", *(self._servers if part.role == "worker" else [])]

    def _hear(self, event: Event) -> None:
        """From the supervisor's thread: pass it on, and see whether anybody is left who can play."""
        self._on_event(event)
        if event.part not in self._players:
            return
        self._losses[event.part] += event.kind == "lost"
        if event.kind == "given_up":
            self._given_up.add(event.part)
            if self._stage.commons:  # or the others, who count its steps, would think the budget spent and wait
                self._stage.commons.seat(int(event.part.rpartition("-")[2])).forget()
        if all(self._losses[name] >= NEVER_PLAYED and not p.read().steps for name, p in self._players.items()):
            self.supervisor.fail(EnvironmentFault(f"no worker ever got to play a step: {event.cause}"))
        elif self._given_up == set(self._players):
            self.supervisor.fail(TroupeError(f"every worker was given up: {event.cause}\n{event.traceback}"))

    def wait_ready(self, timeout_s: float) -> None:
        """Until every process has built what it needs."""
        self.supervisor.wait_ready(timeout_s)

    def turn(self) -> None:
        """Nothing to do but to hear of a failure."""
        self.supervisor.check()

    def stop(self, timeout_s: float) -> None:
        """Ask, wait, kill; then give the memory back."""

        def ask() -> None:
            for hub in self._hubs.values():
                hub.stop()

        self.supervisor.stop(timeout_s, ask)
        for hub in self._hubs.values():
            hub.close()
        for pulse in self._pulses:
            pulse.close()


class SerialCast:
    """The serial twin: every part is a generator in this process, and takes its turn after the main one."""

    def __init__(self, stage: Stage, parts: list[Part]) -> None:
        hubs = {name: MemoryHub(capacity=MEMORY_MESSAGES * max(1, len(parts))) for name in ("learner", "desk")}
        self.learner, self.desk = hubs["learner"].mailbox("learner"), hubs["desk"].mailbox("desk")
        servers = [part for part in parts if part.role == "server"]
        hubs |= {part.name: MemoryHub(capacity=MEMORY_MESSAGES * len(parts)) for part in servers}
        self._servers = [self._play(part, stage, hubs, lambda: None) for part in servers]
        others = [part for part in parts if part.role != "server"]
        self._loops = [*self._servers, *(self._play(part, stage, hubs, self._serve) for part in [*others, EVALUATOR])]

    def _play(
        self, part: Part, stage: Stage, hubs: dict[str, MemoryHub], on_wait: Callable[[], None]
    ) -> Iterator[None]:
        links: dict[str, Mailbox] = {}
        for name, hub in hubs.items():
            links["self" if name == part.name else name] = hub.mailbox(part.name)
        return perform(part, stage, links, stage.life * LIVES, lambda steps: None, on_wait)

    def _serve(self) -> None:
        """While a worker waits for the servers, they have a turn."""
        for loop in self._servers:
            next(loop)

    def wait_ready(self, timeout_s: float) -> None:
        """Everyone was built in the constructor."""

    def turn(self) -> None:
        """Each part once."""
        for loop in self._loops:
            next(loop)

    def stop(self, timeout_s: float) -> None:
        """Close the environments."""
        for loop in self._loops:
            loop.close()  # type: ignore[attr-defined]

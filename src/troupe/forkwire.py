"""What the fork server is asked, and what it reports: single packets of JSON."""

from __future__ import annotations

from typing import Any

import msgspec


class Preload(msgspec.Struct, tag=True, frozen=True):
    """The first request: what to import, and where from."""

    modules: tuple[str, ...]
    sys_path: tuple[str, ...]


class Fork(msgspec.Struct, tag=True, frozen=True):
    """Run `entry` ("package.module:function") in a new process; the first descriptor sent along is its log."""

    name: str
    entry: str
    payload: dict[str, Any]
    nice: int = 0


class Kill(msgspec.Struct, tag=True, frozen=True):
    """SIGKILL to the process group of a child."""

    pid: int


class Ready(msgspec.Struct, tag=True, frozen=True):
    """Imported; forks are possible from here."""

    seconds: float


class Started(msgspec.Struct, tag=True, frozen=True):
    """A child runs."""

    name: str
    pid: int


class Exited(msgspec.Struct, tag=True, frozen=True):
    """A child ended, and what was left of its process group was killed. `signal` is 0 where it exited by itself."""

    name: str
    pid: int
    code: int
    signal: int


class Refused(msgspec.Struct, tag=True, frozen=True):
    """A request that was not carried out; without a name it is the preload that failed."""

    name: str
    reason: str
    final: bool  # trying again would end the same way


Request = Preload | Fork | Kill
Report = Ready | Started | Exited | Refused

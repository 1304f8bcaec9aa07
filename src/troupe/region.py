"""Nameless shared memory and the bell that says something changed in it: file descriptors that leave nothing behind.

The memory has no name, so that there is nothing to leak whoever is killed; a process is handed its descriptor.
"""

from __future__ import annotations

import mmap
import os
import select
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Final

from troupe.errors import TroupeError

_MILLISECONDS: Final = 1000.0


def reserve(name: str, size: int) -> int:
    """A descriptor of `size` bytes of zeros; `name` is only what /proc/<pid>/maps shows.

    The pages are reserved now (ftruncate alone does not): memory that is not there is an error here and not a SIGBUS
    in the middle of a run. A memfd has no size limit of its own, so asking for too much would not fail either: the
    kernel would kill other processes to grant it. Hence the look at what is free.
    """
    free = available_bytes()
    if size > free:
        raise TroupeError(
            f"{size} bytes of shared memory for {name}, where {free} are free: use fewer, smaller buffers"
        )
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create(name, os.MFD_CLOEXEC)
    else:
        fd, path = tempfile.mkstemp(prefix=f"{name}-")
        os.unlink(path)
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        os.close(fd)
        raise TroupeError(
            f"{size} bytes of shared memory for {name} cannot be had ({error.strerror}): use fewer, smaller buffers"
        ) from error
    return fd


def available_bytes() -> int:
    """Memory that can still be taken without swapping, by the machine's count and by this process's control groups."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    free = [1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            free += _group_bytes(Path("/sys/fs/cgroup" + path), "memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            group = Path("/sys/fs/cgroup/memory" + path)
            free += _group_bytes(group, "memory.limit_in_bytes", "memory.usage_in_bytes")
    return min(free)


def _group_bytes(group: Path, limit: str, usage: str) -> list[int]:
    """What a control group has left; nothing where it says "max", or where a container does not show it."""
    try:
        return [int((group / limit).read_text()) - int((group / usage).read_text())]
    except (OSError, ValueError):
        return []


class Region:
    """Reserved memory, mapped, with the descriptor it came from."""

    def __init__(self, fd: int) -> None:
        """Map what is behind `fd`, which is this object's from now on."""
        self.fd = fd
        self._map = mmap.mmap(fd, os.fstat(fd).st_size)
        self.view = memoryview(self._map)

    def close(self) -> None:
        """Unmap it and close the descriptor. Where arrays still lie in it, it is unmapped with the last of them."""
        with suppress(BufferError):
            self.view.release()
            self._map.close()
        os.close(self.fd)


class Bell:
    """Rung by anyone who holds its descriptor, waited for by one. Neither side's death or restart disturbs it."""

    def __init__(self, fd: int | None = None) -> None:
        """A new bell, or the one behind `fd`, which is this object's from now on."""
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) if fd is None else fd
        self._poll = select.poll()
        self._poll.register(self.fd, select.POLLIN)

    def ring(self) -> None:
        """Wake who waits, or who will."""
        with suppress(BlockingIOError):  # rung 2**64 times without being heard: it is ringing
            os.eventfd_write(self.fd, 1)

    def wait(self, timeout_s: float) -> None:
        """Until it is rung (also before this call), at most `timeout_s`. Look at the memory afterwards, always."""
        self._poll.poll(max(timeout_s, 0.0) * _MILLISECONDS)
        with suppress(BlockingIOError):
            os.eventfd_read(self.fd)

    def close(self) -> None:
        """Close the descriptor."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

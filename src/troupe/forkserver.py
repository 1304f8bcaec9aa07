"""A small process that has imported what is slow to import, and forks a worker from itself in milliseconds.

It is started as `python -m troupe.forkserver`, imports the modules it is told, runs nothing of them, and stays single
threaded: forking a process with threads, or one in which torch has computed, may hang the child. When the process
that started it ends, however it ends, it kills all its children and all their descendants, and ends too.

Requests and reports are single packets of JSON on a socket pair (packets, so that a request and its file descriptors
arrive together or not at all). Both ends are this one machine, one user and one run. Linux only.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import importlib
import os
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import msgspec

from troupe.errors import TroupeError
from troupe.forkwire import Exited, Fork, Kill, Preload, Ready, Refused, Report, Request, Started

_PACKET_BYTES: Final = 128 * 1024  # of a request: a run's configuration is a few KB
MAX_FDS: Final = 253  # the kernel's own limit for one packet (SCM_MAX_FD)
_CHECK_PARENT_S: Final = 0.5  # should a process forked by our parent hold the socket open, this notices its death
_END_S: Final = 1.5  # from the parent's death to giving up on descendants that do not die
_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36
_ONE_THREAD: Final = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class ForkServer:
    """The side of the process that wants children. For one long-lived thread: the server dies with it."""

    def __init__(self, preload: Sequence[str] = ()) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            root = str(Path(__file__).resolve().parents[1])
            environment = os.environ | _ONE_THREAD
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
            command = [sys.executable, "-P", "-m", "troupe.forkserver", str(theirs.fileno()), str(os.getpid())]
            self._process = subprocess.Popen(
                command,
                env=environment,
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C in the terminal is for the parent, which orders the stop
            )
        self._socket = ours
        self._decode = msgspec.json.Decoder(Report).decode
        self.pid = self._process.pid
        self.alive = True
        self._send(Preload(tuple(preload), tuple(sys.path)), ())

    def fork(
        self, name: str, entry: str, payload: dict[str, Any], fds: Sequence[int], log_fd: int, nice: int = 0
    ) -> bool:
        """Ask for a child; Started or Refused is reported, and Exited in the end. False: not asked, try again."""
        return self._send(Fork(name, entry, payload, nice), [log_fd, *fds])

    def kill(self, pid: int) -> None:
        """Ask for the end of a child and its process group; Exited is reported."""
        self._send(Kill(pid), ())

    def reports(self, timeout_s: float) -> list[Report]:
        """All that was reported since; waits up to `timeout_s` for the first."""
        found: list[Report] = []
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        milliseconds = timeout_s * 1000.0
        while self.alive and poll.poll(milliseconds):
            packet = b""
            with suppress(ConnectionResetError):
                packet = self._socket.recv(_PACKET_BYTES)
            if packet:
                found.append(self._decode(packet))
            else:
                self.alive = False
            milliseconds = 0.0
        return found

    def close(self, timeout_s: float = 2.0) -> None:
        """Hang up, upon which the server kills its descendants and ends; wait for that, then kill it."""
        self.alive = False
        self._socket.close()
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(timeout_s)

    def _send(self, request: Request, fds: Sequence[int]) -> bool:
        packet = msgspec.json.encode(request)
        if len(packet) > _PACKET_BYTES or len(fds) > MAX_FDS:
            raise TroupeError(
                f"a request of {len(packet)} bytes and {len(fds)} descriptors to the fork server, over the limit of "
                f"{_PACKET_BYTES} and {MAX_FDS}: hand bulk data over in shared memory"
            )
        try:
            socket.send_fds(self._socket, [packet], list(fds), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except OSError:  # gone, which `reports` says; or not reading now
            return False
        return True


class _Hangup(Exception):
    """The parent is gone, or wants us gone."""


class _Server:
    """The loop of the forkserver process."""

    def __init__(self, control: socket.socket, parent_pid: int) -> None:
        self._control = control
        self._parent_pid = parent_pid
        self._children: dict[int, str] = {}  # pid, which is also its process group -> name
        self._decode = msgspec.json.Decoder(Request).decode
        self._kept_fds: set[int] = set()  # opened by preloaded modules: theirs to keep in the children
        self._wake_out, self._wake_in = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(control, select.POLLIN)
        self._poll.register(self._wake_out, select.POLLIN)

    def run(self) -> None:
        """Until the parent hangs up; afterwards no descendant is left."""
        # While modules load nobody reads the socket, so that only this ends us with our parent. Off again before the
        # first fork: it fires when the parent's *thread* ends.
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)  # what our children leave behind becomes our child, also in other sessions
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake_in, warn_on_full_buffer=False)
        try:
            self._check_parent()
            self._preload()
            while True:
                self._serve()
        except _Hangup:
            pass
        finally:
            self._end()

    def _preload(self) -> None:
        began = time.monotonic()
        request, fds = self._receive()
        _close_all(fds)
        assert isinstance(request, Preload)
        own = _open_fds()
        sys.path[:] = request.sys_path
        for module in request.modules:
            try:
                importlib.import_module(module)
            except Exception:
                self._report(Refused("", f"preloading {module} failed:\n{traceback.format_exc()}", final=True))
                raise _Hangup from None
        self._kept_fds = _open_fds() - own
        gc.collect()
        gc.freeze()  # the collector of a child need not touch, and so copy, what was imported
        self._check_parent()
        _prctl(_PR_SET_PDEATHSIG, 0)
        self._report(Ready(time.monotonic() - began))

    def _serve(self) -> None:
        ready = {fd for fd, _ in self._poll.poll(_CHECK_PARENT_S * 1000.0)}
        self._check_parent()
        if self._wake_out in ready:
            with suppress(BlockingIOError):
                os.read(self._wake_out, 4096)
        self._reap()
        if self._control.fileno() in ready:
            request, fds = self._receive()
            try:
                if isinstance(request, Fork):
                    self._fork(request, fds)
                elif isinstance(request, Kill) and request.pid in self._children:
                    _kill_group(request.pid)
            finally:
                _close_all(fds)

    def _receive(self) -> tuple[Request, list[int]]:
        try:
            packet, fds, _, _ = socket.recv_fds(self._control, _PACKET_BYTES, MAX_FDS)
        except ConnectionResetError:
            raise _Hangup from None
        if not packet:
            raise _Hangup
        for fd in fds:
            os.set_inheritable(fd, False)
        return self._decode(packet), fds

    def _report(self, report: Report) -> None:
        try:
            self._control.send(msgspec.json.encode(report), socket.MSG_NOSIGNAL)
        except (BrokenPipeError, ConnectionResetError):
            raise _Hangup from None

    def _check_parent(self) -> None:
        if os.getppid() != self._parent_pid:
            raise _Hangup

    def _fork(self, request: Fork, fds: list[int]) -> None:
        threads = len(os.listdir("/proc/self/task"))
        if threads > 1:
            self._report(
                Refused(
                    request.name,
                    f"the fork server has {threads} threads, and forking one of several may hang the child for ever: "
                    "a preloaded module starts threads when it is imported; take it out of `preload`",
                    final=True,
                )
            )
            return
        server_pid = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            self._report(Refused(request.name, f"no new process can be had: {error.strerror}", final=False))
            return
        if pid == 0:
            _child(request, fds, self._kept_fds, server_pid)
        self._children[pid] = request.name
        self._report(Started(request.name, pid))

    def _reap(self) -> None:
        while True:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None:
                return
            pid = ended.si_pid
            if pid in self._children:  # its pid, and so its group's, is not reused before waitpid
                _kill_group(pid)
            os.waitpid(pid, 0)
            name = self._children.pop(pid, None)
            if name is not None:
                exited = ended.si_code == os.CLD_EXITED
                self._report(Exited(name, pid, ended.si_status if exited else 0, 0 if exited else ended.si_status))

    def _end(self) -> None:
        """Kill the groups, then whatever became our child by losing its own parent, until nothing is left."""
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
        for pid in self._children:
            _kill_group(pid)
        deadline = time.monotonic() + _END_S
        while time.monotonic() < deadline:
            for pid in _own_children():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            try:
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            except ChildProcessError:
                return
            signal.sigtimedwait({signal.SIGCHLD}, 0.01)  # the next death, or have a look


def _child(request: Fork, fds: list[int], kept_fds: set[int], server_pid: int) -> None:
    """The rest of the child's life; never returns."""
    code = 1
    try:
        os.setsid()
        signal.set_wakeup_fd(-1)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        for number in signal.valid_signals():
            with suppress(OSError, ValueError):  # SIGKILL and SIGSTOP
                signal.signal(number, signal.SIG_DFL)
        # To the whole group: the parent hears it and orders the stop. Not SIG_IGN, which exec would hand on: programs
        # that an environment runs could not be terminated by it any more.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: None)
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # as Python has it: a broken pipe is an exception
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != server_pid:  # it died before the line above
            os._exit(1)
        log_fd, *own = fds
        os.dup2(log_fd, 1)
        os.dup2(log_fd, 2)
        _close_all(_open_fds() - {0, 1, 2, *own, *kept_fds})
        faulthandler.enable(2, all_threads=True)
        os.nice(request.nice)
        module, _, function = request.entry.partition(":")
        getattr(importlib.import_module(module), function)(request.payload, own)
        code = 0
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            code = error.code or 0
        else:
            print(error.code, file=sys.stderr)
    except BaseException:
        with suppress(OSError, ValueError):
            sys.stdout.flush()
        traceback.print_exc()
    finally:
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code & 0xFF)


def _kill_group(pid: int) -> None:
    # Both: a child that was forked this instant has not made its own group yet, a leader that ended has left one.
    for kill in (os.killpg, os.kill):
        with suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


def _own_children() -> list[int]:
    pid = os.getpid()
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _open_fds() -> set[int]:
    with os.scandir("/proc/self/fd") as entries:
        return {int(entry.name) for entry in entries}  # the scan's own is in it and closed by now: _close_all forgives


def _close_all(fds: Sequence[int] | set[int]) -> None:
    for fd in fds:
        with suppress(OSError):
            os.close(fd)


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")


def main(arguments: Sequence[str]) -> None:
    """`python -m troupe.forkserver <control descriptor> <pid of the parent>`."""
    control, parent_pid = map(int, arguments)
    with socket.socket(fileno=control) as connection:
        connection.set_inheritable(False)
        _Server(connection, parent_pid).run()


if __name__ == "__main__":
    main(sys.argv[1:])

"""A private RabbitMQ node for people who have Debian's package but no server; nothing of it outlives its maker."""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Final

from troupe.errors import TroupeError, UserError

LOOPBACK: Final = "127.0.0.1"
START_TIMEOUT_S: Final = 90.0  # a small board takes half a minute
STOP_TIMEOUT_S: Final = 10.0
_USER: Final = "troupe"
_NODE: Final = "troupe@localhost"  # its port mapper is private, so the name need not be unique
_SCRIPTS: Final = Path("/usr/lib/rabbitmq/bin")  # the wrappers in /usr/sbin insist on root or the package's own user
_INSTALL: Final = "install it with  apt-get install rabbitmq-server"
_LOG_LINES: Final = 5

_CONFIG: Final = """\
default_user = {user}
default_pass = {password}
default_vhost = /
vm_memory_high_watermark.relative = 0.4
disk_free_limit.absolute = 256MB
log.file.level = warning
listeners.tcp.1 = 127.0.0.1:{port}
"""
_TLS_CONFIG: Final = """\
listeners.ssl.1 = {host}:{port}
ssl_options.certfile = {certificate}
ssl_options.keyfile = {key}
ssl_options.verify = verify_none
ssl_options.fail_if_no_peer_cert = false
"""


@dataclass(frozen=True, slots=True)
class Tls:
    """What the node shows to prove who it is."""

    certificate: Path
    key: Path


def start(folder: Path, *, port: int = 0, host: str = LOOPBACK, tls: Tls | None = None) -> Node:
    """A running node whose files are all in `folder`, which keeps its queues, its user and its password.

    It listens on loopback at `port` (0: a free one) and, where there is `tls`, at a second port of `host`. The
    processes end with the thread that called this, however that ends.
    """
    if host != LOOPBACK and tls is None:
        raise UserError(
            f"a broker at {host} without TLS would show its password to the network: give it a certificate and a key,"
            f" or leave it on {LOOPBACK}"
        )
    if not (_SCRIPTS / "rabbitmq-server").exists() or shutil.which("epmd") is None:
        raise UserError(f"RabbitMQ is not installed on this machine: {_INSTALL}")
    node = Node(folder.resolve(), port, host, tls)
    try:
        node.restart()
    except BaseException:
        node.stop()
        raise
    return node


class Node:
    """One RabbitMQ node and the port mapper of its own. Leave the block, or call `stop`, to end both."""

    def __init__(self, folder: Path, port: int, host: str, tls: Tls | None) -> None:
        self.folder = folder
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
        self._lock = _Lock(folder / "lock")
        self._password = _kept_secret(folder / "password")
        _kept_secret(folder / ".erlang.cookie")
        free = _free_ports(4)
        self.port, self._tls_port = port or free[0], free[1]
        self._host, self._tls = host, tls
        self._environment = _environment(folder, dist_port=free[2], epmd_port=free[3])
        self._epmd: subprocess.Popen[bytes] | None = None
        self._server: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        """Where this machine reaches it, password included."""
        return f"amqp://{_USER}:{self._password}@{LOOPBACK}:{self.port}/"

    @property
    def tls_address(self) -> str | None:
        """Where other machines reach it, if it has a certificate."""
        return f"amqps://{_USER}:{self._password}@{self._host}:{self._tls_port}/" if self._tls else None

    def restart(self) -> None:
        """Start what does not run, on the same ports, and wait until it takes connections."""
        if self._epmd is None or self._epmd.poll() is not None:
            mapper = ["epmd", "-port", self._environment["ERL_EPMD_PORT"], "-address", LOOPBACK]
            self._epmd = self._spawn(mapper, "epmd.log")
        if self._server is None or self._server.poll() is not None:
            self._write_config()
            self._server = self._spawn([str(_SCRIPTS / "rabbitmq-server")], "startup.log")
        self._wait_open()

    def running(self) -> bool:
        """The server's process is there."""
        return self._server is not None and self._server.poll() is None

    def kill(self) -> None:
        """End the server as a power cut would."""
        _end(self._server, signal.SIGKILL, STOP_TIMEOUT_S)

    def stop(self) -> None:
        """End both processes: asked, then killed."""
        _end(self._server, signal.SIGTERM, STOP_TIMEOUT_S)
        _end(self._epmd, signal.SIGKILL, STOP_TIMEOUT_S)
        self._lock.close()

    def control(self, *arguments: str, timeout_s: float = 60.0) -> str:
        """What `rabbitmqctl` answers; it takes a second of a processor to start."""
        done = subprocess.run(
            [str(_SCRIPTS / "rabbitmqctl"), "--quiet", "--node", _NODE, *arguments],
            env=self._environment, capture_output=True, text=True, timeout=timeout_s, check=False,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
        if done.returncode:
            raise TroupeError(f"rabbitmqctl {arguments[0]} failed: {(done.stderr or done.stdout).strip()}")
        return done.stdout

    def last_words(self) -> str:
        """The end of what it printed, for a sentence."""
        lines = (self.folder / "startup.log").read_text(errors="replace").split("\n")
        return " | ".join([line.strip() for line in lines if line.strip()][-_LOG_LINES:]) or "it printed nothing"

    def __enter__(self) -> Node:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _write_config(self) -> None:
        text = _CONFIG.format(user=_USER, password=self._password, port=self.port)
        if self._tls:
            certificate, key = self._tls.certificate.resolve(), self._tls.key.resolve()
            text += _TLS_CONFIG.format(host=self._host, port=self._tls_port, certificate=certificate, key=key)
        _write_private(self.folder / "rabbitmq.conf", text)
        _write_private(self.folder / "enabled_plugins", "[].\n")

    def _spawn(self, command: list[str], log: str) -> subprocess.Popen[bytes]:
        """A process that the kernel kills when the thread that started it is gone; `exec` keeps that."""
        with (self.folder / log).open("wb") as output:
            return subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", "--", *command],
                env=self._environment, cwd=self.folder, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                start_new_session=True,  # Ctrl-C in the terminal is ours to handle
            )  # fmt: skip

    def _wait_open(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            if not self.running():
                raise TroupeError(f"the broker in {self.folder} did not start: {self.last_words()}")
            with suppress(OSError), socket.create_connection((LOOPBACK, self.port), timeout=1.0):
                return
            time.sleep(0.05)
        raise TroupeError(f"the broker in {self.folder} took over {START_TIMEOUT_S:.0f} s to start")


def serve(
    folder: Path,
    *,
    port: int = 0,
    host: str = LOOPBACK,
    tls: Tls | None = None,
    tell: Callable[[str], None] = print,
) -> None:
    """Run a node until SIGINT or SIGTERM; its address is told once it takes connections. For the main thread."""
    asked = threading.Event()

    def ask(number: int, frame: FrameType | None) -> None:
        asked.set()

    with ExitStack() as leaving:
        for number in (signal.SIGINT, signal.SIGTERM):
            leaving.callback(signal.signal, number, signal.signal(number, ask))
        node = leaving.enter_context(start(folder, port=port, host=host, tls=tls))
        tell(node.tls_address or node.address)
        while not asked.wait(0.5):
            if not node.running():
                raise TroupeError(f"the broker in {folder} ended by itself: {node.last_words()}")


def _environment(folder: Path, *, dist_port: int, epmd_port: int) -> dict[str, str]:
    """Everything the scripts would otherwise look for in the system's folders."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("RABBITMQ_", "ERL_"))}
    ours: Mapping[str, object] = {
        "HOME": folder,  # the cookie is looked for there
        "LC_ALL": "C.UTF-8",
        "ERL_EPMD_ADDRESS": LOOPBACK,
        "ERL_EPMD_PORT": epmd_port,
        "RABBITMQ_NODENAME": _NODE,
        "RABBITMQ_DIST_PORT": dist_port,
        "RABBITMQ_CONF_ENV_FILE": folder / "no-rabbitmq-env.conf",
        "RABBITMQ_CONFIG_FILE": folder / "rabbitmq.conf",
        "RABBITMQ_ADVANCED_CONFIG_FILE": folder / "no-advanced.config",
        "RABBITMQ_ENABLED_PLUGINS_FILE": folder / "enabled_plugins",
        "RABBITMQ_MNESIA_BASE": folder / "mnesia",
        "RABBITMQ_LOG_BASE": folder / "log",
        "RABBITMQ_PID_FILE": folder / "pid",
        "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-start_epmd false -kernel inet_dist_use_interface {127,0,0,1}",
        "RABBITMQ_CTL_ERL_ARGS": "-start_epmd false -kernel inet_dist_use_interface {127,0,0,1}",
        "RUNNING_UNDER_SYSTEMD": "true",  # the script then becomes the server instead of waiting for it
    }
    return kept | {name: str(value) for name, value in ours.items()}


class _Lock:
    """Held while a node runs from a folder; the kernel gives it back."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.close()
            raise UserError(f"a broker runs from {path.parent} already: use its address, or another folder") from None

    def close(self) -> None:
        self._file.close()


def _kept_secret(path: Path) -> str:
    """The secret in `path`, made at the first start."""
    if not path.exists():
        _write_private(path, secrets.token_hex(16), mode=0o400)
    return path.read_text()


def _write_private(path: Path, text: str, mode: int = 0o600) -> None:
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w") as file:
        file.write(text)


def _free_ports(count: int) -> list[int]:
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind((LOOPBACK, 0))
        return [one.getsockname()[1] for one in sockets]


def _end(process: subprocess.Popen[bytes] | None, number: signal.Signals, timeout_s: float) -> None:
    if process is None:
        return
    process.send_signal(number)
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(timeout_s)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)  # its helpers, should one linger

"""Where an AMQP broker is, how to reach it, and its errors in one sentence that says what, where and what to do."""

from __future__ import annotations

import logging
import re
import socket
import ssl
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from troupe.errors import ConfigError, MissingExtra, PeerLost, TroupeError, UserError

try:
    import pika as pika  # its other users take it from here, where it is missed with a sentence
    from pika import exceptions
except ImportError as error:
    raise MissingExtra("pika, which --via amqp:// needs,", "rabbitmq") from error

HEARTBEAT_S: Final = 5  # pika looks every 5 s more than that: what is cut off knows after 10 to 20 s
_CONNECT_TIMEOUT_S: Final = 5.0  # TCP, for each address of the host
_HANDSHAKE_TIMEOUT_S: Final = 10.0  # TCP, TLS and AMQP together
_PORTS: Final = {"amqp": 5672, "amqps": 5671}
_FORM: Final = "the form is amqp://user:password@host:port/vhost, percent-encoded"

# Whatever ends a handshake, pika makes a guess of its own of it and keeps the broker's words only as text.
_CLOSED: Final = re.compile(r"ConnectionClosedByBroker: \((\d+)\) ['\"](.*?)['\"]\W*$")

logging.getLogger("pika").setLevel(logging.CRITICAL + 1)  # it prints the traceback of every refused connection


class Locked(UserError):
    """Another connection holds exclusively what this one needs."""


@dataclass(frozen=True)
class Address:
    """A broker, and who we are there. The password is never shown."""

    host: str
    port: int
    user: str = "guest"
    password: str = field(default="guest", repr=False)
    vhost: str = "/"
    tls: bool = False
    cafile: str = ""  # PEM of the authority to trust; empty: those of the system

    @classmethod
    def parse(cls, text: str) -> Address:
        """`amqp://user:password@host:port/vhost`, or `amqps://`, with `?cafile=` where the authority is one's own."""
        try:
            parts = urlsplit(text)
            port = parts.port
        except ValueError as error:
            raise ConfigError(f"not the address of a broker: {error}; {_FORM}") from None
        if parts.scheme not in _PORTS:
            raise ConfigError(f"not the address of a broker: it begins with {parts.scheme!r}; {_FORM}")
        if not parts.hostname or port == 0 or parts.fragment or "/" in parts.path[1:]:
            raise ConfigError(f"not the address of a broker: {_what_is_wrong(parts.hostname, port)}; {_FORM}")
        query = dict(parse_qsl(parts.query, keep_blank_values=True))
        tls = parts.scheme == "amqps"
        if set(query) - ({"cafile"} if tls else set()):
            raise ConfigError(f"{parts.hostname}: of a broker's address only ?cafile= may follow, and only of amqps://")
        return cls(
            host=parts.hostname,
            port=port or _PORTS[parts.scheme],
            user=unquote(parts.username) if parts.username is not None else "guest",
            password=unquote(parts.password) if parts.password is not None else "guest",
            vhost=unquote(parts.path[1:]) or "/",
            tls=tls,
            cafile=query.get("cafile", ""),
        )

    @property
    def redacted(self) -> str:
        """The address without its password."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        vhost = "" if self.vhost == "/" else quote(self.vhost, safe="")
        return f"{'amqps' if self.tls else 'amqp'}://{quote(self.user, safe='')}@{host}:{self.port}/{vhost}"

    def __str__(self) -> str:
        return self.redacted


def parameters(address: Address, name: str) -> Any:
    """What pika connects with; `name` is what the broker's own tools show."""
    return pika.ConnectionParameters(
        host=address.host,
        port=address.port,
        virtual_host=address.vhost,
        credentials=pika.PlainCredentials(address.user, address.password),
        heartbeat=HEARTBEAT_S,
        blocked_connection_timeout=None,  # an alarm of the broker passes; what waits has a timeout of its own
        socket_timeout=_CONNECT_TIMEOUT_S,
        stack_timeout=_HANDSHAKE_TIMEOUT_S,
        ssl_options=pika.SSLOptions(_context(address), address.host) if address.tls else None,
        client_properties={"connection_name": name},
    )


def explained(error: BaseException, address: Address) -> TroupeError:
    """The sentence for whatever pika, ssl or the socket said about `address`."""
    causes = list(_causes(error))
    for cause in causes:
        if isinstance(cause, ssl.SSLCertVerificationError):
            return ConfigError(
                f"{address}: its certificate is not trusted ({cause.verify_message}): name the file of the authority"
                " that signed it, amqps://...?cafile=/path/to/ca.pem"
            )
        if isinstance(cause, exceptions.ChannelClosedByBroker):
            return _of_channel(cause.reply_code, cause.reply_text, address)
        if isinstance(cause, exceptions.ConnectionClosedByBroker):
            return _of_connection(cause.reply_code, cause.reply_text, address)
        if isinstance(cause, exceptions.AMQPConnectionError) and (said := _CLOSED.search(str(cause))):
            return _of_connection(int(said[1]), said[2], address)
    return _of_socket(causes, address)


def _what_is_wrong(host: str | None, port: int | None) -> str:
    if not host:
        return "no host"
    return "port 0" if port == 0 else f"what follows {host} is no virtual host (a / in it is %2f, a # %23)"


def _context(address: Address) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=address.cafile or None)
    except (OSError, ssl.SSLError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"{address}: {address.cafile} cannot be read as certificates: {why}") from None


def _causes(error: BaseException) -> Iterator[BaseException]:
    """`error`, and what pika wrapped into it, outermost first."""
    yield error
    inner = [getattr(error, "exception", None), *getattr(error, "exceptions", ()), *error.args, error.__cause__]
    for one in inner:
        if isinstance(one, BaseException):
            yield from _causes(one)


def _bad_password(address: Address) -> ConfigError:
    return ConfigError(
        f"{address}: the broker refuses the user {address.user!r} or the password: check both in the address"
    )


def _of_socket(causes: list[BaseException], address: Address) -> TroupeError:
    for cause in causes:
        if isinstance(cause, ssl.SSLError):
            return ConfigError(f"{address}: what answers there does not speak TLS: check the port, or write amqp://")
        if isinstance(cause, exceptions.IncompatibleProtocolError):
            return PeerLost(
                f"{address}: what answers there does not speak AMQP: check the port; for TLS write amqps://"
            )
        if isinstance(cause, socket.gaierror):
            return PeerLost(f"{address}: there is no host of that name: check the address")
        if isinstance(cause, exceptions.StreamLostError | exceptions.AMQPHeartbeatTimeout):
            return PeerLost(f"{address}: the connection to the broker was lost: it is tried again")
    reasons = [str(cause.strerror) for cause in causes if isinstance(cause, OSError) and cause.strerror]
    why = reasons[-1] if reasons else type(causes[-1]).__name__
    return PeerLost(f"{address}: no broker answers there ({why}): start one with  troupe broker, or check the address")


def _of_connection(code: int, text: str, address: Address) -> TroupeError:
    if code == 403:
        return _bad_password(address)
    if code == 530 and "not found" in text:
        return ConfigError(
            f"{address}: the broker has no virtual host {address.vhost!r}: name one that is there, or make it with "
            f" rabbitmqctl add_vhost {address.vhost}"
        )
    if code == 530:
        return _no_permission(address, f"may not use the virtual host {address.vhost!r}")
    return PeerLost(f"{address}: the broker closed the connection ({text}): it is tried again")


def _of_channel(code: int, text: str, address: Address) -> TroupeError:
    if code == 403:
        what = text.partition(" - ")[2].partition(" refused")[0]
        return _no_permission(address, f"has no permission there ({what} refused)")
    if code == 405:
        return Locked(f"{address}: another connection holds it ({text})")
    if code == 406:
        return UserError(f"{address}: it is there with other settings ({text}): use another run id, or delete it there")
    return PeerLost(f"{address}: the broker closed the channel ({text}): it is tried again")


def _no_permission(address: Address, what: str) -> ConfigError:
    return ConfigError(
        f"{address}: the user {address.user!r} {what}: allow it with "
        f" rabbitmqctl set_permissions -p {address.vhost} {address.user} '.*' '.*' '.*'"
    )

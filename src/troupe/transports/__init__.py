"""The transports, by name: what each is for. They meet the schemes in `cast`."""

from __future__ import annotations

TRANSPORTS: dict[str, str] = {
    "shared": "worker processes on this machine; rings in nameless shared memory",
    "memory": "one process, one role after another: the serial twin, for tests and debugging",
    "rabbitmq": "other machines too, through a message broker: --via amqp://user:password@host/vhost",
}
REMOTE = ("rabbitmq",)  # those that reach other machines, so that nobody need play on this one
_SCHEMES = {"amqp": "rabbitmq", "amqps": "rabbitmq"}  # of addresses


def transport(via: str) -> str:
    """Which of them carries what goes `via` an address; a transport without one goes by its name."""
    return _SCHEMES.get(via.partition("://")[0], via)

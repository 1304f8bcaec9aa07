"""The transports, by name: what each is for. They meet the schemes in `launch`."""

from __future__ import annotations

TRANSPORTS: dict[str, str] = {
    "shared": "worker processes on this machine; rings in nameless shared memory",
    "memory": "one process, one role after another: the serial twin, for tests and debugging",
}

"""A broker's address, and the sentence for each way in which connecting to it can fail."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import replace

import pytest

from rabbit import new_run, rollout, wait_for
from troupe.broker import Node
from troupe.errors import ConfigError, PeerLost, TroupeError
from troupe.transports.amqp import Address
from troupe.transports.desk import RabbitDesk
from troupe.transports.rabbitmq import RabbitHub, RabbitMailbox

SECRET = "s3cret"


def test_an_address_is_read_with_all_its_parts() -> None:
    assert Address.parse("amqp://ann:s3cret@box:5673/lab") == Address("box", 5673, "ann", SECRET, "lab")
    assert Address.parse("amqp://box") == Address.parse("amqp://guest:guest@box:5672/")
    assert Address.parse("amqps://box").port == 5671
    odd = Address.parse("amqp://a%40b:p%2F%3Aw@[::1]/%2Fmy%20host")
    assert (odd.user, odd.password, odd.host, odd.vhost) == ("a@b", "p/:w", "::1", "/my host")
    own = Address.parse("amqps://ann:s3cret@box/lab?cafile=/tmp/ca.pem")
    assert (own.tls, own.cafile) == (True, "/tmp/ca.pem")


def test_an_address_never_shows_its_password() -> None:
    address = Address.parse(f"amqp://ann:{SECRET}@box:5673/my%2Flab")
    assert str(address) == address.redacted == "amqp://ann@box:5673/my%2Flab"
    assert SECRET not in f"{address}{address!r}"
    assert Address.parse(str(address)).vhost == "my/lab"


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (f"http://ann:{SECRET}@box", "'http'"),
        (f"ann:{SECRET}@box", "begins with"),
        ("amqp://", "no host"),
        (f"amqp://ann:{SECRET}@box:many/", "ort"),
        (f"amqp://ann:{SECRET}@box:0/", "port 0"),
        (f"amqp://ann:{SECRET}@box/a/b", "%2f"),
        (f"amqp://ann:{SECRET}@box/a#b", "%23"),
        (f"amqp://ann:{SECRET}@box/?cafile=x", "only of amqps"),
        (f"amqps://ann:{SECRET}@box/?verify=no", "cafile"),
    ],
)
def test_what_is_no_address_is_refused_in_one_sentence_without_the_password(text: str, what: str) -> None:
    with pytest.raises(ConfigError, match=what) as refused:
        Address.parse(text)
    assert SECRET not in str(refused.value)
    assert "\n" not in str(refused.value)


def test_without_pika_the_extra_is_named() -> None:
    code = "import sys; sys.modules['pika'] = None\nimport troupe.transports.rabbitmq"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert "MissingExtra: pika, which --via amqp:// needs, is not installed" in done.stderr
    assert "troupe[rabbitmq]" in done.stderr


def refused(address: Address, kind: type[TroupeError], *words: str) -> None:
    """All three that connect say it, in one sentence, soon, and without the password."""
    began = time.monotonic()
    with pytest.raises(kind) as raised:
        RabbitHub(address, new_run(), timeout_s=2.0)
    assert time.monotonic() - began < 4.0
    for word in (*words, str(address)):
        assert word in str(raised.value)
    assert address.password not in str(raised.value)
    assert "\n" not in str(raised.value)


def test_no_broker_there(node: Node) -> None:
    refused(replace(Address.parse(node.address), port=1), PeerLost, "no broker answers", "refused", "troupe broker")
    nowhere = replace(Address.parse(node.address), host="no-such-host.invalid")
    refused(nowhere, PeerLost, "no host of that name")


def test_wrong_password(node: Node) -> None:
    refused(replace(Address.parse(node.address), password="wrongpass"), ConfigError, "refuses the user 'troupe'")


def test_no_such_virtual_host(node: Node) -> None:
    refused(replace(Address.parse(node.address), vhost="nowhere"), ConfigError, "'nowhere'", "add_vhost")


def test_no_permission(node: Node) -> None:
    """Neither where the virtual host is closed to the user, nor where it is open and the names in it are not."""
    stranger = replace(Address.parse(node.address), user="ann", password=SECRET)
    node.control("add_user", "ann", SECRET)
    refused(stranger, ConfigError, "may not use the virtual host", "set_permissions -p / ann")
    node.control("set_permissions", "ann", "^other", ".*", ".*")
    refused(stranger, ConfigError, "has no permission there", "troupe.test-", "set_permissions -p / ann")
    with pytest.raises(ConfigError, match="no permission"):
        RabbitDesk(stranger, timeout_s=2.0)


def test_tls_is_verified(node: Node) -> None:
    assert node.tls_address is not None
    address = Address.parse(node.tls_address)
    refused(address, ConfigError, "certificate is not trusted", "cafile=")
    authority = str(node.folder.parent / "tls" / "ca.pem")
    trusted = Address.parse(f"{node.tls_address}?cafile={authority}")
    refused(replace(trusted, host="localhost"), ConfigError, "certificate is not trusted", "localhost")
    refused(replace(trusted, cafile="/no/such/file"), ConfigError, "/no/such/file", "No such file")
    refused(replace(trusted, port=node.port), ConfigError, "does not speak TLS")
    hub = RabbitHub(trusted, run := new_run())
    worker = RabbitMailbox(hub.connect("worker-0"), trusted)
    worker.send("learner", rollout(run, 1, size=300_000), 5.0)
    got = hub.mailbox().receive(5.0)
    assert got is not None
    assert got.arrays["data"].sum() == 300_000
    worker.close()
    hub.close()


def test_amqp_to_a_tls_port(node: Node) -> None:
    assert node.tls_address is not None
    address = replace(Address.parse(node.tls_address), tls=False)
    with pytest.raises(PeerLost, match="does not speak AMQP"):
        RabbitHub(address, new_run(), timeout_s=2.0)


def test_nothing_is_left_of_a_connection(node: Node) -> None:
    """No thread, no descriptor, whether it came up or not."""
    import os
    import threading

    address = Address.parse(node.address)
    RabbitHub(address, new_run()).close()
    before = len(os.listdir("/proc/self/fd")), threading.active_count()
    RabbitHub(address, new_run()).close()
    with pytest.raises(PeerLost):
        RabbitHub(replace(address, port=1), new_run(), timeout_s=0.3)
    wait_for(lambda: (len(os.listdir("/proc/self/fd")), threading.active_count()) == before)

"""Rings and slots in shared memory, seen from close by: wrap-around, damage, fairness, and nothing left behind."""

from __future__ import annotations

import errno
import json
import mmap
import os
import random
import signal
import time
from collections.abc import Iterator

import numpy as np
import pytest

from troupe import region
from troupe.errors import BadMessage, PeerLost, TroupeError
from troupe.pulse import Phase, Pulse
from troupe.region import Bell, reserve
from troupe.transports import shared
from troupe.transports.rings import Ring, Slot
from troupe.transports.shared import SharedHub, SharedMailbox
from troupe.types import Message


def ring(capacity: int) -> Ring:
    return Ring(memoryview(bytearray(Ring.HEADER_BYTES + capacity)))


def read(source: Ring | Slot) -> bytes | None:
    value = source.read()
    return None if value is None else bytes(value)


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def message(sequence: int, sender: str = "worker", size: int = 64) -> Message:
    return Message("k", "run", sender, sequence=sequence, arrays={"a": np.full(size, sequence % 251, np.uint8)})


@pytest.fixture
def hub() -> Iterator[SharedHub]:
    made = SharedHub(1 << 16, {"weights": 1 << 20})
    yield made
    made.close()


def child(hub: SharedHub, name: str) -> SharedMailbox:
    connection = hub.connect(name)
    return SharedMailbox(connection.spec, [os.dup(fd) for fd in connection.fds])


def test_records_of_all_sizes_pass_round_the_ring_unchanged() -> None:
    rng = random.Random(1)
    pipe = ring(1024)
    waiting: list[bytes] = []
    passed = 0
    while passed < 3000:
        record = rng.randbytes(rng.randint(0, 400))
        cut = rng.randint(0, len(record))
        if pipe.write([record[:cut], memoryview(record)[cut:]], len(record)):
            waiting.append(record)
        else:
            assert waiting, "an empty ring takes what fits"
            assert read(pipe) == waiting.pop(0)
            passed += 1
    assert pipe.corrupted == 0


def test_positions_may_wrap_around_64_bits() -> None:
    pipe = ring(256)
    start = 2**64 - 96
    pipe._words[0] = pipe._words[8] = start
    for number in range(20):
        assert pipe.write([bytes([number]) * 50], 50)
        assert read(pipe) == bytes([number]) * 50


def test_a_record_of_just_the_capacity_fits_and_one_more_byte_never_does() -> None:
    pipe = ring(256)
    assert pipe.write([bytes(232)], 232)
    assert read(pipe) == bytes(232)
    with pytest.raises(BadMessage, match="cannot pass"):
        pipe.write([bytes(233)], 233)


def test_every_flipped_bit_of_a_record_is_noticed_and_the_ring_goes_on() -> None:
    rng = random.Random(2)
    for bit in rng.sample(range(8 * (24 + 40)), 200):
        pipe = ring(256)
        pipe.write([b"a" * 40], 40)
        pipe.write([b"b" * 40], 40)
        pipe._data[bit // 8] ^= 1 << (bit % 8)
        got = read(pipe)
        if not 96 <= bit < 128:  # the reserved bytes, which nobody reads
            assert got in (None, b"b" * 40)
            assert pipe.corrupted >= 1
        while read(pipe) is not None:
            pass
        assert pipe.write([b"c" * 40], 40)
        assert read(pipe) == b"c" * 40


@pytest.mark.parametrize("head", [2**63, 2**64 - 1, 1000, 7])
def test_a_head_that_cannot_be_is_counted_and_the_ring_goes_on(head: int) -> None:
    pipe = ring(256)
    pipe._words[0] = head
    assert read(pipe) is None
    assert pipe.corrupted == 1
    assert pipe.write([b"next"], 4)
    assert read(pipe) == b"next"


def test_a_slot_is_never_torn_under_a_reader(hub: SharedHub) -> None:
    """A writing process publishes without a pause; each value read is one that was written, and they only get newer."""
    fd = reserve("test-slot", Slot.bytes_for(1 << 16))
    memory = memoryview(mmap.mmap(fd, Slot.bytes_for(1 << 16)))
    os.close(fd)
    writer_pid = os.fork()
    if writer_pid == 0:  # never returns into pytest
        try:
            slot = Slot(memory)
            for count in range(10**9):
                written = count.to_bytes(8, "little") * 8192
                slot.write([written], len(written))
        finally:
            os._exit(1)
    try:
        slot, newest, reads = Slot(memory), -1, 0
        deadline = time.monotonic() + 20.0
        while reads < 200 and time.monotonic() < deadline:
            value = read(slot)
            if value is not None:
                count = int.from_bytes(value[:8], "little")
                assert value == value[:8] * 8192
                assert count > newest
                newest, reads = count, reads + 1
        assert reads == 200
    finally:
        os.kill(writer_pid, signal.SIGKILL)
        os.waitpid(writer_pid, 0)


def test_a_damaged_slot_is_not_returned_and_the_next_value_is(hub: SharedHub) -> None:
    slot = Slot(memoryview(bytearray(Slot.bytes_for(100))))
    slot.write([b"one"], 3)
    slot._halves[1][64] ^= 1
    assert read(slot) is None
    slot.write([b"two"], 3)
    assert read(slot) == b"two"
    assert read(slot) is None


def test_a_fast_sender_does_not_starve_the_others(hub: SharedHub) -> None:
    boxes = [child(hub, f"w{n}") for n in range(3)]
    for sequence in range(1, 101):
        boxes[0].send("learner", message(sequence, "w0"), 1.0)
    for box in boxes[1:]:
        box.send("learner", message(1, box.name), 1.0)
    first = [hub.mailbox().receive(1.0) for _ in range(3)]
    assert {m.sender for m in first if m} == {"w0", "w1", "w2"}
    for box in boxes:
        box.close()


def test_a_damaged_message_is_counted_with_its_reason_and_the_next_is_delivered(hub: SharedHub) -> None:
    box = child(hub, "w")
    box._link.up.write([b"not a frame of ours, yet its CRC is right"], 41)
    box.send("learner", message(1, "w"), 1.0)
    mailbox = hub.mailbox()
    got = mailbox.receive(1.0)
    assert got is not None
    assert mailbox.receipts.corrupted == 1
    assert "bad message" in mailbox.receipts.last_damage
    box.close()


def test_the_next_incarnation_is_handed_the_same_ring_with_what_waits_in_it(hub: SharedHub) -> None:
    first = child(hub, "w")
    first.send("learner", message(1, "w"), 1.0)
    first.close()
    second = child(hub, "w")
    second.send("learner", message(2, "w"), 1.0)
    mailbox = hub.mailbox()
    assert [m.sequence for _ in range(2) if (m := mailbox.receive(1.0))] == [1, 2]
    second.close()


def test_a_spec_is_json_and_is_all_that_a_child_needs(hub: SharedHub) -> None:
    connection = hub.connect("w")
    spec = json.loads(json.dumps(connection.spec))
    box = SharedMailbox(spec, [os.dup(fd) for fd in connection.fds])
    hub.mailbox().publish("weights", message(7))
    assert box.latest("weights") is not None
    with pytest.raises(BadMessage, match="declared"):
        box.latest("nothing")
    with pytest.raises(BadMessage, match="only 'learner' does"):
        box.publish("weights", message(8))
    box.close()


def test_stop_ends_waits_and_waiting_shows_a_sign_of_life(hub: SharedHub) -> None:
    connection = hub.connect("w")
    beats: list[float] = []
    box = SharedMailbox(connection.spec, [os.dup(f) for f in connection.fds], lambda: beats.append(time.monotonic()))
    assert box.wait_latest("weights", 0.25) is None
    assert len(beats) >= 2
    with pytest.raises(PeerLost, match="stayed full"):
        while True:
            box.send("learner", message(0, size=8000), 0.05)
    assert not box.stopping
    hub.stop()
    assert box.stopping
    began = time.monotonic()
    assert box.wait_latest("weights", 30.0) is None
    with pytest.raises(PeerLost, match="stopping"):
        box.send("learner", message(0, size=8000), 30.0)
    assert time.monotonic() - began < 5.0
    box.close()


def test_messages_pass_between_processes_through_a_ring_they_fill_many_times(
    hub: SharedHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared, "_SLICE_S", 30.0)  # only the bells wake anyone
    connection = hub.connect("w")
    pid = os.fork()
    if pid == 0:  # never returns into pytest
        try:
            box = SharedMailbox(connection.spec, connection.fds)
            for sequence in range(1, 2001):
                box.send("learner", message(sequence, "w", size=sequence % 9000), 15.0)
        finally:
            os._exit(0)
    mailbox = hub.mailbox()
    got = [mailbox.receive(15.0) for _ in range(2000)]
    os.waitpid(pid, 0)
    assert [m.sequence for m in got if m] == list(range(1, 2001))
    assert all(m.arrays["a"].size == m.sequence % 9000 for m in got if m)
    assert mailbox.receipts.corrupted == 0


def test_nothing_is_left_when_a_hub_is_closed() -> None:
    before, listing = open_fds(), sorted(os.listdir("/dev/shm"))
    hub = SharedHub(1 << 16, {"weights": 1 << 16})
    boxes = [child(hub, f"w{n}") for n in range(3)]
    pulse = Pulse.create()
    boxes[0].send("learner", message(1), 1.0)
    assert sorted(os.listdir("/dev/shm")) == listing
    closables: list[SharedMailbox | Pulse] = [*boxes, pulse]
    for closable in closables:
        closable.close()
        closable.close()
    hub.close()
    assert open_fds() == before
    assert sorted(os.listdir("/dev/shm")) == listing


def test_memory_that_is_not_there_is_an_error_at_the_start_and_leaks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    # Only ever with a pretended limit: a memfd has none, and the kernel would kill other processes to fill it.
    before = open_fds()
    monkeypatch.setattr(region, "available_bytes", lambda: 10_000)
    with pytest.raises(TroupeError, match="10000 are free"):
        reserve("too-large", 10_001)

    def full(fd: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(TroupeError, match="No space left"):
        reserve("full", 4096)
    assert open_fds() == before


def test_without_memfd_a_file_without_a_name_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    fd = reserve("fallback", 4096)
    assert os.fstat(fd).st_nlink == 0
    assert os.fstat(fd).st_blocks * 512 >= 4096
    os.close(fd)


def test_reserved_memory_is_there_and_what_is_free_is_known() -> None:
    assert 1 << 20 < region.available_bytes() < 1 << 50
    fd = reserve("pages", 1 << 16)
    assert os.fstat(fd).st_blocks * 512 == 1 << 16  # ftruncate would leave 0 here, and a SIGBUS for later
    os.close(fd)


def test_a_bell_rung_before_the_wait_is_heard() -> None:
    bell = Bell()
    bell.ring()
    began = time.monotonic()
    bell.wait(10.0)
    bell.wait(0.01)
    assert time.monotonic() - began < 5.0
    bell.close()


def test_a_pulse_tells_phase_steps_and_where_the_time_went() -> None:
    pulse = Pulse.create()
    twin = Pulse.attach(os.dup(pulse.fd))
    assert pulse.read().at_s == 0.0
    twin.beat(Phase.PLAY)
    twin.add_steps(40)
    twin.beat(Phase.SEND)
    twin.touch()
    read = pulse.read()
    assert abs(read.at_s - time.monotonic()) < 5.0
    assert (read.phase, read.steps) == (Phase.SEND, 40)
    assert read.seconds[Phase.PLAY] > 0.0
    assert read.seconds[Phase.SEND] > 0.0
    assert read.seconds[Phase.LEARN] == 0.0
    pulse.rest()
    assert (pulse.read().at_s, pulse.read().steps) == (0.0, 40)
    pulse._words[1] = 99  # scribbled over
    assert pulse.read().phase is Phase.START
    twin.close()
    pulse.close()

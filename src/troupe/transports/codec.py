"""Message to bytes and back: a small typed header, then the raw arrays; whatever is malformed is a BadMessage.

A frame is

    prefix   24 bytes: magic, protocol version, reserved, header bytes, reserved, bytes of the whole frame
    header   MessagePack of `_Header`, at most 64 KiB, padded with zeros to 8 bytes
    arrays   raw little-endian, C order, each padded with zeros to 8 bytes

The layout has one encoding for each message: `decode` refuses every other one (unknown fields, repeated keys, padding
that is not zero), so that two peers can never read the same bytes differently.
"""

from __future__ import annotations

import math
import struct
from typing import Annotated, Final, NoReturn

import msgspec
import numpy as np

from troupe.errors import BadMessage
from troupe.types import Array, Message

MAGIC: Final = b"TRPE"
PROTOCOL: Final = 1
MAX_HEADER_BYTES: Final = 64 * 1024
MAX_MESSAGE_BYTES: Final = 16 * 1024 * 1024
MAX_DIMENSIONS: Final = 8
ALIGNMENT: Final = 8  # bytes; the widest dtype below

_DTYPES: Final = {
    name: np.dtype(code)
    for name, code in {
        "bool": "?",
        "u1": "u1",
        "i1": "i1",
        "u2": "<u2",
        "i2": "<i2",
        "u4": "<u4",
        "i4": "<i4",
        "u8": "<u8",
        "i8": "<i8",
        "f2": "<f2",
        "f4": "<f4",
        "f8": "<f8",
    }.items()
}
_NAMES: Final = {dtype: name for name, dtype in _DTYPES.items()}
_PREFIX: Final = struct.Struct("<4sHHIIQ")
_PADDING: Final = tuple(bytes(n) for n in range(ALIGNMENT))

_Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class _Spec(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    name: str
    dtype: str
    shape: list[_Count]


class _Header(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    kind: str
    run: str
    sender: str
    incarnation: _Count
    sequence: _Count
    version: _Count
    meta: dict[str, bool | int | float | str]
    arrays: list[_Spec]


_pack: Final = msgspec.msgpack.Encoder().encode
_unpack: Final = msgspec.msgpack.Decoder(_Header).decode


def encode(message: Message) -> list[bytes | memoryview]:
    """The frame of `message` in pieces to be written one after the other.

    Contiguous little-endian arrays are not copied: the views alias them until the pieces are written.
    """
    specs: list[_Spec] = []
    pieces: list[bytes | memoryview] = []
    array_bytes = 0
    for name, array in message.arrays.items():
        plain = _plain(name, array)
        specs.append(_Spec(name, _NAMES[plain.dtype], list(array.shape)))
        if plain.nbytes:
            pieces.append(plain.reshape(-1).view(np.uint8).data)
            if padding := -plain.nbytes % ALIGNMENT:
                pieces.append(_PADDING[padding])
            array_bytes += plain.nbytes + padding
    header = _packed_header(message, specs)
    total = _PREFIX.size + _padded(len(header)) + array_bytes
    prefix = _PREFIX.pack(MAGIC, PROTOCOL, 0, len(header), 0, total)
    return [prefix + header + _PADDING[-len(header) % ALIGNMENT], *pieces]


def encoded_size(message: Message) -> int:
    """Bytes of the frame that `encode` gives."""
    return sum(map(len, encode(message)))


def decode(
    buffer: memoryview | bytes | bytearray, max_bytes: int = MAX_MESSAGE_BYTES, *, copy: bool = False
) -> Message:
    """The message in `buffer`, which must hold one whole frame and nothing else; BadMessage for anything malformed.

    The arrays are views of `buffer`, writable where it is (so give a buffer that nobody else keeps, or a read-only
    one); with `copy` they are arrays of their own. All lengths are checked before anything is allocated.
    """
    view = memoryview(buffer).cast("B")
    header, start = _read_header(view, max_bytes)
    arrays: dict[str, Array] = {}
    for spec in header.arrays:
        if spec.name in arrays:
            _bad(f"two arrays are named {spec.name!r}")
        arrays[spec.name], start = _read_array(view, start, spec, max_bytes, copy)
    if start != len(view):
        _bad(f"{len(view) - start} bytes follow the last array")
    return Message(
        kind=header.kind,
        run=header.run,
        sender=header.sender,
        incarnation=header.incarnation,
        sequence=header.sequence,
        version=header.version,
        meta=header.meta,
        arrays=arrays,
    )


def _plain(name: str, array: Array) -> Array:
    """`array` as C-ordered little-endian, itself where it is that already."""
    little = array.dtype.newbyteorder("<")
    if little not in _NAMES:
        _bad(f"array {name!r} has dtype {array.dtype}, which does not travel; use one of {', '.join(_DTYPES)}")
    if array.ndim > MAX_DIMENSIONS:
        _bad(f"array {name!r} has {array.ndim} dimensions; at most {MAX_DIMENSIONS} travel")
    return np.asarray(array, dtype=little, order="C")


def _packed_header(message: Message, specs: list[_Spec]) -> bytes:
    for counter in ("incarnation", "sequence", "version"):
        if not 0 <= getattr(message, counter) < 2**63:
            _bad(f"{counter} is {getattr(message, counter)}, not in 0 .. 2**63 - 1")
    for key, value in message.meta.items():
        if type(value) not in (bool, int, float, str):
            _bad(f"meta {key!r} is a {type(value).__name__}; only bool, int, float and str travel")
    try:
        header = _pack(
            _Header(
                message.kind,
                message.run,
                message.sender,
                message.incarnation,
                message.sequence,
                message.version,
                dict(message.meta),
                specs,
            )
        )
    except (TypeError, ValueError, OverflowError) as error:
        raise BadMessage(f"message {message.kind!r} of {message.sender!r} cannot be written: {error}") from error
    if len(header) > MAX_HEADER_BYTES:
        _bad(f"the header takes {len(header)} bytes, over the limit of {MAX_HEADER_BYTES}: put bulk data into arrays")
    return header


def _read_header(view: memoryview, max_bytes: int) -> tuple[_Header, int]:
    """The header, and where the arrays start."""
    if not _PREFIX.size <= len(view) <= max_bytes:
        _bad(f"a frame of {len(view)} bytes, where {_PREFIX.size} to {max_bytes} are taken")
    magic, protocol, reserved, header_bytes, reserved_too, total = _PREFIX.unpack_from(view)
    if magic != MAGIC:
        _bad(f"it begins with {magic!r}, not {MAGIC!r}: not a message of Troupe")
    if protocol != PROTOCOL:
        _bad(f"it speaks protocol {protocol}, this is {PROTOCOL}: run the same version of Troupe on both sides")
    if reserved or reserved_too:
        _bad("reserved bytes are not zero")
    if total != len(view):
        _bad(f"it says it has {total} bytes and has {len(view)}")
    end = _PREFIX.size + header_bytes
    start = _PREFIX.size + _padded(header_bytes)
    if header_bytes > MAX_HEADER_BYTES or start > len(view):
        _bad(f"a header of {header_bytes} bytes in a frame of {len(view)} (limit {MAX_HEADER_BYTES})")
    packed = bytes(view[_PREFIX.size : end])
    try:
        header = _unpack(packed)
        canonical = _pack(header) == packed
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError) as error:
        raise BadMessage(f"bad message: its header cannot be read: {error}") from error
    if not canonical or any(view[end:start]):
        _bad("its header is not in the one form that Troupe writes (repeated key, wide number or padding)")
    return header, start


def _read_array(view: memoryview, start: int, spec: _Spec, max_bytes: int, copy: bool) -> tuple[Array, int]:
    """The array at `start`, and where the next one starts."""
    dtype = _DTYPES.get(spec.dtype)
    if dtype is None:
        _bad(f"array {spec.name!r} has dtype {spec.dtype!r}, which is not allowed")
    if len(spec.shape) > MAX_DIMENSIONS:
        _bad(f"array {spec.name!r} has {len(spec.shape)} dimensions, over the limit of {MAX_DIMENSIONS}")
    # numpy overflows on the dimensions of an empty array too, so a zero does not hide the other factors
    if math.prod(max(n, 1) for n in spec.shape) * dtype.itemsize > max_bytes:
        _bad(f"array {spec.name!r} of shape {spec.shape} is over the limit of {max_bytes} bytes")
    count = math.prod(spec.shape)
    stop = start + count * dtype.itemsize
    end = _padded(stop)
    if end > len(view):
        _bad(f"array {spec.name!r} of shape {spec.shape} ends {end - len(view)} bytes after the frame")
    if any(view[stop:end]):
        _bad(f"the padding after array {spec.name!r} is not zero")
    if count == 0:
        return np.empty(spec.shape, dtype), end
    flat = np.frombuffer(view[start:stop], dtype)
    if dtype == np.bool_ and flat.view(np.uint8).max() > 1:
        _bad(f"array {spec.name!r} holds bytes that are neither true nor false")
    return (flat.copy() if copy else flat).reshape(spec.shape), end


def _padded(size: int) -> int:
    return size + -size % ALIGNMENT


def _bad(why: str) -> NoReturn:
    raise BadMessage(f"bad message: {why}")

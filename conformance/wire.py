"""Bytes between the suite and its ranks: framed messages, with tensors as raw bytes.

Tensors travel inside an ordinary pickle. `torch.multiprocessing` would move them through shared
memory and file descriptors, which a killed rank leaves behind; `torch.save` works too but takes
twice as long for the many small tensors of a task.
"""

from __future__ import annotations

import io
import pickle
import socket
import struct
import time
from typing import Any

import torch
from torch import Tensor

_LENGTH = struct.Struct("<Q")
_READ_SIZE = 1 << 20


def encode(value: object) -> bytes:
    """Any picklable value as bytes; its tensors are detached, made contiguous and put on the CPU.

    >>> decode(encode({"loss": torch.tensor(0.5, requires_grad=True)}))
    {'loss': tensor(0.5000)}
    """
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=5).dump(value)
    return buffer.getvalue()


def decode(message: bytes | bytearray) -> Any:
    """The value of `encode`; its tensors own their memory and can be written to."""
    return pickle.loads(message)


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return _tensor, (value.dtype, tuple(value.shape), _raw_bytes(value))
        return NotImplemented


def _raw_bytes(tensor: Tensor) -> bytearray:
    raw = bytearray(tensor.numel() * tensor.element_size())
    if raw:
        torch.frombuffer(raw, dtype=tensor.dtype).copy_(tensor.detach().reshape(-1))
    return raw


def _tensor(dtype: torch.dtype, shape: tuple[int, ...], raw: bytearray) -> Tensor:
    if not raw:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(raw, dtype=dtype).reshape(shape)


class Channel:
    """One end of a stream socket that carries framed messages.

    A rank blocks in `receive`. The suite's side waits for many channels at once, so it calls
    `read_available` when one is readable, and a rank that stops halfway never holds it up.
    """

    def __init__(self, stream: socket.socket) -> None:
        self._stream = stream
        self._unread = bytearray()

    def fileno(self) -> int:
        return self._stream.fileno()

    def send(self, message: bytes, *, timeout_s: float | None = None) -> None:
        """Send one message.

        Raises:
            TimeoutError: the other side did not take it within `timeout_s`; the channel is
                unusable from here on.
            OSError: the other side is gone.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        for part in (_LENGTH.pack(len(message)), message):
            left = None if deadline is None else max(deadline - time.monotonic(), 1e-3)
            self._stream.settimeout(left)
            self._stream.sendall(part)

    def receive(self) -> bytearray:
        """Block until one whole message is there. Raises EOFError when the other side is gone."""
        while True:
            message = self._next_message()
            if message is not None:
                return message
            self._stream.settimeout(None)
            self._fill()

    def read_available(self) -> bytearray | None:
        """The next message if it is complete; call it only when the channel is readable.

        Raises:
            EOFError: the other side is gone.
        """
        self._fill()
        return self._next_message()

    def close(self) -> None:
        self._stream.close()

    def _fill(self) -> None:
        try:
            data = self._stream.recv(_READ_SIZE)
        except ConnectionResetError:
            data = b""
        if not data:
            raise EOFError("the other side of the channel is gone")
        self._unread += data

    def _next_message(self) -> bytearray | None:
        if len(self._unread) < _LENGTH.size:
            return None
        end = _LENGTH.size + _LENGTH.unpack_from(self._unread)[0]
        if len(self._unread) < end:
            return None
        message = self._unread[_LENGTH.size : end]
        del self._unread[:end]
        return message

"""`delay.py SECONDS DEVICE...`: send every frame that arrives at a device out of it again, so much later.

For kernels without `netem`. Frames keep their offload header, so TCP's segments pass unsplit and a gigabit
is a few thousand frames a second. Run as a file in the switch of a lab, with the standard library alone.
"""

from __future__ import annotations

import collections
import contextlib
import select
import socket
import struct
import sys
import time

_ALL_PROTOCOLS = 3
_SOL_PACKET, _PACKET_VNET_HDR, _PACKET_IGNORE_OUTGOING = 263, 15, 23
_BIGGEST_FRAME = 70_000
_BUFFER_BYTES = 32 << 20
"""Of one device, in flight; more is dropped, as a router would."""


def main() -> None:
    """Until killed."""
    delay_s, devices = float(sys.argv[1]), [_opened(name) for name in sys.argv[2:]]
    waiting: collections.deque[tuple[float, socket.socket, bytes]] = collections.deque()
    held: dict[socket.socket, int] = dict.fromkeys(devices, 0)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    while True:
        pause = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        for device in select.select(devices, (), (), pause)[0]:
            frame = device.recv(_BIGGEST_FRAME)
            if held[device] + len(frame) <= _BUFFER_BYTES:
                held[device] += len(frame)
                waiting.append((time.monotonic() + delay_s, device, frame))
        while waiting and waiting[0][0] <= time.monotonic():
            _, device, frame = waiting.popleft()
            held[device] -= len(frame)
            with contextlib.suppress(OSError):  # a full or vanished link loses frames
                device.send(frame)


def _opened(name: str) -> socket.socket:
    device = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    device.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, struct.pack("i", 1))
    device.setsockopt(_SOL_PACKET, _PACKET_IGNORE_OUTGOING, struct.pack("i", 1))
    device.setsockopt(socket.SOL_SOCKET, getattr(socket, "SO_RCVBUFFORCE", 33), _BUFFER_BYTES)
    device.bind((name, _ALL_PROTOCOLS))
    return device


if __name__ == "__main__":
    main()

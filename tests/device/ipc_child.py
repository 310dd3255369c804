"""The other process of tests: does as it is told, line by line. ``python ipc_child.py KIND``."""

from __future__ import annotations

import sys

from kvstore.device import PinnedBuffer, open_device


def main() -> None:
    device = open_device(sys.argv[1])
    stream = device.stream()
    address = 0
    for line in sys.stdin:
        command, *words = line.split()
        answer = ""
        if command == "open":
            address = device.ipc_open(bytes.fromhex(words[0]))
            answer = "opened"
        elif command == "export":
            byte, size_bytes = int(words[0]), int(words[1])
            address = device.malloc(size_bytes)
            device.fill(address, byte, size_bytes, stream)
            device.sync_stream(stream)
            answer = device.ipc_export(address).hex()
        elif command == "read":
            size_bytes = int(words[0])
            with PinnedBuffer(device, size_bytes) as buffer:
                device.copy(buffer.address, address, size_bytes, stream)
                device.sync_stream(stream)
                answer = buffer.array[:64].tobytes().hex() + buffer.array[-64:].tobytes().hex()
        elif command == "fill":
            device.fill(address, int(words[0]), int(words[1]), stream)
            device.sync_stream(stream)
            answer = "filled"
        elif command == "free":
            device.free(address)
            answer = "freed"
        elif command == "close":
            device.ipc_close(address)
            answer = "closed"
        print(answer, flush=True)  # noqa: T201
    device.close()


main()

"""Reads a catalog in a process of its own: LMDB follows page numbers it finds in the file, and a damaged file
ends the process that reads it. Run as a script; prints every name, key and value side by side.

Exit code 0: all was read. Anything else: what was printed is worth nothing.
"""

import sys

import lmdb

NAMES, FACTS, COMPLETE = b"names", b"facts", b"complete"
KEY_BYTES, VALUE_BYTES = 12, 64
NOT_COMPLETE, ODD_RECORD = 3, 4
_CHUNK = 4096


def main(path: str) -> int:
    """Print the names of the catalog at ``path``."""
    out = sys.stdout.buffer
    with lmdb.open(path, max_dbs=2, readonly=True, lock=False) as env:
        names, facts = env.open_db(NAMES, create=False), env.open_db(FACTS, create=False)
        with env.begin() as reading:
            if reading.get(COMPLETE, db=facts) is None:
                return NOT_COMPLETE
            n_left = int(reading.stat(names)["entries"])
            pieces: list[bytes] = []
            last = b""
            for key, value in reading.cursor(names):
                n_left -= 1
                if len(key) != KEY_BYTES or len(value) != VALUE_BYTES or key <= last or n_left < 0:
                    return ODD_RECORD
                last = key
                pieces += (key, value)
                if len(pieces) >= _CHUNK:
                    out.write(b"".join(pieces))
                    pieces.clear()
            if n_left:
                return ODD_RECORD
            out.write(b"".join(pieces))
    out.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))

"""Messages that are of the right type and hardly ever make sense, and bytes that are hardly ever a message."""

from __future__ import annotations

import json
import random
from typing import Any

from google.protobuf.message import Message

from kvstore.types import KVSpec, Namespace

NAMESPACE = Namespace("fuzz", KVSpec.opaque(4, 4096))
SHORT_WAIT_S = 0.01


class OddMessages:
    """Makes them from one seeded source. Integers in ``known``, by field name, are ones that mean something."""

    def __init__(self, dice: random.Random) -> None:
        self.known: dict[str, list[int]] = {}
        self._dice = dice

    def filled(self, message: Any, depth: int = 0) -> Message:
        """The same message, with most of its fields set."""
        for field in message.DESCRIPTOR.fields:
            if self._dice.random() < 0.25:
                continue
            if field.message_type is not None:
                if field.message_type.GetOptions().map_entry or depth > 2:
                    continue
                if field.is_repeated:
                    for _ in range(self._dice.randint(0, 3)):
                        self.filled(getattr(message, field.name).add(), depth + 1)
                else:
                    self.filled(getattr(message, field.name), depth + 1)
            elif field.is_repeated:
                getattr(message, field.name).extend(self._value(field) for _ in range(self._dice.randint(0, 5)))
            else:
                setattr(message, field.name, self._value(field))
        return message  # type: ignore[no-any-return]

    def spoiled(self, payload: bytes) -> bytes:
        """These bytes with some changed, put in, or left out."""
        spoiled = bytearray(payload)
        for _ in range(self._dice.randint(1, 4)):
            at = self._dice.randint(0, len(spoiled))
            change = self._dice.randint(0, 2)
            if change == 0:
                spoiled[at:at] = self._dice.randbytes(self._dice.randint(1, 9))
            elif change == 1:
                del spoiled[at : at + self._dice.randint(1, 9)]
            elif at < len(spoiled):
                spoiled[at] ^= 1 << self._dice.randint(0, 7)
        return bytes(spoiled)

    def _value(self, field: Any) -> Any:
        dice = self._dice
        if field.enum_type is not None:
            return dice.choice(field.enum_type.values).number
        if field.cpp_type in (field.CPPTYPE_DOUBLE, field.CPPTYPE_FLOAT):
            odd = [0.0, 1.0, -1.0, 1e-9, 3e9, float("nan"), float("inf"), -float("inf")]
            return dice.choice([0.0, SHORT_WAIT_S] if "wait" in field.name else odd)
        if field.cpp_type == field.CPPTYPE_BOOL:
            return dice.random() < 0.5
        if field.type == field.TYPE_BYTES:
            return dice.choice([b"", NAMESPACE.digest(), dice.randbytes(dice.choice([1, 4, 16, 64, 4096]))])
        if field.type == field.TYPE_STRING:
            if "json" in field.name:
                return self._description()
            return dice.choice(["", "default", "a", "\0", "x" * 5000, "\u20ac\U0001f600", "../../etc"])
        if self.known.get(field.name) and dice.random() < 0.5:
            return dice.choice(self.known[field.name])
        bits = 32 if field.cpp_type in (field.CPPTYPE_UINT32, field.CPPTYPE_INT32) else 64
        signed = field.cpp_type in (field.CPPTYPE_INT32, field.CPPTYPE_INT64)
        most = (1 << (bits - 1 if signed else bits)) - 1
        return dice.choice([0, 1, 2, 3, 1 << 20, most, dice.randint(0, most)])

    def _description(self) -> str:
        plain = NAMESPACE.to_dict()
        for _ in range(self._dice.randint(0, 2)):
            name = self._dice.choice(sorted(plain))
            plain[name] = self._dice.choice([None, -1, 0, 1 << 40, "", "x" * 2000, [], {}, [[[]]], 1.5, True])
        text = json.dumps(plain)
        return text if self._dice.random() < 0.8 else text[: self._dice.randint(0, len(text))]

"""Episodes and models as bytes, for the way to the process that learns and back: a header, arrays, a checksum."""

from __future__ import annotations

import json

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvstore.errors import KVStoreError
from kvstore.prefix_index.policies.hazard_ages import N_AGES
from kvstore.prefix_index.policies.hazard_features import N_FEATURES, N_STRATA, N_VALUES
from kvstore.prefix_index.policies.hazard_model import Episodes, Model
from kvstore.prefix_index.policies.hazard_worth import TABLE_SHAPE, WorthTable

_SUM_BYTES = 8
_MODEL = {"rates": ("<f8", (N_STRATA, N_AGES)), "betas": ("<f8", (2, N_FEATURES * N_VALUES)), "split": ("<i8", (1,))}
_LOGS = {"logs": ("<f4", TABLE_SHAPE)}

Arrays = dict[str, NDArray[np.generic]]
Shapes = dict[str, tuple[str, tuple[int, ...]]]


class ParcelError(KVStoreError):
    """Bytes that are not what they should be."""


def pack_request(before: Model, seen: Episodes) -> bytes:
    """A model and the episodes to learn from."""
    parts: Arrays = {
        **_model_arrays(before),
        "strata": seen.strata.astype("|u1"), "features": seen.features.astype("<u8"),
        "ages_s": seen.ages_s.astype("<f8"), "blocks": seen.blocks.astype("<f8"), "hits": seen.hits.astype("|b1"),
    }  # fmt: skip
    return _pack(parts, {"episodes": len(seen)})


def unpack_request(data: bytes) -> tuple[Model, Episodes]:
    """Raises ParcelError."""
    body, facts = _open(data)
    n = facts.get("episodes")
    if not isinstance(n, int) or n < 0:
        raise ParcelError(f"a parcel says that it has {n!r} episodes")
    shapes: Shapes = {
        **_MODEL, "strata": ("|u1", (n,)), "features": ("<u8", (n,)), "ages_s": ("<f8", (n,)),
        "blocks": ("<f8", (n,)), "hits": ("|b1", (n,)),
    }  # fmt: skip
    got = _arrays(body, shapes)
    seen = Episodes(
        got["strata"].astype(np.uint8), got["features"].astype(np.uint64), got["ages_s"].astype(np.float64),
        got["blocks"].astype(np.float64), got["hits"].astype(np.bool_),
    )  # fmt: skip
    return _model(got), seen


def pack_answer(model: Model, table: WorthTable) -> bytes:
    """A new model and its table."""
    return _pack({**_model_arrays(model), "logs": table.logs.astype("<f4")}, {})


def unpack_answer(data: bytes) -> tuple[Model, WorthTable]:
    """Raises ParcelError for anything but a model with finite numbers."""
    got = _arrays(_open(data)[0], {**_MODEL, **_LOGS})
    model, logs = _model(got), got["logs"].astype(np.float32)
    if not (np.isfinite(model.rates).all() and (model.rates > 0).all()):
        raise ParcelError("a model has rates that are not positive numbers")
    if not (np.isfinite(model.betas).all() and np.isfinite(logs).all() and 0 <= model.split < N_AGES):
        raise ParcelError("a model has numbers that are not finite, or a split that is no bucket")
    return model, WorthTable(logs, model.split)


def _model_arrays(model: Model) -> Arrays:
    return {
        "rates": model.rates.astype("<f8"),
        "betas": model.betas.astype("<f8"),
        "split": np.array([model.split], "<i8"),
    }


def _model(got: Arrays) -> Model:
    return Model(
        got["rates"].astype(np.float64), got["betas"].astype(np.float64), int(got["split"].astype(np.int64)[0])
    )


def _pack(parts: Arrays, facts: dict[str, int]) -> bytes:
    head = json.dumps(facts).encode()
    body = b"".join((len(head).to_bytes(4, "little"), head, *(part.tobytes() for part in parts.values())))
    return xxhash.xxh3_64_digest(body) + body


def _open(data: bytes) -> tuple[memoryview, dict[str, object]]:
    body = memoryview(data)[_SUM_BYTES:]
    if len(body) < 4 or xxhash.xxh3_64_digest(body) != data[:_SUM_BYTES]:
        raise ParcelError(f"{len(data)} bytes are no parcel: their checksum is wrong")
    n = int.from_bytes(body[:4], "little")
    try:
        facts = json.loads(bytes(body[4 : 4 + n]))
    except ValueError:
        facts = None
    if not isinstance(facts, dict):
        raise ParcelError("the header of a parcel can't be read")
    return body[4 + n :], facts


def _arrays(body: memoryview, shapes: Shapes) -> Arrays:
    got: Arrays = {}
    at = 0
    for name, (dtype, shape) in shapes.items():
        count = int(np.prod(shape))
        end = at + count * np.dtype(dtype).itemsize
        if end > len(body):
            raise ParcelError(f"a parcel ends within {name}: it has {len(body)} bytes, {end} were to come")
        got[name] = np.frombuffer(body[at:end], dtype).reshape(shape)
        at = end
    if at != len(body):
        raise ParcelError(f"a parcel has {len(body) - at} bytes too many")
    return got

"""The codecs that there are, by number, and the formats made of them: one codec for K and one for V."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvstore.compression.codec import Codec, CodecId
from kvstore.compression.differential import Differential
from kvstore.compression.frame_format import FrameError, PlaneKind
from kvstore.compression.lossless import Lossless
from kvstore.compression.payload import Kept
from kvstore.compression.plane import PlaneShape
from kvstore.compression.quantize import Quantizer
from kvstore.compression.raw import Raw
from kvstore.native.quantize import Scheme

_ALL: tuple[Codec, ...] = (
    Raw(),
    Quantizer(CodecId.Q8, Scheme.TOKEN, 8),
    Quantizer(CodecId.Q4, Scheme.TOKEN, 4),
    Quantizer(CodecId.Q2, Scheme.TOKEN, 2),
    Quantizer(CodecId.Q8_ROTATED, Scheme.ROTATED, 8),
    Quantizer(CodecId.Q4_ROTATED, Scheme.ROTATED, 4),
    Quantizer(CodecId.Q2_ROTATED, Scheme.ROTATED, 2),
    Quantizer(CodecId.Q8_CHANNEL, Scheme.CHANNEL, 8),
    Quantizer(CodecId.Q4_CHANNEL, Scheme.CHANNEL, 4),
    Quantizer(CodecId.Q2_CHANNEL, Scheme.CHANNEL, 2),
    Quantizer(CodecId.FP8, Scheme.FP8, 8),
    Lossless(CodecId.BYTES, by_channel=False),
    Lossless(CodecId.BYTES_CHANNEL, by_channel=True),
    Differential(CodecId.Q8_Q4_CHANNEL, Scheme.CHANNEL, 8, 4),
    Differential(CodecId.Q4_Q2_ROTATED, Scheme.ROTATED, 4, 2),
)
CODECS: Mapping[int, Codec] = {int(codec.id): codec for codec in _ALL}


def codec_of(number: int) -> Codec:
    """The codec with this number in a frame. Raises FrameError where this release knows none: the frame is a miss."""
    codec = CODECS.get(number)
    if codec is None:
        raise FrameError(f"the plane has codec {number}, which this release does not know")
    return codec


@dataclass(frozen=True, slots=True)
class Format:
    """How a block is stored: codecs for K and V, and how many tokens of a prompt are kept exact.

    ``sinks``: the first tokens of a prompt, which all later ones attend to. ``recent``: the last ones of what is
    stored of it; where more is stored later, they must be encoded anew from a raw copy. ``high_share``: of the others,
    how many a differential codec keeps in its higher precision.
    """

    k: CodecId
    v: CodecId
    sinks: int = 0
    recent: int = 0
    high_share: float = 0.0

    def codec(self, kind: PlaneKind) -> Codec:
        """The codec of a plane; a latent is stored as K."""
        return CODECS[self.v if kind is PlaneKind.V else self.k]

    def kept(self, first_token: int, tokens: int, stored_tokens: int) -> Kept:
        """What to keep of a page group of ``tokens`` tokens that begins at ``first_token`` of ``stored_tokens``.

        Raises BadInputError for no tokens at all.
        """
        recent = first_token + tokens + self.recent - stored_tokens
        return Kept(tokens, max(0, self.sinks - first_token), max(0, recent))

    def bytes_per_token(self, k: PlaneShape, v: PlaneShape, stored_tokens: int) -> float:
        """Average bytes of one layer's token, K and V, in a prompt of whole page groups of these shapes.

        All metadata of page groups counts; for codecs whose sizes follow from the shape.
        """
        total = 0
        for first in range(0, stored_tokens, k.tokens):
            kept = self.kept(first, min(k.tokens, stored_tokens - first), stored_tokens)
            total += self._stored_bytes(PlaneKind.K, k, kept) + self._stored_bytes(PlaneKind.V, v, kept)
        return total / stored_tokens

    def _stored_bytes(self, kind: PlaneKind, plane: PlaneShape, kept: Kept) -> int:
        codec = self.codec(kind)
        if isinstance(codec, Differential):
            return codec.stored_bytes(plane, kept, round(self.high_share * kept.rounded))
        return codec.stored_bytes(plane, kept)


_SINKS, _RECENT, _HIGH = 4, 32, 0.25

FORMATS: Mapping[str, Format] = {
    "raw": Format(CodecId.RAW, CodecId.RAW),
    "lossless": Format(CodecId.BYTES_CHANNEL, CodecId.BYTES),
    "fp8": Format(CodecId.FP8, CodecId.FP8),
    "k8v8": Format(CodecId.Q8_ROTATED, CodecId.Q8_ROTATED),
    "k8v4": Format(CodecId.Q8_CHANNEL, CodecId.Q4_ROTATED, _SINKS, _RECENT),
    "k4v4": Format(CodecId.Q4_CHANNEL, CodecId.Q4_ROTATED, _SINKS, _RECENT),
    "k4v2": Format(CodecId.Q4_ROTATED, CodecId.Q2_ROTATED, _SINKS, _RECENT),
    "k8v4-k4v4": Format(CodecId.Q8_Q4_CHANNEL, CodecId.Q4_ROTATED, _SINKS, _RECENT, _HIGH),
    "k8v4-k4v2": Format(CodecId.Q8_Q4_CHANNEL, CodecId.Q4_Q2_ROTATED, _SINKS, _RECENT, _HIGH),
}
"""Formats by name; of those with two names the first is for tokens that matter, the second for the others."""

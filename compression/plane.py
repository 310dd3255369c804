"""What a codec sees of a page group: one plane, K or V or a latent, of some pages of one layer."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.compression.frame_format import PlaneKind
from kvstore.errors import BadInputError
from kvstore.types import DTYPE_BYTES, GroupKind, KVGroup


@dataclass(frozen=True, slots=True)
class PlaneShape:
    """Where in a raw page group the rows of a plane lie; a row is ``dim`` elements of one token and head.

    The row of token ``t`` and head ``h`` is at byte ``offset + t // page_tokens * page_stride + t % page_tokens *
    token_stride + h * head_stride`` of the page group; all strides are in bytes. Within a page a plane is contiguous.
    """

    dtype: str
    heads: int
    dim: int
    pages: int
    page_tokens: int
    offset: int
    page_stride: int
    token_stride: int
    head_stride: int

    @classmethod
    def of(cls, group: KVGroup, kind: PlaneKind, page_tokens: int, pages: int) -> PlaneShape:
        """A plane of ``pages`` pages of a group of layers, as ``FrameLayout`` lays them.

        Raises BadInputError where a codec can't know what is inside (opaque layouts, states), and for a plane that
        such groups don't have: latents are WHOLE, others K and V.
        """
        if group.layout == "opaque" or group.kind is GroupKind.STATE:
            raise BadInputError(f"a {group.kind} group with layout {group.layout} has no rows to encode; store it raw")
        is_latent = group.kind is GroupKind.MLA
        if is_latent != (kind is PlaneKind.WHOLE):
            raise BadInputError(f"a {group.kind} group has no plane {kind.name}")
        row_bytes = group.head_dim * DTYPE_BYTES[group.dtype]
        page_bytes = group.bytes_per_page(page_tokens)
        by_token = group.layout == "NHD"
        return cls(
            dtype=group.dtype,
            heads=group.kv_heads,
            dim=group.head_dim,
            pages=pages,
            page_tokens=page_tokens,
            offset=page_bytes // 2 if kind is PlaneKind.V else 0,
            page_stride=page_bytes,
            token_stride=group.kv_heads * row_bytes if by_token else row_bytes,
            head_stride=row_bytes if by_token else page_tokens * row_bytes,
        )

    @property
    def tokens(self) -> int:
        """Tokens that there is room for."""
        return self.pages * self.page_tokens

    @property
    def row_bytes(self) -> int:
        """Bytes of one token of one head."""
        return self.dim * DTYPE_BYTES[self.dtype]

    @property
    def part_bytes(self) -> int:
        """Bytes of this plane in one page."""
        return self.page_tokens * self.heads * self.row_bytes

    @property
    def raw_bytes(self) -> int:
        """Bytes of this plane in the page group."""
        return self.pages * self.part_bytes

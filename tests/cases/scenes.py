"""What the cases share: blocks that lie on NVMe only, and how to find them there by hand."""

from __future__ import annotations

from kvstore.store.requests import Prompt
from tests.store.two_tier import TwoTierRig
from tests.tiers.segment_files import FrameOnDisk, frames_of

WRITER, READER = 1, 2


def stored_below(rig: TwoTierRig, *prompts: Prompt) -> TwoTierRig:
    """Store prompts durably and start again: their blocks are on NVMe only."""
    for prompt in prompts:
        assert rig.put(WRITER, prompt).n_committed == prompt.path.n_rows
        assert rig.persist(prompt) == prompt.path.n_rows
    rig.store.forget_session(WRITER)
    return rig.killed()


def again(rig: TwoTierRig, prompt: Prompt) -> Prompt:
    """The same prompt for a store that was started again."""
    namespace = rig.store.namespaces.open(prompt.namespace.namespace)
    return prompt._replace(namespace=namespace, time_s=rig.clock.now_s())


def frame_of(rig: TwoTierRig, prompt: Prompt, row: int) -> FrameOnDisk:
    """The frame of a block that was written once."""
    key = bytes(prompt.path.keys(prompt.root_key)[row])
    (frame,) = frames_of(rig.directory, key)
    return frame


def read(rig: TwoTierRig, prompt: Prompt) -> list[bytes]:
    """The bytes that a client gets which waits; released again."""
    lease = rig.read(READER, prompt)
    content = rig.bytes_at(rig.slots_of(lease), prompt.namespace.block_bytes)
    rig.store.release(READER, lease.id)
    rig.store.check()
    return content

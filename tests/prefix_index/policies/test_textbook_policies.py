"""What each textbook policy prefers, in scenes small enough to follow by hand."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore.errors import ConfigError
from kvstore.hints import Hints
from kvstore.prefix_index.block_table import DRAM, NVME
from kvstore.prefix_index.index import PrefixIndex
from kvstore.prefix_index.policies import make_policy, make_tier_policies
from kvstore.prefix_index.policies.gdsf import GdsfPolicy
from kvstore.prefix_index.policies.ghosts import Ghosts
from kvstore.prefix_index.policies.workload import WorkloadPolicy
from kvstore.prefix_index.policy import EvictionPolicy, Use
from kvstore.prefix_index.rows import RowPath

ROOT = b"r" * 16


class Scene:
    """Prompts of one-token blocks by their tokens."""

    def __init__(self, policy: EvictionPolicy, *, nvme: bool = False) -> None:
        self.index = PrefixIndex(policy, reserve_blocks=64, nvme=nvme)
        self.now_s = 0.0

    def use(self, **more: object) -> Use:
        self.now_s += 1
        return Use(self.now_s, block_tokens=1, **more)  # type: ignore[arg-type]

    def ids(self, *tokens: int) -> np.ndarray:
        return self.index.match(ROOT, self.path(*tokens)).ids

    @staticmethod
    def path(*tokens: int) -> RowPath:
        return RowPath.from_tokens(np.array(tokens, np.uint32), 1)

    def request(self, *tokens: int, size_bytes: int = 1, **more: object) -> None:
        """As a client does: look up, store the rest."""
        use, found = self.use(n_tokens=len(tokens), **more), self.ids(*tokens)
        self.index.touch(found, use)
        n = len(tokens) - len(found)
        self.index.insert(ROOT, self.path(*tokens), len(found), np.zeros(n, np.int64), size_bytes, use)

    def evict(self, n: int = 1) -> list[int]:
        """The last tokens of the prompts whose tails went."""
        before = {block: self.token_of(block) for block in self.index.table.alive().tolist()}
        return [before[block] for block in self.index.evict(n).ids.tolist()]

    def token_of(self, block: int) -> int:
        return int(np.frombuffer(self.index.frame_rows(np.array([block], np.uint32))[0][0], "<u4")[0])


def test_fifo_forgets_no_age_by_use() -> None:
    scene = Scene(make_policy("fifo"))
    for token in (1, 2, 3, 1, 1):
        scene.request(token)
    assert scene.evict(3) == [1, 2, 3]


def test_fifo_counts_a_block_that_comes_back_from_nvme_as_new_in_dram() -> None:
    scene = Scene(make_policy("fifo"), nvme=True)
    for token in (1, 2):
        scene.request(token)
    ids = scene.ids(1)
    scene.index.add_nvme(ids, np.zeros(1, np.int64))
    assert scene.evict(1) == [1]
    scene.index.add_dram(ids, np.zeros(1, np.int64))
    assert scene.evict(1) == [2]


def test_lfu_keeps_what_is_used_often_and_of_equals_the_recent() -> None:
    scene = Scene(make_policy("lfu"))
    for token in (1, 2, 3, 1, 1, 2, 4):
        scene.request(token)
    assert scene.evict(4) == [3, 4, 2, 1]


def test_a_use_that_was_counted_is_not_counted_again() -> None:
    scene = Scene(make_policy("lfu"))
    for token in (1, 2, 2):
        scene.request(token)
    for _ in range(5):
        scene.index.touch(scene.ids(1), scene.use(is_again=True))
    assert scene.evict(1) == [1]


def test_gdsf_gives_up_heads_before_tails_of_the_same_use_as_they_are_cheaper() -> None:
    scene = Scene(GdsfPolicy(half_cost_tokens=4.0))
    scene.request(1)
    scene.request(*range(100, 120))
    assert scene.evict(1) == [1], "20 tokens deep costs more to compute again"
    for token in (2, 3):
        scene.request(token, size_bytes=4 if token == 3 else 1)
    assert scene.evict(1) == [3], "of two as cheap the larger"


def test_gdsf_ages_what_is_not_used() -> None:
    scene = Scene(make_policy("gdsf"))
    for _ in range(3):
        scene.request(1)
    for token in range(10, 30):
        scene.request(token)
        scene.index.evict(max(scene.index.n_blocks - 4, 0))
    assert not len(scene.ids(1)), "three uses do not last forever"


def test_gdsf_refuses_a_cost_that_can_not_be() -> None:
    with pytest.raises(ConfigError, match="half_cost_tokens is 0"):
        make_policy("gdsf", half_cost_tokens=0)


def test_s3fifo_keeps_what_was_used_twice_in_the_small_queue_from_a_scan() -> None:
    scene = Scene(make_policy("s3fifo"))
    for _ in range(3):
        scene.request(1)
    for token in range(10, 60):
        scene.request(token)
        scene.index.evict(max(scene.index.n_blocks - 10, 0))
    assert len(scene.ids(1)) == 1
    assert not len(scene.ids(20))


def test_s3fifo_remembers_what_left_the_small_queue() -> None:
    scene = Scene(make_policy("s3fifo"))
    for token in range(10):
        scene.request(token)
    assert scene.evict(1) == [0]
    scene.request(0)  # remembered: into the main queue
    assert scene.evict(9) == list(range(1, 10))


def test_ghosts_are_forgotten_in_order_and_survive_growth() -> None:
    ghosts, keys = Ghosts(), np.random.default_rng(1).integers(0, 256, (600, 16), np.uint8)
    for start in range(0, 600, 50):
        ghosts.add(keys[start : start + 50], most=500)
        assert not ghosts.take(keys[start + 50 :]).any()
    ghosts.fit(10_000)
    found = ghosts.take(keys)
    assert not found[:100].any()
    assert found[100:].mean() > 0.95, "few shared a set with many"
    assert not ghosts.take(keys).any(), "each is taken once"
    ghosts.add(keys[:10], most=3)
    assert ghosts.take(keys).nonzero()[0].tolist() == [7, 8, 9]
    ghosts.add(np.repeat(keys[:1], 3, axis=0), most=10)
    assert ghosts.take(keys).nonzero()[0].tolist() == [0]


def test_workload_gives_up_first_what_would_have_come_back_by_now() -> None:
    scene = Scene(WorkloadPolicy())
    agent, batch = Hints(request_type="agent", turn=1), Hints(request_type="batch", turn=1)
    for step in range(60):
        scene.request(1000 + step % 4, hints=agent)  # back after 8 s
        scene.request(2000 + step % 20, hints=batch)  # back after 40 s
    scene.now_s += 30
    scene.request(1, hints=batch)
    scene.index.policy.version += 1
    assert sorted(scene.evict(4)) == [1000, 1001, 1002, 1003], "the oldest are of the other kind"


def test_workload_infers_turns_from_what_a_request_continues() -> None:
    policy = WorkloadPolicy()
    scene = Scene(policy)
    scene.request(1, 2, 3)
    scene.request(1, 2, 3, 4, 5)
    scene.request(1, 9, 9, 9)
    assert policy._turn[scene.ids(1, 2, 3, 4, 5)].tolist() == [1, 2, 2, 2, 2]
    assert policy._turn[scene.ids(1, 9, 9, 9)[-1]] == 1


def test_workload_without_anything_known_is_lru() -> None:
    scene, lru = Scene(WorkloadPolicy()), Scene(make_policy("lru"))
    for each in (scene, lru):
        for token in (1, 2, 3, 1, 4, 2):
            each.request(token)
    assert scene.evict(4) == lru.evict(4)


def test_a_share_of_reuse_gives_up_first_what_mostly_never_comes_back() -> None:
    gone = {}
    for name in ("workload", "workload_pw"):
        scene = Scene(make_policy(name))
        assert scene.index.policy.name == name
        seldom, often = Hints(request_type="seldom"), Hints(request_type="often")
        for step in range(50):
            scene.request(100 + step, hints=seldom)
            scene.request(100 + step // 10 * 10, hints=seldom)  # soon back, but few ever are
            scene.request(5, hints=often)
        scene.request(7, hints=seldom)
        scene.index.policy.version += 1
        gone[name] = scene.evict(scene.index.n_blocks - 1)
    assert gone["workload"][-1] == 5, "the last used stays"
    assert gone["workload_pw"][-1] == 7


def test_policies_of_two_tiers_disagree() -> None:
    scene = Scene(make_tier_policies("lru", "fifo"), nvme=True)
    for token in (1, 2):
        scene.request(token)
        scene.index.add_nvme(scene.ids(token), np.zeros(1, np.int64))
    scene.request(1)
    ids = {token: int(scene.ids(token)[0]) for token in (1, 2)}
    assert scene.index.coldest(1, DRAM).tolist() == [ids[2]]
    assert scene.index.coldest(1, NVME).tolist() == [ids[1]]
    assert scene.index.policy.name == "lru, fifo on NVMe"


def test_an_unknown_policy_is_named_with_its_tier() -> None:
    with pytest.raises(ConfigError, match="policy is 'mru'; known are fifo, gdsf"):
        make_policy("mru")
    with pytest.raises(ConfigError, match="on NVMe, policy is 'mru'") as error:
        make_tier_policies("lru", "mru")
    assert error.value.settings == ("nvme_policy",)

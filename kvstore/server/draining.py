"""The end of a daemon: what only DRAM holds is written to NVMe, longer lives too, and nothing else moves."""

from __future__ import annotations

import asyncio

from kvstore.server.jobs import JobPump
from kvstore.store.store import Store

RETRY_S = 0.05


def read_no_more(store: Store) -> None:
    """From now on no block is read into DRAM, nor copied to HBM.

    Before any client's right ends: none needs room any more.
    """
    if store.hierarchy is not None:
        store.hierarchy.onboarder.close()
    if store.hbm is not None:
        store.hbm.promoter.stop()


async def drain(store: Store, pump: JobPump, deadline_s: float) -> bool:
    """Write what only DRAM holds and lives that got longer; let the store's jobs end, and those that follow from them.

    Blocks until ``deadline_s`` of the loop's clock at most. False if a job still runs then.
    """
    hierarchy, loop = store.hierarchy, asyncio.get_running_loop()
    while await pump.until_quiet(deadline_s) and hierarchy is not None and not hierarchy.cleaner.drain():
        if store.jobs:
            continue
        # The store holds something back (a disk that failed is tried again later): the next tick will tell.
        left_s = deadline_s - loop.time()
        if left_s <= 0:
            break
        await asyncio.sleep(min(RETRY_S, left_s))
    return pump.n_running == 0

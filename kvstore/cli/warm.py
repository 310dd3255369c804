"""``kvstore warm``: what is stored of known prompts is read into DRAM before anybody asks for it."""

from __future__ import annotations

import contextlib
import itertools
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from kvstore.bench import workload
from kvstore.bench.report import progress_bar
from kvstore.bench.trace import load_trace
from kvstore.cli.params import SIZE, DaemonPlace, FiniteRange, json_option, place_options, timeout_option
from kvstore.cli.selecting import Handle, Selection, namespace_options, opened, tenant_option, the_namespace
from kvstore.cli.token_files import read_prompts
from kvstore.client import Prefetch
from kvstore.errors import BadInputError, UnavailableError
from kvstore.types import Root

Prompts = Iterator[NDArray[Any]]


@dataclass(slots=True)
class Warmed:
    """What became of the prompts: blocks of theirs that are stored, in DRAM at the end, and those read for it."""

    prompts: int = 0
    found_blocks: int = 0
    ready_blocks: int = 0
    loaded_blocks: int = 0
    pending_blocks: int = 0
    """Asked for, and not there when the waiting ended."""

    def count(self, before: int, result: Prefetch) -> None:
        """One more prompt; ``before``: leading blocks that were in DRAM."""
        self.prompts += 1
        self.found_blocks += result.n_blocks
        self.ready_blocks += result.n_ready
        self.loaded_blocks += max(result.n_ready - before, 0)
        self.pending_blocks += result.n_pending


class Pace:
    """Lets no more than so many bytes a second through, on average since the start. 0 lets everything through."""

    def __init__(
        self,
        bytes_per_s: float,
        now_s: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._bytes_per_s = bytes_per_s
        self._sleep = sleep
        self._now_s = now_s
        self._free_at_s = now_s()

    def spend(self, n_bytes: int) -> None:
        """So much has just gone through. Blocks until more may."""
        if not self._bytes_per_s:
            return
        now_s = self._now_s()
        self._free_at_s = max(self._free_at_s, now_s) + n_bytes / self._bytes_per_s
        if self._free_at_s > now_s:
            self._sleep(self._free_at_s - now_s)


@click.command(short_help="Read what is stored of prompts into DRAM.")
@click.argument("files", type=click.Path(path_type=Path, dir_okay=False), nargs=-1, required=True)
@click.option("--trace", "is_trace", is_flag=True, help="FILES are traces, as `kvstore replay` takes them.")
@click.option("--limit", type=click.IntRange(1), help="Only the first prompts of each file.")
@click.option("--salt", default="", help="Cache salt of the prompts.")
@click.option("--lora", default="", help="LoRA identity of the prompts.")
@click.option(
    "--wait",
    "wait_s",
    type=FiniteRange(0, 86400),
    default=10.0,
    show_default=True,
    help="Seconds to wait for each prompt; 0 = only start reading.",
)
@click.option("--rate", "bytes_per_s", type=SIZE, default="0", show_default="no limit", help="Bytes a second at most.")
@place_options
@tenant_option
@namespace_options
@timeout_option
@json_option
def warm(
    files: tuple[Path, ...],
    is_trace: bool,
    limit: int | None,
    salt: str,
    lora: str,
    wait_s: float,
    bytes_per_s: int,
    place: DaemonPlace,
    tenant: str,
    timeout_s: float,
    as_json: bool,
    **selected: Any,
) -> None:
    """Read what is stored of the prompts in FILES from NVMe into DRAM, one prompt after the other.

    They have token ids: .jsonl (a list per line), .npy (one prompt, or one per row), or raw little-endian uint32. If
    the daemon knows several namespaces say which. DRAM must have room: later prompts take it from earlier ones.
    """
    each = [_prompts(file, limit, is_trace=is_trace) for file in files]
    prompts, n_prompts = itertools.chain.from_iterable(found for found, _ in each), sum(n for _, n in each)
    with place.client(tenant, timeout_s, name="kvstore warm") as client:
        handle = opened(client, the_namespace(client, Selection(**selected)))
        with progress_bar("warming", n_prompts) as progress:
            done = warmed(handle, prompts, Root(salt, lora), wait_s, Pace(bytes_per_s), progress)
    if as_json:
        click.echo(json.dumps(asdict(done), indent=2))
        return
    table = Table("what", "how many")
    for name, n in asdict(done).items():
        table.add_row(name.replace("_", " "), f"{n:,}")
    Console().print(table)


def warmed(
    handle: Handle, prompts: Prompts, root: Root, wait_s: float, pace: Pace, progress: Callable[[int], object]
) -> Warmed:
    """Have each prompt read. Blocks; raises UnavailableError when the daemon can't be asked any more."""
    done = Warmed()
    block_bytes = handle.namespace.spec.block_bytes
    for tokens in prompts:
        before = handle.match(tokens, root=root)
        result = handle.prefetch(tokens, root=root, wait=wait_s)
        if before.reason or result.reason:
            raise UnavailableError(f"after {done.prompts} prompts: {before.reason or result.reason}")
        done.count(before.n_dram_blocks, result)
        progress(1)
        pace.spend(max(result.n_ready - before.n_dram_blocks, 0) * block_bytes)
    return done


def _prompts(file: Path, limit: int | None, *, is_trace: bool) -> tuple[Prompts, int]:
    """The prompts of a file, and how many. What is wrong with it is said before the daemon is asked."""
    if is_trace:
        trace = load_trace(file, limit)
        return (workload.prompt(trace, i) for i in range(len(trace.requests))), len(trace.requests)
    n = 0
    with contextlib.closing(read_prompts(file)) as read:
        for n, _ in enumerate(read, 1):
            if n == limit:
                break
    if not n:
        raise BadInputError(f"{file} has no prompt in it")
    return (tokens for _, tokens in zip(range(n), read_prompts(file), strict=False)), n

"""``kvstore probe``: what this machine can do for a store, and which way KV should take to its GPU."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import click

from kvstore.bench.device_packages import installed_packages
from kvstore.bench.device_ways import effort_for, figures, measure_own_gb_per_s, measure_ways
from kvstore.bench.gpus_together import Together, measure_all
from kvstore.bench.kv_sizes import MODELS, attention_doubling_tokens, bytes_per_token
from kvstore.bench.report import print_tables
from kvstore.cli.params import SIZE, FiniteRange, json_option
from kvstore.cli.probe_machine import cuda_missing, disk_facts, host_facts, registration_facts
from kvstore.cli.probe_tables import probe_tables
from kvstore.device.choose import open_device
from kvstore.device.cuda import gpus
from kvstore.device.seam import Device
from kvstore.errors import BadInputError, DeviceError
from kvstore.plan.calibration import Calibration
from kvstore.plan.links import Links, read_links
from kvstore.plan.prefill import Prefill, Verdict, load_or_recompute
from kvstore.plan.regime import Advisor, Facts
from kvstore.plan.uses import BLOCK_BYTES, USES, advice, for_tokens
from kvstore.plan.ways import STAGED, Direction

COPY_BYTES = 64 << 20
JUDGED_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class Computing:
    """What loading is compared with: computing KV of ``token_bytes`` a token."""

    token_bytes: int
    prefill: Prefill


@click.command("probe", short_help="Show what this machine can do, and how KV should get to its GPU.")
@click.option(
    "--device",
    "device_name",
    help="Measure this one: cuda:1, or simulated to try without a GPU.  [default: cuda:0 if there is one]",
)
@click.option(
    "--nvme-dir", type=click.Path(path_type=Path, file_okay=False, exists=True), help="Measure the disk there, too."
)
@click.option("--disk-bytes", type=SIZE, default="256MiB", show_default=True, help="How large a file for that.")
@click.option(
    "--model",
    help=f"Compare with computing this model's KV again (its config.json, or one of {', '.join(MODELS)}),",
)
@click.option(
    "--prefill-tokens-per-s", type=FiniteRange(min=0, min_open=True), help="where the engine computes so many"
)
@click.option("--prefill-tokens", type=click.IntRange(1), default=8192, show_default=True, help="of prompts so long.")
@json_option
def probe_command(
    device_name: str | None,
    nvme_dir: Path | None,
    disk_bytes: int,
    model: str | None,
    prefill_tokens_per_s: float | None,
    prefill_tokens: int,
    as_json: bool,
) -> None:
    """Show what this machine can do for a store: memory, disk, GPUs and their links, what each way of moving KV
    between host and GPU reaches, and which to take for typical uses, with reasons.

    Without a GPU it says what is missing; --device simulated takes the same steps over a simulated one.
    """
    if (model is None) != (prefill_tokens_per_s is None):
        raise BadInputError("to compare with computing KV again, give both --model and --prefill-tokens-per-s")
    computing = None
    if model is not None and prefill_tokens_per_s is not None:
        took_s = prefill_tokens / prefill_tokens_per_s
        prefill = Prefill.measured(attention_doubling_tokens(model), prefill_tokens, took_s)
        computing = Computing(bytes_per_token(model), prefill)
    links, missing = read_links(), cuda_missing()
    found: dict[str, Any] = {
        "host": host_facts(COPY_BYTES),
        "support": {"installed": installed_packages(), "missing": missing},
        "links": _links_dict(links),
    }
    if nvme_dir is not None:
        found["disk"] = disk_facts(nvme_dir, disk_bytes)
    if device_name is None and missing:
        found["device"] = {"absent": "none: no GPU can be used; --device simulated shows what would be measured"}
    else:
        found["device"] = _device(device_name, links, computing)
    if as_json:
        click.echo(json.dumps(found, indent=2))
    else:
        print_tables(probe_tables(found))


def _links_dict(links: Links) -> dict[str, Any]:
    gpus = [
        asdict(gpu) | {"pcie_gb_per_s": gpu.pcie_gb_per_s, "link": gpu.words, "same_switch": list(gpu.same_switch)}
        for gpu in links.gpus
    ]
    return {"gpus": gpus, "driver": links.driver, "cuda": links.cuda, "absent": links.absent}


def _device(name: str | None, links: Links, computing: Computing | None) -> dict[str, Any]:
    """What measuring a device gave, or why none was. One that was asked for by name must be there."""
    try:
        device = open_device(name or "cuda:0")
    except DeviceError as error:
        if name is not None:
            raise
        return {"absent": str(error)}
    try:
        return _measured(device, links, computing)
    except DeviceError as error:
        if name is not None:
            raise
        return {"absent": f"{device.facts.name} can't be measured: {error}"}
    finally:
        device.close()


def _measured(device: Device, links: Links, computing: Computing | None) -> dict[str, Any]:
    effort = effort_for(device)
    registration = registration_facts(device)
    table = measure_ways(device, effort)
    own_gb_per_s = measure_own_gb_per_s(device, effort)
    link = links.of_device(device.facts.uuid)
    together = _together(device)
    facts = Facts.of(
        link, can_map=registration["sealed"], cannot_map_reason=registration["reason"], gpu_gb_per_s=own_gb_per_s
    )
    if together is not None and together.note:
        facts = replace(facts, notes=(*facts.notes, together.note))
    calibration = Calibration(table)
    advisor = Advisor(calibration, facts, computing.prefill if computing is not None else None)
    uses = for_tokens(computing.token_bytes) if computing is not None else USES
    told = {
        **{field: getattr(device.facts, field) for field in ("kind", "name", "uuid", "ordinal", "total_bytes")},
        "link": link.words if link is not None else "not told by NVML",
        "registration": registration,
        "own_gb_per_s": own_gb_per_s,
        "together": together.to_dict() if together is not None else None,
        "bandwidth": table.to_dict(),
        "figures": figures(table),
        "advice": [
            {
                "use": use.what,
                "recommended": said.option.name if said.option is not None else None,
                "expected_s": said.option.expected_s if said.option is not None else None,
                "reasons": list(said.reasons),
            }
            for use, said in advice(advisor, uses)
        ],
    }
    if computing is not None:
        told["load_or_recompute"] = _verdict_dict(_verdict(calibration, computing))
    return told


def _together(device: Device) -> Together | None:
    """Of all GPUs, where there are several and each can be used."""
    names = [f"cuda:{each.ordinal}" for each in gpus()] if device.facts.kind == "cuda" else []
    try:
        return measure_all(names) if len(names) > 1 else None
    except DeviceError:
        return None


def _verdict(calibration: Calibration, computing: Computing) -> Verdict:
    """Of a prompt's first tokens, loaded in blocks by the best way."""
    rate = max(calibration.rate(Direction.LOAD, way, BLOCK_BYTES) for way in STAGED)
    return load_or_recompute(computing.prefill, computing.token_bytes / (rate * 1e9), 0, JUDGED_TOKENS)


def _verdict_dict(verdict: Verdict) -> dict[str, Any]:
    """JSON has no infinity: null is "from nowhere on"."""
    plain: dict[str, Any] = {"tokens": JUDGED_TOKENS, **asdict(verdict)}
    return {name: None if isinstance(value, float) and math.isinf(value) else value for name, value in plain.items()}

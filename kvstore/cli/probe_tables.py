"""What ``kvstore probe`` found, for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.markup import escape
from rich.table import Table

from kvstore.config import format_size

Found = Mapping[str, Any]


def probe_tables(found: Found) -> list[Table]:
    """A table for each part that there is something to say about."""
    tables = [_lines("This machine", _machine(found))]
    tables += [_lines(f"GPU {gpu['ordinal']}: {gpu['name'] or 'unknown'}", _gpu(gpu)) for gpu in found["links"]["gpus"]]
    device = found["device"]
    if "bandwidth" in device:
        tables += [_bandwidth(device), _advice(device)]
    if "load_or_recompute" in device:
        tables.append(_lines("Load or compute again", _verdict(device["load_or_recompute"])))
    return tables


def _lines(title: str, lines: Sequence[tuple[str, str]]) -> Table:
    table = Table("what", "value", title=title)
    table.columns[1].overflow = "fold"
    for name, value in lines:
        table.add_row(name, escape(value))
    return table


def _machine(found: Found) -> list[tuple[str, str]]:
    host, links, device = found["host"], found["links"], found["device"]
    auto = host["numa_node_auto"]
    nodes = ", ".join(f"{each['node']} ({len(each['cpus'])} CPUs)" for each in host["numa_nodes"])
    lines = [
        ("system", host["system"]),
        ("memory, CPUs", f"{format_size(host['memory_bytes'])}, {host['cpus']}"),
        ("NUMA nodes", nodes or "the kernel tells of none"),
        ("DRAM tier's node (auto)", f"{'any' if auto['node'] is None else auto['node']}: {auto['reason']}"),
        ("copying", f"{host['copy_gb_per_s']:.1f} GB/s with one thread; the store's copies: {host['copy_backend']}"),
        ("huge pages", host["huge_pages_note"] or "yes"),
        ("sealed memory", host["seals"]),
    ]
    if (disk := found.get("disk")) is not None:
        lines.append(("disk", disk["directory"]))
        lines.append(
            ("", disk["absent"])
            if "absent" in disk
            else (
                "",
                f"reads {disk['read_gb_per_s']:.2f}, writes {disk['write_gb_per_s']:.2f} GB/s "
                f"({disk['measured_with']}), {format_size(disk['free_bytes'])} free",
            )
        )
    support = ", ".join(f"{name} {version}" for name, version in found["support"]["installed"].items() if version)
    lines.append(("device packages", support or "none"))
    lines.append(("GPUs, by CUDA", found["support"]["missing"] or "can be used"))
    lines.append(("GPUs, by NVML", str(len(links["gpus"])) if links["gpus"] else links["absent"]))
    if links["driver"]:
        lines.append(("driver", f"{links['driver']}, CUDA {links['cuda'] or 'unknown'}"))
    lines.append(("device measured", device["name"] if "name" in device else device["absent"]))
    if "registration" in device:
        told = device["registration"]
        lines.append(("sealed memory for kernels", "can be registered" if told["sealed"] else told["reason"]))
    return lines


def _gpu(gpu: Found) -> list[tuple[str, str]]:
    absent = gpu["absent"]

    def told(name: str, words: str = "{}") -> str:
        return f"unknown: {absent.get(name, 'not told')}" if gpu[name] is None else words.format(gpu[name])

    lines = [
        ("link", gpu["link"]),
        ("PCIe now", f"{told('pcie_generation', 'generation {}')}, {told('pcie_width', 'x{}')} (idle links slow down)"),
        ("PCIe traffic to it", told("pcie_received_gb_per_s", "{:.2f} GB/s")),
        ("from it", told("pcie_sent_gb_per_s", "{:.2f} GB/s")),
        ("chip-to-chip link", told("c2c") if gpu["c2c"] is None else "yes" if gpu["c2c"] else "no"),
        ("addressing", told("addressing")),
        ("near NUMA node", told("host_numa_node")),
        ("memory", "unknown" if gpu["total_bytes"] is None else
            f"{format_size(gpu['total_bytes'])}, {format_size(gpu['used_bytes'])} in use"),
        ("other processes", told("other_processes")),
    ]  # fmt: skip
    if gpu["same_switch"]:
        others = ", ".join(map(str, gpu["same_switch"]))
        lines.append(("shares its uplink", f"with GPU {others}, behind the same PCIe switches"))
    return lines


def _bandwidth(device: Found) -> Table:
    note = ": no GPU, these rates are those of this CPU" if device["kind"] == "simulated" else ""
    rows = device["figures"]
    ways = list(dict.fromkeys((row["way"], row["direction"]) for row in rows))
    table = Table("piece", *(f"{way}\n{direction}" for way, direction in ways), title=f"GB/s, {device['name']}{note}")
    for column in table.columns:
        column.justify = "right"
    for size in dict.fromkeys(row["piece_bytes"] for row in rows):
        rates = {(row["way"], row["direction"]): row["gb_per_s"] for row in rows if row["piece_bytes"] == size}
        table.add_row(format_size(size), *(f"{rates[key]:.3g}" if key in rates else "-" for key in ways))
    notes = ["as measured; recommendations go by curves smoothed so that they never fall with the size"]
    notes += [f"without {each['way']}: {each['reason']}" for each in device["bandwidth"]["absent"]]
    table.caption = "\n".join(notes)
    return table


def _advice(device: Found) -> Table:
    simulated = " (of the simulated device)" if device["kind"] == "simulated" else ""
    table = Table("use", "recommended", "because", title=f"How to read stored KV{simulated}")
    for each in device["advice"]:
        table.add_row(each["use"], each["recommended"] or "nothing", escape("\n".join(each["reasons"])))
    return table


def _verdict(verdict: Found) -> list[tuple[str, str]]:
    pays = verdict["pays_from_prefix_tokens"]
    return [
        (f"the first {verdict['tokens']:,} tokens", "load" if verdict["load"] else "compute"),
        ("because", verdict["reason"]),
        ("kappa", "without end" if verdict["kappa"] is None else f"{verdict['kappa']:.3g}"),
        ("prefixes worth loading", "none" if pays is None else "all" if not pays else f"from {pays:,.0f} tokens on"),
    ]

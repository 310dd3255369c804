"""Which namespace a command is about, and whose: options, and the one that fits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import click

from kvstore.client import Client, NamespaceHandle
from kvstore.client.admin import NamespaceInfo
from kvstore.client.hybrid import HybridHandle
from kvstore.errors import BadInputError
from kvstore.hybrid import parts_of

Command = TypeVar("Command", bound=Callable[..., Any])
Handle = NamespaceHandle | HybridHandle

LISTED_MAX = 8
"""Namespaces that a message lists."""
FIELDS_MAX = 3
"""Differing fields of a namespace that it names."""

tenant_option = click.option("--tenant", default="default", show_default=True, help="Whose blocks it is about.")
all_tenants_option = click.option("--all-tenants", is_flag=True, help="All tenants'; on the daemon's host only.")

_AXES = ("tp", "pp")


class ShardType(click.ParamType[dict[str, int]]):
    """A shard such as tp=1,pp=0; gives the ranks by axis."""

    name = "shard"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> dict[str, int]:
        ranks: dict[str, int] = {}
        for part in str(value).split(","):
            axis, _, rank = (word.strip() for word in part.partition("="))
            if axis not in _AXES or axis in ranks or not (rank.isascii() and rank.isdigit() and int(rank) < 1 << 16):
                self.fail(f"{part.strip()!r} in {value!r} is no rank of a shard: give tp=RANK, pp=RANK or both, as in "
                          "tp=1,pp=0", param, ctx)  # fmt: skip
            ranks[axis] = int(rank)
        return ranks


_OPTIONS = (
    click.option("--name", default="", help="The namespace with this name."),
    click.option("--digest", "digest_prefix", default="", help="Those whose digest begins with these hex digits."),
    click.option("--model", default="", help="Those of this model."),
    click.option("--revision", help="Of the model: those of this revision only ('' for none)."),
    click.option("--shard", type=ShardType(), help="Those of this shard: tp=RANK, pp=RANK or both with a comma."),
)


def namespace_options(command: Command) -> Command:
    """Options that choose namespaces, under the names of ``Selection``."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


@dataclass(frozen=True, slots=True)
class Selection:
    """What those options say."""

    name: str = ""
    digest_prefix: str = ""
    model: str = ""
    revision: str | None = None
    shard: dict[str, int] | None = None
    """Ranks by axis."""

    @property
    def is_empty(self) -> bool:
        """Whether none was given."""
        return self == Selection()

    def as_dict(self) -> dict[str, Any]:
        """As arguments of ``Client.namespaces``, ``clear`` and ``watch``."""
        return {
            "name": self.name,
            "digest_prefix": self.digest_prefix,
            "model": self.model,
            "revision": self.revision,
            **{f"{axis}_rank": rank for axis, rank in (self.shard or {}).items()},
        }


def the_namespace(client: Client, selection: Selection) -> NamespaceInfo:
    """The one namespace that fits. Raises BadInputError if none does, or several do, and says which."""
    found = client.namespaces(**selection.as_dict())
    if len(found) == 1:
        return found[0]
    if not found:
        raise nothing_fits(client)
    raise BadInputError(
        f"{len(found)} namespaces fit, say which (--digest, --name, --model, --shard): "
        f"{listed(found)}{told_apart(found)}"
    )


def nothing_fits(client: Client, *, all_tenants: bool = False) -> BadInputError:
    """The error for a selection that no namespace fits; says which there are."""
    known = client.namespaces(all_tenants=all_tenants)
    if not known:
        return BadInputError(has_nothing("namespace", "" if all_tenants else client.tenant))
    whose = "" if all_tenants else f", of tenant {client.tenant!r} (--tenant)"
    return BadInputError(f"no namespace fits; it knows {listed(known)}{whose}")


def has_nothing(what: str, tenant: str) -> str:
    """That the daemon has no ``what`` of the tenant ("" = of any), and how to look at others."""
    if not tenant:
        return f"the daemon knows no {what}: likely no engine has stored anything yet"
    return (
        f"the daemon knows no {what} of tenant {tenant!r}: likely no engine has stored anything yet; if one has, give "
        "its --tenant (`kvstore inspect namespaces --all-tenants` shows whose there are)"
    )


def opened(client: Client, info: NamespaceInfo) -> Handle:
    """A handle for a namespace that the daemon knows. Raises BadInputError if nobody has described it."""
    if info.namespace is None:
        raise BadInputError(f"namespace {info.digest.hex()} is known by its blocks only: no client has opened it yet")
    if parts_of(info.namespace.spec):
        return client.open_hybrid(info.namespace)
    return client.open(info.namespace)


def title(info: NamespaceInfo) -> str:
    """A namespace in a few words: its model and revision, and its shard where there are several."""
    if info.namespace is None:
        return "(not described)"
    revision = f"@{info.namespace.revision}" if info.namespace.revision else ""
    shard = info.namespace.shard
    axes = (("tp", shard.tp_rank, shard.tp_size), ("pp", shard.pp_rank, shard.pp_size))
    ranks = "".join(f" {axis} {rank}/{size}" for axis, rank, size in axes if size > 1)
    return f"{info.namespace.model}{revision}{ranks}"


def told_apart(found: list[NamespaceInfo]) -> str:
    """In which fields the first of them differs from the others, to end a message that lists them."""
    described = [(each.digest.hex()[:12], each.namespace) for each in found[:LISTED_MAX] if each.namespace is not None]
    told = [
        f"{digest} in {', '.join(described[0][1].differences(namespace)[:FIELDS_MAX])}"
        for digest, namespace in described[1:]
    ]
    return f"; the first differs from {'; from '.join(told)}" if told else ""


def listed(found: list[NamespaceInfo]) -> str:
    """Namespaces in a message: what their digests begin with, and their titles."""
    more = f" and {len(found) - LISTED_MAX} more" if len(found) > LISTED_MAX else ""
    return ", ".join(f"{each.digest.hex()[:12]} {title(each)}" for each in found[:LISTED_MAX]) + more

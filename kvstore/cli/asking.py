"""Commands that ask about prompts of a file: their options, and the namespace that those mean."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import click

from kvstore.cli.params import DaemonPlace, json_option, place_options, timeout_option
from kvstore.cli.selecting import Handle, Selection, namespace_options, opened, tenant_option, the_namespace
from kvstore.types import Root

number_option = click.option(
    "--number", type=click.IntRange(0), default=0, show_default=True, help="Which prompt of the file."
)


@dataclass(frozen=True, slots=True)
class Asked:
    """What those options say."""

    tokens: Path
    root: Root
    place: DaemonPlace
    tenant: str
    timeout_s: float
    selection: Selection
    as_json: bool

    @contextlib.contextmanager
    def handle(self, name: str = "") -> Iterator[Handle]:
        """The namespace, open at the daemon as long as the context lasts; ``name``: of the client.

        Raises what ``Client`` does, and BadInputError if no namespace fits or several do.
        """
        with self.place.client(self.tenant, self.timeout_s, name=name) as client:
            yield opened(client, the_namespace(client, self.selection))


def prompt_options(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command ``asked``, by the argument TOKENS and options for identity, namespace, daemon and JSON."""

    @functools.wraps(command)
    def with_asked(
        tokens: Path,
        salt: str,
        lora: str,
        place: DaemonPlace,
        tenant: str,
        timeout_s: float,
        as_json: bool,
        **more: Any,
    ) -> None:
        selection = Selection(**{each.name: more.pop(each.name) for each in fields(Selection)})
        command(asked=Asked(tokens, Root(salt, lora), place, tenant, timeout_s, selection, as_json), **more)

    options = (
        click.argument("tokens", type=click.Path(path_type=Path, dir_okay=False)),
        click.option("--salt", default="", help="The prompt's cache salt."),
        click.option("--lora", default="", help="The prompt's LoRA identity."),
        place_options,
        tenant_option,
        namespace_options,
        timeout_option,
        json_option,
    )
    wrapped: Callable[..., None] = with_asked
    for option in reversed(options):
        wrapped = option(wrapped)
    return wrapped

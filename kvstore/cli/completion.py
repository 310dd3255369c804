"""``kvstore completion``: the shell's part of completing commands and options."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

SHELLS = ("bash", "zsh", "fish")
PROGRAM = "kvstore"


@click.command(short_help="Print what a shell needs to complete commands.")
@click.argument("shell", type=click.Choice(SHELLS))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print a script for SHELL that completes commands and options.

    Put `eval "$(kvstore completion bash)"` into ~/.bashrc (zsh: ~/.zshrc), or for fish write the output to
    ~/.config/fish/completions/kvstore.fish.
    """
    kind = get_completion_class(shell)
    assert kind is not None, shell  # noqa: S101 - the choices are those that click knows
    click.echo(kind(ctx.find_root().command, {}, PROGRAM, "_KVSTORE_COMPLETE").source())

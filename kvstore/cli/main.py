"""The ``kvstore`` command.

Exit codes: 0 done; 1 the daemon can't be reached or failed, or what it needs is in use elsewhere; 2 wrong input;
3 wrong bytes; 130 interrupted.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn

import click

from kvstore import __version__
from kvstore.errors import BadInputError, IntegrityError, InUseError, KVStoreError

EXIT_FAILED, EXIT_BAD_INPUT, EXIT_WRONG_BYTES, EXIT_INTERRUPTED = 1, 2, 3, 130

_COMMANDS = {
    "serve": ("kvstore.cli.serve", "serve"),
    "config": ("kvstore.cli.config", "config_command"),
    "status": ("kvstore.cli.status", "status"),
    "record": ("kvstore.cli.record", "record"),
    "replay": ("kvstore.cli.replay", "replay_command"),
    "plan": ("kvstore.cli.plan", "plan_command"),
    "probe": ("kvstore.cli.probe", "probe_command"),
    "overlap": ("kvstore.cli.overlap", "overlap"),
    "bench": ("kvstore.cli.bench", "bench"),
    "demo": ("kvstore.cli.demo", "demo"),
    "inspect": ("kvstore.cli.inspect", "inspect_command"),
    "explain": ("kvstore.cli.explain", "explain"),
    "pin": ("kvstore.cli.pin", "pin"),
    "unpin": ("kvstore.cli.pin", "unpin"),
    "clear": ("kvstore.cli.clear", "clear"),
    "warm": ("kvstore.cli.warm", "warm"),
    "verify": ("kvstore.cli.verify", "verify"),
    "watch": ("kvstore.cli.watch", "watch"),
    "top": ("kvstore.cli.top", "top"),
    "version": ("kvstore.cli.version", "version"),
    "completion": ("kvstore.cli.completion", "completion"),
}


class LazyGroup(click.Group):
    """Imports a command's module only when the command is used, so that none pays for the others."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's interface
        return sorted(_COMMANDS)

    def load(self, name: str) -> click.Command:
        """The command of that name, loaded."""
        home, attribute = _COMMANDS[name]
        command: click.Command = getattr(import_module(home), attribute)
        return command

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002 - click's interface
        return self.load(cmd_name) if cmd_name in _COMMANDS else None


cli = LazyGroup(
    "kvstore",
    help="A tiered KV-cache store for LLM inference.",
    epilog="Exit codes: 0 done; 1 the daemon can't be reached or failed, trying again may help; 2 wrong input; "
    "3 wrong bytes found; 130 interrupted.",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
click.version_option(__version__, prog_name="kvstore")(cli)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line; a user's mistake ends with one line and exit code 2, never with a traceback."""
    sys.exit(_run(list(sys.argv[1:] if arguments is None else arguments)))


def serve_main() -> NoReturn:
    """The ``kvstored`` command: ``kvstore serve`` under its own name."""
    serve = click.version_option(__version__, prog_name="kvstored")(cli.load("serve"))
    sys.exit(_run(sys.argv[1:], serve, "kvstored"))


def _run(arguments: list[str], command: click.Command = cli, name: str = "kvstore") -> int:
    # As Ctrl-C: what is under way is wound up in order. ``serve`` has handlers of its own.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        result = command.main(arguments, prog_name=name, standalone_mode=False)
        sys.stdout.flush()
    except click.exceptions.Exit as done:
        return done.exit_code
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        _drop_output()
        return 0
    except IntegrityError as error:
        return _complain(error, EXIT_WRONG_BYTES)
    except InUseError as error:
        return _complain(error, EXIT_FAILED)
    except BadInputError as error:
        return _complain(error, EXIT_BAD_INPUT)
    except KVStoreError as error:
        return _complain(error, EXIT_FAILED)
    except OSError as error:
        _drop_output()
        return _complain(error, EXIT_FAILED)
    return result if isinstance(result, int) else 0


def _drop_output() -> None:
    """Nobody reads any more; what is still buffered must not fail again when the interpreter ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _complain(error: Exception, code: int) -> int:
    if not (isinstance(error, KVStoreError) and error.logged):
        click.echo(f"error: {error}", err=True)
    return code

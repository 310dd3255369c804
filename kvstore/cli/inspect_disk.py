"""``kvstore inspect directory`` and ``frame``: an NVMe directory from outside, and one frame in it."""

from __future__ import annotations

import json
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import click
import numpy as np

from kvstore.cli.params import json_option
from kvstore.cli.verify import print_survey, survey_dict
from kvstore.compression.frame import FrameError, FrameHeader, decode_header, header_bytes_of, inspect, verify_frame
from kvstore.errors import BadInputError, IntegrityError
from kvstore.tiers.nvme.superblock import segment_name
from kvstore.tiers.nvme.survey import survey

HEADER_START_BYTES = 16


@click.command()
@click.argument("path", type=click.Path(path_type=Path, file_okay=False))
@json_option
def directory(path: Path, as_json: bool) -> None:
    """Show an NVMe directory that no daemon has open: superblock, segments, catalog. Frames are not read.

    `kvstore verify` reads them.
    """
    found = survey(path, inspect, verify_frame, frames=False)
    click.echo(json.dumps(survey_dict(found), indent=2)) if as_json else print_survey(found)


@click.command()
@click.argument("path", type=click.Path(path_type=Path, file_okay=False))
@click.argument("segment", type=click.IntRange(0))
@click.argument("offset", type=click.IntRange(0))
def frame(path: Path, segment: int, offset: int) -> None:
    """Show the header of the frame at byte OFFSET of SEGMENT in a directory, as JSON.

    Exit code 3 if there is no intact header, or if the bytes behind it are damaged.
    """
    header, intact = read_frame(path / segment_name(segment), offset)
    click.echo(json.dumps({**header_dict(header), "intact": intact}, indent=2))
    if not intact:
        raise IntegrityError("the header is intact, the payload is not")


def read_frame(path: Path, offset: int) -> tuple[FrameHeader, bool]:
    """The header of the frame at this place of a file, and whether its payload is intact.

    Raises BadInputError for a file that can't be read, IntegrityError that says why no frame is there.
    """
    try:
        with path.open("rb") as file:
            file.seek(offset)
            start = file.read(HEADER_START_BYTES)
            header_bytes = header_bytes_of(start)
            whole = start + file.read((header_bytes or HEADER_START_BYTES) - HEADER_START_BYTES)
            header = decode_header(whole)
            whole += file.read(header.frame_bytes - len(whole))
    except OSError as error:
        raise BadInputError(f"{path} can't be read: {error.strerror}") from error
    except FrameError as error:
        raise IntegrityError(f"{path}, byte {offset}: {error}") from error
    return header, verify_frame(whole)


def header_dict(header: FrameHeader) -> dict[str, Any]:
    """A header as JSON has it; of the page groups only how many there are."""
    plain = _plain(header)
    assert isinstance(plain, dict)  # noqa: S101 - it is a dataclass
    return plain


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return {each.name: _plain(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, np.ndarray):
        return {"page_groups": int(value.size), "stored_bytes": int(value["stored_bytes"].sum())}
    if isinstance(value, Enum):
        return value.name.lower()
    if isinstance(value, tuple | list):
        return [_plain(each) for each in value]
    return value

"""Arrays and errors across the wire, and that the generated code is that of the schema."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf import descriptor_pb2
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore import errors
from kvstore.errors import KVStoreError, ProtocolError
from kvstore.wire import faults
from kvstore.wire import kvstore_pb2 as pb
from kvstore.wire import service_pb2 as spb
from kvstore.wire.packing import I64, U64, pack, unpack

# Packing -----------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(st.integers(-(1 << 63), (1 << 63) - 1)), st.lists(st.integers(0, (1 << 64) - 1)))
def test_arrays_come_back(signed: list[int], unsigned: list[int]) -> None:
    for values, dtype in ((signed, I64), (unsigned, U64)):
        data = pack(np.array(values, dtype), dtype)
        assert data == b"".join(v.to_bytes(8, "little", signed=dtype is I64) for v in values)
        back = unpack("slots.ids", data, dtype, len(values))
        assert back.tolist() == values
        assert not back.flags.writeable


def test_packing_takes_strided_big_endian_and_narrower_arrays() -> None:
    for values in (np.arange(10)[::2], np.arange(0, 10, 2, dtype=">i8"), np.arange(0, 10, 2, dtype=np.uint8)):
        assert unpack("x", pack(values, I64), I64).tolist() == [0, 2, 4, 6, 8]


@pytest.mark.parametrize("n_bytes", [1, 7, 9, 15])
def test_a_length_that_is_no_whole_number_of_items_is_refused(n_bytes: int) -> None:
    with pytest.raises(ProtocolError, match=rf"slots.ids has {n_bytes} bytes, not a multiple of 8"):
        unpack("slots.ids", bytes(n_bytes), I64)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_another_count_than_expected_is_refused(count: int) -> None:
    with pytest.raises(ProtocolError, match=rf"slots.ids has 2 items; {count} were expected"):
        unpack("slots.ids", bytes(16), I64, count)
    assert len(unpack("slots.ids", bytes(16), I64)) == 2
    assert len(unpack("slots.ids", b"", I64, 0)) == 0


# Errors ------------------------------------------------------------------------------------------

KINDS = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, KVStoreError) and kind is not KVStoreError
]
# What crosses the wire as itself; the others arrive as the nearest that a client can act on.
ARRIVES_AS: dict[type[Exception], type[Exception]] = {
    errors.BadInputError: errors.BadInputError,
    errors.ConfigError: errors.BadInputError,
    errors.InUseError: errors.BadInputError,
    errors.TraceError: errors.BadInputError,
    errors.SpecMismatchError: errors.SpecMismatchError,
    errors.ProtocolError: errors.BadInputError,
    errors.VersionError: errors.VersionError,
    errors.EndedError: errors.EndedError,
    errors.SessionEndedError: errors.SessionEndedError,
    errors.UnavailableError: errors.UnavailableError,
    errors.SocketInUseError: errors.UnavailableError,
    errors.DeniedError: errors.DeniedError,
    errors.IntegrityError: KVStoreError,
    errors.DeviceError: KVStoreError,
    errors.DeviceMemoryError: KVStoreError,
}


def over_the_wire(error: Exception) -> KVStoreError:
    message = pb.Error()
    message.ParseFromString(faults.to_message(error).SerializeToString())
    return faults.to_exception(message)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_error_arrives_as_what_a_client_can_act_on(kind: type[Exception]) -> None:
    back = over_the_wire(kind("the value is 7"))
    assert type(back) is ARRIVES_AS[kind]
    if type(back) is KVStoreError:
        assert kind.__name__ in str(back)
    else:
        assert str(back) == "the value is 7"


@pytest.mark.parametrize("error", [RuntimeError("secret"), KeyError("secret"), OSError(5, "secret")])
def test_faults_of_the_daemon_keep_their_text_to_themselves(error: Exception) -> None:
    back = over_the_wire(error)
    assert type(back) is KVStoreError
    assert "secret" not in str(back)
    assert type(error).__name__ in str(back)


def test_an_error_of_a_later_version_is_still_an_error() -> None:
    back = faults.to_exception(pb.Error(code=99, message="too new"))  # type: ignore[arg-type]
    assert (type(back), str(back)) == (KVStoreError, "too new")


@pytest.mark.parametrize("text", ["\ud800", "naïve \U0001f600", "\0", "x" * 100_000])
def test_any_text_can_be_said(text: str) -> None:
    back = over_the_wire(errors.BadInputError(f"the name is {text}"))
    assert str(back).startswith("the name is ")
    assert len(str(back)) < 10_000


# Generated code ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("schema", "module"), [("kvstore", pb), ("service", spb)])
def test_the_generated_code_is_that_of_the_schema(tmp_path: Path, schema: str, module: Any) -> None:
    if find_spec("grpc_tools") is None:
        pytest.skip("grpc_tools is not installed")
    folder = Path(faults.__file__).parent
    root = folder.parents[1]
    made = tmp_path / "kvstore" / "wire"
    command = [
        sys.executable, "-m", "grpc_tools.protoc", "-I", str(root), f"--python_out={tmp_path}",
        f"--pyi_out={tmp_path}", f"--descriptor_set_out={tmp_path / 'set'}", str(folder / f"{schema}.proto"),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    fresh = descriptor_pb2.FileDescriptorSet.FromString((tmp_path / "set").read_bytes()).file[0]
    ours = descriptor_pb2.FileDescriptorProto()
    module.DESCRIPTOR.CopyToProto(ours)
    for part in (fresh, ours):
        part.ClearField("source_code_info")
        forget_json_names(part.message_type)
    assert ours == fresh, "run `make proto`"
    for name in (f"{schema}_pb2.py", f"{schema}_pb2.pyi"):
        # Comments name the versions of the tools, which may differ from those that were used.
        assert code_of(folder / name) == code_of(made / name), f"{name} is stale: run `make proto`"


def forget_json_names(messages: Any) -> None:
    for message in messages:
        for field in message.field:
            field.ClearField("json_name")
        forget_json_names(message.nested_type)


def code_of(path: Path) -> list[str]:
    lines = path.read_text().splitlines()
    start = next((i for i, line in enumerate(lines) if "DESCRIPTOR" in line), 0)
    return [line for line in lines[start:] if not line.lstrip().startswith("#")]

"""Which weights an engine serves: the digest of files, the commit of a model from the hub, or what the user says.

File digests are of all bytes, read in parallel: about a second a GB and core, once at the start of the engine,
when the files have just been read anyway. ``weights_id`` saves it.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from kvstore.errors import ConfigError
from kvstore.types import canonical_digest

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz")
_CHUNK_BYTES = 32 << 20
_THREADS = min(16, os.cpu_count() or 1)
_COMMIT = re.compile(r"[0-9a-f]{40}")

_SAYS_NOTHING = frozenset(
    (
        "_commit_hash", "_name_or_path", "architectures", "bos_token_id", "dtype", "eos_token_id", "id2label",
        "initializer_range", "label2id", "output_attentions", "output_hidden_states", "pad_token_id", "problem_type",
        "torch_dtype", "transformers_version", "use_cache",
    )
)  # fmt: skip
"""Fields of a config that don't change what a model computes."""


def weights_id(model: str, revision: str | None, load_format: str) -> str:
    """Names the weights behind a model's path or hub id. Blocks while files are read.

    Raises ConfigError where that can't be told: the user must say ``weights_id``.
    """
    path = Path(model)
    if load_format == "dummy":
        raise _say(model, "load_format 'dummy' makes weights at random")
    if path.is_dir():
        return f"files {files_digest(_weight_files(path), path)}"
    if path.is_file():
        return f"files {files_digest([path], path.parent)}"
    return f"hub {model}@{_hub_commit(model, revision)}"


def config_digest(hf_config: Any, also: Iterable[tuple[str, object]]) -> str:
    """32 hex digits for what else decides the KV: the model's config, as the engine uses it, and ``also``."""
    facts = {name: value for name, value in hf_config.to_dict().items() if name not in _SAYS_NOTHING}
    return canonical_digest("kvstore.config.1", _plain([facts, sorted(also)])).hex()


def files_digest(files: Iterable[Path], folder: Path) -> str:
    """32 hex digits for names below ``folder`` and all bytes of files. Raises ConfigError for what can't be read."""
    parts: list[tuple[str, Path, int]] = []
    for file in sorted(files):
        n_bytes = _size(file)
        parts += [(file.relative_to(folder).as_posix(), file, at) for at in range(0, max(n_bytes, 1), _CHUNK_BYTES)]
    with ThreadPoolExecutor(_THREADS) as pool:
        digests = pool.map(lambda part: _chunk_digest(part[1], part[2]), parts)
        return canonical_digest(
            "kvstore.files.1", [[name, at, digest] for (name, _, at), digest in zip(parts, digests, strict=True)]
        ).hex()


def _weight_files(folder: Path) -> list[Path]:
    files = [path for path in folder.rglob("*") if path.suffix in _WEIGHTS and path.is_file()]
    if not files:
        raise _say(str(folder), f"there are no weights ({', '.join(_WEIGHTS)}) in it")
    return files


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError as error:
        raise _say(str(file), str(error)) from None


def _chunk_digest(file: Path, at: int) -> str:
    try:
        with file.open("rb", buffering=0) as opened:
            opened.seek(at)
            digest, left = hashlib.blake2b(digest_size=16), _CHUNK_BYTES
            while left and (read := opened.read(min(left, 4 << 20))):
                digest.update(read)
                left -= len(read)
            return digest.hexdigest()
    except OSError as error:
        raise _say(str(file), str(error)) from None


def _hub_commit(model: str, revision: str | None) -> str:
    if revision and _COMMIT.fullmatch(revision):
        return revision
    try:
        from huggingface_hub import snapshot_download

        commit = Path(snapshot_download(model, revision=revision, local_files_only=True)).name
    except Exception as error:
        raise _say(model, f"its commit is not in the hub's cache ({error})") from None
    if not _COMMIT.fullmatch(commit):
        raise _say(model, f"{commit!r} is no commit")
    return commit


def _say(model: str, why: str) -> ConfigError:
    return ConfigError(
        f"which weights {model!r:.200} has can't be told: {why}. "
        "Say it: kv_connector_extra_config = {'weights_id': 'a name that no other weights have'}"
    )


def _plain(value: Any) -> Any:
    """As JSON has it, whatever a config holds."""
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, set | frozenset):
        return sorted((_plain(each) for each in value), key=repr)
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value if isinstance(value, str | int | bool | None) else repr(value)

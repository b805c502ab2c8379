"""vLLM as a running OpenAI-compatible server: ids in, ids and log-probabilities out, counters from ``/metrics``."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import re
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eagle3_jax.engines.vllm.bridge import (
    Completion,
    Engine,
    EngineOptions,
    Generated,
    Scored,
    Tokens,
    VLLMError,
    VLLMUnavailable,
    difference,
    per_prompt,
)

_COUNTER = re.compile(r"^vllm:spec_decode_(\w+?)_total\{([^}]*)\} ([\d.e+]+)$", re.MULTILINE)
_POSITION = re.compile(r'position="(\d+)"')


class Server:
    r"""One server.

    Example::

        python -m vllm.entrypoints.openai.api_server --model TARGET --logprobs-mode raw_logits \
            --no-enable-prefix-caching --per-request-spec-decode-metrics detailed \
            --speculative-config '{"method": "eagle3", "model": HEAD, "num_speculative_tokens": 3}'
    """

    def __init__(self, url: str):
        """Ask the server who it is.

        Raises:
            VLLMError: Nothing answers there, or something that is not vLLM.
        """
        self.url = url.rstrip("/")
        if urllib.parse.urlsplit(self.url).scheme not in ("http", "https"):
            raise VLLMError(f"{url} is not the address of a server; expected something like http://localhost:8000")
        # A proxy of the environment must not be asked for a server on this machine.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        version = self._get_json("/version").get("version")
        models = self._get_json("/v1/models").get("data")
        if not isinstance(version, str) or not models:
            raise VLLMError(f"what answers at {self.url} is not a vLLM server")
        self.versions = {"vllm": version, "server": "OpenAI-compatible"}
        self.model: str = models[0]["id"]
        self.root: str = models[0].get("root") or self.model
        self.speculates = bool(self.counters())

    def counters(self) -> dict[str, Any]:
        """The ``spec_decode_*`` counters since the server started; empty where it does not speculate."""
        return parse_counters(self._get("/metrics").decode())

    def serves(self, model: str) -> bool:
        """Whether this is the model of a directory or hub id; paths on another machine are compared by name."""
        named = {self.model, self.root}
        return model in named or Path(model).name in {Path(name).name for name in named}

    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        """One request to ``/v1/completions``."""
        return json.loads(self._open("/v1/completions", json.dumps({"model": self.model, **body}).encode()))

    def _get_json(self, path: str) -> dict[str, Any]:
        try:
            return json.loads(self._get(path))
        except ValueError:
            raise VLLMError(f"what answers at {self.url} is not a vLLM server") from None

    def _get(self, path: str) -> bytes:
        return self._open(path, None)

    def _open(self, path: str, data: bytes | None) -> bytes:
        with self._request(path, data) as response:
            try:
                return response.read()
            except (OSError, urllib.error.URLError) as error:
                raise VLLMError(f"the server at {self.url} broke off: {error}") from None

    def _request(self, path: str, data: bytes | None) -> Any:
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        try:
            return self._opener.open(request, timeout=600)
        except urllib.error.HTTPError as error:
            said = " ".join(error.read().decode(errors="replace").split())[:300]
            raise VLLMError(f"the server at {self.url} answered {error.code} to {path}: {said}") from None
        except OSError as error:
            reason = getattr(error, "reason", None) or error
            raise VLLMError(
                f"no vLLM server answers at {self.url} ({reason}); is it up, and is the address right?"
            ) from None


class Servers:
    """The named servers, each a fixed engine; see :class:`eagle3_jax.engines.vllm.bridge.VLLM`."""

    def __init__(self, urls: Sequence[str]):
        self.servers = [Server(url) for url in urls]
        self.versions = self.servers[0].versions

    def engine(self, options: EngineOptions) -> Engine:
        """The server that is this engine already.

        Raises:
            VLLMUnavailable: None of them is.
            VLLMError: They serve another model.
        """
        wanted = options.speculative is not None
        mine = [server for server in self.servers if server.serves(options.model)]
        if not mine:
            served = ", ".join(server.root for server in self.servers)
            raise VLLMError(f"the vLLM server serves {served}, not {options.model}; validate what it serves: --target")
        for server in mine:
            if server.speculates == wanted:
                engine = ServerEngine(server, options)
                if wanted:
                    engine.check_num_speculative_tokens()
                return engine
        raise VLLMUnavailable(
            "no server speculates; give one to --vllm-url"
            if wanted
            else "no server decodes plainly; give one to --vllm-plain-url"
        )

    def close(self) -> None:
        """Do nothing: the servers belong to the user."""


@dataclasses.dataclass(frozen=True)
class ServerEngine:
    """See :class:`eagle3_jax.engines.vllm.bridge.Engine`."""

    server: Server
    options: EngineOptions

    def check_num_speculative_tokens(self) -> None:
        """Compare the server's ``K`` with the one asked for.

        Raises:
            VLLMUnavailable: It drafts another number of tokens.
        """
        assert self.options.speculative is not None
        wanted = self.options.speculative["num_speculative_tokens"]
        drafting = len(self.server.counters().get("num_accepted_tokens_per_pos", []))
        if drafting != wanted:
            raise VLLMUnavailable(f"the server drafts {drafting} tokens, not {wanted}")

    def generate(
        self,
        prompts: Sequence[Tokens],
        *,
        max_new_tokens: int | Sequence[int],
        temperature: float | Sequence[float] = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int | None = None,
    ) -> Generated:
        """Complete prompts to their limits, as many requests at a time as the options' batch."""
        count = len(prompts)
        limits, heats = per_prompt(max_new_tokens, count), per_prompt(temperature, count)

        def one(row: int) -> Completion:
            answer = self.server.complete(
                {
                    "prompt": prompts[row],
                    "max_tokens": limits[row],
                    "temperature": heats[row],
                    "top_k": top_k,
                    "top_p": top_p,
                    "seed": None if seed is None else seed + row,
                    "ignore_eos": True,
                    "return_token_ids": True,
                }
            )
            detail = (answer.get("metrics") or {}).get("speculative_decoding") or {}
            tokens = answer["choices"][0]["token_ids"]
            return Completion(
                tokens=tokens, accepted=detail.get("per_step_accepted"), drafted=detail.get("per_step_drafted")
            )

        before, start = self.server.counters(), time.perf_counter()
        with concurrent.futures.ThreadPoolExecutor(self.options.max_num_seqs) as pool:
            completions = list(pool.map(one, range(count)))
        seconds = time.perf_counter() - start
        return Generated(completions=completions, seconds=seconds, counters=difference(self.server.counters(), before))

    def score(self, prompts: Sequence[Tokens], outputs: Sequence[Tokens]) -> list[Scored]:
        """Teacher-force the outputs after their prompts.

        Raises:
            VLLMUnavailable: The server gives log-probabilities, which do not tell a unit in the last place of a logit.
        """
        return [self._score(prompt, output) for prompt, output in zip(prompts, outputs, strict=True)]

    def _score(self, prompt: Tokens, output: Tokens) -> Scored:
        answer = self.server.complete(
            {"prompt": prompt + output, "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 2}
        )
        found: dict[str, list] = {"best": [], "rank": [], "gap": [], "best_value": []}
        for entries, token in zip(answer["choices"][0]["prompt_logprobs"][len(prompt) :], output, strict=True):
            highest, second = sorted((entry["logprob"] for entry in entries.values()), reverse=True)[:2]
            given = entries[str(token)]["logprob"]
            found["best"].append(min(int(key) for key, entry in entries.items() if entry["logprob"] == highest))
            # As in worker.py: vLLM's rank counts equal logits as well.
            found["rank"].append(1 if given == highest else 2 if given == second else entries[str(token)]["rank"])
            found["gap"].append(highest - given)
            found["best_value"].append(highest)
        return Scored(**found)


def parse_counters(text: str) -> dict[str, Any]:
    """The counters of speculation in Prometheus' text format, under the names of ``SpeculationStats``."""
    found: dict[str, Any] = {}
    per_position: dict[int, int] = {}
    for name, labels, value in _COUNTER.findall(text):
        if name == "num_accepted_tokens_per_pos":
            position = _POSITION.search(labels)
            assert position is not None
            index = int(position[1])
            per_position[index] = per_position.get(index, 0) + int(float(value))
        else:
            found[name] = found.get(name, 0) + int(float(value))
    if per_position:
        found["num_accepted_tokens_per_pos"] = [per_position[index] for index in sorted(per_position)]
    return found

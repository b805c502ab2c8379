"""Options that the plans share, and the deployment that they describe."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Annotated, Any

from typer import Option

from eagle3_jax.cli._errors import Misuse
from eagle3_jax.cli.plan.models import read_head, read_target
from eagle3_jax.files.sources import FORMS
from eagle3_jax.theory import speedup as theory
from eagle3_jax.theory.accelerators import (
    CACHE_BYTES,
    WEIGHT_BITS,
    accelerator_named,
    custom_accelerator,
)
from eagle3_jax.theory.known_models import KNOWN_MODELS
from eagle3_jax.theory.memory import Deployment
from eagle3_jax.theory.sizes import sizes_of

_SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}

LengthOption = Annotated[
    int, Option("--num-speculative-tokens", "-K", help="Draft length K.", min=1, max=4096)
]
ContextOption = Annotated[
    int | None,
    Option(
        help="Earlier tokens of each sequence. Default: 1024, or all positions of the target.",
        min=0,
    ),
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeploymentOptions:
    """A target and its head on accelerators."""

    target: Annotated[
        str | None,
        Option(
            help=(
                f"Directory with a config.json, hub id, {', '.join(KNOWN_MODELS)}. Default:"
                " bundled."
            )
        ),
    ] = None
    drafter: Annotated[
        str | None,
        Option(
            help=(
                "Directory with the config.json of a head of any method or of a draft model, hub"
                f" id, {FORMS}. Default: the bundled head for the bundled target; for others a"
                " usual EAGLE-3 head (one layer like the target's, draft vocabulary 32000)."
            )
        ),
    ] = None
    gpu: Annotated[
        str | None, Option(help="Accelerator, such as H100, H200, L40S, MI300X or TPU-v6e.")
    ] = None
    bandwidth_gb_per_s: Annotated[
        float | None,
        Option(
            help="Memory bandwidth of an accelerator without a name, or measured on the named one."
        ),
    ] = None
    peak_tflops: Annotated[float | None, Option(help="Dense bfloat16 peak of the accelerator.")] = (
        None
    )
    memory_gb: Annotated[float | None, Option(help="Memory of the accelerator.")] = None
    num_gpus: Annotated[int, Option(help="Tensor-parallel size.", min=1)] = 1
    weights: Annotated[
        str | None,
        Option(
            help=(
                f"Type of the target's layers: {', '.join(WEIGHT_BITS)}, or bf16, fp16, fp32."
                " Default: as the target is published."
            )
        ),
    ] = None
    cache: Annotated[str, Option(help=f"Type of both caches: {', '.join(CACHE_BYTES)}.")] = (
        "bfloat16"
    )

    def read(self) -> Deployment:
        """Returns the deployment that the options describe.

        Raises:
            ValueError: The options contradict each other or name something unknown; the message
                names the option.
        """
        target = read_target(self.target)
        weights = self.weights
        head = read_head(self.drafter, target, bundled=self.target is None)

        if self.bandwidth_gb_per_s is not None:
            accelerator = custom_accelerator(
                gb_per_s=self.bandwidth_gb_per_s,
                tflops=self.peak_tflops,
                memory_gb=self.memory_gb,
                base=None if self.gpu is None else accelerator_named(self.gpu),
            )
        elif self.peak_tflops is None and self.memory_gb is None:
            accelerator = accelerator_named("H100" if self.gpu is None else self.gpu)
        else:
            raise Misuse(
                "--peak-tflops and --memory-gb describe an accelerator by hand; add"
                " --bandwidth-gb-per-s"
            )

        return Deployment(
            target=target.config,
            head=head.config,
            accelerator=accelerator,
            num_accelerators=self.num_gpus,
            weights=target.weights if weights is None else _SHORT.get(weights, weights),
            cache=_SHORT.get(self.cache, self.cache),
            stored=target.stored if weights is None else None,
            target_name=target.name,
            head_name=head.name,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftOptions:
    """A chain of drafts and its acceptance."""

    num_speculative_tokens: LengthOption = 5
    mean_acceptance_length: Annotated[
        float | None, Option(help="τ: tokens per round, the target's own included.")
    ] = None
    draft_acceptance_rate: Annotated[
        float | None, Option(help="r: accepted over drafted tokens, as in vLLM's log.")
    ] = None
    conditional_acceptance_rate: Annotated[
        float | None,
        Option(
            "--conditional-acceptance-rate",
            "--alpha",
            help=(
                "Probability that a token is accepted if all before it were. Default: 0.7, or"
                " computed from τ or r."
            ),
        ),
    ] = None

    def acceptance(self, classes: Sequence[theory.TrafficClass] = ()) -> theory.Rates:
        """Returns the acceptance of classes of traffic, or of one of the three options.

        Without any of them it is a conditional rate of 0.7.

        Raises:
            ValueError: Several options were given, or no chain can have this acceptance.
        """
        k = self.num_speculative_tokens
        tau = self.mean_acceptance_length
        rate = self.draft_acceptance_rate
        alpha = self.conditional_acceptance_rate
        num_rates = 3 - [tau, rate, alpha].count(None)

        if classes and num_rates:
            raise Misuse(
                "--traffic has the acceptance of every class; leave the other options of"
                " acceptance out"
            )
        if num_rates > 1:
            raise Misuse(
                "--mean-acceptance-length, --draft-acceptance-rate and"
                " --conditional-acceptance-rate mean the same in three ways; give one"
            )

        if classes:
            taus = [
                theory.tau_from_conditional_rate(kind.conditional_acceptance_rate, k)
                for kind in classes
            ]
            tau = theory.blended_tau([kind.share for kind in classes], taus)
        elif rate is not None:
            tau = theory.tau_from_draft_rate(rate, k)
        elif tau is None:
            tau = theory.tau_from_conditional_rate(0.7 if alpha is None else alpha, k)
        return theory.rates(tau, k)

    def read_for(self, deployment: Deployment) -> tuple[int, float]:
        """Returns ``K`` and ``τ`` of a deployment; 0 and 1 without a head."""
        tau = self.acceptance().mean_acceptance_length
        k = draft_length(self.num_speculative_tokens, deployment)
        return k, tau if deployment.head else 1.0


def draft_length(num_draft_tokens: int, deployment: Deployment) -> int:
    """Returns ``K``, which the head must be able to draft; 0 without a head."""
    if deployment.head is None:
        return 0

    head = sizes_of(deployment.head)
    if num_draft_tokens <= head.longest:
        return num_draft_tokens
    reason = " drafts"
    if head.longest + 1 == head.max_positions:
        reason = f" has {head.max_positions} positions, so K is"
    raise Misuse(
        f"--num-speculative-tokens {num_draft_tokens} is above the limit of the head:"
        f" {deployment.head_name}{reason} at most {head.longest}"
    )


def read_context(context: int | None, default: int, deployment: Deployment) -> int:
    """Returns the context length of the option.

    The default is bounded by the positions of the target.
    """
    target = deployment.target
    if context is None:
        return min(default, target.max_positions)
    if context > target.max_positions:
        raise Misuse(
            f"--context {context} is beyond the {target.max_positions} positions of"
            f" {deployment.target_name}"
        )
    return context


def deployment_json(deployment: Deployment) -> dict[str, Any]:
    """Returns the deployment as plain values."""
    target = sizes_of(deployment.target)
    head = None if deployment.head is None else sizes_of(deployment.head)
    cache_bytes = None if head is None else deployment.cache_bytes_per_token(head)

    return {
        "target": deployment.target_name,
        "target_parameters": target.owned.total,
        "target_active_parameters": target.active,
        "drafter": None if head is None else deployment.head_name,
        "drafter_method": None if head is None else head.method,
        "drafter_parameters": None if head is None else head.owned.total,
        "drafter_cache_bytes_per_token": cache_bytes,
        "accelerator": dataclasses.asdict(deployment.accelerator),
        "num_gpus": deployment.num_accelerators,
        "weights": deployment.weights,
        "cache": deployment.cache,
    }


def title_of(deployment: Deployment, context: int, text: str, gpu: str | None = None) -> str:
    """Returns the deployment and a text in one line.

    A warning follows if the context is beyond the positions of the head.
    """
    head = deployment.head
    head_name = deployment.head_name if head else "no head"
    gpus = f"{deployment.num_accelerators} x {gpu or deployment.accelerator.name}"
    title = f"{deployment.target_name} ({deployment.weights}) with {head_name} on {gpus}; {text}\n"
    if head is not None and context > head.max_positions:
        title += (
            f"Beyond the {head.max_positions:,} positions that the head was built for, expect it to"
            " draft worse.\n"
        )
    return title

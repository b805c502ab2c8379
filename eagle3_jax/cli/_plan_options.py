"""The options that the commands of `eagle3 plan` share, each declared once, and what they describe."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple, get_type_hints

import typer

from eagle3_jax.cli._errors import Misuse
from eagle3_jax.cli._planning import read_head, read_target
from eagle3_jax.named import FORMS
from eagle3_jax.theory.accelerators import Accelerator, accelerator_named, custom_accelerator
from eagle3_jax.theory.known_models import KNOWN_MODELS
from eagle3_jax.theory.memory import CACHE_BYTES, WEIGHT_BITS, Deployment
from eagle3_jax.theory.speedup import Rates, rates, tau_from_conditional_rate, tau_from_draft_rate

TargetOption = Annotated[
    str | None,
    typer.Option(
        "--target",
        help="Directory with a config.json, hub id, or one of "
        f"{', '.join(KNOWN_MODELS)}; the bundled one when left out.",
    ),
]
DrafterOption = Annotated[
    str | None,
    typer.Option(
        "--drafter",
        help=f"Directory with the config.json of a head of any method or of a draft model, hub id, {FORMS}. Left out: "
        "the bundled head for the bundled target, for others EAGLE-3's usual one (one layer like the target's, draft "
        "vocabulary 32000).",
    ),
]
GpuOption = Annotated[
    str | None, typer.Option("--gpu", help="Accelerator, such as H100, H200, L40S, MI300X or TPU-v6e.")
]
BandwidthOption = Annotated[
    float | None,
    typer.Option("--bandwidth-gb-per-s", help="Any other accelerator, or the measured bandwidth of the one named."),
]
TflopsOption = Annotated[float | None, typer.Option("--peak-tflops", help="Its dense bfloat16 peak.")]
MemoryOption = Annotated[float | None, typer.Option("--memory-gb", help="Its memory.")]
NumGpusOption = Annotated[int, typer.Option("--num-gpus", help="Tensor-parallel size.", min=1)]
WeightsOption = Annotated[
    str, typer.Option("--weights", help=f"Of the target's layers: {', '.join(WEIGHT_BITS)}, or bf16, fp16, fp32.")
]
CacheOption = Annotated[str, typer.Option("--cache", help=f"Of both caches: {', '.join(CACHE_BYTES)}.")]
LengthOption = Annotated[
    int, typer.Option("--num-speculative-tokens", "-K", help="Tokens of the draft chain.", min=1, max=4096)
]
TauOption = Annotated[
    float | None, typer.Option("--mean-acceptance-length", help="τ, tokens per round, the target's own included.")
]
DraftRateOption = Annotated[
    float | None, typer.Option("--draft-acceptance-rate", help="Accepted over drafted tokens, as vLLM logs it.")
]
ConditionalRateOption = Annotated[
    float | None,
    typer.Option(
        "--conditional-acceptance-rate",
        "--alpha",
        help="Probability of a token given that all before it were accepted; 0.7 when nothing is given.",
    ),
]
ContextOption = Annotated[
    int | None,
    typer.Option("--context", help="Tokens that each sequence has behind it; 1024 if the target has them.", min=0),
]

_SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeploymentOptions:
    """A target and its head on accelerators."""

    target: TargetOption = None
    drafter: DrafterOption = None
    gpu: GpuOption = None
    bandwidth_gb_per_s: BandwidthOption = None
    peak_tflops: TflopsOption = None
    memory_gb: MemoryOption = None
    num_gpus: NumGpusOption = 1
    weights: WeightsOption = "bfloat16"
    cache: CacheOption = "bfloat16"

    @property
    def names_accelerator(self) -> bool:
        """Whether one was chosen, by name or by its bandwidth."""
        return self.gpu is not None or self.bandwidth_gb_per_s is not None

    def read(self) -> Deployment:
        """What the options describe.

        Raises:
            ValueError: They describe nothing that can be planned; the message says which option.
        """
        target = read_target(self.target)
        head = read_head(self.drafter, target, bundled=self.target is None)
        return Deployment(
            target=target.config,
            head=head.config,
            accelerator=read_accelerator(
                self.gpu, bandwidth=self.bandwidth_gb_per_s, tflops=self.peak_tflops, memory=self.memory_gb
            ),
            num_accelerators=self.num_gpus,
            weights=_SHORT.get(self.weights, self.weights),
            cache=_SHORT.get(self.cache, self.cache),
            target_name=target.name,
            head_name=head.name,
        )


class DraftPlan(NamedTuple):
    """What is drafted in a round.

    Attributes:
        num_draft_tokens: ``K``; 0 without a head.
        mean_acceptance_length: ``τ``; 1 without a head.
    """

    num_draft_tokens: int
    mean_acceptance_length: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftOptions:
    """A chain of drafts and how much of it is accepted."""

    num_speculative_tokens: LengthOption = 5
    mean_acceptance_length: TauOption = None
    draft_acceptance_rate: DraftRateOption = None
    conditional_acceptance_rate: ConditionalRateOption = None

    @property
    def says_acceptance(self) -> bool:
        """Whether any of the three options of acceptance was given."""
        given = (self.mean_acceptance_length, self.draft_acceptance_rate, self.conditional_acceptance_rate)
        return any(value is not None for value in given)

    def acceptance(self) -> Rates:
        """The acceptance that one of three options gives; conditional 0.7 when none does.

        Raises:
            ValueError: More than one was given, or no chain has such an acceptance.
        """
        k, tau, conditional = self.num_speculative_tokens, self.mean_acceptance_length, self.conditional_acceptance_rate
        given = [value for value in (tau, self.draft_acceptance_rate, conditional) if value is not None]
        if len(given) > 1:
            raise Misuse(
                "--mean-acceptance-length, --draft-acceptance-rate and --conditional-acceptance-rate say the same in "
                "three ways; give one"
            )
        if self.draft_acceptance_rate is not None:
            tau = tau_from_draft_rate(self.draft_acceptance_rate, k)
        elif tau is None:
            tau = tau_from_conditional_rate(0.7 if conditional is None else conditional, k)
        return rates(tau, k)

    def of(self, deployment: Deployment) -> DraftPlan:
        """The draft of a deployment, plain decoding where it has no head."""
        found = self.acceptance()
        if deployment.head is None:
            return DraftPlan(0, 1.0)
        return DraftPlan(self.num_speculative_tokens, found.mean_acceptance_length)


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """The command with one option for every field of the dataclasses that it takes.

    Typer reads a signature and knows no groups, so it is shown this one; the command gets the dataclasses.
    """
    options: list[inspect.Parameter] = []
    groups: dict[str, tuple[type, list[str]]] = {}
    hints = get_type_hints(command, include_extras=True)
    for parameter in inspect.signature(command).parameters.values():
        kind = hints[parameter.name]
        if not (isinstance(kind, type) and dataclasses.is_dataclass(kind)):
            options.append(parameter.replace(annotation=kind))
            continue
        fields = get_type_hints(kind, include_extras=True)
        own = inspect.signature(kind).parameters.values()
        options += [field.replace(annotation=fields[field.name]) for field in own]
        groups[parameter.name] = kind, [field.name for field in own]

    @functools.wraps(command)
    def flat(**given: Any) -> None:
        together = {
            name: kind(**{field: given.pop(field) for field in fields}) for name, (kind, fields) in groups.items()
        }
        command(**together, **given)

    flat.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
    flat.__annotations__ = {option.name: option.annotation for option in options}
    return flat


def read_accelerator(
    gpu: str | None, *, bandwidth: float | None, tflops: float | None, memory: float | None
) -> Accelerator:
    """The one named, the one described, or an H100."""
    if bandwidth is None:
        if tflops is not None or memory is not None:
            raise Misuse("--peak-tflops and --memory-gb describe an accelerator by hand; add --bandwidth-gb-per-s")
        return accelerator_named("H100" if gpu is None else gpu)
    base = None if gpu is None else accelerator_named(gpu)
    return custom_accelerator(gb_per_s=bandwidth, tflops=tflops, memory_gb=memory, base=base)


def check_draft_length(num_draft_tokens: int, deployment: Deployment) -> None:
    """Refuse a chain that the head has no positions for."""
    head = deployment.head
    longest = getattr(head, "longest", None)
    if longest is not None and num_draft_tokens > longest:
        raise Misuse(
            f"--num-speculative-tokens {num_draft_tokens} is above what {deployment.head_name} drafts at once; give at "
            f"most -K {longest}"
        )
    if head is not None and num_draft_tokens >= head.max_positions:  # the root needs one too
        raise Misuse(
            f"--num-speculative-tokens {num_draft_tokens} is above the limit of the head: {deployment.head_name} has "
            f"{head.max_positions} positions, so K is at most {head.max_positions - 1}"
        )


def read_context(context: int | None, usual: int, deployment: Deployment) -> int:
    """The length that was asked for, or the usual one as far as the target reaches."""
    target = deployment.target
    if context is None:
        return min(usual, target.max_positions)
    if context > target.max_positions:
        raise Misuse(f"--context {context} is beyond the {target.max_positions} positions of {deployment.target_name}")
    return context

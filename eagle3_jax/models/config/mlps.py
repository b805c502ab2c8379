"""What works on each position alone: a gated MLP, or a choice of experts."""

from __future__ import annotations

import dataclasses
from typing import Literal

from eagle3_jax.models.config.ranges import MOST, positive, within

# gelu-tanh: the tanh approximation of GELU (Gemma).
Activation = Literal["silu", "gelu-tanh"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatedMLP:
    """A gated MLP (Shazeer, 2020), by default a SwiGLU.

    Attributes:
        width: Its inner width.
        bias: Whether its projections carry a bias.
        activation: Activation of the gate.
    """

    width: int
    bias: bool = False
    activation: Activation = "silu"

    def __post_init__(self) -> None:
        if not 1 <= self.width <= MOST:
            raise ValueError(f"mlp width is {str(self.width)[:40]}; expected a whole number from 1 to {MOST:g}")


# What a router makes of its logits. softmax: of all experts, then the k largest. sigmoid: of each; a correction is
# added to choose k, by groups first, and does not enter the weights. softmax-of-chosen: of the k largest logits.
# sigmoid-of-input: of the k largest logits, and it multiplies what goes into the expert, not what comes out.
Router = Literal["softmax", "sigmoid", "softmax-of-chosen", "sigmoid-of-input"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experts:
    """A mixture of experts: every token goes through some of many small gated MLPs.

    Attributes:
        num_experts: ``E``.
        per_token: ``k``, experts that a token goes through.
        width: Inner width of an expert.
        router: How the experts of a token and their weights follow from its logits.
        normalise: Whether the weights of the chosen are divided by their sum (``softmax``, ``sigmoid``).
        scaling: What the weights are multiplied with after that.
        groups: Runs of neighbouring experts that are chosen first (``sigmoid``).
        kept_groups: How many of them stay.
        shared_width: Inner width of the MLP that every token goes through beside; 0 for none.
        shared_gate: Whether that MLP's output is multiplied with the sigmoid of one number per token.
        bias: Whether router and experts carry biases.
        limit: Clamped gates (gpt-oss): ``(up + 1) * gate * sigmoid(1.702 * gate)`` with ``gate <= limit`` and
            ``|up| <= limit``; ``silu(gate) * up`` when ``None``.
    """

    num_experts: int
    per_token: int
    width: int
    router: Router
    normalise: bool = True
    scaling: float = 1.0
    groups: int = 1
    kept_groups: int = 1
    shared_width: int = 0
    shared_gate: bool = False
    bias: bool = False
    limit: float | None = None

    def __post_init__(self) -> None:
        positive(self, "num_experts", "per_token", "width", "groups", "kept_groups")
        within(self, "shared_width", 0, MOST)
        within(self, "scaling", 1e-6, 1e6)
        within(self, "limit", 1e-6, 1e6)
        if self.per_token > self.num_experts:
            raise ValueError(f"{self.per_token} experts per token of {self.num_experts}; expected at most as many")
        if self.num_experts % self.groups or self.kept_groups > self.groups:
            raise ValueError(
                f"{self.num_experts} experts in {self.groups} groups of which {self.kept_groups} are kept; expected "
                "groups of one size, and no more kept than there are"
            )
        if self.groups > 1 and (self.router != "sigmoid" or self.num_experts < 2 * self.groups):
            raise ValueError(
                f"{self.num_experts} experts in {self.groups} groups of a {self.router} router; expected a sigmoid "
                "router and at least two experts a group"
            )
        if self.per_token > self.num_experts // self.groups * self.kept_groups:
            raise ValueError(f"{self.per_token} experts per token; the groups kept have fewer")
        if self.shared_gate and not self.shared_width:
            raise ValueError("shared_gate without a shared expert; give shared_width")

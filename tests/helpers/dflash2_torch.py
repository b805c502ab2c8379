"""A second implementation of DFlash2 in PyTorch, from the rules of its file, without a cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, silu


class Twin:
    """A drafter from its ``config.json`` in z-lab's layout and its tensors.

    Features, hidden states and logits may have any leading axes.
    """

    def __init__(
        self, config: Mapping[str, Any], tensors: Mapping[str, Tensor], tables: tuple[Tensor, ...]
    ):
        self.config = config
        self.options = config["dflash_config"]
        self.w = {name.removesuffix(".weight"): value for name, value in tensors.items()}
        self.table, self.output = tables

    def norm(self, x: Tensor, name: str) -> Tensor:
        eps = self.config["rms_norm_eps"]
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps) * self.w[name]

    def linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self.w[name].T

    def heads(self, x: Tensor, name: str) -> Tensor:
        return self.linear(x, name).unflatten(-1, (-1, self.config["head_dim"]))

    def turn(self, x: Tensor, first: int) -> Tensor:
        """Rotates ``[... T heads H]`` from position ``first`` on."""
        half = x.shape[-1] // 2
        rope = self.config.get("rope_parameters") or self.config
        speed = rope["rope_theta"] ** (-torch.arange(half) / half)
        angle = (first + torch.arange(x.shape[-3]))[:, None, None] * speed
        a = x[..., :half]
        b = x[..., half:]
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)

    def convolve(self, x: Tensor, change: Tensor, base: Tensor) -> Tensor:
        """Sums ``(base[t] + change[t]) x[row - t]`` over the taps; before the block is zero."""
        total = torch.zeros_like(x)
        for tap, kernel in enumerate(base):
            wide = change[..., tap, :].repeat_interleave(self.options["conv_group_size"], -1)
            total = total + (kernel + wide) * pad(x, (0, 0, tap, 0))[..., : x.shape[-2], :]
        return total

    def wrap(self, x: Tensor, name: str, layer: Any) -> Tensor:
        """Runs a part of a block between two convolutions, whose kernels follow from ``x``."""
        bases = self.w[f"{name}.base_kernel"]
        changes = self.linear(x, f"{name}.kernel_projection")
        changes = changes.unflatten(-1, (2, bases.shape[1], -1))
        inside = layer(self.convolve(x, changes[..., 0, :, :], bases[0]))
        return self.convolve(inside, changes[..., 1, :, :], bases[1])

    def attend(self, x: Tensor, context: Tensor, name: str, kind: str) -> Tensor:
        known = context.shape[-2]
        query = self.turn(self.norm(self.heads(x, f"{name}.q_proj"), f"{name}.q_norm"), known)
        both = [self.heads(y, f"{name}.k_proj") for y in (context, x)]
        keys = self.turn(self.norm(torch.cat(both, -3), f"{name}.k_norm"), 0)
        values = torch.cat([self.heads(y, f"{name}.v_proj") for y in (context, x)], -3)
        group = query.shape[-2] // keys.shape[-2]
        keys, values = (y.repeat_interleave(group, -2) for y in (keys, values))

        score = torch.einsum("...qhd,...khd->...hqk", query, keys) / query.shape[-1] ** 0.5
        at = torch.arange(keys.shape[-3])
        ahead = at[None] - at[known:, None]
        slides = kind == "sliding_attention"
        hidden = (ahead > 0) & self.config.get("is_causal", slides)
        if slides:
            hidden = hidden | (ahead.abs() >= self.config["sliding_window"])
        weight = score.masked_fill(hidden, -torch.inf).softmax(-1)
        out = torch.einsum("...hqk,...khd->...qhd", weight, values).flatten(-2)
        return self.linear(out, f"{name}.o_proj")

    def mlp(self, x: Tensor, name: str) -> Tensor:
        inner = silu(self.linear(x, f"{name}.gate_proj")) * self.linear(x, f"{name}.up_proj")
        return self.linear(inner, f"{name}.down_proj")

    def block(self, features: Tensor, root: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Returns hidden states and logits of ``count`` masks after ``features [... n A·Dt]``."""
        context = self.norm(self.linear(features, "fc"), "hidden_norm")
        masks = torch.full((*root.shape, count), self.options["mask_token_id"])
        x = self.table[torch.cat([root[..., None], masks], -1)]
        x = x * self.options.get("input_embedding_scale", 1.0)

        for layer, kind in enumerate(self.config["layer_types"]):
            name = f"layers.{layer}"
            attention = lambda y, name=name, kind=kind: self.attend(
                y, context, f"{name}.self_attn", kind
            )
            y = self.norm(x, f"{name}.input_layernorm")
            x = x + self.wrap(y, f"{name}.attention_conv", attention)
            y = self.norm(x, f"{name}.post_attention_layernorm")
            x = x + self.wrap(
                y, f"{name}.mlp_conv", lambda z, name=name: self.mlp(z, f"{name}.mlp")
            )

        hidden = self.norm(x, "norm")[..., 1:, :]
        logits = hidden @ self.w.get("lm_head", self.output).T
        logits = logits * self.options.get("output_multiplier", 1.0)
        cap = self.options.get("final_logit_softcapping")
        return hidden, cap * torch.tanh(logits / cap) if cap else logits

    def scores(self, hidden: Tensor, logits: Tensor, before: Tensor) -> Tensor:
        """Returns the scores ``[... V]`` of one row after a token; others than candidates: -inf."""
        w = self.w
        best, ids = logits.topk(self.options["selector_top_k"])
        factor = self.linear(hidden, "candidate_selector.hidden_projection")
        factor = factor * w["candidate_selector.predecessor_codebook"][before]
        fit = (w["candidate_selector.successor_codebook"][ids] * factor[..., None, :]).sum(-1)
        return torch.full_like(logits, -torch.inf).scatter(-1, ids, best + fit)

    def chain(self, hidden: Tensor, logits: Tensor, root: int) -> tuple[list[int], Tensor]:
        """Returns the greedy chain after a root and its scores ``[K V]``."""
        tokens = [root]
        rows = []
        for state, row in zip(hidden, logits, strict=True):
            rows.append(self.scores(state, row, torch.tensor(tokens[-1])))
            tokens.append(int(rows[-1].argmax()))
        return tokens[1:], torch.stack(rows)

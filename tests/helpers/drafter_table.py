"""Every drafting method by name, with small random models.

A new method is one more row of ``ALL_DRAFTERS``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
import tiny

from eagle3_jax.decode import LoadedDrafter
from eagle3_jax.drafters import Fallback, Markov, NGram, Plain, Suffix, layer_skip
from eagle3_jax.models.config import Experts, GatedMLP, Latent, LayerConfig, uniform
from eagle3_jax.topology import Chain, DynamicTree
from eagle3_jax.types import DraftSampling

TARGET = tiny.target(13)
PROBABILISTIC = DraftSampling.PROBABILISTIC
TREE = DynamicTree(num_nodes=9, max_depth=3, top_k=3)
WINDOWED = tiny.layers(1, window=3, qk_norm=True) + tiny.layers(1, qk_norm=True)
# A block of DeepSeek V3.
LATENT = (
    LayerConfig(
        mixer=Latent(num_heads=4, q_rank=6, kv_rank=8, nope_dim=4, rope_dim=4, value_dim=6),
        mlp=Experts(num_experts=4, per_token=2, width=12, router="sigmoid", shared_width=12),
    ),
)
# Some rows of a batch match, others do not.
RARE = NGram(2, min_ngram=2)


def latent_layers(count: int) -> tuple[LayerConfig, ...]:
    """Returns layers of latent attention with a dense MLP."""
    mixer = Latent(num_heads=4, q_rank=6, kv_rank=8, nope_dim=4, rope_dim=4, value_dim=3)
    return uniform(count, mixer, GatedMLP(width=24))


ALL_DRAFTERS: dict[str, Callable[[], LoadedDrafter]] = {
    "plain": lambda: LoadedDrafter(Plain()),
    "plain, padded": lambda: LoadedDrafter(Plain(4)),
    "n-grams": lambda: LoadedDrafter(NGram(3)),
    "suffixes": lambda: LoadedDrafter(Suffix(3)),
    "EAGLE-3 chain": lambda: tiny.eagle3(TARGET, Chain(3), draft_vocab_size=7),
    "EAGLE-3 sampled chain": lambda: tiny.eagle3(
        TARGET, Chain(3), draft_vocab_size=7, draft_sampling=PROBABILISTIC
    ),
    "EAGLE-3 dynamic tree": lambda: tiny.eagle3(TARGET, TREE),
    "EAGLE-3 static tree": lambda: tiny.eagle3(TARGET, tiny.STATIC_TREE),
    "draft model chain": lambda: tiny.draft_model(TARGET, Chain(3)),
    "draft model sampled chain": lambda: tiny.draft_model(
        TARGET, Chain(3), draft_sampling=PROBABILISTIC
    ),
    "draft model dynamic tree": lambda: tiny.draft_model(TARGET, TREE),
    "layer skip": lambda: layer_skip(TARGET, 1),
    "EAGLE-2 dynamic tree": lambda: tiny.eagle1(TARGET, TREE),
    "EAGLE-1 drawn tree": lambda: tiny.eagle1(
        TARGET, tiny.STATIC_TREE, num_layers=2, draft_sampling=PROBABILISTIC
    ),
    "MTP chain": lambda: tiny.mtp(TARGET, Chain(3), own_output=True),
    "MTP dynamic tree of latents and experts": lambda: tiny.mtp(TARGET, TREE, layers=LATENT),
    "MTP modules, a chain": lambda: tiny.mtp(TARGET, Chain(3), layers=tiny.layers(2, window=4)),
    "MTP modules, a sampled chain": lambda: tiny.mtp(
        TARGET, Chain(3), layers=(*tiny.layers(1), *LATENT), draft_sampling=PROBABILISTIC
    ),
    "DFlash chain": lambda: tiny.dflash(TARGET, Chain(3), draft_vocab_size=7),
    "DFlash sampled chain, windows": lambda: tiny.dflash(
        TARGET, Chain(3), draft_sampling=PROBABILISTIC, layers=WINDOWED
    ),
    "DFlash dynamic tree, causal windows": lambda: tiny.dflash(
        TARGET, TREE, layers=WINDOWED, causal_windows=True
    ),
    "DSpark sampled chain": lambda: tiny.dflash(
        TARGET, draft_sampling=PROBABILISTIC, block_size=3, from_anchor=True, markov=Markov(rank=4)
    ),
    "DSpark dynamic tree": lambda: tiny.dflash(TARGET, TREE, markov=Markov(rank=4)),
    "DFlash2 chain": lambda: tiny.dflash2(TARGET, Chain(3)),
    "DFlash2 sampled chain": lambda: tiny.dflash2(
        TARGET, draft_sampling=PROBABILISTIC, layers=tiny.layers(2, qk_norm=True, window=3)
    ),
    "DFlash2 dynamic tree": lambda: tiny.dflash2(TARGET, TREE, final_logit_softcapping=2.0),
    "EAGLE-3.1 chain": lambda: tiny.eagle3(
        TARGET, Chain(2), norm_output=True, fc_norm=True, num_layers=2
    ),
    "Medusa chain": lambda: tiny.medusa(TARGET, Chain(3), shared_output=True, draft_vocab_size=7),
    "Medusa sampled chain": lambda: tiny.medusa(TARGET, Chain(3), draft_sampling=PROBABILISTIC),
    "Medusa dynamic tree": lambda: tiny.medusa(TARGET, TREE),
    "Medusa static tree": lambda: tiny.medusa(TARGET, tiny.STATIC_TREE),
    "EAGLE-3 under a window": lambda: tiny.eagle3(
        TARGET, tiny.STATIC_TREE, layers=tiny.layers(1, window=3)
    ),
    "EAGLE-3 of latents, sampled chain": lambda: tiny.eagle3(
        TARGET,
        Chain(3),
        layers=latent_layers(2),
        norm_output=True,
        draft_vocab_size=7,
        draft_sampling=PROBABILISTIC,
    ),
    "EAGLE-3 of latents, dynamic tree": lambda: tiny.eagle3(TARGET, TREE, layers=latent_layers(1)),
    "P-EAGLE chain": lambda: tiny.p_eagle(TARGET, Chain(3), draft_vocab_size=7),
    "P-EAGLE sampled chain": lambda: tiny.p_eagle(TARGET, Chain(3), draft_sampling=PROBABILISTIC),
    "P-EAGLE dynamic tree": lambda: tiny.p_eagle(TARGET, TREE),
    "Gemma 4's assistant, a chain": lambda: tiny.gemma4(TARGET, Chain(3)),
    "Gemma 4's assistant, a sampled chain of clusters": lambda: tiny.gemma4(
        TARGET, Chain(3), draft_sampling=PROBABILISTIC, num_centroids=13, num_clusters=5
    ),
    "n-grams, else Gemma 4's assistant": lambda: Fallback.of(RARE, tiny.gemma4(TARGET, TREE)),
    "n-grams, else an EAGLE-3 chain": lambda: Fallback.of(
        RARE, tiny.eagle3(TARGET, Chain(3), draft_vocab_size=7)
    ),
    "n-grams, else a sampled EAGLE-3 chain": lambda: Fallback.of(
        RARE, tiny.eagle3(TARGET, Chain(3), draft_vocab_size=7, draft_sampling=PROBABILISTIC)
    ),
    "n-grams, else an EAGLE-3 dynamic tree": lambda: Fallback.of(RARE, tiny.eagle3(TARGET, TREE)),
}
SAMPLED_TREE = LoadedDrafter(
    tiny.Sampled((-1, 0, 0, 1)),
    jnp.array(np.random.default_rng(0).dirichlet(np.ones(13), 13), jnp.float32),
)


@functools.cache
def drafter_of(name: str) -> LoadedDrafter:
    """One of :data:`ALL_DRAFTERS`."""
    return ALL_DRAFTERS[name]()

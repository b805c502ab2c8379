# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 10 · Your own drafter and acceptance rule
#
# The drafter and the acceptance rule are replaceable. After this notebook you can
#
# - compare drafters on the same text with a lower and an upper bound;
# - write a drafter that learns while it decodes;
# - find mistakes with `e3.check_drafter` and `e3.check_verifier`;
# - write a lossless acceptance rule, and a lossy one with a label;
# - use both from the command line.
#
# The notebook runs on a laptop CPU, offline, in a checkout. Read
# [01](01_memory_bound_decoding.ipynb) and [02](02_speculative_sampling.ipynb) first. The page
# [Drafters](../docs/drafters.md) has the contract. The page [Extending](../docs/extending.md) shows
# your own target and checkpoint format.

# %% tags=["hide-input"]
import first_cell

first_cell.start(repository=True)

import ast
import dataclasses
import json
import linecache
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import tiny  # tests/helpers/tiny.py: random models of a few hundred parameters
from IPython.display import display
from pictures.ribbons import acceptance_ribbons
from pictures.strips import PROMPT, TokenStrip, tokens_of

import eagle3_jax as e3
from eagle3_jax.drafters import NGram, Plain, Suffix, layer_skip
from eagle3_jax.measure import trace
from eagle3_jax.prompts.benchmark import shipped
from validation.forcing import forced_logits

target = e3.load_target()
head = e3.load_drafter(target=target)

# %% [markdown]
# ## The drafter protocol
#
# A drafter has three methods:
#
# - `init` makes an empty state.
# - `observe` receives committed tokens. Of its `T` tokens, only the first `length` are valid.
#   `length` differs by row and is 0 for a finished row.
# - `propose` drafts.
#
# `Newest` predicts that a token is followed by the same token as at its latest occurrence. It keeps
# one number per token of the vocabulary: `position · V + follower` of the latest occurrence. So the
# largest number is the newest. To draft, it looks up one token after the other.


# %%
@dataclasses.dataclass(frozen=True)
class Newest:
    vocab_size: int
    num_speculative_tokens: int = 4
    aux_layers: tuple[int, ...] = ()  # it reads no features of the target
    is_chain: bool = True

    @property
    def num_nodes(self):
        return self.num_speculative_tokens + 1

    @property
    def max_depth(self):
        return self.num_speculative_tokens

    def init(self, params, batch, capacity):
        zero = jnp.zeros((batch,), jnp.int32)
        return {
            "root": zero,
            "place": zero,
            "after": jnp.full((batch, self.vocab_size), -1, jnp.int32),
        }

    def observe(self, params, state, seen):
        index = jnp.arange(seen.tokens.shape[1])
        end = seen.length[:, None]
        follower = jnp.where(
            index == end - 1, seen.next_token[:, None], jnp.roll(seen.tokens, -1, axis=1)
        )

        # The position comes first in the code, so the maximum is the newest follower.
        code = (state["place"][:, None] + index) * self.vocab_size + follower
        newest = jax.vmap(lambda after, tokens, code: after.at[tokens].max(code))

        return {
            "root": jnp.where(seen.length > 0, seen.next_token, state["root"]),
            "place": state["place"] + seen.length,
            "after": newest(state["after"], seen.tokens, jnp.where(index < end, code, -1)),
        }

    def propose(self, params, state, keys, sampling):
        tokens = [state["root"]]
        valid = [jnp.ones_like(state["root"], jnp.bool_)]
        for _ in range(self.num_speculative_tokens):
            code = jnp.take_along_axis(state["after"], tokens[-1][:, None], axis=1)[:, 0]
            valid.append(valid[-1] & (code >= 0))  # a token without a known follower ends the draft
            tokens.append(jnp.where(code >= 0, code % self.vocab_size, 0))
        tokens = jnp.stack(tokens, axis=1)
        valid = jnp.stack(valid, axis=1)
        parents = jnp.broadcast_to(jnp.arange(self.num_nodes, dtype=jnp.int32) - 1, tokens.shape)
        return e3.Draft(tokens=tokens, parents=parents, valid=valid)


# %% [markdown]
# Your drafter can use parts that several published methods share:
#
# | file in `eagle3_jax/drafters` | provides | you write |
# |---|---|---|
# | `text.py` | `init` and `observe` that store the text, `matches` | `propose` |
# | `base.py` | parameters, the target's tables, draft shapes | a network, `observe`, `propose` |
# | `eagle3.py` | a cache, committed pairs, feedback of its output, chains, trees | a network |
# | `parallel.py` | a draft of any shape from the logits of one forward pass | the logits |
#
# ## Drafters compared
#
# `KnowsTheText` is the upper bound: it drafts the text that the target will generate. A head with
# random weights is the lower bound. The cell compares them with `Newest`, three more drafters
# without training, and the trained head:
#
# - **prompt lookup** (`NGram`) copies the tokens that followed an earlier occurrence of the last
#   tokens;
# - **suffix decoding** (`Suffix`) chooses the most frequent continuation of all earlier
#   occurrences;
# - **layer skip** runs the target's first three layers.
#
# The prompts are code, prose, and repetitive text. `trace.record` runs a decoder and records every
# round.

# %%
REPEATED = [
    (
        'POINTS = [\n    {"x": 1, "y": 2, "name": "first"},\n    {"x": 2, "y": 4, "name":'
        ' "second"},\n    {"x": 3, '
    ),
    (
        "- the first item of the list is here\n- the second item of the list is here\n- the third"
        " item of the"
    ),
    "import os.path\nimport os.path\nimport os.path\nimport os.path\nimport",
]
prompts = [*shipped()[0:72:12], *REPEATED]
K = 4
NEW = 51


def play(drafter, **options):
    decoder = e3.SpeculativeDecoder(target, drafter, stop_tokens=(), **options)
    limits = [NEW] * len(prompts)
    return trace.record(
        decoder, prompts, max_new_tokens=limits, sampling=e3.SamplingParams(), seed=0
    )


class KnowsTheText(Newest):
    """Drafts the next tokens of `params`, which are the whole texts."""

    def init(self, params, batch, capacity):
        return jnp.zeros((batch,), jnp.int32)  # tokens that the target has read

    def observe(self, params, state, seen):
        return state + seen.length

    def propose(self, params, state, keys, sampling):
        indices = jnp.minimum(state[:, None] + jnp.arange(self.num_nodes), params.shape[1] - 1)
        tokens = jnp.take_along_axis(params, indices, axis=1)
        parents = jnp.broadcast_to(jnp.arange(self.num_nodes, dtype=jnp.int32) - 1, tokens.shape)
        return e3.Draft(tokens=tokens, parents=parents, valid=jnp.ones(tokens.shape, jnp.bool_))


runs = {"plain": play(Plain(num_nodes=K + 1))}  # blocks of the same shape as the chains
rows = [row.prompt_tokens + row.tokens for row in runs["plain"].result.rows]
padded = np.zeros((len(rows), max(map(len, rows))), np.int32)
for index, row in enumerate(rows):
    padded[index, : len(row)] = row
random_head = head.params | {"head": head.drafter.init_params(jax.random.key(0))}
chain = {"num_speculative_tokens": K}
runs |= {
    "random head": play(dataclasses.replace(head, params=random_head), **chain),
    "layer skip": play(layer_skip(target, 3), **chain),
    "Newest": play(Newest(target.vocab_size, K)),
    "n-gram": play(NGram(K)),
    "suffix": play(Suffix(K)),
    "EAGLE-3": play(head, **chain),
    "knows the text": play(e3.LoadedDrafter(KnowsTheText(target.vocab_size, K), jnp.array(padded))),
}
plain = runs["plain"].result.tokens


def per_round(run, chosen):
    """Tokens per round over all rounds, including rounds without a draft."""
    return (NEW - 1) * len(chosen) / sum(len(run.prompts[index]["rounds"]) for index in chosen)


ordinary = range(6)
repeated = range(6, 9)
pace = {name: (per_round(run, ordinary), per_round(run, repeated)) for name, run in runs.items()}
tau = {name: run.result.stats.mean_acceptance_length for name, run in runs.items()}
print(f"{'tokens per round':18}{'ordinary':>10}{'repetitive':>12}{'τ':>8}")
for name, run in runs.items():
    print(f"{name:18}{pace[name][0]:>10.2f}{pace[name][1]:>12.2f}{tau[name]:>8.2f}")
    assert run.result.tokens == plain, "every drafter: the text of plain decoding"

# %%
assert tau["knows the text"] == K + 1 and tau["random head"] < 1.05, "the two bounds"
others = ("layer skip", "Newest", "n-gram", "suffix")
assert all(pace[name][0] < pace["EAGLE-3"][0] for name in others), (
    "on ordinary text the trained head is best"
)
assert pace["suffix"][1] > pace["EAGLE-3"][1], "on repetitive text suffix decoding is better"
assert pace["layer skip"][0] < 1 + K * 3 / target.model.config.num_layers, (
    "layer skip costs more than it adds"
)
assert tau["n-gram"] > per_round(runs["n-gram"], range(9)) + 0.2, (
    "τ excludes rounds without a draft"
)

# %% tags=["hide-input"]
for name in ("n-gram", "EAGLE-3"):
    prompt = runs[name].prompts[0]
    pieces = [token for token in tokens_of(prompt, target.tokenizer) if token.kind != PROMPT]
    display(TokenStrip(pieces[:NEW], f"{name}: {len(prompt['rounds'])} rounds"))
shown = {name: runs[name].result.stats for name in ("layer skip", "n-gram", "suffix", "EAGLE-3")}
acceptance_ribbons(
    {name: stats.acceptance_per_position for name, stats in shown.items()},
    rounds={name: int(stats.num_drafts) for name, stats in shown.items()},
    title="Acceptance by position in rounds with a draft",
)

# %% [markdown]
# τ counts only rounds with a draft (the convention of vLLM and of this library). Prompt lookup
# often finds no earlier occurrence. Such a round has no draft and is a plain step. So compare
# tokens per round over **all** rounds.
#
# The methods that need training (Medusa, EAGLE-1, P-EAGLE, MTP, DFlash and others) are compared on
# this target on the page [Methods](../docs/methods/index.md).
#
# ## Contract checks
#
# With one exception (a wrong declared distribution, see below), a mistake in a drafter only costs
# time and does not change the output. `e3.check_drafter` finds such mistakes on a small random
# target.

# %%
small = tiny.target(13)
report = e3.check_drafter(Newest(small.vocab_size, 3), small, samples=2048)
print(report)
assert report.ok, "every check passes or does not apply to this drafter"

# %% [markdown]
# ## Common mistakes
#
# **An unhashable drafter.** A class instead of an instance, or a dataclass that is not frozen,
# raises an error before compilation.


# %%
class Thawed(Newest):
    """Equality without a hash, as in a dataclass that is not frozen."""

    def __eq__(self, value):
        return self is value


for wrong in (Newest, Thawed(target.vocab_size)):
    try:
        e3.SpeculativeDecoder(target, wrong)
    except ValueError as error:
        print(error)
    else:
        raise AssertionError("no error was raised")

# %% [markdown]
# **Reading the padding of an observation.** `Careless` reads the padding as text. The output is
# still the target's, so no test of the output detects the mistake. The contract check does.


# %%
class Careless(Newest):
    def observe(self, params, state, seen):
        everything = jnp.where(seen.length > 0, seen.tokens.shape[1], 0)
        return super().observe(params, state, seen.replace(length=everything))


result = play(Careless(target.vocab_size, K)).result
print(
    f"same texts: {result.tokens == plain}, τ {result.stats.mean_acceptance_length:.2f} instead of"
    f" {tau['Newest']:.2f}"
)
some = ("padding behind an observation does not matter", "an empty observation changes nothing")
report = e3.check_drafter(Careless(small.vocab_size, 3), small, checks=some)
for finding in report.failures:
    print(finding)
assert result.tokens == plain and result.stats.mean_acceptance_length < tau["Newest"]
assert "padding behind an observation does not matter" in [
    finding.name for finding in report.failures
]

# %% [markdown]
# **Declaring a wrong distribution.** The acceptance rule relies on the declared `q`. `Boaster`
# drafts the same tokens and declares a uniform distribution, so the rule accepts them too often.
# The *text* is wrong. Only a check with many samples detects the mistake.


# %%
class Boaster(Newest):
    def propose(self, params, state, keys, sampling):
        draft = super().propose(params, state, keys, sampling)
        return draft.replace(
            probs=jnp.full((*draft.tokens.shape, self.vocab_size), 1.0 / self.vocab_size)
        )


some = ("draws from what it declares", "sampled output has the target's distribution")
report = e3.check_drafter(Boaster(small.vocab_size, 3), small, checks=some, samples=2048)
for finding in report.failures:
    print(finding)
assert {finding.name for finding in report.failures} == set(some), "both checks detect it"

# %% [markdown]
# ## A lossless acceptance rule
#
# The simplest exact rule: **sample a token from the target, and accept the draft token if both are
# equal.** `Looks` does this at every node of the draft. With `looks=2` it samples again if the
# first token was not drafted. This raises the probability of drafted tokens, so the rule is lossy.
# Its attribute `lossless` must be false. The check fails for a rule that claims to be lossless and
# is not.


# %%
@dataclasses.dataclass(frozen=True)
class Looks:
    looks: int = 1

    @property
    def lossless(self):
        return self.looks == 1

    def __call__(self, draft, logits, sampling, keys, *, sampling_mode, max_depth):
        p = e3.probabilities(logits, sampling, sampling_mode)
        batch, nodes, vocab = p.shape
        uniforms = e3.uniforms(keys, self.looks * nodes * e3.num_digits(vocab)).reshape(
            batch, self.looks, nodes, -1
        )
        # [B node child]
        child = draft.valid[:, None] & (draft.parents[:, None] == jnp.arange(nodes)[:, None])

        token = e3.draw(p, uniforms[:, 0])
        for look in range(1, self.looks):
            drafted = jnp.any(child & (draft.tokens[:, None] == token[:, :, None]), axis=-1)
            token = jnp.where(drafted, token, e3.draw(p, uniforms[:, look]))
        return e3.verify_greedy(draft, token, max_depth=max_depth)


one_look = e3.check_verifier(Looks(), samples=8192)
two_looks = e3.check_verifier(Looks(2), samples=2048)
print(one_look)
print("\n" + str(two_looks.findings[-1]))
assert one_look.ok, "one look is lossless, and the check confirms it"
assert not two_looks.failures and two_looks.findings[-1].verdict == "skipped", (
    "for a lossy rule, the distribution is not checked"
)


class Liar(Looks):
    @property
    def lossless(self):
        return True


failures = e3.check_verifier(Liar(2), samples=8192).failures
assert [finding.name for finding in failures] == ["what it emits has the target's distribution"]

# %% [markdown]
# ## Cost of both rules
#
# - **Acceptance.** One look accepts a token sampled from `q` with probability `Σ p(x) q(x)`. The
#   exact rule accepts it with probability `Σ min(p, q)`, which is never lower.
# - **Error.** If the draft is one fixed token `x` with `p = p(x)`, two looks output it with
#   probability `1 − (1 − p)²` instead of `p`. The total variation distance is `p (1 − p)`.

# %%
rules = {"exact": e3.Exact(), "one look": Looks(), "two looks": Looks(2)}
sampled = e3.SamplingParams(temperature=1.0)
taus = {}
for name, rule in rules.items():
    decoder = e3.SpeculativeDecoder(
        target,
        head,
        num_speculative_tokens=2,
        draft_sampling=e3.DraftSampling.PROBABILISTIC,
        verifier=rule,
    )
    result = decoder.generate(prompts[:6], max_new_tokens=NEW, sampling=sampled)
    taus[name] = result.stats.mean_acceptance_length
    print(f"{name:10} τ {taus[name]:.2f}   result.lossless: {result.lossless}")
    assert result.lossless == rule.lossless, "a result has the label of its rule"
assert taus["one look"] < taus["exact"], "one look accepts less than the exact rule"

# %%
text_ids = target.tokenizer.encode("def main(argv=None):\n    parser = argparse.ArgumentParser").ids
logits = jnp.asarray(forced_logits(target, [text_ids])[0][-1])
p = np.asarray(jax.nn.softmax(logits), np.float64)
ROWS = 1024
CHUNKS = 12
guess = int(p.argmax())


def share_of_guess(rule):
    """Share of rounds with the guess as first token, if it is the only draft token."""
    draft = e3.Draft(
        tokens=jnp.broadcast_to(jnp.array([0, guess], jnp.int32), (ROWS, 2)),
        parents=jnp.broadcast_to(jnp.array([-1, 0], jnp.int32), (ROWS, 2)),
        valid=jnp.ones((ROWS, 2), bool),
    )
    sampling = e3.SamplingParams(
        temperature=jnp.ones(ROWS), top_k=jnp.zeros(ROWS, jnp.int32), top_p=jnp.ones(ROWS)
    )

    @jax.jit
    def hits(keys, logits):
        same = jnp.broadcast_to(logits, (ROWS, 2, logits.size))
        mode = e3.SamplingMode.TEMPERATURE
        verdict = rule(draft, same, sampling, keys, sampling_mode=mode, max_depth=1)
        return jnp.mean((verdict.num_accepted > 0) | (verdict.next_token == guess))

    keys = jax.random.split(jax.random.key(0), (CHUNKS, ROWS))
    return float(np.mean([hits(key, logits) for key in keys]))


expected = {"exact": p[guess], "one look": p[guess], "two looks": 1 - (1 - p[guess]) ** 2}
seen = {name: share_of_guess(rule) for name, rule in rules.items()}
noise = 5 * np.sqrt(p[guess] * (1 - p[guess]) / (ROWS * CHUNKS))
for name, share in seen.items():
    print(
        f"{name:10} share of the guess {share:.3f}, expected {expected[name]:.3f}; p ="
        f" {p[guess]:.3f}"
    )
    assert abs(share - expected[name]) < noise
assert seen["two looks"] - p[guess] > 2 * noise, "two looks shift the distribution"

# %% [markdown]
# ## Command line
#
# `module:name` selects a drafter or a rule in your own file. `name` is an object. For a drafter it
# can also be a function of the text after a `=` and of the target. The cell writes the classes of
# this notebook to a file and uses this file.

# %%
FACTORY = """
def newest(argument, target):
    return Newest(target.vocab_size, int(argument or 4))

two_looks = Looks(2)
"""


def source_of(part, method):
    """Source of a class of this notebook (`inspect` reads only files)."""
    lines = linecache.getlines(getattr(part, method).__code__.co_filename)
    named = [
        node
        for node in ast.parse("".join(lines)).body
        if getattr(node, "name", "") == part.__name__
    ]
    return "".join(lines[named[0].decorator_list[0].lineno - 1 : named[0].end_lineno])


imports = "import dataclasses\nimport jax\nimport jax.numpy as jnp\nimport eagle3_jax as e3\n"
with tempfile.TemporaryDirectory() as folder:
    source = "\n\n".join(
        [imports, source_of(Newest, "propose"), source_of(Looks, "__call__"), FACTORY]
    )
    Path(folder, "mine.py").write_text(source, encoding="utf-8")
    options = (
        "--drafter mine:newest=3 --verifier mine:two_looks --max-new-tokens 24 --temperature 1"
        " --json"
    )
    command = [sys.executable, "-m", "eagle3_jax", "generate", "class Stack:", *options.split()]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
print("eagle3 generate 'class Stack:'", options)
answer = json.loads(done.stdout)
print("lossless:", answer["lossless"])
assert done.returncode == 0 and answer["lossless"] is False, (
    "the command line labels the lossy rule"
)

# %% [markdown]
# ## Exercises
#
# **1.** `Newest` packs `position · V + follower` into 32 bits. Up to which length is this correct
# for this target, and for a vocabulary of 128,256 tokens? What happens for longer texts?
#
# <details><summary>Answer</summary>
#
# It is correct while `position · V + follower < 2³¹`: up to 524,287 positions with 4,096 tokens,
# 16,743 with 128,256. For longer texts the number is negative, and `.max` ignores it, so the table
# stops learning. The text is correct, τ falls.
#
# </details>
#
# **2.** Why do one look and the exact rule accept equally often if drafts are greedy?
#
# <details><summary>Answer</summary>
#
# A greedy draft is a point mass on `x`. The exact rule accepts it with probability `p(x)`. One look
# accepts it if the target samples `x`. This also has probability `p(x)`.
#
# </details>
#
# **3.** What is the error of a rule of `n` looks, for one fixed draft token with probability `p`?
#
# <details><summary>Answer</summary>
#
# It outputs the draft token with probability `1 − (1 − p)ⁿ`, so the total variation distance is
# `(1 − p) − (1 − p)ⁿ`. For large `n` the output is the drafter's text, except for tokens with
# `p = 0`.
#
# </details>
#
#
# ## Checked claims
#
# - All drafters generate the text of plain decoding. A drafter that knows the text reaches τ = K +
#   1, a random head about 1.
# - The trained head is best on ordinary text. Suffix decoding is better on repetitive text. τ
#   excludes rounds without a draft.
# - `check_drafter` passes the correct drafter. It finds a drafter that reads padding (same text,
#   lower τ) and one that declares a wrong distribution. A class and an unhashable instance each
#   raise an error.
# - One look is lossless and accepts less than the exact rule. Two looks are lossy and shift the
#   distribution by `p (1 − p)`. Results and the command line label them. A rule with a wrong label
#   fails the check.

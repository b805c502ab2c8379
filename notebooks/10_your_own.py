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
# # 10 · Your own drafter and acceptance rule in thirty lines
#
# Everything between the target and the text can be replaced. Afterwards you can
#
# - write a drafter that learns while it decodes, and plug it in without touching the library;
# - let `e3.check_drafter` and `e3.check_verifier` tell you what is wrong with yours;
# - write an acceptance rule that is lossless, and one that is not and says so;
# - start both from the command line.
#
# It takes under a minute on a laptop CPU, offline, with the pair that ships with the package. Read 01 and 02 before.
# The whole contract is in `docs/drafters.md`; `docs/extending.md` has another drafter, another rule, a target and a
# checkpoint format. `eagle3_jax/drafters` has one file for each published method, in the same protocol.

# %%
import first_cell

first_cell.start(repository=True)

# %%
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
from matplotlib import pyplot as plt
from pictures import style

import eagle3_jax as e3
from eagle3_jax.drafters.text import TextDrafter
from eagle3_jax.prompts import shipped
from validation.forcing import forced_logits

target = e3.load_target()
head = e3.load_drafter(target=target)
prompts = shipped()[0:40:5]

# %% [markdown]
# ## A drafter
#
# The idea: what followed a token the last time will follow it again. `Newest` keeps one number per token of the
# vocabulary: where that token was last seen, and what came after it, packed as `place · V + follower` so that the
# largest number is the newest. To draft it looks up one token after the other.
#
# A drafter has three methods. `init` makes an empty state, `observe` is told the truth, `propose` guesses. The one
# subtle thing is `observe`: of the `T` tokens that it is given only the first `length` are real, in every row another
# number, and none in a row that has finished.


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
        index, end = jnp.arange(seen.tokens.shape[1]), seen.length[:, None]
        follower = jnp.where(
            index == end - 1, seen.next_token[:, None], jnp.roll(seen.tokens, -1, axis=1)
        )
        code = (state["place"][:, None] + index) * self.vocab_size + follower
        newest = jax.vmap(lambda after, tokens, code: after.at[tokens].max(code))
        return {
            "root": jnp.where(seen.length > 0, seen.next_token, state["root"]),
            "place": state["place"] + seen.length,
            "after": newest(state["after"], seen.tokens, jnp.where(index < end, code, -1)),
        }

    def propose(self, params, state, keys, sampling):
        tokens, valid = [state["root"]], [jnp.ones_like(state["root"], jnp.bool_)]
        for _ in range(self.num_speculative_tokens):
            code = jnp.take_along_axis(state["after"], tokens[-1][:, None], axis=1)[:, 0]
            valid.append(
                valid[-1] & (code >= 0)
            )  # a token that nothing has followed yet ends the draft
            tokens.append(jnp.where(code >= 0, code % self.vocab_size, 0))
        tokens, valid = jnp.stack(tokens, axis=1), jnp.stack(valid, axis=1)
        parents = jnp.broadcast_to(jnp.arange(self.num_nodes, dtype=jnp.int32) - 1, tokens.shape)
        return e3.Draft(tokens=tokens, parents=parents, valid=valid)


# %% [markdown]
# Your drafter can use the parts that several published methods share:
#
# | file in `eagle3_jax/drafters` | provides | leaves to you |
# |---|---|---|
# | `text.py` | `init` and `observe` that keep the text, `matches` | `propose` |
# | `base.py` | parameters of an nnx network, the target's tables, shapes of drafts | the network, `observe`, `propose` |
# | `eagle3.py` | a cache, committed pairs, feeding its own output back, chains and trees | the network |
# | `parallel.py` | a draft of any shape from the logits of one forward | the logits |
#
# `LastHalf` below guesses that the text goes on as it did half of it ago: no good, but it is whole in ten lines.


# %%
class LastHalf(TextDrafter):
    def propose(self, params, state, keys, sampling):
        ahead = (state.length // 2)[:, None] + jnp.arange(self.num_speculative_tokens)
        guess = jnp.take_along_axis(state.tokens, ahead % state.tokens.shape[1], axis=1)
        tokens = jnp.concatenate([state.root, guess], axis=1)
        parents = jnp.broadcast_to(jnp.arange(self.num_nodes, dtype=jnp.int32) - 1, tokens.shape)
        return e3.Draft(tokens=tokens, parents=parents, valid=jnp.ones(tokens.shape, jnp.bool_))


# %% [markdown]
# Plug `Newest` in, beside prompt lookup, the EAGLE-3 head and no drafter at all. All write the same text; they differ in
# how many rounds that takes.

# %%
K, NEW = 4, 64
drafters = {
    "none": {},
    "LastHalf": {"drafter": LastHalf(K)},
    "Newest": {"drafter": Newest(target.vocab_size, K)},
    "n-gram": {"drafter": e3.drafters.NGram(K)},
    "EAGLE-3": {"drafter": head, "num_speculative_tokens": K},
}
results = {
    name: e3.SpeculativeDecoder(target, stop_tokens=(), **options).generate(
        prompts, max_new_tokens=NEW
    )
    for name, options in drafters.items()
}
plain = results["none"].tokens

for name, result in results.items():
    same = sum(a == b for a, b in zip(result.tokens, plain, strict=True))
    stats = result.stats
    print(
        f"{name:8} same texts {same} of {len(prompts)}   rounds that drafted {int(stats.num_drafts):4}   ",
        end="",
    )
    print(
        f"τ {stats.mean_acceptance_length:.2f}   drafted tokens accepted {stats.draft_acceptance_rate:.0%}"
    )
    assert result.tokens == plain, "whatever is guessed, the text is the target's own"

tau = {name: result.stats.mean_acceptance_length for name, result in results.items()}
assert 1 < tau["Newest"] < tau["EAGLE-3"], (
    "a table of the newest followers drafts; a trained head drafts better"
)

# %% [markdown]
# ## The contract
#
# Whatever a drafter does wrong costs time and never the output, with one exception below. So mistakes are easy to miss,
# and there is a contract to find them: `e3.check_drafter` runs it on your machine. A small random target is the place
# for that.

# %%
small = tiny.target(13)
report = e3.check_drafter(Newest(small.vocab_size, 3), small, samples=2048)
print(report)
assert report.ok, "every check passed, or is of something that this drafter does not offer"

# %% [markdown]
# ## What would go wrong
#
# **Refused in one line**, before anything is compiled: a class instead of an instance, and a dataclass that is not
# frozen.


# %%
class Thawed(Newest):
    """Equality without a hash, as every dataclass has it that is not frozen."""

    def __eq__(self, other):
        return self is other


for wrong in (Newest, Thawed(target.vocab_size)):
    try:
        e3.SpeculativeDecoder(target, wrong)
    except ValueError as error:
        print(error)
    else:
        raise AssertionError("it was not refused")

# %% [markdown]
# **Found by the contract, and by nothing else**: `Careless` takes the padding behind an observation for text. The
# output is still the target's, so no test of the output can see it. It drafts worse, which nobody notices who does not
# know how well it could draft.


# %%
class Careless(Newest):
    def observe(self, params, state, seen):
        everything = jnp.where(seen.length > 0, seen.tokens.shape[1], 0)
        return super().observe(params, state, seen.replace(length=everything))


careless = e3.SpeculativeDecoder(target, Careless(target.vocab_size, K), stop_tokens=())
result = careless.generate(prompts, max_new_tokens=NEW)
print(
    f"same texts: {result.tokens == plain}, τ {result.stats.mean_acceptance_length:.2f} instead of {tau['Newest']:.2f}"
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
# **The one thing that is believed**: what a drafter declares to have drawn from. `Boaster` looks up the same tokens and
# declares a uniform distribution, which makes the rule keep them far too often. Now the *text* is wrong, and only a
# check that draws many times can tell.


# %%
class Boaster(Newest):
    def propose(self, params, state, keys, sampling):
        draft = super().propose(params, state, keys, sampling)
        return draft.replace(
            probs=jnp.full((*draft.tokens.shape, self.vocab_size), 1.0 / self.vocab_size)
        )


some = ("draws from what it declares", "sampled output has the target's law")
report = e3.check_drafter(Boaster(small.vocab_size, 3), small, checks=some, samples=2048)
for finding in report.failures:
    print(finding)
assert {one.name for one in report.failures} == set(some), "both checks see it"

# %% [markdown]
# ## An acceptance rule that is lossless
#
# The simplest exact rule that there is: **draw the target's own token first, and keep the draft if it is that token.**
# What is emitted is then what the target drew, whatever was drafted. `Looks` does so at every node of the draft; with
# `looks=2` it draws once more where the first token was not drafted, and hopes for a match. That sounds harmless. It is
# a second chance for drafted tokens alone, so the rule is not lossless any more, and it must say so.


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
        dice = e3.uniforms(keys, self.looks * nodes * e3.num_digits(vocab)).reshape(
            batch, self.looks, nodes, -1
        )
        child = draft.valid[:, None] & (
            draft.parents[:, None] == jnp.arange(nodes)[:, None]
        )  # [B node child]
        token = e3.draw(p, dice[:, 0])
        for look in range(1, self.looks):
            drafted = jnp.any(child & (draft.tokens[:, None] == token[:, :, None]), axis=-1)
            token = jnp.where(drafted, token, e3.draw(p, dice[:, look]))
        return e3.verify_greedy(draft, token, max_depth=max_depth)


one_look = e3.check_verifier(Looks(), samples=8192)
two_looks = e3.check_verifier(Looks(2), samples=2048)
print(one_look)
print("\n" + str(two_looks.findings[-1]))
assert one_look.ok, "one look is lossless, and the contract holds it to that"
assert not two_looks.failures and two_looks.findings[-1].verdict == "skipped", (
    "two looks are measured, not judged"
)

# %% [markdown]
# A rule that lies about it is caught:


# %%
class Liar(Looks):
    @property
    def lossless(self):
        return True


failures = e3.check_verifier(Liar(2), samples=8192).failures
print(*failures, sep="\n")
assert [one.name for one in failures] == ["what it emits has the target's law"]

# %% [markdown]
# ## What both cost
#
# *In acceptance.* A token drawn from `q` is kept by one look with probability `Σ p(x) q(x)`: both have to name the same
# token. The exact rule keeps it with `Σ min(p, q)`, which is never less. *In truth.* Take a draft of one certain token
# `x` with `p = p(x)`. Two looks emit it with probability `1 − (1 − p)²` in place of `p`: a total variation of `p (1 −
# p)`, which is largest for a guess as good as a coin.

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
    result = decoder.generate(prompts, max_new_tokens=NEW, sampling=sampled)
    taus[name] = result.stats.mean_acceptance_length
    print(f"{name:10} τ {taus[name]:.2f}   the result says lossless={result.lossless}")
    assert result.lossless == rule.lossless, "results repeat what the rule says of itself"
assert taus["one look"] < taus["exact"], "one look is lossless and keeps less"

# %%
place = target.tokenizer.encode("def main(argv=None):\n    parser = argparse.ArgumentParser").ids
logits = jnp.asarray(forced_logits(target, [place])[0][-1])
p = np.asarray(jax.nn.softmax(logits), np.float64)
ROWS, CHUNKS = 1024, 12


def law_of_first(rule, guess):
    """How often each token comes first, when `guess` is the whole draft."""
    draft = e3.Draft(
        tokens=jnp.broadcast_to(jnp.array([0, guess], jnp.int32), (ROWS, 2)),
        parents=jnp.broadcast_to(jnp.array([-1, 0], jnp.int32), (ROWS, 2)),
        valid=jnp.ones((ROWS, 2), bool),
    )
    every = e3.SamplingParams(
        temperature=jnp.ones(ROWS), top_k=jnp.zeros(ROWS, jnp.int32), top_p=jnp.ones(ROWS)
    )

    @jax.jit
    def first(keys, logits):
        same = jnp.broadcast_to(logits, (ROWS, 2, logits.size))
        verdict = rule(
            draft, same, every, keys, sampling_mode=e3.SamplingMode.TEMPERATURE, max_depth=1
        )
        return jnp.where(verdict.num_accepted > 0, guess, verdict.next_token)

    keys = jax.random.split(jax.random.key(0), (CHUNKS, ROWS))
    return np.bincount(np.concatenate([first(key, logits) for key in keys]), minlength=p.size) / (
        ROWS * CHUNKS
    )


guess = int(p.argmax())
seen = {name: law_of_first(rule, guess) for name, rule in rules.items()}
expected = {"exact": p[guess], "one look": p[guess], "two looks": 1 - (1 - p[guess]) ** 2}
noise = 5 * np.sqrt(p[guess] * (1 - p[guess]) / (ROWS * CHUNKS))
for name, law in seen.items():
    shift = law[guess] - p[guess]
    print(
        f"{name:10} emits the guess with {law[guess]:.3f}, expected {expected[name]:.3f}; p is {p[guess]:.3f}"
    )
    assert abs(law[guess] - expected[name]) < noise, "as computed"
print(f"total variation of two looks: {p[guess] * (1 - p[guess]):.3f}")
assert seen["two looks"][guess] - p[guess] > 2 * noise, "the shift is real, and the rule says so"

top = np.argsort(-p)[:6]
figure, ax = plt.subplots()
for shift, (name, law), colour in zip((-0.27, 0, 0.27), seen.items(), style.SERIES, strict=False):
    ax.bar(np.arange(6) + shift, law[top], 0.25, color=colour, label=name)
ax.plot(np.arange(6), p[top], "_", color="black", markersize=34, label="p, the target")
ax.set_xticks(
    range(6), [repr(target.tokenizer.decode([int(token)])) for token in top], family="monospace"
)
ax.set(ylabel="share of first tokens", title="The guess is the first token: two looks favour it")
ax.legend()
plt.show()

# %% [markdown]
# ## From the command line
#
# `module:name` reaches a drafter or a rule in a file of your own. `name` is an object, or for a drafter a function of
# what stands behind a `=` and of the target. Here the classes of this notebook are written to a file and used from
# there.

# %%
FACTORY = """
def newest(argument, target):
    return Newest(target.vocab_size, int(argument or 4))

two_looks = Looks(2)
"""


def source_of(part, method):
    """The text of a class of this notebook: `inspect` reads classes of files only."""
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
    options = "--drafter mine:newest=3 --verifier mine:two_looks --max-new-tokens 24 --temperature 1 --no-compare --json"
    command = [sys.executable, "-m", "eagle3_jax", "generate", "class Stack:", *options.split()]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
print("eagle3 generate 'class Stack:'", options)
answer = json.loads(done.stdout)
print({name: answer[name] for name in ("lossless",) if name in answer})
assert done.returncode == 0 and answer["lossless"] is False, (
    "the command line says that the rule is not lossless"
)

# %% [markdown]
# ## Exercises
#
# **1.** `Newest` packs `place · V + follower` into 32 bits. Up to which length of a text is that right for this target,
# and for one of 128,256 tokens? What happens beyond?
#
# <details><summary>Answer</summary>
#
# As long as `place · V + follower < 2³¹`: 524,287 places with 4,096 tokens, 16,743 with 128,256. Beyond, the number
# becomes negative, which `.max` never prefers: the table stops learning. The text stays right, τ falls.
#
# </details>
#
# **2.** Why does one look lose nothing against the exact rule when drafts are greedy?
#
# <details><summary>Answer</summary>
#
# A greedy draft is a point mass on `x`. The exact rule keeps it with probability `p(x)`; one look keeps it when the
# target draws `x`, which is `p(x)` too. They differ only for drawn drafts, `Σ p q` against `Σ min(p, q)`. Above,
# "exact" and "one look" emit the guess equally often.
#
# </details>
#
# **3.** Make `Newest` look at the last *two* tokens, with the one-token table to fall back on. Where does the state go?
#
# <details><summary>Answer</summary>
#
# A second array `[B, M]`, indexed by a hash of both tokens, `(a * 31 + b) % M`, written with the same `.max`. A
# collision gives a wrong guess and no wrong text. `observe` needs the token before its first one: keep it in the state,
# for `tokens[:, 0]` is the root of the round before, and what stood before that was observed earlier.
#
# </details>
#
# **4.** How far off is a rule of `n` looks, for one certain guess with probability `p`? What does it become for large
# `n`?
#
# <details><summary>Answer</summary>
#
# The guess is emitted with `1 − (1 − p)ⁿ`, so the total variation is `(1 − p) − (1 − p)ⁿ`. For large `n` every guess
# that the target finds possible at all is kept: the text becomes the drafter's, with the target as a censor. For `n =
# 2` this is the `p (1 − p)` from above.
#
# </details>
#
# ## What was claimed and checked
#
# - Drafters of one's own, n-grams and EAGLE-3 write the text of plain decoding; their τ differ.
# - `check_drafter` passes the drafter, finds one that reads padding (same text, lower τ) and one that declares what it
#   did not draw from; a class and an unhashable instance are refused in one line.
# - One look is lossless by the contract and keeps less than the exact rule; two looks are not, say so in results and on
#   the command line, and shift the law by `p (1 − p)`; a rule that lies about it fails.
#
# ## Next
#
# `docs/extending.md` replaces the target and the checkpoint format as well. 07 shows what the tests of a decoder can
# and cannot see.

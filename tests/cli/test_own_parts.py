"""Parts of the user's own: reached from the command line, refused in one line, and honest about losing nothing."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import tiny

from eagle3_jax import SpeculativeDecoder
from eagle3_jax.drafters import NGram

GOLDEN = tiny.GOLDEN / "official"
PAIR = ("--target", str(GOLDEN / "target"), "--drafter", str(GOLDEN / "eagle3"))
PROMPT = ("--prompt-ids", "[1, 17, 5, 42]", "--max-new-tokens", "4", "--ignore-eos")

MODULE = '''
import dataclasses
import eagle3_jax as e3
from eagle3_jax.drafters import NGram, Plain

guesses = NGram(2)
guessing = e3.LoadedDrafter(NGram(3), name="guessing")
number = 7


def build(argument, target):
    assert isinstance(target, e3.LoadedTarget)
    return NGram(int(argument or 4))


def broken(argument, target):
    return [argument]


def nothing(argument, dtype):
    return {"dtype": dtype}


@dataclasses.dataclass(frozen=True)
class Loose:
    """The exact rule, which says that it is not."""

    exact: e3.Exact = e3.Exact()
    lossless: bool = False

    def __call__(self, *args, **options):
        return self.exact(*args, **options)


class Silent:
    def __call__(self, *args, **options):
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Narrow:
    lossless: bool = True

    def __call__(self, draft, logits, sampling, keys):
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Shapeless(Loose):
    def __call__(self, draft, *args, **options):
        verdict = self.exact(draft, *args, **options)
        return verdict.replace(path=verdict.path[:, :-1])


loose, silent, shapeless, unsure = Loose(), Silent(), Shapeless(), Loose(lossless="perhaps")
narrow, plain = Narrow(), Plain(3)
'''


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module of that name beside which the command is typed."""
    (tmp_path / "own_parts.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "own_parts", raising=False)


@pytest.mark.parametrize(("source", "length"), [("guesses", 2), ("guessing", 3), ("build", 4), ("build=1", 1)])
def test_a_drafter_comes_from_a_module(cli, source: str, length: int) -> None:
    options = ("--target", str(GOLDEN / "target"), "--drafter", f"own_parts:{source}")
    code, out, err = cli("generate", *options, *PROMPT, "--json")
    assert code == 0, err
    result = json.loads(out)
    assert result["lossless"] is True
    assert len(result["stats"]["num_accepted_tokens_per_pos"]) == length


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            ("--drafter", "missing:part"),
            "--drafter missing:part: there is no module 'missing' in the current directory",
        ),
        (("--drafter", "own_parts:missing"), "own_parts has no 'missing'; see docs/extending.md"),
        (("--drafter", "own_parts:number"), "expected a function of (argument, target)"),
        (("--drafter", "own_parts:broken"), "list is no drafter: it has no num_nodes, max_depth"),
        (("--drafter", "none", "--target", "own_parts:number"), "expected a function of (argument, dtype)"),
        (("--drafter", "none", "--target", "own_parts:nothing"), "gave dict; expected an eagle3_jax.LoadedTarget"),
        (("--verifier", "loose"), "--verifier loose: expected 'block', 'typical', or one of your own"),
        (("--verifier", "own_parts:Loose"), "the verifier is the class Loose; give an instance"),
        (("--verifier", "own_parts:number"), "int is no verifier: it has no lossless, __call__; see docs/extending.md"),
        (("--verifier", "own_parts:silent"), "Silent is no verifier: it has no lossless"),
        (
            ("--verifier", "own_parts:narrow"),
            "Narrow is called without sampling_mode, max_depth, which",
        ),
        (("--verifier", "own_parts:unsure"), "Loose.lossless is 'perhaps'; expected True or False"),
        (("--verifier", "own_parts:shapeless"), "Shapeless gave path as int32[1, 2]; expected int32[1, 3]"),
    ],
)
def test_what_is_no_part_is_refused_in_one_line(refused, options: tuple[str, ...], says: str) -> None:
    with tiny.unchecked():
        assert says in refused("generate", *PAIR, *PROMPT, "--json", *options)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("import a_module_of_theirs", "No module named 'a_module_of_theirs'"),
        ("x = (", "SyntaxError"),
        ("1 / 0", "Zero"),
    ],
)
def test_a_module_that_cannot_be_imported_is_refused_with_its_own_words(refused, text: str, says: str) -> None:
    Path("own_parts.py").write_text(text + "\n")
    line = refused("generate", *PAIR, *PROMPT, "--json", "--drafter", "own_parts:x")
    assert says in line and "python -c 'import own_parts'" in line


def test_a_rule_that_is_not_lossless_says_so_in_every_result(cli) -> None:
    for how in ((), ("--trace", "rounds.json")):
        code, out, err = cli("generate", *PAIR, *PROMPT, "--json", "--verifier", "own_parts:loose", *how)
        assert code == 0, err
        assert json.loads(out)["lossless"] is False
    code, out, err = cli("generate", *PAIR, *PROMPT, "--no-compare", "--verifier", "own_parts:loose")
    assert code == 0 and "not lossless: drafts were accepted by Loose" in out


def test_bench_marks_the_rows_of_a_rule_that_is_not_lossless(cli) -> None:
    options = ("--prompts", "random", "--prompt-tokens", "4", "--max-prompts", "1", "--max-new-tokens", "4")
    options += ("--dtype", "float32", "--repeats", "1", "--chains", "2", "--tree", "none")
    options += ("--ngram", "none", "--rivals", "none")
    code, out, err = cli("bench", *PAIR, *options, "--verifier", "own_parts:loose", "--json")
    assert code in (0, 1), err  # a moment faster than the memory is no matter here
    rows = {row["name"]: row["lossless"] for row in json.loads(out)["reports"][0]["rows"]}
    assert rows == {"plain float32": True, "chain K=2 (Loose, not lossless)": False}


def test_a_drafter_of_ones_own_is_benched_as_it_was_built(cli) -> None:
    options = ("--prompts", "random", "--prompt-tokens", "4", "--max-prompts", "1", "--max-new-tokens", "4")
    options += ("--dtype", "float32", "--repeats", "1", "--chains", "none", "--tree", "none", "--rivals", "none")
    only = ("--target", str(GOLDEN / "target"), "--drafter", "own_parts:plain", "--ngram", "none")
    code, out, err = cli("bench", *only, *options, "--json")
    assert code in (0, 1), err
    (report,) = json.loads(out)["reports"]
    assert [row["name"] for row in report["rows"]] == ["plain float32", "own_parts:plain"]


def test_a_rule_and_a_simulated_acceptance_exclude_each_other(refused) -> None:
    rule = ("--verifier", "own_parts:loose", "--simulated-acceptance-rate", "0.5")
    assert "one rule" in refused("bench", *PAIR, *rule)


def test_a_target_that_is_called_as_in_version_0_1_is_refused_by_the_argument() -> None:
    class Old:
        vocab_size, init_cache, unembed = 13, None, None

        def __call__(self, params, tokens, positions, mask, cache=None, aux_layers=()):
            raise NotImplementedError

    with tiny.unchecked(), pytest.raises(ValueError, match="Old is called without length, which every target is given"):
        SpeculativeDecoder(tiny.dataclasses.replace(tiny.target(), model=Old()), NGram(2))


@pytest.mark.parametrize("missing", ["vocab_size", "init_cache", "unembed"])
def test_a_target_without_a_member_is_refused_by_name(missing: str) -> None:
    target = tiny.target()
    members = {name: None for name in ("vocab_size", "init_cache", "unembed", "__call__") if name != missing}
    part = type("Partial", (), members)()
    with tiny.unchecked(), pytest.raises(ValueError, match=f"Partial is no target: it has no {missing}; see docs/ext"):
        SpeculativeDecoder(tiny.dataclasses.replace(target, model=part), NGram(2))

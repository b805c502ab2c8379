"""Drafters, targets and rules from a user's module: named, refused in one line, labelled."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import pytest
import tiny

import eagle3_jax as e3
from eagle3_jax import SpeculativeDecoder
from eagle3_jax.drafters import NGram
from eagle3_jax.files.sources import bundled

GOLDEN = tiny.GOLDEN / "official"
PAIR = ("--target", str(GOLDEN / "target"), "--drafter", str(GOLDEN / "eagle3"))
ONE_PROMPT = (
    "--prompts", "random", "--prompt-tokens", "4", "--max-prompts", "1", "--max-new-tokens", "4"
)  # fmt: skip
BENCH = (
    *ONE_PROMPT, "--dtype", "float32", "--repeats", "1", "--tree", "none", "--ngram", "none",
    "--rivals", "none"
)  # fmt: skip
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


def read(argument, dtype):
    return e3.load_target(argument, dtype=dtype)


def nothing(argument, dtype):
    return {"dtype": dtype}


@dataclasses.dataclass(frozen=True)
class Loose:
    """The exact rule, which says that it is not."""

    exact: e3.Exact = e3.Exact()
    lossless: bool = False

    def __call__(self, *args, **options):
        return self.exact(*args, **options)


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


loose, shapeless, narrow, plain = Loose(), Shapeless(), Narrow(), Plain(3)
'''


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module of that name in the current directory."""
    (tmp_path / "own_parts.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "own_parts", raising=False)


@pytest.mark.parametrize(
    ("source", "length"), [("guesses", 2), ("guessing", 3), ("build", 4), ("build=1", 1)]
)
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
            "missing:part: there is no module 'missing' in the current directory",
        ),
        (("--drafter", "own_parts:missing"), "own_parts has no 'missing'; see docs/extending.md"),
        (("--drafter", "own_parts:number"), "expected a function of (argument, target)"),
        (
            ("--drafter", "own_parts:broken"),
            "list is not a drafter: it has no num_nodes, max_depth",
        ),
        (
            ("--drafter", "none", "--target", "own_parts:number"),
            "expected a function of (argument, dtype)",
        ),
        (
            ("--drafter", "none", "--target", "own_parts:nothing"),
            "gave dict; expected an eagle3_jax.LoadedTarget",
        ),
        (
            ("--verifier", "loose"),
            "--verifier loose: expected 'block', 'typical', or one of your own",
        ),
        (
            ("--verifier", "own_parts:number"),
            "int is not a verifier: it has no lossless, __call__; see docs/extending.md",
        ),
        (
            ("--verifier", "own_parts:narrow"),
            "Narrow is called without sampling_mode, max_depth, which",
        ),
        (
            ("--verifier", "own_parts:shapeless"),
            "Shapeless gave path as int32[1, 2]; expected int32[1, 3]",
        ),
    ],
)
def test_what_is_no_part_is_refused_in_one_line(
    refused, options: tuple[str, ...], says: str
) -> None:
    with tiny.unchecked():
        assert says in refused("generate", *PAIR, *PROMPT, "--json", *options)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("import a_module_of_theirs", "No module named 'a_module_of_theirs'"),
        ("x = (", "SyntaxError"),
    ],
)
def test_a_module_that_cannot_be_imported_is_refused_with_its_own_words(
    refused, text: str, says: str
) -> None:
    Path("own_parts.py").write_text(text + "\n")
    line = refused("generate", *PAIR, *PROMPT, "--json", "--drafter", "own_parts:x")
    assert says in line and "python -c 'import own_parts'" in line


def test_a_rule_that_is_not_lossless_says_so_in_every_result(cli) -> None:
    for tracing in ((), ("--trace", "rounds.json")):
        code, out, err = cli(
            "generate", *PAIR, *PROMPT, "--json", "--verifier", "own_parts:loose", *tracing
        )
        assert code == 0, err
        assert json.loads(out)["lossless"] is False
    code, out, err = cli("generate", *PAIR, *PROMPT, "--verifier", "own_parts:loose")
    assert code == 0 and "not lossless: drafts were accepted by Loose" in out


@pytest.mark.parametrize(
    ("options", "rows"),
    [
        (
            (*PAIR, "--chains", "2", "--verifier", "own_parts:loose"),
            {"plain float32": True, "chain K=2 (Loose, not lossless)": False},
        ),
        (
            (*PAIR[:2], "--chains", "none", "--drafter", "own_parts:plain"),
            {"plain float32": True, "own_parts:plain": True},
        ),
        (
            (
                "--target",
                f"own_parts:read={GOLDEN / 'target'}",
                "--chains",
                "none",
                "--drafter",
                "own_parts:plain",
            ),
            {"plain float32": True, "own_parts:plain": True},
        ),
    ],
    ids=["a rule", "a drafter", "a target"],
)
def test_bench_names_and_labels(cli, options: tuple[str, ...], rows: dict[str, bool]) -> None:
    code, out, err = cli("bench", *options, *BENCH, "--json")
    # Code 1 is a time below the bound of the memory, which these few tokens can have.
    assert code in (0, 1), err
    assert {row["name"]: row["lossless"] for row in json.loads(out)["reports"][0]["rows"]} == rows


MEMBERS = dict.fromkeys(("vocab_size", "init_cache", "unembed", "__call__"))


@pytest.mark.parametrize(
    ("members", "says"),
    [
        (
            {name: None for name in MEMBERS if name != "init_cache"},
            "Part is not a target: it has no init_cache; see",
        ),
        (
            MEMBERS
            | {
                "__call__": (
                    lambda self, params, tokens, positions, mask, cache=None, aux_layers=(): None
                )
            },
            "Part is called without length, which every target is given",
        ),
    ],
)
def test_what_is_no_target_is_refused(members: dict[str, object], says: str) -> None:
    with tiny.unchecked(), pytest.raises(ValueError, match=says):
        SpeculativeDecoder(
            dataclasses.replace(tiny.target(), model=type("Part", (), members)()), NGram(2)
        )


def test_lookup_first_and_a_head_draft_as_one(cli, refused, tmp_path):
    head = bundled("eagle3")
    options = ("--max-new-tokens", 30, "--dtype", "float32", "--json")
    rows = []
    for drafter in ("none", head, f"ngram+{head}"):
        code, out, err = cli("generate", "x = 1\ny = 1\nx = 1\n", "--drafter", drafter, *options)
        assert (code, err) == (0, "")
        rows.append(json.loads(out))
    assert rows[0]["text"] == rows[1]["text"] == rows[2]["text"]
    assert rows[2]["drafter_method"].startswith("NGram, else EAGLE-3 head")

    target = e3.load_target(dtype="float32")
    expected = e3.Fallback.of(e3.drafters.NGram(min_ngram=2), e3.load_drafter(target=target))
    result = e3.SpeculativeDecoder(target, expected).generate(
        "x = 1\ny = 1\nx = 1\n", max_new_tokens=30
    )
    assert rows[2]["stats"] == result.stats.to_json()

    for wrong in ("ngram+none", "ngram+suffix"):
        assert f"--drafter {wrong}: expected ngram+ and a head" in refused(
            "generate", "x", "--drafter", wrong
        )
    assert "is not a directory" in refused(
        "generate", "x", "--drafter", f"ngram+{tmp_path / 'absent'}"
    )

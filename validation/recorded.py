"""What vLLM 0.32.0 writes on a CPU in float32, for comparisons where it is not installed.

    # record again, with the prompts of the recording, or with others
    python -m validation.recorded "shipped pair"
    python -m validation.recorded SmolLM2 --prompts mt_bench.jsonl humaneval.jsonl gsm8k.jsonl

A recording holds the new tokens of every prompt and method, the drafted and accepted tokens of each
round, and log-probabilities of a few texts. It is written after each run of vLLM, and the same
command continues it.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import functools
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eagle3_jax import (
    LoadedDrafter,
    LoadedTarget,
    SpeculativeDecoder,
    __version__,
    load_drafter,
    load_target,
)
from eagle3_jax.conversion import convert
from eagle3_jax.drafters import NGram
from eagle3_jax.files.sources import bundled, locate
from eagle3_jax.measure.environment import cpu_model, git, sha256_of
from eagle3_jax.measure.tables import write_text
from eagle3_jax.prompts.benchmark import in_turn, read_prompts
from validation.engines.vllm.bridge import VLLM, Completion, EngineOptions, Tokens, eagle3
from validation.engines.vllm.process import Process
from validation.fixtures import installed_python
from validation.subject import CONTEXT

FOLDER = Path(__file__).parent / "recorded"
PROMPTS = 60
NEW_TOKENS = 64
BATCH = 8
TEXTS = 10  # with log-probabilities
MICRO = 1e-6  # unit of recorded log-probabilities, in nats
NGRAMS = NGram(max_ngram=3, min_ngram=1, earliest=True, num_speculative_tokens=4)
# Draft tokens of each method; those of n-grams are not a head's.
METHODS = {
    "plain": 0,
    "chain of 1": 1,
    "chain of 3": 3,
    "chain of 5": 5,
    "n-grams": NGRAMS.num_speculative_tokens,
}


@dataclasses.dataclass(frozen=True)
class Pair:
    """A target and its head, by the names that the loaders take."""

    target: str | None
    drafter: str | None
    longest: int  #: Prompt, in tokens.
    cut: bool  #: Whether longer prompts keep their last tokens; otherwise they are left out.

    @property
    def head(self) -> Path:
        """Directory of the head, which vLLM reads as it is."""
        return locate(self.drafter, "eagle3")

    def load(self, dtype: str) -> tuple[LoadedTarget, LoadedDrafter]:
        """Loads both in a precision."""
        target = load_target(self.target, dtype=dtype)
        return target, load_drafter(self.drafter, target=target)

    def checkpoints(self) -> dict[str, str]:
        """Hashes of the files of both."""
        return {"target": sha256_of(locate(self.target, "target")), "head": sha256_of(self.head)}

    def prompts(self, files: Sequence[Path]) -> list[Tokens]:
        """Chooses prompts of files, as many of each."""
        target = self.load("float32")[0]
        chosen = []
        for file in files:
            prompts = read_prompts(file, target, max_new_tokens=NEW_TOKENS)
            fitting = [
                prompt for prompt in prompts if self.cut or len(prompt.tokens) <= self.longest
            ]
            chosen += in_turn(fitting, PROMPTS // len(files))
        return [prompt.tokens[-self.longest :] for prompt in chosen]


PAIRS = {
    "shipped pair": Pair(None, None, CONTEXT, cut=True),
    "SmolLM2": Pair("smollm2", "smollm2", 160, cut=False),  # a chat's prompt keeps its template
}


@dataclasses.dataclass(frozen=True)
class Text:
    """The log-probabilities of a text, from its second token on, in nats."""

    tokens: Tokens
    log_probs: list[float]  #: Of each token.
    highest: list[float]  #: Of the likeliest token at each place.


@dataclasses.dataclass(frozen=True)
class Recording:
    """A recording of one pair."""

    data: dict[str, Any]  #: The JSON file.

    @classmethod
    @functools.cache
    def of(cls, name: str) -> Recording:
        """Reads the recording of one of :data:`PAIRS`."""
        return cls(json.loads(file_of(name).read_text(encoding="utf-8")))

    @property
    def prompts(self) -> list[Tokens]:
        """Token ids of every prompt."""
        return self.data["prompts"]

    def completions(self, method: str) -> list[Completion]:
        """What vLLM wrote after every prompt."""
        return [Completion(**row) for row in self.data["runs"][method]]

    @property
    def texts(self) -> list[Text]:
        """Texts with vLLM's log-probabilities."""
        return [
            Text(
                row["tokens"],
                *([micro * MICRO for micro in row[name]] for name in ("log_probs", "highest")),
            )
            for row in self.data["texts"]
        ]


def file_of(name: str) -> Path:
    """Returns the file of a recording."""
    return FOLDER / f"vllm-{name.lower().replace(' ', '-')}.json"


def decoder_of(method: str, target: LoadedTarget, head: LoadedDrafter) -> SpeculativeDecoder:
    """Our decoder of a method."""
    count = METHODS[method]
    if not count:
        return SpeculativeDecoder(target, stop_tokens=())
    drafter = NGRAMS if method == "n-grams" else head
    return SpeculativeDecoder(target, drafter, num_speculative_tokens=count, stop_tokens=())


# --------------------------------------------------------------------------------------------- vLLM


def options_of(method: str, target: Path, head: Path) -> EngineOptions:
    """Options of vLLM for a method."""
    speculative: dict[str, Any] | None = eagle3(head, METHODS[method])
    if method == "plain":
        speculative = None
    elif method == "n-grams":
        lengths = {"prompt_lookup_max": NGRAMS.max_ngram, "prompt_lookup_min": NGRAMS.min_ngram}
        speculative = {"method": "ngram", "num_speculative_tokens": METHODS[method], **lengths}
    return EngineOptions(
        model=str(target), speculative=speculative, max_num_seqs=BATCH, eager=False
    )


def run(vllm: VLLM, options: EngineOptions, prompts: Sequence[Tokens]) -> list[dict[str, Any]]:
    """Lets vLLM complete prompts; a row each: tokens, drafted and accepted counts."""
    generated = vllm.engine(options).generate(prompts, max_new_tokens=NEW_TOKENS)
    rows = []
    for completion in generated.completions:
        rounds = (
            {}
            if options.speculative is None
            else {"drafted": completion.drafted, "accepted": completion.accepted}
        )
        rows.append({"tokens": completion.tokens, **rounds})
    return rows


def scores(vllm: VLLM, options: EngineOptions, texts: Sequence[Tokens]) -> list[dict[str, Any]]:
    """vLLM's log-probabilities of texts, in millionths of a nat."""
    engine = vllm.engine(dataclasses.replace(options, log_probabilities=True))
    rows = []
    scored = engine.score([text[:1] for text in texts], [text[1:] for text in texts])
    for text, of_text in zip(texts, scored, strict=True):
        highest = [round(value / MICRO) for value in of_text.best_value]
        pairs = zip(of_text.best_value, of_text.gap, strict=True)
        log_probs = [round((best - gap) / MICRO) for best, gap in pairs]
        rows.append({"tokens": text, "log_probs": log_probs, "highest": highest})
    return rows


@contextlib.contextmanager
def directory_for_vllm(pair: Pair) -> Any:
    """The target's directory in the layout that vLLM reads."""
    source = locate(pair.target, "target")
    if source.is_dir():
        yield source
        return
    with tempfile.TemporaryDirectory() as folder:
        convert(source, Path(folder) / "target", "vllm")
        yield Path(folder) / "target"


def record(name: str, files: Sequence[Path], python: Path, threads: int) -> None:
    """Writes the recording of a pair, or what is missing of it."""
    pair = PAIRS[name]
    file = file_of(name)
    data: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    prompts = (
        data["prompts"] if data and not files else pair.prompts(files or [bundled("prompts.jsonl")])
    )

    vllm = Process(python, threads=threads)
    conditions: dict[str, Any] = {
        "pair": name,
        "checkpoints": pair.checkpoints(),
        "vllm": vllm.versions,
        "dtype": "float32",
        "compiled": True,
        "settings": {
            "new_tokens": NEW_TOKENS,
            "batch": BATCH,
            "methods": METHODS,
            "n-grams": dataclasses.asdict(NGRAMS),
        },
        "prompts": prompts,
    }

    # A changed checkpoint or setting starts anew; an interrupted recording is continued.
    if any(data.get(key) != value for key, value in json.loads(json.dumps(conditions)).items()):
        data = {}
    data = {
        **conditions,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "eagle3_jax": __version__,
        "git": git(),
        "cpu": cpu_model(),
        "runs": data.get("runs", {}),
        "texts": data.get("texts", []),
    }

    with contextlib.closing(vllm), directory_for_vllm(pair) as target:
        for method in METHODS:
            if method not in data["runs"]:
                data["runs"][method] = run(vllm, options_of(method, target, pair.head), prompts)
                write(file, data)

        if not data["texts"]:
            step = len(prompts) // TEXTS
            chosen = range(0, step * TEXTS, step)
            texts = [prompts[row] + data["runs"]["plain"][row]["tokens"] for row in chosen]
            data["texts"] = scores(vllm, options_of("plain", target, pair.head), texts)
            write(file, data)


def write(file: Path, data: dict[str, Any]) -> None:
    """Writes compact JSON, a line for each prompt and method."""
    lines = (
        json.dumps(data, separators=(",", ":"))
        .replace('],"', '],\n"')
        .replace("},{", "},\n{")
        .replace("],[", "],\n[")
    )
    file.parent.mkdir(exist_ok=True)
    write_text(file, lines + "\n")
    print(f"{file.name}: {', '.join(data['runs'])}; {len(data['texts'])} texts", flush=True)


def main() -> None:
    """Records one pair."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pair", choices=PAIRS)
    parser.add_argument(
        "--prompts",
        nargs="+",
        type=Path,
        default=[],
        help="JSONL files; default: those of the recording",
    )
    parser.add_argument("--vllm-python", type=Path, default=installed_python())
    parser.add_argument("--threads", type=int, default=2, help="[default: 2]")

    options = parser.parse_args()
    record(options.pair, options.prompts, options.vllm_python, options.threads)


if __name__ == "__main__":
    main()

"""Every drafting method that vLLM's CPU build runs: its options there, its files, and our drafter.

    python -m validation.drafters           # record vLLM's runs again, in tests/golden/vllm_drafters/runs.json
    python -m validation.drafters medusa    # record one of them

``tests/golden/vllm_drafters`` holds a tiny trained head for each method. The heads know the greedy continuations of
most of the recorded prompts and nothing else. Heads that are accepted only by chance would agree with vLLM for any
positions, norms and layers. They were trained by ``validation/drafters/heads.py`` of commit f9faf7c, with networks
written from the papers; any head of the same shapes that drafts as well can take their place.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from eagle3_jax import LoadedDrafter, LoadedTarget, load_drafter
from eagle3_jax.conversion import convert, read_target
from eagle3_jax.conversion.tensors import read_tensors, write_tensors
from eagle3_jax.drafters import NGram, layer_skip
from eagle3_jax.engines.vllm.bridge import Completion, EngineOptions, Generated
from eagle3_jax.engines.vllm.process import Process
from validation.fixtures import installed_python

GOLDEN = Path(__file__).parent.parent / "tests" / "golden"
TARGET, RECORDED = GOLDEN / "vllm" / "target", GOLDEN / "vllm_drafters"
RUNS = RECORDED / "runs.json"
AUX = (2, 4, 5)  # inputs of these layers; a format that counts layers from their end names one less
NEW_TOKENS = 40
PROMPTS = [np.random.default_rng(row).integers(4, 512, 6 + 2 * row).tolist() for row in range(8)]
LAYERS_KEPT = 4

Drafter = LoadedDrafter | NGram
Config = dict[str, Any]
Tensors = dict[str, np.ndarray]
Change = Callable[[Config, Tensors], None]


@dataclasses.dataclass(frozen=True)
class InjectedError:
    """An error that the counts must show.

    Attributes:
        what: The error in words.
        change: Injects it into the head's files.
        drafter: Makes our drafter with it, for methods without files.
    """

    what: str
    change: Change | None = None
    drafter: Callable[[LoadedTarget], Drafter] | None = None


@dataclasses.dataclass(frozen=True)
class Method:
    """One way to draft.

    Attributes:
        speculative: vLLM's options, without the directory of the head.
        num_speculative_tokens: ``K``.
        error: The error that is injected.
        head: Gives the directory that we read, made in the one given if it has to be; ``None`` where there is none.
        layout: Layout in which our writer hands the head to vLLM; ``None`` where vLLM reads what we read.
        ours: Our drafter for a target, of the head's directory.
        least: Mean acceptance length that no head reaches by chance.
        repaired: The CPU build of vLLM 0.32 gets it wrong and is mended for it; see
            :meth:`~eagle3_jax.engines.vllm.process.ProcessEngine.repaired`.
    """

    speculative: dict[str, Any]
    num_speculative_tokens: int
    error: InjectedError
    head: Callable[[Path], Path] | None = None
    layout: str | None = None
    ours: Callable[[LoadedTarget, Path], Drafter] = lambda target, head: load_drafter(head, target=target)
    least: float = 1.5
    repaired: bool = False

    def drafter(self, target: LoadedTarget, directory: Path) -> Drafter:
        """Our drafter; ``directory`` is for files that have to be made."""
        return self.ours(target, self._read(directory))

    def written(self, directory: Path) -> Path:
        """The head as vLLM is given it."""
        head = self._read(directory)
        if self.layout is None:
            return head
        convert(head, directory / "written", self.layout, read_target(TARGET).config)
        return directory / "written"

    def options(self, directory: Path) -> EngineOptions:
        """What vLLM is started with; ``directory`` is for files that have to be made."""
        speculative = self.speculative | {"num_speculative_tokens": self.num_speculative_tokens}
        target = TARGET
        if self.speculative["method"] == "mtp":  # the module is part of the target's files
            target = with_mtp(directory / "target", self.written(directory))
        elif self.head is not None:
            speculative["model"] = str(self.written(directory))
        return EngineOptions(model=str(target), speculative=speculative, max_num_seqs=len(PROMPTS), first_runner=True)

    def with_error(self, target: LoadedTarget, directory: Path) -> Drafter:
        """Our drafter with the error; ``directory`` is for files that have to be made."""
        if self.error.drafter is not None:
            return self.error.drafter(target)
        assert self.error.change is not None
        return self.ours(target, rewritten(self._read(directory), directory / "wrong", self.error.change))

    def _read(self, directory: Path) -> Path:
        return TARGET if self.head is None else self.head(directory / "head")


# ------------------------------------------------------------------------------------------------ files


def _recorded(name: str) -> Callable[[Path], Path]:
    return lambda _: RECORDED / name


def rewritten(source: Path, directory: Path, change: Callable[[Config, Tensors], None]) -> Path:
    """A checkpoint, changed.

    Args:
        source: The checkpoint.
        directory: Directory to write, created if it is missing.
        change: Is given ``config.json`` and the tensors.
    """
    config, tensors = json.loads((source / "config.json").read_text()), dict(read_tensors(source))
    change(config, tensors)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    write_tensors(directory / "model.safetensors", tensors)
    return directory


def with_mtp(directory: Path, module: Path) -> Path:
    """The golden target as a model of MiMo's family, with an MTP module; vLLM knows no other way to give it one."""

    def join(config: Config, tensors: Tensors) -> None:
        config.clear()
        config |= json.loads((module / "config.json").read_text()) | {"torch_dtype": "float32"}
        for name, value in list(tensors.items()):
            if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):  # that family has biases
                tensors[name.replace("weight", "bias")] = np.zeros(len(value), np.float32)
        tensors |= {name: value.astype(np.float32) for name, value in read_tensors(module).items()}

    return rewritten(TARGET, directory, join)


def first_layers(directory: Path) -> Path:
    """The target's first layers with its norm and output matrix: a draft model without weights of its own."""

    def keep(config: Config, tensors: Tensors) -> None:
        config["num_hidden_layers"] = LAYERS_KEPT
        for name in list(tensors):
            if name.startswith("model.layers.") and int(name.split(".")[2]) >= LAYERS_KEPT:
                del tensors[name]

    return rewritten(TARGET, directory, keep)


# ------------------------------------------------------------------------------------------------ injected errors


def _swapped(one: str, other: str) -> Change:
    def change(config: Config, tensors: Tensors) -> None:
        tensors[one], tensors[other] = tensors[other], tensors[one]

    return change


def _halves_swapped(name: str) -> Change:
    def change(config: Config, tensors: Tensors) -> None:
        half = tensors[name].shape[1] // 2
        tensors[name] = np.roll(tensors[name], half, axis=1)

    return change


def _rotating_faster(config: Config, tensors: Tensors) -> None:
    config["rope_theta"] = 100.0


def _of_another_layer(config: Config, tensors: Tensors) -> None:
    config["eagle_aux_hidden_state_layer_ids"] = [2, 4, 6]


def _of_the_layers_behind(config: Config, tensors: Tensors) -> None:
    config["dflash_config"]["target_layer_ids"] = list(AUX)


def _seeing_both_ways(config: Config, tensors: Tensors) -> None:
    config["dflash_config"]["causal"] = False


# ------------------------------------------------------------------------------------------------ the table


def _ngram(target: LoadedTarget, head: Path) -> Drafter:
    return NGram(max_ngram=3, min_ngram=1, earliest=True)


def _first_layers(target: LoadedTarget, head: Path) -> Drafter:
    return layer_skip(target, LAYERS_KEPT)


_PARALLEL = {"method": "eagle3", "parallel_drafting": True}
_OTHER_FEATURE = InjectedError("one feature of another layer", _of_another_layer)
_TOKEN_NORM, _STATE_NORM = (f"model.mtp_layers.0.{name}_layernorm.weight" for name in ("token", "hidden"))

METHODS = {
    "n-gram": Method(
        {"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 1},
        4,
        InjectedError(
            "the latest occurrence instead of the earliest", drafter=lambda target: NGram(max_ngram=3, min_ngram=1)
        ),
        ours=_ngram,
        least=1.3,
    ),
    "draft_model": Method(
        {"method": "draft_model"}, 4, InjectedError("another rotary base", _rotating_faster), _recorded("draft_model")
    ),
    # Half of a model that was not trained to stop there: of first tokens one in five is accepted, by chance one in 500.
    "layer_skip": Method(
        {"method": "draft_model"},
        4,
        InjectedError("one layer less", drafter=lambda target: layer_skip(target, LAYERS_KEPT - 1)),
        first_layers,
        ours=_first_layers,
        least=1.15,
    ),
    "medusa": Method(
        {"method": "medusa"},
        3,
        InjectedError("two heads in each other's place", _swapped("lm_heads.0.weight", "lm_heads.1.weight")),
        _recorded("medusa"),
        "vllm",
    ),
    "eagle": Method(
        {"method": "eagle"},
        4,
        InjectedError("the state before the token", _halves_swapped("fc.weight")),
        _recorded("eagle"),
        "vllm",
    ),
    "p_eagle": Method(_PARALLEL, 4, _OTHER_FEATURE, _recorded("p_eagle"), "vllm"),
    "p_eagle_speculators": Method(_PARALLEL, 4, _OTHER_FEATURE, _recorded("p_eagle"), "speculators"),
    "dflash": Method(
        {"method": "dflash"},
        4,
        InjectedError("features one layer behind", _of_the_layers_behind),
        _recorded("dflash"),
        "vllm",
        repaired=True,
    ),
    "jetspec": Method(
        {"method": "dflash"},
        4,
        InjectedError("a block that sees both ways", _seeing_both_ways),
        _recorded("jetspec"),
        "vllm",
        repaired=True,
    ),
    "mtp_1": Method(
        {"method": "mtp"},
        1,
        InjectedError("the token before the state", _halves_swapped("model.mtp_layers.0.input_proj.weight")),
        _recorded("mtp"),
        "mimo",
        least=1.3,
    ),
    "mtp_3": Method(
        {"method": "mtp"},
        3,
        InjectedError("two norms in each other's place", _swapped(_TOKEN_NORM, _STATE_NORM)),
        _recorded("mtp"),
        "mimo",
    ),
}


# ------------------------------------------------------------------------------------------------ recorded runs


def run(vllm: Process, method: Method, directory: Path) -> tuple[Generated, Generated | None]:
    """The prompts through vLLM; and, of a method that the CPU build gets wrong, through vLLM as it is shipped."""
    engine = vllm.engine(method.options(directory))
    if not method.repaired or vllm.versions["device"] != "cpu":
        return engine.generate(PROMPTS, max_new_tokens=NEW_TOKENS), None
    shipped = engine.generate(PROMPTS, max_new_tokens=NEW_TOKENS)
    with engine.repaired("context_keys"):
        return engine.generate(PROMPTS, max_new_tokens=NEW_TOKENS), shipped


@functools.cache
def _runs() -> dict[str, Any]:
    return json.loads(RUNS.read_text("utf-8"))


def recorded(name: str) -> Generated:
    """A run of :data:`METHODS` as it was recorded."""
    found = _runs()["methods"][name]
    rows = zip(_runs()["outputs"], found["accepted"], found["drafted"], strict=True)
    completions = [Completion(tokens=tokens, accepted=accepted, drafted=drafted) for tokens, accepted, drafted in rows]
    return Generated(completions=completions, seconds=0.0, counters=found["counters"])


def mean_acceptance_length(generated: Generated) -> float:
    """Tokens per round, from vLLM's counters."""
    return 1 + generated.counters["num_accepted_tokens"] / generated.counters["num_drafts"]


def main(names: list[str]) -> None:
    """Record."""
    vllm = Process(installed_python())
    found: dict[str, Any] = json.loads(RUNS.read_text()) if names else {}
    found |= {"versions": vllm.versions, "max_new_tokens": NEW_TOKENS, "prompts": PROMPTS}
    plain = vllm.engine(EngineOptions(model=str(TARGET), max_num_seqs=len(PROMPTS)))
    found["outputs"] = [one.tokens for one in plain.generate(PROMPTS, max_new_tokens=NEW_TOKENS).completions]
    runs = found.setdefault("methods", {})
    for name in names or METHODS:
        with tempfile.TemporaryDirectory() as directory:
            generated, _ = run(vllm, METHODS[name], Path(directory))
        assert [one.tokens for one in generated.completions] == found["outputs"], name
        runs[name] = {
            "counters": generated.counters,
            "accepted": [one.accepted for one in generated.completions],
            "drafted": [one.drafted for one in generated.completions],
        }
        print(f"{name}: mean acceptance length {mean_acceptance_length(generated):.2f}", flush=True)
    vllm.close()
    RUNS.write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])

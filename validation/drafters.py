"""Every drafting method that vLLM's CPU build runs: its options there, its files, and our drafter.

    # record vLLM's runs again, in tests/golden/vllm_drafters/runs.json
    python -m validation.drafters
    python -m validation.drafters medusa    # record one of them

``tests/golden/vllm_drafters`` holds a tiny trained head for each method. The heads know the greedy
continuations of most of the recorded prompts and nothing else. Heads that are accepted only by
chance would agree with vLLM for any positions, norms and layers. They were trained by
``validation/drafters/heads.py`` of commit f9faf7c, with networks written from the papers; any head
of the same shapes that drafts as well can take their place.
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
from validation.engines.vllm.bridge import Completion, EngineOptions, Generated
from validation.engines.vllm.process import Process
from validation.fixtures import installed_python

GOLDEN = Path(__file__).parent.parent / "tests" / "golden"
TARGET = GOLDEN / "vllm" / "target"
RECORDED = GOLDEN / "vllm_drafters"
RUNS = RECORDED / "runs.json"
AUX = (2, 4, 5)  # inputs of these layers; a format that counts layers from their end names one less
NEW_TOKENS = 40
PROMPTS = [np.random.default_rng(row).integers(4, 512, 6 + 2 * row).tolist() for row in range(8)]
LAYERS_KEPT = 4

Drafter = LoadedDrafter | NGram
Config = dict[str, Any]
Tensors = dict[str, np.ndarray]
Change = Callable[[Config, Tensors], None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Method:
    """One way to draft."""

    speculative: dict[str, Any]  #: vLLM's options, without the directory of the head.
    num_speculative_tokens: int  #: ``K``.
    error: str  #: An error that the counts must show, in words.
    change: Change | None = None  #: Injects it into the head's files.
    head: str | None = None  #: Name of the recorded head; ``None`` for methods without one.
    #: Our drafter for a target, of a method without a head; with the error if the second argument
    #: is true.
    ours: Callable[[LoadedTarget, bool], Drafter] | None = None
    #: Layout in which our writer hands the head to vLLM; ``None`` where vLLM reads what we read.
    layout: str | None = None
    least: float = 1.5  #: Mean acceptance length that no head reaches by chance.
    #: The CPU build of vLLM 0.32 gets it wrong and is mended for it; see
    #: :meth:`~validation.engines.vllm.process.ProcessEngine.repaired`.
    repaired: bool = False

    def drafter(self, target: LoadedTarget, directory: Path, *, wrong: bool = False) -> Drafter:
        """Our drafter, with the error or without; ``directory`` is for new files."""
        if self.head is None:
            assert self.ours is not None
            return self.ours(target, wrong)
        files = RECORDED / self.head
        if wrong:
            assert self.change is not None
            files = rewritten(files, directory / "wrong", self.change)
        return load_drafter(files, target=target)

    def options(self, directory: Path) -> EngineOptions:
        """What vLLM is started with; ``directory`` is for files that have to be made."""
        speculative = self.speculative | {"num_speculative_tokens": self.num_speculative_tokens}
        target = TARGET
        head = RECORDED / (self.head or "")
        if self.layout is not None:
            convert(head, directory / "written", self.layout, read_target(TARGET).config)
            head = directory / "written"

        if self.speculative["method"] == "mtp":  # the module is part of the target's files
            target = rewritten(TARGET, directory / "target", functools.partial(_join_mtp, head))
        elif self.speculative["method"] != "ngram":
            if self.head is None:
                head = rewritten(TARGET, directory / "head", _keep_first_layers)
            speculative["model"] = str(head)

        return EngineOptions(
            model=str(target), speculative=speculative, max_num_seqs=len(PROMPTS), first_runner=True
        )


# -------------------------------------------------------------------------------------------- files


def rewritten(source: Path, directory: Path, change: Change) -> Path:
    """Write a checkpoint whose ``config.json`` and tensors are changed into a directory."""
    config = json.loads((source / "config.json").read_text())
    tensors = dict(read_tensors(source))
    change(config, tensors)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    write_tensors(directory / "model.safetensors", tensors)
    return directory


def _join_mtp(module: Path, config: Config, tensors: Tensors) -> None:
    """Makes a target one of MiMo's family, with an MTP module.

    vLLM has no other way to give it one.
    """
    config.clear()
    config |= json.loads((module / "config.json").read_text()) | {"torch_dtype": "float32"}
    for name, value in list(tensors.items()):
        # That family has biases.
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            tensors[name.replace("weight", "bias")] = np.zeros(len(value), np.float32)
    tensors |= {name: value.astype(np.float32) for name, value in read_tensors(module).items()}


def _keep_first_layers(config: Config, tensors: Tensors) -> None:
    """Makes a draft model of the target's first layers, its norm and its output matrix."""
    config["num_hidden_layers"] = LAYERS_KEPT
    for name in list(tensors):
        if name.startswith("model.layers.") and int(name.split(".")[2]) >= LAYERS_KEPT:
            del tensors[name]


# ---------------------------------------------------------------------------------- injected errors


def _swap(first: str, second: str, config: Config, tensors: Tensors) -> None:
    tensors[first], tensors[second] = tensors[second], tensors[first]


def _swap_halves(name: str, config: Config, tensors: Tensors) -> None:
    half = tensors[name].shape[1] // 2
    tensors[name] = np.roll(tensors[name], half, axis=1)


def _configure(config: Config, tensors: Tensors, *, part: str = "", **fields: Any) -> None:
    (config[part] if part else config).update(fields)


# ---------------------------------------------------------------------------------------- the table


_PARALLEL = {"method": "eagle3", "parallel_drafting": True}
_P_EAGLE = Method(
    speculative=_PARALLEL, num_speculative_tokens=4, error="one feature of another layer",
    change=functools.partial(_configure, eagle_aux_hidden_state_layer_ids=[2, 4, 6]),
    head="p_eagle", layout="vllm",
)  # fmt: skip
_DFLASH = Method(
    speculative={"method": "dflash"}, num_speculative_tokens=4, error="features one layer behind",
    change=functools.partial(_configure, part="dflash_config", target_layer_ids=list(AUX)),
    head="dflash", layout="vllm", repaired=True,
)  # fmt: skip
_MTP = Method(
    speculative={"method": "mtp"}, num_speculative_tokens=1, error="the token before the state",
    change=functools.partial(_swap_halves, "model.mtp_layers.0.input_proj.weight"), head="mtp",
    layout="mimo", least=1.3,
)  # fmt: skip
_TOKEN_NORM, _STATE_NORM = (
    f"model.mtp_layers.0.{name}_layernorm.weight" for name in ("token", "hidden")
)

METHODS = {
    "n-gram": Method(
        speculative={"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 1},
        num_speculative_tokens=4, error="the latest occurrence instead of the earliest",
        ours=lambda target, wrong: NGram(max_ngram=3, min_ngram=1, earliest=not wrong), least=1.3,
    ),
    "draft_model": Method(
        speculative={"method": "draft_model"}, num_speculative_tokens=4,
        error="another rotary base",
        change=functools.partial(_configure, rope_theta=100.0), head="draft_model",
    ),
    # Half of a model that was not trained to stop there: of first tokens one in five is accepted,
    # by chance one in 500.
    "layer_skip": Method(
        speculative={"method": "draft_model"}, num_speculative_tokens=4, error="one layer less",
        ours=lambda target, wrong: layer_skip(target, LAYERS_KEPT - wrong), least=1.15,
    ),
    "medusa": Method(
        speculative={"method": "medusa"}, num_speculative_tokens=3,
        error="two heads in each other's place",
        change=functools.partial(_swap, "lm_heads.0.weight", "lm_heads.1.weight"), head="medusa",
        layout="vllm",
    ),
    "eagle": Method(
        speculative={"method": "eagle"}, num_speculative_tokens=4,
        error="the state before the token",
        change=functools.partial(_swap_halves, "fc.weight"), head="eagle", layout="vllm",
    ),
    "p_eagle": _P_EAGLE,
    "p_eagle_speculators": dataclasses.replace(_P_EAGLE, layout="speculators"),
    "dflash": _DFLASH,
    "jetspec": dataclasses.replace(
        _DFLASH, error="a block that sees both ways",
        change=functools.partial(_configure, part="dflash_config", causal=False), head="jetspec",
    ),
    "mtp_1": _MTP,
    "mtp_3": dataclasses.replace(
        _MTP, num_speculative_tokens=3, error="two norms in each other's place",
        change=functools.partial(_swap, _TOKEN_NORM, _STATE_NORM), least=1.5,
    ),
}  # fmt: skip


# ------------------------------------------------------------------------------------ recorded runs


def run(vllm: Process, method: Method, directory: Path) -> tuple[Generated, Generated | None]:
    """The prompts through vLLM.

    Of a method that the CPU build gets wrong, also through vLLM as it is shipped.
    """
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
    rounds = _runs()["methods"][name]
    rows = zip(_runs()["outputs"], rounds["accepted"], rounds["drafted"], strict=True)
    completions = [
        Completion(tokens=tokens, accepted=accepted, drafted=drafted)
        for tokens, accepted, drafted in rows
    ]
    return Generated(completions=completions, seconds=0.0, counters=rounds["counters"])


def mean_acceptance_length(generated: Generated) -> float:
    """Tokens per round, from vLLM's counters."""
    return 1 + generated.counters["num_accepted_tokens"] / generated.counters["num_drafts"]


def main(names: list[str]) -> None:
    """Record."""
    vllm = Process(installed_python())
    record: dict[str, Any] = json.loads(RUNS.read_text()) if names else {}
    record |= {"versions": vllm.versions, "max_new_tokens": NEW_TOKENS, "prompts": PROMPTS}
    plain = vllm.engine(EngineOptions(model=str(TARGET), max_num_seqs=len(PROMPTS)))
    record["outputs"] = plain.generate(PROMPTS, max_new_tokens=NEW_TOKENS).outputs

    runs = record.setdefault("methods", {})
    for name in names or METHODS:
        with tempfile.TemporaryDirectory() as directory:
            generated, _ = run(vllm, METHODS[name], Path(directory))
        assert generated.outputs == record["outputs"], name
        runs[name] = {
            "counters": generated.counters,
            "accepted": [completion.accepted for completion in generated.completions],
            "drafted": [completion.drafted for completion in generated.completions],
        }
        print(f"{name}: mean acceptance length {mean_acceptance_length(generated):.2f}", flush=True)

    vllm.close()
    RUNS.write_text(json.dumps(record) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])

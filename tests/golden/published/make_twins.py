"""Records MTP modules that transformers does not draft with, by a twin in PyTorch.

    python tests/golden/published/make_twins.py qwen3_5_mtp1 ...

Targets and blocks are classes of transformers. What joins them (norms, the matrix, the order of
the halves, the state that is fed back) is written here, after vLLM and SGLang, and uses no cache:
every round computes the target and all rows of the module again.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.models.glm4_moe_lite import modeling_glm4_moe_lite as glm
from transformers.models.qwen2 import modeling_qwen2 as qwen2
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen3_5
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as qwen3_5_moe
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

FOLDER = Path(__file__).parent
LENGTHS = (1, 2, 3, 7, 12, 19, 29, 40)
NEW_TOKENS = 40
QWEN = ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm", "mtp.layers.0")
DEEPSEEK = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
MIMO = (".token_layernorm", ".hidden_layernorm", ".input_proj", ".final_layernorm", "")


@dataclasses.dataclass
class Rules:
    """How a module reads its inputs."""

    state_first: bool = False
    state_normed: bool = True  #: After the target's final norm.
    feeds_normed: bool = True  #: What is fed back is the state after the module's norm.
    zero_first: bool = False  #: The embedding of the first row is zero.


@dataclasses.dataclass
class Family:
    """A tiny target, and the names of its module."""

    target: Callable[[], nn.Module]
    code: object  #: The module of transformers with its classes.
    prefix: str  #: Of its classes.
    names: tuple[str, ...]  #: Of embedding norm, state norm, matrix, final norm, block.
    rules: Rules = dataclasses.field(default_factory=Rules)
    text_config: dict = dataclasses.field(default_factory=dict)  #: What published files say more.
    config: dict = dataclasses.field(default_factory=dict)  #: The same, outside text_config.
    copies: bool = False  #: Embedding and head are in the module's layer again.
    split: bool = False  #: Experts of the module are stored each on its own.
    steps: int = 500
    seed: int = 21
    quiet: float = 0.4  #: How much sub-layers write; less makes the text easier.


class Module(nn.Module):
    """An MTP module around a decoder layer of transformers."""

    def __init__(self, target: nn.Module, family: Family) -> None:
        super().__init__()
        config = copy.deepcopy(target.config.get_text_config())
        width = config.hidden_size
        config.num_hidden_layers = 1
        config.layer_types = ["full_attention"]
        config.mlp_layer_types = ["sparse"]
        norm = getattr(family.code, f"{family.prefix}RMSNorm")
        self.embedding_norm, self.state_norm, self.norm = (
            norm(width, eps=config.rms_norm_eps) for _ in range(3)
        )
        self.join = nn.Linear(2 * width, width, bias=False)
        self.block = getattr(family.code, f"{family.prefix}DecoderLayer")(config, 0)

    def forward(
        self, target: nn.Module, tokens: torch.Tensor, states: torch.Tensor, rules: Rules
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Row t has token t + 1 and the state of t. Returns logits and what is fed back."""
        embeds = target.get_input_embeddings()(tokens)
        if rules.zero_first:
            embeds = torch.cat([torch.zeros_like(embeds[:, :1]), embeds[:, 1:]], 1)
        halves = [self.embedding_norm(embeds), self.state_norm(states)]
        x = self.join(torch.cat(halves[::-1] if rules.state_first else halves, -1))

        rows = x.shape[1]
        hidden = torch.full((rows, rows), torch.finfo(x.dtype).min).triu(1)
        places = torch.arange(rows)[None].expand(len(x), -1)
        rotary = decoder_of(target).rotary_emb(x, places)
        x = self.block(x, position_embeddings=rotary, attention_mask=hidden[None, None])
        normed = self.norm(x)
        return target.get_output_embeddings()(normed), normed if rules.feeds_normed else x


def decoder_of(target: nn.Module) -> nn.Module:
    return getattr(target.model, "language_model", target.model)


def read(target: nn.Module, text: torch.Tensor, rules: Rules) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the target's logits and the states that the module reads."""
    before: list[torch.Tensor] = []
    hook = decoder_of(target).norm.register_forward_pre_hook(lambda _, args: before.append(args[0]))
    after = decoder_of(target)(text, use_cache=False).last_hidden_state
    hook.remove()
    return target.get_output_embeddings()(after), after if rules.state_normed else before[0]


def draft(
    target: nn.Module, module: Module, text: list[int], count: int, rules: Rules
) -> torch.Tensor:
    """Logits [count, vocabulary] after a text whose last token the target has not read."""
    tokens = torch.tensor([text[1:]])
    _, states = read(target, torch.tensor([text[:-1]]), rules)
    rows = []
    for _ in range(count):
        logits, feed = module(target, tokens, states, rules)
        rows.append(logits[0, -1])
        tokens = torch.cat([tokens, rows[-1].argmax()[None, None]], 1)
        states = torch.cat([states, feed[:, -1:]], 1)
    return torch.stack(rows)


# ---------------------------------------------------------------------------------------- weights


def shake(module: nn.Module, seed: int, quiet: float = 1.0) -> None:
    """Random weights; every norm and bias away from its neutral value."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, value in module.state_dict().items():
            noise = torch.randn(value.shape, generator=generator)
            if name.endswith(("A_log", "dt_bias")):
                value.copy_(0.5 * noise - (1.0 if name.endswith("dt_bias") else 0.0))
            elif value.ndim == 1:
                bias = name.endswith("bias")
                value.copy_(
                    (0.05 if "e_score" in name else 0.1) * noise if bias else value + 0.4 * noise
                )
            elif "embed_tokens" in name:
                value.copy_(noise)
            else:
                fan = value.shape[-1] * value.shape[-2] if "conv1d" in name else value.shape[-1]
                writes = name.endswith(
                    ("o_proj.weight", "down_proj.weight", "down_proj", "out_proj.weight")
                )
                value.copy_(noise * (quiet if writes else 1.0) / fan**0.5)
    round_off(module)


def round_off(module: nn.Module) -> None:
    """To values that bfloat16 holds; rotary frequencies are in no file and stay."""
    with torch.no_grad():
        for value in module.state_dict().values():
            value.copy_(value.bfloat16().float())


def prompts(vocab: int, seed: int, lengths: tuple[int, ...], rows: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(4, vocab, (rows, length), generator=generator) for length in lengths]


@torch.no_grad()
def continue_greedily(target: nn.Module, text: torch.Tensor, total: int) -> torch.Tensor:
    while text.shape[1] < total:
        logits, _ = read(target, text, Rules())
        text = torch.cat([text, logits[:, -1:].argmax(-1)], 1)
    return text


def train(target: nn.Module, module: Module, family: Family) -> None:
    """Teaches the module the target's own greedy text, and fed back the steps after it."""
    vocab = target.config.get_text_config().vocab_size
    texts = [continue_greedily(target, p, 64) for p in prompts(vocab, 5, (1, 10, 20), 80)]
    text = torch.cat(texts)
    with torch.no_grad():
        logits, states = read(target, text, family.rules)
    labels = logits.argmax(-1)
    target.requires_grad_(False)
    optimiser = torch.optim.Adam(module.parameters(), lr=2e-3)
    generator = torch.Generator().manual_seed(7)
    for step in range(family.steps):
        rows = torch.randint(len(text), (24,), generator=generator)
        logits, _ = module(target, text[rows, 1:], states[rows, :-1], family.rules)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels[rows, 1:].flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        if step % 100 == 0 or step == family.steps - 1:
            print("step", step, "loss", round(loss.item(), 3), flush=True)
    module.requires_grad_(False)
    round_off(module)


# ------------------------------------------------------------------------------------------ files


def stored(family: Family, name: str, value: torch.Tensor) -> dict[str, torch.Tensor]:
    """Returns views of a module's parameter, by their names in a file."""
    part, _, inner = name.partition(".")
    prefix = family.names[("embedding_norm", "state_norm", "join", "norm", "block").index(part)]
    if not family.split or not inner.startswith("mlp.experts."):
        return {f"{prefix}.{inner}": value}
    kinds = ("down_proj",) if inner.endswith("down_proj") else ("gate_proj", "up_proj")
    return {
        f"{prefix}.mlp.experts.{expert}.{kind}.weight": piece
        for expert, matrix in enumerate(value)
        for kind, piece in zip(kinds, matrix.chunk(len(kinds)), strict=True)
    }


def load(family: Family, folder: Path) -> tuple[nn.Module, Module]:
    target = type(family.target()).from_pretrained(folder, dtype=torch.float32).eval()
    module = Module(target, family).eval()
    tensors = load_file(folder / "model.safetensors")
    for name, value in module.state_dict().items():
        for key, piece in stored(family, name, value).items():
            piece.copy_(tensors[key])
    return target, module.requires_grad_(False)


def save(target: nn.Module, module: Module, family: Family, folder: Path) -> None:
    target.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for name, value in module.state_dict().items():
        tensors |= stored(family, name, value)
    if family.copies:
        tensors[f"{family.names[-1]}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"]
        tensors[f"{family.names[-1]}.shared_head.head.weight"] = tensors["lm_head.weight"]
    # Copies, because a file holds no tensor twice.
    tensors = {name: value.bfloat16().clone() for name, value in tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    config = json.loads((folder / "config.json").read_text())
    config.get("text_config", config).update(family.text_config)
    config.update(family.config)
    (folder / "config.json").write_text(json.dumps(config, indent=1, sort_keys=True) + "\n")


@torch.no_grad()
def record(
    target: nn.Module, module: Module, count: int, rules: Rules, folder: Path
) -> list[tuple[list[int], list[int]]]:
    """Decodes the prompts, and writes the rounds into a folder. Returns texts and candidates."""
    vocab = target.config.get_text_config().vocab_size
    rows: list[dict] = []
    arrays: dict[str, np.ndarray] = {}
    drafted: list[tuple[list[int], list[int]]] = []
    for index, prompt in enumerate(prompts(vocab, 11, LENGTHS, 1)):
        text = prompt[0].tolist()
        end = len(text) + NEW_TOKENS
        greedy = continue_greedily(target, prompt, end + count)
        logits, _ = read(target, greedy, rules)
        best = logits[0, len(text) - 1 : end - 1].topk(2).values
        margins = [float((best[:, 0] - best[:, 1]).min())]
        truth = greedy[0].tolist()
        rounds = []
        length = len(text) + 1
        while length < end:
            logits = draft(target, module, truth[:length], count, rules)
            best = logits.topk(2).values
            margins.append(float((best[:, 0] - best[:, 1]).min()))
            candidates = logits.argmax(-1).tolist()
            # Greedy verification accepts what plain greedy decoding writes.
            matches = 0
            while matches < count and candidates[matches] == truth[length + matches]:
                matches += 1
            if len(rounds) < 2:
                arrays[f"{index}_{len(rounds)}"] = logits.numpy()
            rounds.append([length, candidates, matches])
            length += matches + 1
        rows.append(
            {
                "prompt": text,
                "greedy": truth[len(text) : end],
                "smallest_margin": margins[0],
                "smallest_draft_margin": min(margins[1:]),
                "rounds": rounds,
            }
        )
        drafted += [(truth[:length], tokens) for length, tokens, _ in rounds]
    counts = [entry[2] for row in rows for entry in row["rounds"]]
    print(
        f"rounds {len(counts)}, mean accepted {np.mean(counts):.2f} of {count}, margins",
        f"{min(row['smallest_margin'] for row in rows):.1e}",
        f"{min(row['smallest_draft_margin'] for row in rows):.1e}",
        "distinct tokens",
        [len(set(row["greedy"])) for row in rows],
        flush=True,
    )
    folder.mkdir(exist_ok=True)
    upstream = f"a twin in PyTorch: make_twins.py, transformers {hf.__version__}"
    lines = ",\n".join(json.dumps(row) for row in rows)
    text = f'{{"upstream": "{upstream}",\n"prompts": [\n{lines}\n]}}\n'
    (folder / "rounds.json").write_text(text)
    np.savez_compressed(folder / "drafter_logits.npz", **arrays)
    return drafted


# fmt: off
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
RECURRENT = dict(
    hidden_size=48, num_hidden_layers=5, head_dim=16, linear_conv_kernel_dim=4,
    linear_key_head_dim=8, linear_value_head_dim=12, linear_num_key_heads=2,
    linear_num_value_heads=4, max_position_embeddings=256, bos_token_id=None, eos_token_id=None,
    layer_types=["linear_attention", "full_attention", *3 * ["linear_attention"]],
)
EXPERTS = dict(
    num_experts=6, num_experts_per_tok=2, moe_intermediate_size=20,
    shared_expert_intermediate_size=24,
)
QWEN3_5 = dict(
    RECURRENT, vocab_size=160, num_attention_heads=6, num_key_value_heads=2,
    rope_parameters=ROPE | {"mrope_section": [2, 1, 1], "mrope_interleaved": True},
)
PUBLISHED_QWEN3_5 = dict(
    attn_output_gate=True, mamba_ssm_dtype="float32",
    mtp_num_hidden_layers=1, mtp_use_dedicated_embeddings=False,
)
VISION = dict(
    depth=1, hidden_size=16, intermediate_size=16, num_heads=2, patch_size=4, out_hidden_size=48,
    num_position_embeddings=4,
)
MARKS = {f"{name}_token_id": 155 + number for number, name in enumerate(
    ("image", "video", "vision_start", "vision_end")
)}
GLM = "model.layers.4"

FAMILIES = {
    "qwen3_5_mtp1": Family(
        lambda: hf.Qwen3_5ForCausalLM(hf.Qwen3_5TextConfig(intermediate_size=80, **QWEN3_5)),
        qwen3_5, "Qwen3_5", QWEN, text_config=PUBLISHED_QWEN3_5,
    ),
    "mimo_mtp1": Family(
        lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(
            vocab_size=170, hidden_size=64, intermediate_size=80, num_hidden_layers=4,
            num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=256,
            rope_parameters={"rope_type": "default", "rope_theta": 640000.0}, eos_token_id=None,
            bos_token_id=None, use_sliding_window=False, tie_word_embeddings=False,
        )),
        qwen2, "Qwen2", tuple(f"model.mtp_layers.0{name}" for name in MIMO),
        rules=Rules(state_first=True, state_normed=False, zero_first=True), quiet=0.7,
        config=dict(
            model_type="mimo", architectures=["MiMoForCausalLM"], num_nextn_predict_layers=1,
            attention_bias=True, head_dim=32, rope_theta=640000, rope_scaling=None,
            max_window_layers=4,
        ),
    ),
    "qwen3_next_mtp1": Family(
        lambda: hf.Qwen3NextForCausalLM(hf.Qwen3NextConfig(
            **RECURRENT, **EXPERTS, vocab_size=180, intermediate_size=64, num_attention_heads=4,
            num_key_value_heads=2, rope_parameters=ROPE, mlp_only_layers=[], decoder_sparse_step=1,
            norm_topk_prob=True, tie_word_embeddings=False,
        )),
        qwen3_next, "Qwen3Next", QWEN, split=True, seed=25,
    ),
    "glm4_moe_lite_mtp1": Family(
        lambda: hf.Glm4MoeLiteForCausalLM(hf.Glm4MoeLiteConfig(
            vocab_size=160, hidden_size=48, intermediate_size=64, moe_intermediate_size=20,
            num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=4, n_routed_experts=6,
            n_shared_experts=1, num_experts_per_tok=2, kv_lora_rank=16, q_lora_rank=24,
            qk_rope_head_dim=8, qk_nope_head_dim=12, v_head_dim=16, max_position_embeddings=256,
            bos_token_id=None, eos_token_id=None, tie_word_embeddings=False,
            rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
        )),
        glm, "Glm4MoeLite", (*(f"{GLM}.{name}" for name in DEEPSEEK), GLM), copies=True, split=True,
        config=dict(num_nextn_predict_layers=1, first_k_dense_replace=1, topk_method="noaux_tc"),
        quiet=0.6,
    ),
    "qwen3_5_moe_mtp1": Family(
        lambda: hf.Qwen3_5MoeForCausalLM(hf.Qwen3_5MoeTextConfig(**QWEN3_5, **EXPERTS)),
        qwen3_5_moe, "Qwen3_5Moe", QWEN, text_config=PUBLISHED_QWEN3_5,
    ),
}
# fmt: on


def wrap(folder: Path, wrapped: Path) -> None:
    """Writes a text model in the layout of a model with images, which decodes the same."""
    text = hf.Qwen3_5TextConfig.from_pretrained(folder)
    config = hf.Qwen3_5Config(text_config=text.to_dict(), vision_config=VISION, **MARKS)
    model = hf.Qwen3_5ForConditionalGeneration(config)
    shake(model.model.visual, seed=3)
    model.save_pretrained(wrapped)
    images = load_file(wrapped / "model.safetensors").items()
    tensors = {name: value.bfloat16() for name, value in images if ".visual." in name}
    for name, value in load_file(folder / "model.safetensors").items():
        tensors[name.replace("model.", "model.language_model.", name.startswith("model."))] = value
    save_file(tensors, wrapped / "model.safetensors", metadata={"format": "pt"})


def main(names: list[str]) -> None:
    torch.set_num_threads(1)
    hf.logging.set_verbosity_error()
    for name in [name for name in names if name in FAMILIES] or FAMILIES:
        family = FAMILIES[name]
        folder = FOLDER / name
        if "--train" in names:
            target = family.target().eval().float()
            shake(target, family.seed, family.quiet)
            module = Module(target, family).eval()
            shake(module, family.seed + 1)
            train(target, module, family)
            save(target, module, family, folder / "target")

        if name == "qwen3_5_mtp1":
            wrap(folder / "target", FOLDER / "qwen3_5_wrapped" / "target")
        target, module = load(family, folder / "target")
        for count in (1, 3):
            recording = FOLDER / name.replace("mtp1", f"mtp{count}")
            drafted = record(target, module, count, family.rules, recording)
            for field in dataclasses.fields(Rules) if "--changes" in names else ():
                rules = dataclasses.replace(
                    family.rules, **{field.name: not getattr(family.rules, field.name)}
                )
                others = [draft(target, module, text, count, rules) for text, _ in drafted]
                pairs = zip(others, drafted, strict=True)
                differ = sum(logits.argmax(-1).tolist() != tokens for logits, (_, tokens) in pairs)
                print(f"  other {field.name}: {differ} of {len(drafted)} rounds", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])

"""``eagle3 train``: texts and a draft head for a target; and a small target."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from eagle3_jax.cli._errors import Misuse
from eagle3_jax.cli._options import grouped
from eagle3_jax.cli.train import data, head
from eagle3_jax.cli.train.files import (
    check_trainable,
    fingerprint,
    read_corpus,
    refuse_finished,
    same_run,
    write_target,
)
from eagle3_jax.cli.train.run import (
    MOST_ROWS,
    DtypeOption,
    OptimizerOptions,
    RunOptions,
    SeedOption,
    StepsOption,
    named,
    parse_stages,
    train,
)
from eagle3_jax.devices.compilation import keep_compiled_programs

if TYPE_CHECKING:
    from eagle3_jax.models.config import DecoderConfig
    from eagle3_jax.training.lm import Phase

_RECIPE = """\b
Example, a head for a chat model from your conversations:
  eagle3 train data smollm2 data chats.jsonl
  eagle3 train head smollm2 data head
With --rewrite the target writes the answers. With --self 4000 it writes 4,000
conversations. The recipe of the bundled pair also trains the target:
  python examples/corpus.py corpus
  eagle3 train target corpus target
  eagle3 train data target data corpus/train.jsonl
  eagle3 train head target data head
with --rewrite for data. For a first look: --steps 100 for target and head."""

app = typer.Typer(
    help="Train a draft head for a target, or a small target.",
    epilog=_RECIPE,
    rich_markup_mode=None,
)


app.command("data", epilog="Example: eagle3 train data smollm2 data chats.jsonl --rewrite")(
    grouped(data.data)
)
app.command("head", epilog="Example: eagle3 train head smollm2 data head --freeze-output")(
    grouped(head.head)
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TargetShape:
    """The shape of a new target."""

    layers: Annotated[int, typer.Option(help="Number of layers.")] = 12
    width: Annotated[int, typer.Option(help="Width of the residual stream.")] = 256
    mlp_width: Annotated[int, typer.Option(help="Inner width of the MLPs.")] = 704
    heads: Annotated[int, typer.Option(help="Number of query heads.")] = 4
    kv_heads: Annotated[int, typer.Option(help="Number of key/value heads.")] = 2
    head_dim: Annotated[int, typer.Option(help="Width of a head.")] = 64
    max_positions: Annotated[int, typer.Option(help="Longest sequence.")] = 512
    norm_eps: Annotated[float, typer.Option(help="Added to the mean square in RMSNorm.")] = 1e-5

    def config(self, vocab_size: int) -> DecoderConfig:
        """Returns the configuration of the target."""
        from eagle3_jax.models.config import DecoderConfig, GatedMLP, GroupedQuery, uniform

        mixer = GroupedQuery(
            num_heads=self.heads, num_kv_heads=self.kv_heads, head_dim=self.head_dim
        )
        return DecoderConfig(
            vocab_size=vocab_size,
            width=self.width,
            layers=uniform(self.layers, mixer, GatedMLP(width=self.mlp_width)),
            max_positions=self.max_positions,
            norm_eps=self.norm_eps,
        )


@app.command("target", epilog="Example: eagle3 train target data target --steps 900")
@grouped
def target(
    data: Annotated[
        Path, typer.Argument(metavar="CORPUS", help="Directory that `examples/corpus.py` wrote.")
    ],
    out: Annotated[
        Path, typer.Argument(help="Directory to write; its checkpoints/ is where a run continues.")
    ],
    *,
    steps: StepsOption = 900,
    phases: Annotated[
        str, typer.Option(help="Batch shapes as STEPS:ROWSxTOKENS; the last one holds to the end.")
    ] = "800:16x256,8x512",
    shape: TargetShape,
    optimizer: OptimizerOptions,
    dtype: DtypeOption = "mixed",
    seed: SeedOption = 0,
    running: RunOptions,
) -> None:
    """Train a Llama-style target on next tokens and write it in Hugging Face layout."""
    import jax
    import numpy as np

    from eagle3_jax.load import precision_named
    from eagle3_jax.models.decoder import DecoderTarget
    from eagle3_jax.training.lm import next_token_loss, random_windows
    from eagle3_jax.training.loop import Trainer

    keep_compiled_programs(running.compilation_cache)
    tokens, tokenizer = read_corpus(data)
    refuse_finished(out)
    config = shape.config(tokenizer.get_vocab_size())
    model = DecoderTarget(config, precision_named(dtype))
    check_trainable(model.param_shapes())
    schedule = optimizer.schedule(steps)
    batches = random_windows(tokens, _phases(phases, steps), seed)
    options = {
        "CORPUS": fingerprint(np.asarray(tokens)),
        "--steps": steps,
        "--phases": phases,
        "--seed": seed,
    }
    same_run(out, options | named(optimizer) | named(shape) | {"--dtype": dtype})
    trainer = Trainer(functools.partial(next_token_loss, model), schedule, out / "checkpoints")
    start = model.init(jax.random.key(seed))
    state = train(trainer, start, batches, steps=steps, total=steps, save_every=running.save_every)
    write_target(out, data, config, state.params, dtype=running.store)
    typer.echo(f"wrote {out}")


def _phases(text: str, steps: int) -> tuple[Phase, ...]:
    from eagle3_jax.training.lm import Phase

    def read(shape: str) -> tuple[int, int]:
        rows, _, length = shape.partition("x")
        return int(rows), int(length)

    message = f"--phases {text!r}: expected STEPS:ROWSxTOKENS,..., for example '800:16x256,8x512'"
    phases = tuple(
        Phase(until, *shape) for until, shape in parse_stages(text, steps, read, message)
    )
    if not all(1 <= phase.batch <= MOST_ROWS and phase.length >= 1 for phase in phases):
        raise Misuse(f"--phases {text!r}: expected 1 to {MOST_ROWS} rows, and at least one token")
    return phases

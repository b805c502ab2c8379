"""``eagle3 train``: from an installed CPython to a target and a draft head for it, in four commands."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from eagle3_jax.cli._compiled import keep_compiled_programs
from eagle3_jax.cli._errors import Misuse
from eagle3_jax.cli._options import CompilationCacheOption, check_writable, grouped
from eagle3_jax.cli._progress import progress_bar, spinner
from eagle3_jax.cli._training_files import (
    check_trainable,
    fingerprint,
    read_corpus,
    refuse_finished,
    same_run,
    weights_of,
    write_draft_model,
    write_head,
    write_target,
)
from eagle3_jax.writing import whole_directory

if TYPE_CHECKING:
    from eagle3_jax.models.config import DecoderConfig
    from eagle3_jax.training.lm import Phase
    from eagle3_jax.training.loop import OptimizerConfig, Trainer, TrainState

_RECIPE = """\b
Example, the recipe of the bundled pair:
  eagle3 train corpus data
  eagle3 train target data target
  eagle3 train regenerate target data text.npz
  eagle3 train head target text.npz head
For a first look: --steps 100 for target and head, --rows 256 for regenerate."""

app = typer.Typer(
    help="Train a small target and a draft head for it.",
    epilog=_RECIPE,
    rich_markup_mode=None,
)


_MOST_STEPS = 1_000_000_000
_MOST_ROWS = 65_536  # of a batch
_MOST_DEPTH = 64  # of an unroll, every step of which is compiled
SeedOption = Annotated[int, typer.Option(help="Random seed.", min=0, max=2**32 - 1)]
StepsOption = Annotated[int, typer.Option(help="Optimizer steps.", min=1, max=_MOST_STEPS)]
DtypeOption = Annotated[str, typer.Option(help="Precision of the products.")]
LearningRate = Annotated[float, typer.Option(help="Peak learning rate.")]
EmbeddingLearningRate = Annotated[float, typer.Option(help="Peak learning rate of what muon leaves to adamw.")]
WeightDecay = Annotated[float, typer.Option(help="Weight decay.")]


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerOptions:
    """The optimizer; the defaults are those of a target."""

    optimizer: Annotated[str, typer.Option(help="muon or adamw.")] = "muon"
    learning_rate: LearningRate = 5e-3
    embedding_learning_rate: EmbeddingLearningRate = 3e-3
    warmup_steps: Annotated[
        int, typer.Option(help="Steps, part of --steps, in which the learning rate rises.", min=0)
    ] = 20
    weight_decay: WeightDecay = 0.05
    clip_norm: Annotated[float, typer.Option(help="Maximum norm of the gradient.")] = 1.0

    def schedule(self, steps: int) -> OptimizerConfig:
        """The configuration for the trainer."""
        from eagle3_jax.training.loop import OptimizerConfig

        options = dataclasses.asdict(self)
        return OptimizerConfig(method=options.pop("optimizer"), num_steps=steps, **options)


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadOptimizerOptions(OptimizerOptions):
    """The optimizer with the defaults of a head."""

    learning_rate: LearningRate = 4e-3
    embedding_learning_rate: EmbeddingLearningRate = 2e-3
    weight_decay: WeightDecay = 0.01


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Everything of a run that does not change its result, except the stored type."""

    store: Annotated[Literal["float32", "bfloat16"], typer.Option(help="Type of the weights that are written.")] = (
        "bfloat16"
    )
    save_every: Annotated[
        int,
        typer.Option(
            help="Steps between checkpoints; an interrupted run continues from the last one.", min=1, max=_MOST_STEPS
        ),
    ] = 100
    compilation_cache: CompilationCacheOption = None


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
        """The configuration of the target."""
        from eagle3_jax.models.config import DecoderConfig, GatedMLP, GroupedQuery, uniform

        mixer = GroupedQuery(num_heads=self.heads, num_kv_heads=self.kv_heads, head_dim=self.head_dim)
        return DecoderConfig(
            vocab_size=vocab_size,
            width=self.width,
            layers=uniform(self.layers, mixer, GatedMLP(width=self.mlp_width)),
            max_positions=self.max_positions,
            norm_eps=self.norm_eps,
        )


@app.command("corpus", epilog="Example: eagle3 train corpus data --docs cpython/Doc")
def corpus(
    out: Annotated[Path, typer.Argument(help="Directory to create.")],
    *,
    stdlib: Annotated[Path | None, typer.Option(help="CPython's Lib. Default: that of this interpreter.")] = None,
    docs: Annotated[Path | None, typer.Option(help="CPython's Doc. Default: the topics of pydoc.")] = None,
    vocab_size: Annotated[
        int, typer.Option(help="Vocabulary size of the byte-level BPE tokenizer.", min=257, max=65_536)
    ] = 4096,
    target: Annotated[
        Path | None, typer.Option(help="Encode for this target, with its tokenizer, instead of training one.")
    ] = None,
    seed: SeedOption = 0,
) -> None:
    """Gather CPython's sources and documentation, train a tokenizer and encode them.

    Writes tokenizer.json, train.npy, heldout.npy and corpus.jsonl (every file with its hash and its part).
    """
    import sysconfig

    import numpy as np

    from eagle3_jax.conversion.sidecars import tokenizer_of
    from eagle3_jax.training import corpus as texts

    source = stdlib or Path(sysconfig.get_path("stdlib"))
    if out.exists():
        raise Misuse(f"{out} exists already; name a new directory")
    if docs is not None and not docs.is_dir():
        raise Misuse(f"--docs {docs} is not a directory; give CPython's Doc folder")
    documents = texts.read_corpus(source, docs)
    train = [document for document in documents if not document.held_out]
    held_out = [document for document in documents if document.held_out]
    if not train or not held_out:
        raise Misuse(
            f"--stdlib {source} is no CPython Lib: it holds {len(train)} files to train on, {len(held_out)} held out"
        )
    if target is not None:
        tokenizer = tokenizer_of(target)
        if tokenizer is None:
            raise Misuse(f"--target {target} has no tokenizer.json; give a target's directory that has one")
    else:
        with spinner("training the tokenizer"):
            tokenizer = texts.train_tokenizer((document.text for document in train), vocab_size)

    with spinner("encoding"), whole_directory(out) as folder:
        texts.save_tokenizer(tokenizer, folder)
        np.save(folder / "train.npy", texts.encode(tokenizer, train, seed))
        np.save(folder / "heldout.npy", texts.encode(tokenizer, held_out, seed))
        texts.write_manifest(folder / "corpus.jsonl", documents)
    sizes = [len(np.load(out / name, mmap_mode="r")) for name in ("train.npy", "heldout.npy")]
    typer.echo(
        f"wrote {out}: {len(train)} files, {sizes[0]:,} tokens; held out {len(held_out)} files, {sizes[1]:,} tokens"
    )


@app.command("target", epilog="Example: eagle3 train target data target --steps 900")
@grouped
def target(
    data: Annotated[Path, typer.Argument(metavar="CORPUS", help="Directory that `eagle3 train corpus` wrote.")],
    out: Annotated[Path, typer.Argument(help="Directory to write; its checkpoints/ is where a run continues.")],
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
    options = {"CORPUS": fingerprint(np.asarray(tokens)), "--steps": steps, "--phases": phases, "--seed": seed}
    same_run(out, options | _named(optimizer) | _named(shape) | {"--dtype": dtype})
    trainer = Trainer(functools.partial(next_token_loss, model), schedule, out / "checkpoints")
    start, every = model.init(jax.random.key(seed)), running.save_every
    state = _train(trainer, start, batches, steps=steps, of=steps, save_every=every)
    write_target(out, data, config, state.params, dtype=running.store)
    typer.echo(f"wrote {out}")


@app.command("regenerate", epilog="Example: eagle3 train regenerate target data text.npz --rows 4096")
def regenerate(
    target: Annotated[Path, typer.Argument(help="Directory of the target.")],
    data: Annotated[Path, typer.Argument(metavar="CORPUS", help="Directory that `eagle3 train corpus` wrote.")],
    out: Annotated[Path, typer.Argument(help="The .npz file to write.")],
    *,
    rows: Annotated[int, typer.Option(help="Rows of text.", min=1, max=100_000_000)] = 4096,
    prompt_length: Annotated[int, typer.Option(help="Tokens of the corpus at the start of a row.", min=1)] = 64,
    length: Annotated[int, typer.Option(help="Tokens of a row, prompt included.", min=2)] = 256,
    batch: Annotated[int, typer.Option(help="Rows generated at once.", min=1, max=_MOST_ROWS)] = 64,
    greedy_share: Annotated[float, typer.Option(help="Share of rows decoded greedily.", min=0, max=1)] = 0.6,
    temperature: Annotated[float, typer.Option(help="Sampling temperature of the other rows.", min=0, max=1000)] = 0.8,
    dtype: Annotated[str, typer.Option(help="Precision of the target.")] = "mixed",
    seed: SeedOption = 0,
    compilation_cache: CompilationCacheOption = None,
) -> None:
    """Let the target continue windows of the training text; a head learns from the result."""
    import numpy as np

    from eagle3_jax import load_target
    from eagle3_jax.training import regenerate as texts

    keep_compiled_programs(compilation_cache)
    check_writable(out)
    if out.exists() or out.suffix != ".npz":
        raise Misuse(f"{out} exists already or does not end in .npz; name a new .npz file")
    if length <= prompt_length:
        raise Misuse(f"--length {length} leaves no room after a prompt of {prompt_length} tokens")
    tokens, _ = read_corpus(data)
    if prompt_length >= len(tokens):
        raise Misuse(f"--prompt-length {prompt_length} is more than the {len(tokens)} tokens of {data}")
    writer = load_target(target, dtype=dtype)
    if length > writer.max_positions:
        raise Misuse(f"--length {length} is beyond the {writer.max_positions} positions of {target}")
    config = texts.RegenerationConfig(
        num_rows=rows, prompt_length=prompt_length, length=length, batch=min(batch, rows),
        greedy_share=greedy_share, temperature=temperature, seed=seed,
    )  # fmt: skip
    written = []
    with progress_bar("regenerating", -(-rows // config.batch)) as (progress, task):
        for part in texts.regenerate(writer, tokens, config):
            written.append(part)
            progress.advance(task)
    fields = [field.name for field in dataclasses.fields(texts.Rows)]
    merged = texts.Rows(*(np.concatenate([getattr(part, name) for part in written])[:rows] for name in fields))
    merged.save(out)
    typer.echo(
        f"wrote {out}: {len(merged.tokens):,} rows, {int(np.sum(merged.length - merged.prompt_length)):,} new tokens"
    )


@app.command("head", epilog="Example: eagle3 train head target text.npz head --draft-vocab-size 2048")
@grouped
def head(
    target: Annotated[Path, typer.Argument(help="Directory of the target.")],
    text: Annotated[Path, typer.Argument(help="The .npz file that `eagle3 train regenerate` wrote.")],
    out: Annotated[Path, typer.Argument(help="Directory to write; its checkpoints/ is where a run continues.")],
    *,
    method: Annotated[str, typer.Option(help="Drafting method; an unknown name lists them.")] = "eagle3",
    steps: StepsOption = 1100,
    batch: Annotated[int, typer.Option(help="Rows per step.", min=1, max=_MOST_ROWS)] = 8,
    draft_vocab_size: Annotated[
        int | None, typer.Option(help="Draft vocabulary size. Default: 2048 for eagle3, else all tokens.", min=1)
    ] = None,
    layers: Annotated[
        int | None, typer.Option(help="Number of layers. Default: the usual number of the method.", min=1, max=10_000)
    ] = None,
    width: Annotated[
        int | None, typer.Option(help="Width of a draft model. Default: half of the target's.", min=1)
    ] = None,
    mlp_width: Annotated[
        int | None, typer.Option(help="Inner width of the MLPs. Default: the target's.", min=1)
    ] = None,
    unroll: Annotated[
        str | None,
        typer.Option(help="Draft positions learned, as UNTIL:POSITIONS,...; the last one holds to the end."),
    ] = None,
    optimizer: HeadOptimizerOptions,
    dtype: DtypeOption = "mixed",
    seed: SeedOption = 0,
    running: RunOptions,
) -> None:
    """Train a draft head with the objective of its method and write it in the layout of its method."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from eagle3_jax import load_target
    from eagle3_jax.models.config import DecoderConfig
    from eagle3_jax.training.batches import row_batches
    from eagle3_jax.training.loop import Trainer
    from eagle3_jax.training.methods import RECIPES, HeadOptions
    from eagle3_jax.training.regenerate import Rows
    from eagle3_jax.training.vocab import coverage, select_draft_vocabulary, token_counts

    keep_compiled_programs(running.compilation_cache)
    if method not in RECIPES:
        raise Misuse(f"--method {method!r} is not known; use one of {', '.join(RECIPES)}")
    recipe = RECIPES[method]
    refuse_finished(out)
    depths = _unrolls(recipe.depths if unroll is None else unroll, steps)
    loaded, rows = load_target(target, dtype=dtype), Rows.load(text)
    model: Any = loaded.model
    size = draft_vocab_size or recipe.draft_vocab_size
    counts = token_counts(rows.tokens.astype(np.int32), rows.masks[1], loaded.vocab_size)
    draft_to_target = None if size is None else select_draft_vocabulary(counts, size)
    options = HeadOptions(
        depth=depths[-1][1], num_layers=layers, width=width, mlp_width=mlp_width, draft_vocab_size=size
    )
    config = recipe.config(model.config, options)
    drafter = recipe.drafter(config, precision=model.precision)
    check_trainable(drafter.param_shapes())
    schedule = optimizer.schedule(steps)
    state, batches = None, row_batches(rows, batch, seed)
    run_options = {
        "TARGET": weights_of(loaded.params), "TEXT": fingerprint(dataclasses.astuple(rows)), "--method": method,
        "--steps": steps, "--batch": batch, "--seed": seed, "--draft-vocab-size": size, "--layers": layers,
        "--width": width, "--mlp-width": mlp_width, "--unroll": recipe.depths if unroll is None else unroll,
        **_named(optimizer), "--dtype": dtype,
    }  # fmt: skip
    draft_to_target = same_run(out, run_options, draft_to_target)
    if draft_to_target is not None:
        typer.echo(f"the draft vocabulary covers {coverage(counts, draft_to_target):.1%} of what the target wrote")
    frozen: Any = {
        "target_params": loaded.params,
        "embedding": model.tables(loaded.params).embedding,
        "draft_to_target": None if draft_to_target is None else jnp.asarray(draft_to_target),
    }
    start = recipe.start(drafter, loaded, draft_to_target, jax.random.key(seed))
    for until, depth in depths:  # short drafts first: they are cheap, and the deeper ones build on them
        chosen = dataclasses.replace(options, depth=depth)
        loss = lambda params, rows, chosen=chosen: recipe.loss(drafter, model, params, frozen, rows, chosen)
        trainer = Trainer(loss, schedule, out / "checkpoints")
        state = _train(trainer, start, batches, steps=until, of=steps, save_every=running.save_every)
        trainer.save(state)
    assert state is not None
    if isinstance(config, DecoderConfig):
        write_draft_model(out, target, config, state.params, dtype=running.store)
    else:
        depth = model.config.num_layers
        write_head(out, config, state.params, draft_to_target, dtype=running.store, num_target_layers=depth)
    typer.echo(f"wrote {out}")


def _named(group: Any) -> dict[str, Any]:
    """The options of a group as they are typed, with their values."""
    return {f"--{name.replace('_', '-')}": value for name, value in dataclasses.asdict(group).items()}


def _train(
    trainer: Trainer, params: Any, batch_at: Callable[[int], Any], *, steps: int, of: int, save_every: int
) -> TrainState:
    """Trains from the last checkpoint to step ``steps`` of ``of``; Ctrl-C leaves a checkpoint."""
    state = trainer.start(params)
    done = int(state.step)
    if done:
        typer.echo(f"continuing from step {done}")
    with progress_bar("training", of, done) as (progress, task):
        try:
            for latest, metrics in trainer.run(state, batch_at, steps, save_every):
                state, shown = latest, _metrics(metrics)
                progress.update(task, advance=1, description=shown)
                step = int(state.step)
                if progress.disable and (step % 10 == 0 or step == steps):
                    typer.echo(f"step {step} of {of} {shown}")
        except KeyboardInterrupt:
            trainer.save(state)
            typer.echo(f"interrupted at step {int(state.step)} of {of}; the same command continues there", err=True)
            raise
    return state


def _metrics(metrics: dict[str, float]) -> str:
    """The headline numbers; the accuracies of an unrolled head as one list."""
    shown = [f"{name} {metrics[name]:.3f}" for name in ("loss", "accuracy", "simulated_tau") if name in metrics]
    steps = [metrics[f"accuracy_{k}"] for k in range(len(metrics)) if f"accuracy_{k}" in metrics]
    if steps:
        shown.append("accuracy " + " ".join(f"{value:.2f}" for value in steps))
    return ", ".join(shown)


def _staged(text: str, steps: int, read: Callable[[str], Any], wrong: str) -> list[tuple[int, Any]]:
    """The stages of ``UNTIL:VALUE,...`` as pairs of last step and value; the last stage ends the run."""
    *parts, last = text.split(",")
    try:
        stages = [(int(until), read(value)) for until, _, value in (part.rpartition(":") for part in parts)]
        return [*(stage for stage in stages if stage[0] < steps), (steps, read(last.rpartition(":")[2]))]
    except ValueError:
        raise Misuse(wrong) from None


def _phases(text: str, steps: int) -> tuple[Phase, ...]:
    from eagle3_jax.training.lm import Phase

    def read(shape: str) -> tuple[int, int]:
        rows, _, length = shape.partition("x")
        return int(rows), int(length)

    wrong = f"--phases {text!r}: expected STEPS:ROWSxTOKENS,..., for example '800:16x256,8x512'"
    phases = tuple(Phase(until, *shape) for until, shape in _staged(text, steps, read, wrong))
    if not all(1 <= phase.batch <= _MOST_ROWS and phase.length >= 1 for phase in phases):
        raise Misuse(f"--phases {text!r}: expected 1 to {_MOST_ROWS} rows, and at least one token")
    return phases


def _unrolls(text: str, steps: int) -> list[tuple[int, int]]:
    """Phases of the training-time test as ``(last step, depth)``."""
    depths = _staged(text, steps, int, f"--unroll {text!r}: expected UNTIL:STEPS,..., for example '300:2,5'")
    if not all(1 <= depth <= _MOST_DEPTH for _, depth in depths):
        raise Misuse(f"--unroll {text!r}: expected 1 to {_MOST_DEPTH} steps")
    return depths

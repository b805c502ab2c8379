"""``eagle3 train head``: a draft head for a target, from texts of ``eagle3 train data``."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from eagle3_jax.cli._errors import Misuse
from eagle3_jax.cli._parts import fetch_first
from eagle3_jax.cli._progress import progress_bar
from eagle3_jax.cli.train.files import (
    CHECKPOINTS,
    check_trainable,
    fingerprint,
    read_texts,
    refuse_finished,
    same_run,
    weights_of,
    write_draft_model,
    write_head,
)
from eagle3_jax.cli.train.run import (
    MOST_ROWS,
    DtypeOption,
    HeadOptimizerOptions,
    RunOptions,
    SeedOption,
    StepsOption,
    named,
    parse_stages,
    train,
)
from eagle3_jax.devices.compilation import keep_compiled_programs
from eagle3_jax.measure.tables import write_text

if TYPE_CHECKING:
    from eagle3_jax.conversion import HeadCheckpoint
    from eagle3_jax.loaded import LoadedTarget
    from eagle3_jax.models.functional import Params
    from eagle3_jax.training.evaluation import Evaluation
    from eagle3_jax.training.features import Features
    from eagle3_jax.training.loop import TrainState
    from eagle3_jax.training.methods import HeadOptions, Recipe
    from eagle3_jax.training.texts import Texts

# Depth of an unroll, every step of which is compiled.
_MOST_DEPTH = 64
# Parameters whose columns are draft tokens: of most methods, of Medusa, and of the Markov head of
# DSpark.
_OUTPUTS = frozenset({"head", "outputs", "after"})


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadShape:
    """The method of a head, its shape, and its training objective."""

    method: Annotated[str, typer.Option(help="Drafting method; an unknown name lists them.")] = (
        "eagle3"
    )
    draft_vocab_size: Annotated[
        int | None,
        typer.Option(
            help="Draft vocabulary size. Default: a third for eagle3 and p-eagle, else all tokens.",
            min=1,
        ),
    ] = None
    layers: Annotated[
        int | None,
        typer.Option(
            help="Number of layers. Default: the usual number of the method.", min=1, max=10_000
        ),
    ] = None
    width: Annotated[
        int | None,
        typer.Option(help="Width of a draft model. Default: half of the target's.", min=1),
    ] = None
    mlp_width: Annotated[
        int | None, typer.Option(help="Inner width of the MLPs. Default: the target's.", min=1)
    ] = None
    unroll: Annotated[
        str | None,
        typer.Option(
            help=(
                "Number of draft positions to learn, as UNTIL:POSITIONS,...; the last one holds to"
                " the end."
            )
        ),
    ] = None
    noise: Annotated[
        float | None,
        typer.Option(
            help="Noise on the features, as a share of their size. Default: none.", min=0, max=1
        ),
    ] = None
    freeze_output: Annotated[
        bool,
        typer.Option(
            "--freeze-output", help="Keep the target's output matrix instead of training it."
        ),
    ] = False


def head(
    target: Annotated[str, typer.Argument(help="Directory, GGUF file or name of the target.")],
    data: Annotated[
        Path, typer.Argument(metavar="DATA", help="Directory that `eagle3 train data` wrote.")
    ],
    out: Annotated[
        Path, typer.Argument(help="Directory to write; its checkpoints/ is where a run continues.")
    ],
    *,
    shape: HeadShape,
    steps: StepsOption = 1100,
    batch: Annotated[
        int,
        typer.Option(
            help="Rows per step for the longest texts; more rows for shorter texts.",
            min=1,
            max=MOST_ROWS,
        ),
    ] = 8,
    init: Annotated[
        Path | None, typer.Option(help="Head of the same target and method to start from.")
    ] = None,
    online: Annotated[
        bool,
        typer.Option(
            "--online", help="Run the target in every step. Default: store its features in DATA."
        ),
    ] = False,
    evaluate_every: Annotated[
        int, typer.Option(help="Steps between evaluations on held-out texts; 0: none.", min=0)
    ] = 100,
    optimizer: HeadOptimizerOptions,
    dtype: DtypeOption = "mixed",
    seed: SeedOption = 0,
    running: RunOptions,
) -> None:
    """Train a draft head with the objective of its method and write it in the layout of its method.

    Evaluations are in OUT/checkpoints/log.jsonl: tokens per round (tau) on held-out texts, by
    decoding and in one pass.
    """
    import jax
    import jax.numpy as jnp

    from eagle3_jax import load_target
    from eagle3_jax.conversion import identify
    from eagle3_jax.files.sources import locate
    from eagle3_jax.models.config import DecoderConfig
    from eagle3_jax.training.batches import text_batches
    from eagle3_jax.training.evaluation import Evaluation
    from eagle3_jax.training.loop import Trainer
    from eagle3_jax.training.methods import RECIPES, HeadOptions
    from eagle3_jax.training.texts import token_counts
    from eagle3_jax.training.vocab import coverage, select_draft_vocabulary

    keep_compiled_programs(running.compilation_cache)
    if shape.method not in RECIPES:
        raise Misuse(f"--method {shape.method!r} is not known; use one of {', '.join(RECIPES)}")
    recipe = RECIPES[shape.method]
    refuse_finished(out)
    schedule = optimizer.schedule(steps)
    unroll = recipe.depths if shape.unroll is None else shape.unroll
    depths = _unrolls(unroll, steps)
    texts, held_out = read_texts(data)

    # A path that holds no checkpoint is refused before the target is loaded.
    if init is not None:
        identify(init)
    fetch_first(target)
    loaded = load_target(target, dtype=dtype)

    model: Any = loaded.model
    size = shape.draft_vocab_size or recipe.draft_vocab_size(loaded.vocab_size)
    counts = token_counts(texts, loaded.vocab_size)

    options = HeadOptions(
        depth=depths[-1][1],
        num_layers=shape.layers,
        width=shape.width,
        mlp_width=shape.mlp_width,
        draft_vocab_size=size,
        noise=shape.noise,
    )
    config = recipe.config(model.config, options)
    drafter = recipe.drafter(config, precision=model.precision)

    check_trainable(drafter.param_shapes())
    if shape.freeze_output and "head" not in drafter.param_shapes():
        raise Misuse(
            f"--freeze-output: a head of the method {shape.method} has no output matrix to freeze;"
            " leave it out"
        )
    begun_from = None if init is None else _head_to_continue(init, shape.method, config, loaded)
    init_hash = None
    if begun_from is not None:
        init_hash = fingerprint([begun_from.head, begun_from.draft_to_target])

    weights = weights_of(loaded.params)
    run_options = {
        "TARGET": weights,
        "DATA": fingerprint(dataclasses.astuple(texts)),
        **named(shape),
        "--draft-vocab-size": size,
        "--unroll": unroll,
        "--steps": steps,
        "--batch": batch,
        "--init": init_hash,
        "--seed": seed,
        **named(optimizer),
        "--dtype": dtype,
    }
    chosen = None if size is None else select_draft_vocabulary(counts, size)
    draft_to_target = same_run(out, run_options, chosen)
    if draft_to_target is not None:
        unseen = int((counts[draft_to_target] == 0).sum())
        note = ""
        if unseen:
            note = f"; {unseen:,} of its {len(draft_to_target):,} tokens occur in no text"
        typer.echo(
            f"the draft vocabulary covers {coverage(counts, draft_to_target):.1%} of what is"
            f" learned{note}"
        )

    layers = getattr(drafter, "aux_layers", ())
    folder = data / "features" / "-".join([weights.removeprefix("sha256 "), *map(str, layers)])
    features = None if online else _features(loaded, texts, layers, folder / "texts")
    features_held_out = None if online else _features(loaded, held_out, layers, folder / "held-out")

    frozen: Any = {
        "target_params": loaded.params,
        "embedding": model.tables(loaded.params).embedding,
        "draft_to_target": None if draft_to_target is None else jnp.asarray(draft_to_target),
    }
    start = recipe.start(drafter, loaded, draft_to_target, jax.random.key(seed))
    if begun_from is not None:
        start = _continued(begun_from, start, draft_to_target)
    fixed = {"head": start.pop("head")} if shape.freeze_output else {}

    batch_at, _ = text_batches(texts, batch, seed, features)

    def inputs_at(step: int) -> tuple[Any, Any, Params]:
        return batch_at(step), frozen, fixed

    evaluation = Evaluation(loaded, drafter, frozen, held_out, features_held_out, depths[-1][1])
    log = Log(out / CHECKPOINTS / "log.jsonl", evaluation, fixed, evaluate_every, steps)
    state = None
    # Short drafts first: they are cheap, and the deeper ones build on them.
    for until, depth in depths:
        phase_options = dataclasses.replace(options, depth=depth)
        loss = functools.partial(_loss, recipe, drafter, model, phase_options)
        trainer = Trainer(loss, schedule, out / CHECKPOINTS)
        state = train(
            trainer,
            start,
            inputs_at,
            steps=until,
            total=steps,
            save_every=running.save_every,
            after_step=log.add,
            first_phase=state is None,
        )
        trainer.save(state)

    assert state is not None
    params = {**state.params, **fixed}
    if isinstance(config, DecoderConfig):
        write_draft_model(out, locate(target, "target"), config, params, dtype=running.store)
    else:
        depth = model.config.num_layers
        write_head(
            out, config, params, draft_to_target, dtype=running.store, num_target_layers=depth
        )
    typer.echo(f"wrote {out}")


def _features(
    target: LoadedTarget, texts: Texts, layers: tuple[int, ...], directory: Path
) -> Features:
    """Returns the target's features at each token of the texts, computed if they are not stored."""
    from eagle3_jax.training.features import TEXTS_OF_A_PART, stored_features

    num_parts = -(-len(texts) // TEXTS_OF_A_PART)
    with progress_bar("running the target over the texts", num_parts) as (progress, task):
        for features in stored_features(target, texts, layers, directory):
            if features is not None:
                return features
            progress.advance(task)
    raise AssertionError("the last value is the features")


def _loss(
    recipe: Recipe, drafter: Any, model: Any, options: HeadOptions, params: Params, inputs: Any
) -> Any:
    """Returns the loss of a head, some parameters of which may be fixed, and its metrics."""
    rows, frozen, fixed = inputs
    return recipe.loss(drafter, model, {**params, **fixed}, frozen, rows, options)


class Log(NamedTuple):
    """The evaluations of a run, a line of JSON each."""

    path: Path
    evaluation: Evaluation
    fixed: Params  #: Parameters that are not trained.
    every: int  #: Steps between evaluations; 0 for none.
    last: int  #: Last step of the run, which is evaluated too.

    def add(self, state: TrainState, metrics: dict[str, float]) -> None:
        """Evaluates the head if it is due, and adds a line.

        Later lines, of an interrupted run, are dropped.
        """
        step = int(state.step)
        if not self.every or (step % self.every and step != self.last):
            return

        params = {**state.params, **self.fixed}
        measured = self.evaluation.in_one_pass(params) or {}
        line = {"step": step, **metrics, "tau_decoded": self.evaluation.by_decoding(params)}
        line |= {f"held_out_{name}": value for name, value in measured.items()}

        before = self.path.read_text(encoding="utf-8").splitlines() if self.path.exists() else []
        lines = [earlier for earlier in before if json.loads(earlier)["step"] < step]
        write_text(self.path, "".join(f"{text}\n" for text in [*lines, json.dumps(line)]))

        read = ""
        if measured:
            num_texts = len(self.evaluation.texts)
            read = f", read off {num_texts:,} held-out texts {measured['tau']:.2f}"
        typer.echo(f"step {step}: tau {line['tau_decoded']:.2f} by decoding{read}")


def _head_to_continue(init: Path, method: str, config: Any, target: LoadedTarget) -> HeadCheckpoint:
    """Reads the head of ``--init``.

    Args:
        init: Its directory.
        method: The method of the run.
        config: The configuration of the new head.
        target: The target of the run.

    Raises:
        ValueError: The head does not fit the target, or has another method or shape than the new
            one.
    """
    import numpy as np

    from eagle3_jax.conversion import read_head
    from eagle3_jax.conversion.heads import HEADS
    from eagle3_jax.files.jsonl import shown

    model: Any = target.model
    read = read_head(init, model.config)
    if type(config) is not HEADS[read.method].classes[0]:
        raise Misuse(
            f"--init {init} is a head of the method {read.method}, and --method is {method}; give"
            " the same"
        )

    # The draft vocabulary may be another: only output matrices depend on it.
    before = {**dataclasses.asdict(read.config), "draft_vocab_size": None}
    after = {**dataclasses.asdict(config), "draft_vocab_size": None}
    differing = [
        f"{name} is {shown(before[name])} and not {shown(after[name])}"
        for name in after
        if before[name] != after[name]
    ]
    if differing:
        raise Misuse(
            f"--init {init} is another head than the options describe: {'; '.join(differing)}"
        )
    if read.embedding is not None:
        shared = np.asarray(model.tables(target.params).embedding)
        if not np.array_equal(read.embedding.astype(shared.dtype), shared):
            raise Misuse(
                f"--init {init} has its own embedding, which cannot be trained; give a head"
                " without one"
            )
    return read


def _continued(read: HeadCheckpoint, start: Params, draft_to_target: Any) -> Params:
    """Returns the parameters of a head as the first ones of a run.

    Args:
        read: The head.
        start: First parameters of a run without ``--init``. They supply the output matrices if the
            vocabularies differ.
        draft_to_target: ``[W]``, the draft vocabulary of the run; ``None`` for all tokens.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np

    params = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), read.head)
    every = np.arange(read.config.vocab_size)
    before = every if read.draft_to_target is None else read.draft_to_target
    after = every if draft_to_target is None else draft_to_target
    if np.array_equal(before, after):
        return params

    def chosen(path: tuple[Any, ...], leaf: jax.Array, fresh: jax.Array) -> jax.Array:
        names = {str(getattr(entry, "key", entry)) for entry in path}
        return leaf if names.isdisjoint(_OUTPUTS) else fresh

    return jax.tree_util.tree_map_with_path(chosen, params, start)


def _unrolls(text: str, steps: int) -> list[tuple[int, int]]:
    """Returns the phases of the training-time test as ``(last step, depth)``."""
    depths = parse_stages(
        text, steps, int, f"--unroll {text!r}: expected UNTIL:STEPS,..., for example '300:2,5'"
    )
    if not all(1 <= depth <= _MOST_DEPTH for _, depth in depths):
        raise Misuse(f"--unroll {text!r}: expected 1 to {_MOST_DEPTH} steps")
    return depths

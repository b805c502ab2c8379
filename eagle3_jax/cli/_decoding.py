"""Options of drafts and sampling that commands share, and the decoder that they describe."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from eagle3_jax.cli._errors import Misuse
from eagle3_jax.cli._options import ModelOptions, VerifierOption, parse_schedule, parse_tree
from eagle3_jax.cli._parts import find_own, read_drafter, read_target, read_verifier

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from eagle3_jax import SamplingParams, SpeculativeDecoder


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftOptions:
    """The draft of a round and the rule that accepts it."""

    num_speculative_tokens: Annotated[
        int | None,
        typer.Option(
            help=(
                "Draft length K. Default: 5 (Medusa: one per head; DFlash: the block); on CPUs 3,"
                " fewer for batches above 2."
            )
        ),
    ] = None
    tree: Annotated[
        str | None,
        typer.Option(
            help=(
                "Draft a tree: num_nodes=60,max_depth=8,top_k=10, the name of a published tree such"
                " as medusa-63, or paths of child ranks."
            )
        ),
    ] = None
    schedule: Annotated[
        str | None,
        typer.Option(
            help=(
                "Choose the draft length by the number of active rows: '[[1,4,5],[5,16,3]]', or a"
                " file that `eagle3 tune` wrote."
            )
        ),
    ] = None
    draft_sampling: Annotated[
        Literal["greedy", "probabilistic"] | None,
        typer.Option(
            help=(
                "Draft the most likely tokens, or sample them at the temperature (no dynamic"
                " trees)."
            )
        ),
    ] = None
    verifier: VerifierOption = None
    invariant: Annotated[
        bool,
        typer.Option(
            "--invariant",
            help=(
                "Make the target's bits for a token depend on the text before it alone: greedy text"
                " is then the same with any chain and without drafts, alone and in a batch, also in"
                " bfloat16."
            ),
        ),
    ] = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """The choice of tokens."""

    temperature: Annotated[float, typer.Option(help="Sampling temperature; 0 is greedy.")] = 0.0
    top_k: Annotated[
        int, typer.Option(help="Sample among the k most likely tokens; 0 for all.", max=2**31 - 1)
    ] = 0
    top_p: Annotated[
        float,
        typer.Option(
            help="Sample among the most likely tokens that together have this probability."
        ),
    ] = 1.0
    seed: Annotated[int, typer.Option(help="Random seed.", min=0, max=2**32 - 1)] = 0

    def params(self) -> SamplingParams:
        """Returns the sampling parameters for the decoder.

        Raises:
            ValueError: A value is out of range.
        """
        from eagle3_jax import SamplingParams
        from eagle3_jax.checks import checked_sampling

        params = SamplingParams(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p)
        checked_sampling(params, 1)
        return params


def open_decoder(
    models: ModelOptions,
    draft: DraftOptions,
    dtype: str,
    *,
    batch: int = 1,
    mesh: Mesh | None = None,
    stop_tokens: Sequence[int] | None = None,
) -> SpeculativeDecoder:
    """Loads the models of a command line and makes a decoder.

    Args:
        models: The target and its drafter, from :func:`~eagle3_jax.cli._parts.chosen_models`.
        draft: The draft of a round.
        dtype: The precision.
        batch: Rows that start together. The default draft length depends on it.
        mesh: The mesh that divides the models.
        stop_tokens: Ids that end a row. Default: the target's.
    """
    from eagle3_jax import LoadedDrafter, SpeculativeDecoder
    from eagle3_jax.checks import Drafting
    from eagle3_jax.topology import default_draft_length

    options: dict[str, Any] = {
        "num_speculative_tokens": draft.num_speculative_tokens,
        "tree": None if draft.tree is None else parse_tree(draft.tree),
        "schedule": None if draft.schedule is None else parse_schedule(draft.schedule),
        "draft_sampling": draft.draft_sampling,
        "invariant": draft.invariant,
    }
    target = read_target(models.target, dtype, mesh, weights=models.weights)
    head = read_drafter(models.drafter, target=target, layer_ids=models.layer_ids)
    shapes = {
        "--num-speculative-tokens": draft.num_speculative_tokens,
        "--tree": draft.tree,
        "--schedule": draft.schedule,
    }
    chosen = [f"{name} {value}" for name, value in shapes.items() if value is not None]
    named = chosen + ["--invariant"] * draft.invariant
    drafter = head.drafter if isinstance(head, LoadedDrafter) else head

    # A drafter that proposes a block or all of its heads in one pass keeps its length: a shorter
    # draft would need another network, or cost as much. So does one whose file names a length.
    has_length = isinstance(drafter, Drafting) and not hasattr(drafter, "longest")
    has_length = has_length and getattr(drafter, "topology", None) is None
    if has_length and not chosen and not find_own("--drafter", models.drafter):
        least = 0 if draft.draft_sampling is None else 1
        length = max(least, default_draft_length(batch, weights=models.weights))
        if not length:
            head = None
        # A drafter with another default keeps it, such as several MTP modules.
        elif drafter is not None and length != default_draft_length() == drafter.max_depth:
            options["num_speculative_tokens"] = length

    if head is None and draft.draft_sampling is not None:
        chosen.append(f"--draft-sampling {draft.draft_sampling}")
    if head is None and chosen:
        raise Misuse(
            f"{', '.join(chosen)}: there is no drafter; add --drafter HEAD or --drafter ngram, or"
            " leave the option out for plain decoding"
        )

    verifier = read_verifier(draft.verifier)
    try:
        return SpeculativeDecoder(
            target, head, **options, verifier=verifier, mesh=mesh, stop_tokens=stop_tokens
        )
    except ValueError as error:
        # Name the options that the library's message is about, unless it begins with one.
        is_named = str(error).partition(" is ")[0] in options
        options_named = "" if is_named else ", ".join(named)
        raise Misuse(": ".join(filter(None, (options_named, str(error))))) from None

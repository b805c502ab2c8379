"""The chat model of the notebooks, and the small pair where the chat model cannot be downloaded."""

from __future__ import annotations

from collections.abc import Sequence

import eagle3_jax as e3


def load_chat(
    questions: Sequence[str], code: Sequence[str]
) -> tuple[e3.LoadedTarget, e3.LoadedDrafter, list[list[int]]]:
    """Loads SmolLM2-135M-Instruct (93 MB, downloaded once), its head and the questions as prompts.

    Where it cannot be loaded, one line gives the reason. Then the small pair of the package
    continues ``code`` instead.
    """
    try:
        target = e3.load_target("smollm2", weights="int8")
    except (ValueError, ImportError) as error:
        reason = str(error).partition(";")[0]
        print(f"The small pair of the package replaces the chat model: {reason}")
        target = e3.load_target()
        return (
            target,
            e3.load_drafter(target=target),
            [target.tokenizer.encode(text).ids for text in code],
        )

    conversations = [[{"role": "user", "content": question}] for question in questions]
    prompts = [target.apply_chat_template(messages) for messages in conversations]
    return target, e3.load_drafter("smollm2", target=target), prompts

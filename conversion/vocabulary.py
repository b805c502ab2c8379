"""The tokenizer beside a checkpoint."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from eagle3_jax.conversion.errors import CheckpointError, printable
from eagle3_jax.conversion.files import refuse_pointer


def read_tokenizer(path: Path) -> Tokenizer | None:
    """The tokenizer in a file; ``None`` when there is no such file.

    Raises:
        CheckpointError: It is damaged, or was not fetched.
    """
    if not path.is_file():
        return None
    try:
        refuse_pointer(path)
        tokenizer = Tokenizer.from_str(path.read_text(encoding="utf-8-sig"))
    except CheckpointError:
        raise
    except BaseException as error:
        # tokenizers raises nothing more special, and a panic of its Rust code is not even an Exception.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason = printable(" ".join(str(error).split()))[:120]
        message = f"{path} is not a tokenizer ({reason}); fetch the file again, or remove it"
        raise CheckpointError(message) from None
    # Some are saved with the length that they were trained at; a prompt is fed whole or refused.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer

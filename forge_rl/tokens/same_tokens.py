"""Compares the vocabularies of two models."""

from __future__ import annotations

from pathlib import Path

from forge_rl.errors import ConfigError
from forge_rl.tokens.tokenizer import Tokenizer


def check_same_tokens(who: str, folder: Path, policy: Path) -> None:
    """Check that a model's tokenizer has the same token for each id as the policy's.

    Args:
        who: what errors call the model, such as "the teacher NAME".

    Raises:
        ConfigError: a token differs.
        ModelError: one has no tokenizer.
    """
    if folder.samefile(policy):
        return
    # Logits of two models are compared id by id, so each id must be the same token in both.
    model_ids, policy_ids = (Tokenizer(path).hf.get_vocab() for path in (folder, policy))
    if different_tokens := sorted({token for token, _ in model_ids.items() ^ policy_ids.items()}):
        token = different_tokens[0]
        raise ConfigError(
            f"{who} has another tokenizer than the policy: {len(different_tokens)} tokens differ, such as "
            f"{token!r}, which is {model_ids.get(token, 'none')} there and {policy_ids.get(token, 'none')} in the "
            "policy",
            hint="choose a model of the policy's own family, with the same tokenizer",
        )

"""``python -m hetero_llm.testing.tiny_model FOLDER``: a tiny random Qwen2 with a byte tokenizer, without network.

Head size 64 and 4 query, 2 key-value heads: TP 1 and 2 work on every kind met so far. Needs torch and transformers, so
it runs in a process of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

MODEL_ENV = "HETERO_LLM_CONTRACT_MODEL"
MAX_MODEL_LEN = 512
_DEADLINE_S = 300.0
_END = "<|endoftext|>"


def make_in_child(folder: Path) -> Path:
    """Return the folder named by `MODEL_ENV`, else make the tiny model inside `folder` and return that.

    Raises:
        RuntimeError: it could not be made; the message is what the process said last.
    """
    if given := os.environ.get(MODEL_ENV):
        return Path(given)
    target = folder / "tiny-qwen2"
    argv = [sys.executable, "-m", "hetero_llm.testing.tiny_model", str(target)]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=_DEADLINE_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise _not_made(f"not done after {_DEADLINE_S:g} s") from error
    if done.returncode != 0:
        raise _not_made((done.stderr.strip().splitlines() or ["it said nothing"])[-1])
    return target


def _not_made(why: str) -> RuntimeError:
    return RuntimeError(f"no tiny model could be made ({why}); name a model folder with {MODEL_ENV}")


def make(folder: Path) -> None:
    """Write config, weights and tokenizer into `folder`."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    tokenizer = _byte_tokenizer()
    config = Qwen2Config(
        vocab_size=320,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_MODEL_LEN,
        eos_token_id=tokenizer.convert_tokens_to_ids(_END),
        dtype=torch.float16,
    )
    Qwen2ForCausalLM(config).to(torch.float16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _byte_tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token=_END)


if __name__ == "__main__":
    make(Path(sys.argv[1]))

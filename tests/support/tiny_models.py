"""Write a tiny random model folder: ``python tiny_models.py NAME FOLDER [--seed N]``. No network, seconds.

Run in a child process by tests, because it loads torch and transformers. The same name and seed give the same bytes.

The next token of these models is, by construction, mostly a fixed permutation of the current one: the output matrix is
the embedding with its rows permuted. So greedy decoding has clear winners and does not flip with the rounding of
another tensor-parallel size, yet loops over many different tokens. The alphabet is printable ASCII: any output is text.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """Shape of one tiny Qwen2."""

    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    layers: int
    max_model_len: int = 2048


RECIPES = {
    # Head size 64: TP 1 and 2 work on CPU.
    "tiny-qwen2": Recipe(hidden_size=256, intermediate_size=512, heads=4, kv_heads=2, layers=4),
    # One KV head: with TP 2 both ranks hold it.
    "tiny-mqa": Recipe(hidden_size=256, intermediate_size=512, heads=4, kv_heads=1, layers=3),
    # Head size 16: no CPU attention kernel has it; an engine that gets it dies at its first step.
    "head16": Recipe(hidden_size=64, intermediate_size=128, heads=4, kv_heads=2, layers=2),
}

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

# Text the tokenizer learns its pieces from; what it says does not matter, that it never changes does.
CORPUS = (
    "A pool of unequal accelerators answers as one. The planner counts devices, memory and heads, and says why.",
    "The router sends each request to the replica that should finish first, and never to one that is not ready.",
    "An engine is a child process: it starts, loads weights, answers one real token, and only then is it called ready.",
    "What is the capital of France? Paris is the capital of France. Hello, how are you? I am fine, thank you.",
    "Count from one to ten: one, two, three, four, five, six, seven, eight, nine, ten. 0 1 2 3 4 5 6 7 8 9",
)
VOCAB_SIZE = 512

# How much the layers add to the embedding: enough to be seen in log-probabilities, too little to flip a winner (the
# best token leads by 2.8 standard deviations of the logits or more; 32- and 16-bit runs agree over 64 tokens).
LAYER_GAIN = 0.03


def main() -> int:
    """Write the model the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=sorted(RECIPES))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    vocab_size = write_tokenizer(arguments.folder)
    write_model(arguments.folder, RECIPES[arguments.name], vocab_size, arguments.seed)
    for path in arguments.folder.iterdir():
        path.chmod(0o644)
    return 0


def write_tokenizer(folder: Path) -> int:
    """Write a byte-level BPE tokenizer over ASCII, learnt from `CORPUS`; return its size."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    # The byte-level pre-tokenizer writes a blank as "Ġ" and a line feed as "Ċ".
    alphabet = [chr(code) for code in range(ord("!"), ord("~") + 1)] + ["Ġ", "Ċ"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        min_frequency=1,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=CHAT_TEMPLATE,
    )
    fast.save_pretrained(folder)
    return len(fast)


def write_model(folder: Path, recipe: Recipe, vocab_size: int, seed: int) -> None:
    """Write config, generation config and bf16 weights."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=vocab_size,
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.kv_heads,
        max_position_embeddings=recipe.max_model_len,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=SPECIAL_TOKENS.index("<|im_end|>"),
        pad_token_id=SPECIAL_TOKENS.index("<|endoftext|>"),
        initializer_range=0.08,
        dtype="bfloat16",
    )
    model = Qwen2ForCausalLM(config).to(torch.bfloat16)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(LAYER_GAIN)
            layer.mlp.down_proj.weight.mul_(LAYER_GAIN)
        model.lm_head.weight.copy_(model.model.embed_tokens.weight[next_tokens(vocab_size, seed)])
    model.save_pretrained(folder)


def next_tokens(vocab_size: int, seed: int) -> list[int]:
    """Return for each token the one it follows. Ordinary tokens form one long cycle; special ones follow themselves."""
    import random

    ordinary = list(range(len(SPECIAL_TOKENS), vocab_size))
    random.Random(seed).shuffle(ordinary)
    previous = list(range(vocab_size))
    for before, after in zip(ordinary, ordinary[1:] + ordinary[:1], strict=True):
        previous[after] = before
    return previous


if __name__ == "__main__":
    sys.exit(main())

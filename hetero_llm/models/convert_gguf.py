"""Child-process program: turn a GGUF file into a bf16 folder with config, safetensors and tokenizer.

``python -m hetero_llm.models.convert_gguf GGUF FOLDER``. The only place in `models` that imports torch and
transformers, so that their gigabyte of memory ends with the process. Writes to stdout one JSON object per line,
``{"phase": str, "done": int | null, "total": int | null}`` as it goes on and ``{"error": str}`` when it fails.
Standard input is watched: the program ends when it closes, that is, when the parent is gone.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any


def main(argv: list[str]) -> int:
    """Convert ``argv[0]`` into folder ``argv[1]``; return the exit status."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        convert(Path(argv[0]), Path(argv[1]))
    except Exception as error:  # noqa: BLE001 - a program's border: the parent gets it as data, the log the traceback
        _say({"error": f"{type(error).__name__}: {error}"})
        sys.excepthook(type(error), error, error.__traceback__)
        return 1
    return 0


def convert(gguf_path: Path, folder: Path) -> None:
    """Write the model and tokenizer of `gguf_path` into the existing `folder`."""
    _report("loading libraries")
    torch, transformers = _libraries()
    where = {"pretrained_model_name_or_path": str(gguf_path.parent), "gguf_file": gguf_path.name}
    quantization = transformers.GgufConfig(gguf_file=gguf_path.name, dequantize=True)
    _report("reading the bundled file")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        **where, quantization_config=quantization, dtype=torch.bfloat16
    )
    _report("converting the tokenizer")
    tokenizer = transformers.AutoTokenizer.from_pretrained(**where)
    _report("writing")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _libraries() -> tuple[Any, Any]:
    import gguf
    import torch
    import transformers
    from transformers import modeling_gguf_pytorch_utils as reader

    # transformers parses the file three times (config, weights, tokenizer) and builds the name map once per module.
    # Both are pure functions of their arguments; keeping the first result halves the time.
    gguf.GGUFReader = functools.cache(gguf.GGUFReader)
    gguf.get_tensor_name_map = functools.cache(gguf.get_tensor_name_map)
    # The loop over tensors shows itself through tqdm; this is where its progress can be had as numbers.
    reader.tqdm = _reported
    transformers.utils.logging.disable_progress_bar()
    return torch, transformers


def _reported(tensors: Iterable[Any], desc: str = "") -> Iterator[Any]:
    """Yield `tensors` and report after each how many bytes of them are done. Stands in for tqdm."""
    tensors = list(tensors)
    total = sum(int(tensor.n_bytes) for tensor in tensors)
    done = 0
    for tensor in tensors:
        _report("converting weights", done, total)
        yield tensor
        done += int(tensor.n_bytes)
    _report("converting weights", done, total)


def _report(phase: str, done: int | None = None, total: int | None = None) -> None:
    _say({"phase": phase, "done": done, "total": total})


def _say(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def _end_with_parent() -> None:
    # The bare descriptor: a thread inside sys.stdin's own lock would abort the interpreter when it ends.
    while os.read(0, 1024):
        pass
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

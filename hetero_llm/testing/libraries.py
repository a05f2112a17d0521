"""Names of libraries that only some processes may load, as far as anybody has met them."""

from __future__ import annotations

ENGINE_MODULES = frozenset(
    {
        "cupy",
        "deepspeed",
        "habana_frameworks",
        "intel_extension_for_pytorch",
        "jax",
        "mindspore",
        "onnxruntime",
        "paddle",
        "ray",
        "sglang",
        "tensorflow",
        "tensorrt",
        "torch",
        "torch_mlu",
        "torch_musa",
        "torch_npu",
        "torch_xla",
        "transformers",
        "triton",
        "vllm",
        "vllm_ascend",
        "vllm_gaudi",
    }
)
"""Libraries that open a device or patch others when imported: only engines and pre-flights may load them."""

VENDOR_MODULES = ENGINE_MODULES | frozenset(
    {
        "acl",
        "amdsmi",
        "cndev",
        "cuda",
        "dcmi",
        "hl_pyami",
        "ixsmi",
        "pyamdsmi",
        "pycuda",
        "pydcmi",
        "pymtml",
        "pymxsml",
        "pynvml",
        "pyrsmi",
        "pyze",
        "rocm_smi",
        "tbe",
        "te",
    }
)
"""Libraries that talk to a driver: besides engines, discovery may load them in its own process, an import never."""


def loaded(names: frozenset[str], modules: set[str]) -> tuple[str, ...]:
    """Return which of `names` are among `modules` (dotted names), ascending."""
    return tuple(sorted({name.partition(".")[0] for name in modules} & names))

"""What vLLM's log says on NVIDIA devices only: phases of compilation, and causes that other kinds do not have.

The patterns follow the messages in the sources of vllm 0.32.0, and public reports where they are torch's, NCCL's or the
CUDA driver's; tests/contract compares those of vLLM with what is installed.
"""

from __future__ import annotations

import re

from hetero_llm.plugin import EngineFact, vllm_log
from hetero_llm.plugin.vllm_log import cause, phase

_KV_PHASE = next(i for i, marker in enumerate(vllm_log.PHASES) if marker.phase == "preparing the KV cache")

PHASES = (
    *vllm_log.PHASES[:_KV_PHASE],
    phase(r"Dynamo bytecode transform time|Directly load AOT compilation", "compiling"),
    vllm_log.PHASES[_KV_PHASE],
    phase(r"Capturing CUDA graphs", "capturing CUDA graphs"),
    *vllm_log.PHASES[_KV_PHASE + 1 :],
)
"""In the order of a start; the times between them are what a user waits for."""

FACTS = (*vllm_log.FACTS, EngineFact(pattern=re.compile(r"max_num_batched_tokens=(\d+)"), name="max_batched_tokens"))

_LESS_MEMORY = ("use a smaller model, context or --gpu-memory-utilization", "hetero-llm devices shows who uses memory")
_NETWORK = (
    "hetero-llm doctor cuda",
    "set NCCL_SOCKET_IFNAME to the interface that connects the nodes",
    "give the container shared memory: docker run --shm-size=8g --ipc=host",
)
_UPDATE = ("update the NVIDIA driver", "or install a vLLM built for an older CUDA", "hetero-llm doctor cuda")

ROOT_CAUSES = (
    cause(r"DevicesUnusable: (.+)", "the engine does not see its devices: {1}", "hetero-llm doctor cuda"),
    # -- memory
    cause(
        r"CUDA out of memory\. Tried to allocate ([\d.]+ \w+)\. GPU (\d+) has a total capacity of ([\d.]+ \w+) "
        r"of which ([\d.]+ \w+) is free",
        "out of device memory: {1} more were needed, {4} of {3} are free on its device {2}",
        *_LESS_MEMORY,
    ),
    cause(
        r"CUDA out of memory occurred when warming up (\w+) with (\d+) dummy requests",
        "out of device memory when {2} requests were tried at once",
        "give a smaller --max-num-seqs or --gpu-memory-utilization",
    ),
    cause(r"CUDA (?:error: )?out of memory|CUDA_ERROR_OUT_OF_MEMORY", "out of device memory", *_LESS_MEMORY),
    cause(
        r"Free memory on device (\S*) ?\(([\d.]+)/([\d.]+) GiB\) on startup is less than .*\(([\d.]+), ([\d.]+) GiB\)",
        "{2} of {3} GiB are free on the device, the engine wants {5} GiB (a share of {4})",
        "stop what uses the device: nvidia-smi",
        "give a smaller --gpu-memory-utilization",
    ),
    # -- driver and build
    cause(
        r"The NVIDIA driver on your system is too old \(found version (\d+?)0(\d)0\)",
        "the NVIDIA driver is too old for this torch: it serves CUDA {1}.{2}",
        *_UPDATE,
    ),
    cause(
        r"CUDA driver version is insufficient for CUDA runtime version",
        "the NVIDIA driver is too old for this torch",
        *_UPDATE,
    ),
    cause(
        r"no kernel image is available for execution on the device",
        "this vLLM or torch was not built for this GPU's compute capability",
        "install a build that lists it, or use another GPU",
    ),
    cause(
        r"forward compatibility was attempted on non supported HW",
        "the driver is too old for the CUDA in use, and this GPU takes no compatibility package",
        *_UPDATE,
    ),
    cause(
        r"Error 802: system not yet initialized",
        "the NVLink fabric is not set up",
        "systemctl start nvidia-fabricmanager",
        "hetero-llm doctor cuda",
    ),
    cause(
        r"Error 803: system has unsupported display driver / cuda driver combination",
        "the driver's kernel module and libraries are of different versions",
        "reboot, or unload and load the nvidia kernel modules",
    ),
    cause(
        r"CUDA-capable device\(s\) is/are busy or unavailable",
        "the device is in exclusive use by another process",
        "nvidia-smi",
        "nvidia-smi -c DEFAULT",
    ),
    cause(
        r"uncorrectable ECC error encountered|unspecified launch failure|GPU is lost",
        "the device failed: {0}",
        "dmesg | grep -i -e nvrm -e xid",
        "reset the GPU or reboot",
    ),
    cause(
        r"(lib(?:cuda|nccl|cudart|cublas|nvrtc)\S*\.so\S*): cannot open shared object file",
        "a library of CUDA is missing: {1}",
        "hetero-llm doctor cuda",
    ),
    # -- model on this chip
    cause(
        r"Bfloat16 is only supported on GPUs with compute capability of at least ([\d.]+)\. Your (.+?) GPU has compute "
        r"capability (\d+\.\d+)",
        "{2} (compute capability {3}) does not compute in bfloat16, which needs {1}",
        "give --dtype half after --",
    ),
    cause(
        r"quantization method (.+?) is not supported for the current GPU\. Minimum capability: (\d+)\. "
        r"Current capability: (\d+)",
        "quantisation {1} needs compute capability {2}, this GPU has {3} (in tenths)",
        "use a model without it, or another GPU",
    ),
    cause(
        r"No valid attention backend found for (\S+) with",
        "no attention kernel of vLLM fits this model on {1}",
        "use a model with another head size, or another GPU",
    ),
    cause(
        r"World size \((\d+)\) is larger than the number of available GPUs \((\d+)\)",
        "{1} ranks were asked for, {2} devices are visible to the engine",
        "hetero-llm devices",
        "remove parallel-size flags from your own settings",
    ),
    # -- NCCL
    cause(
        r"Duplicate GPU detected : rank (\d+) and rank (\d+) both on CUDA device (\w+)",
        "ranks {1} and {2} were both put on the device at PCI bus {3}",
        "remove CUDA_VISIBLE_DEVICES from your own settings",
    ),
    cause(
        r"NCCL WARN .*?[Cc]onnect(?: to|ion)? (\S+?) (?:failed|refused)\s*:?\s*(.*)",
        "NCCL cannot reach {1}: {2}",
        *_NETWORK,
    ),
    cause(
        r"NCCL WARN .*no socket interface found",
        "NCCL found no network interface of the name it was given",
        "correct or unset NCCL_SOCKET_IFNAME",
        "ip addr",
    ),
    cause(
        r"NCCL WARN .*(/dev/shm/\S+|shared memory segment).*",
        "NCCL cannot use shared memory: /dev/shm is too small or not writable",
        "docker run --shm-size=8g --ipc=host",
    ),
    cause(
        r"NCCL WARN .*Call to (ibv_\w+) failed(?: with error)?:? ?(.*)",
        "NCCL cannot use InfiniBand or RoCE: {1} failed: {2}",
        "set NCCL_IB_HCA to the ports that are up: ibstat",
        "NCCL_IB_DISABLE=1 goes over TCP",
    ),
    cause(
        r"NCCL error.*(unhandled (?:system|cuda) error|invalid usage|internal error)|ncclSystemError",
        "NCCL failed between the ranks: {1}",
        *_NETWORK,
        "NCCL_DEBUG=INFO shows more",
    ),
    cause(
        r"Watchdog caught collective operation timeout|ncclRemoteError",
        "a rank waited for another that did not come; that one's end is the cause",
        "hetero-llm logs shows all ranks",
        generic=True,
    ),
    cause(
        r"Failed to infer device type",
        "vLLM found no platform it can run on: its NVML finds no GPU, or this is not vLLM's CUDA build",
        "hetero-llm doctor cuda",
    ),
    cause(
        r"PackageNotFoundError: (.+)|No module named '(vllm)'",
        "a part of the engine is not installed: {1}{2}",
        "pip install 'hetero-llm[cuda]'",
        "hetero-llm doctor cuda",
    ),
    *(known for known in vllm_log.ROOT_CAUSES if not known.generic),
    cause(
        r"CUDA error: (.+)",
        "CUDA failed: {1}",
        "dmesg | grep -i -e nvrm -e xid",
        "run the engine's command by hand with CUDA_LAUNCH_BLOCKING=1",
    ),
    cause(
        r"Engine core initialization failed|EngineDeadError",
        "the engine core ended without saying why",
        "dmesg shows whether the system or the device ran out of memory",
        "run the engine's command by hand with VLLM_LOGGING_LEVEL=DEBUG",
        generic=True,
    ),
    *(known for known in vllm_log.ROOT_CAUSES if known.generic),
)
"""From most to least specific, for `hetero_llm.plugin.rootcause.find_root_cause`."""

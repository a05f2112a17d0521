"""Causes in logs of engines on NVIDIA devices: the message formats of vLLM, torch, NCCL and the driver, put in words.

No log of a real device was at hand; the lines are written in the formats of the sources. test_cuda_backend in
tests/contract checks that the parts which vLLM writes still stand in what is installed.
"""

from __future__ import annotations

import pytest
from hetero_llm_cuda.log import FACTS, PHASES, ROOT_CAUSES

from hetero_llm.plugin.rootcause import find_root_cause

WORKER = "(Worker_TP0 pid=7) ERROR 12-01 04:35:24 [multiproc_executor.py:1] "
SUMMARY = (
    "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {'EngineCore': 1}"
)

CAUSES = [
    ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total capacity of 79.25 GiB "
     "of which 1.20 GiB is free. Including non-PyTorch memory, this process has 78 GiB memory in use.",
     "out of device memory: 2.00 GiB more were needed, 1.20 GiB of 79.25 GiB are free on its device 1"),
    ("RuntimeError: CUDA out of memory occurred when warming up sampler with 1024 dummy requests. Please try lowering",
     "out of device memory when 1024 requests were tried at once"),
    ("RuntimeError: CUDA error: out of memory", "out of device memory"),
    ("ValueError: Free memory on device cuda:0 (10.5/79.25 GiB) on startup is less than desired GPU memory utilization "
     "(0.9, 71.33 GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes.",
     "10.5 of 79.25 GiB are free on the device, the engine wants 71.33 GiB (a share of 0.9)"),
    ("RuntimeError: The NVIDIA driver on your system is too old (found version 12020). Please update your GPU driver",
     "the NVIDIA driver is too old for this torch: it serves CUDA 12.2"),
    ("RuntimeError: CUDA driver version is insufficient for CUDA runtime version",
     "the NVIDIA driver is too old for this torch"),
    ("RuntimeError: CUDA error: no kernel image is available for execution on the device",
     "this vLLM or torch was not built for this GPU's compute capability"),
    ("RuntimeError: Unexpected error from cudaGetDeviceCount(). Error 804: forward compatibility was attempted on non "
     "supported HW", "the driver is too old for the CUDA in use"),
    ("RuntimeError: Unexpected error from cudaGetDeviceCount(). Error 802: system not yet initialized",
     "the NVLink fabric is not set up"),
    ("RuntimeError: Unexpected error from cudaGetDeviceCount(). Error 803: system has unsupported display driver / "
     "cuda driver combination", "the driver's kernel module and libraries are of different versions"),
    ("RuntimeError: CUDA error: CUDA-capable device(s) is/are busy or unavailable", "the device is in exclusive use"),
    ("RuntimeError: CUDA error: uncorrectable ECC error encountered", "the device failed: uncorrectable ECC error"),
    ("RuntimeError: CUDA error: an illegal memory access was encountered",
     "CUDA failed: an illegal memory access was encountered"),
    ("ImportError: libcudart.so.13: cannot open shared object file: No such file or directory",
     "a library of CUDA is missing: libcudart.so.13"),
    ("ValueError: Bfloat16 is only supported on GPUs with compute capability of at least 8.0. Your Tesla T4 GPU has "
     "compute capability 7.5. You can use float16 instead by explicitly setting the `dtype` flag in CLI",
     "Tesla T4 (compute capability 7.5) does not compute in bfloat16, which needs 8.0"),
    ("ValueError: The quantization method moe_wna16 + awq is not supported for the current GPU. Minimum "
     "capability: 75. Current capability: 70.",
     "quantisation moe_wna16 + awq needs compute capability 75, this GPU has 70"),
    ("ValueError: No valid attention backend found for cuda with AttentionSelectorConfig(head_size=33)",
     "no attention kernel of vLLM fits this model on cuda"),
    ("ValueError: World size (8) is larger than the number of available GPUs (2) in this node. If this is",
     "8 ranks were asked for, 2 devices are visible to the engine"),
    ("Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 34000",
     "ranks 1 and 0 were both put on the device at PCI bus 34000"),
    ("box:7:9 [0] socket.cc:484 NCCL WARN socketStartConnect: Connect to 10.0.0.1<40123> failed : Connection refused",
     "NCCL cannot reach 10.0.0.1<40123>: Connection refused"),
    ("box:7:9 [0] init.cc:11 NCCL WARN Bootstrap : no socket interface found", "NCCL found no network interface"),
    ("box:7:9 [0] misc/shmutils.cc:87 NCCL WARN Error: failed to extend /dev/shm/nccl-x1 to 33030532 bytes",
     "NCCL cannot use shared memory"),
    ("box:7:9 [0] misc/ibvwrap.cc:200 NCCL WARN Call to ibv_modify_qp failed with error Connection timed out",
     "NCCL cannot use InfiniBand or RoCE: ibv_modify_qp failed: Connection timed out"),
    ("RuntimeError: NCCL error: unhandled system error (run with NCCL_DEBUG=INFO for details)",
     "NCCL failed between the ranks: unhandled system error"),
    ("DevicesUnusable: cuInit failed with 802: the system is not initialised",
     "the engine does not see its devices: cuInit failed with 802"),
    ("RuntimeError: Failed to infer device type", "vLLM found no platform it can run on"),
    ("/opt/venv/bin/python: Error while finding module specification (ModuleNotFoundError: No module named 'vllm')",
     "a part of the engine is not installed: vllm"),
    ("vllm serve: error: unrecognized arguments: --no-such", "the engine does not know the flag --no-such"),
    ("ValueError: User-specified max_model_len (99999) is greater than the derived max_model_len "
     "(max_position_embeddings=2048)", "a context of 99999 tokens was asked for, the model was made for 2048"),
    ("huggingface_hub.errors.GatedRepoError: 403 Client Error.", "the model is gated"),
    ("OSError: acme/toy is not a local folder and is not a valid model identifier listed on 'x'",
     "the hub has no such model"),
    ("OSError: We couldn't connect to 'https://hub.example' to load the files, and couldn't find them",
     "the model is not on this machine and the hub cannot be reached"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "expected"), CAUSES)
def test_each_failure_is_put_in_words_with_a_way_out(line: str, expected: str) -> None:
    cause = find_root_cause([f"{WORKER}{line}", SUMMARY], ROOT_CAUSES)
    assert cause is not None
    assert cause.message.startswith(expected)
    assert cause.next
    assert "{" not in "".join((cause.message, *cause.next))


def test_the_reason_nccl_gives_counts_before_the_error_it_ends_in() -> None:
    log = [
        "box:7:9 [0] socket.cc:484 NCCL WARN socketStartConnect: Connect to 10.0.0.1<40123> failed : No route to host",
        f"{WORKER}RuntimeError: NCCL error: unhandled system error (run with NCCL_DEBUG=INFO for details)",
    ]
    cause = find_root_cause(log, ROOT_CAUSES)
    assert cause is not None
    assert cause.message == "NCCL cannot reach 10.0.0.1<40123>: No route to host"


def test_a_rank_that_waited_in_vain_is_not_the_cause_beside_a_real_one() -> None:
    log = [
        f"{WORKER}[rank1]:[E] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1)",
        f"{WORKER}Traceback (most recent call last):",
        f'{WORKER}  File "w.py", line 1, in f',
        f"{WORKER}ValueError: bad weights",
    ]
    cause = find_root_cause(log, ROOT_CAUSES)
    assert cause is not None
    assert cause.message == "ValueError: bad weights"
    alone = find_root_cause(log[:1], ROOT_CAUSES)
    assert alone is not None
    assert alone.message.startswith("a rank waited for another")


def test_a_core_that_ends_silently_is_not_said_to_have_lacked_memory() -> None:
    cause = find_root_cause(["EngineDeadError"], ROOT_CAUSES)
    assert cause is not None
    assert cause.message == "the engine core ended without saying why"


def test_a_killed_core_is_still_told_as_killed() -> None:
    cause = find_root_cause(["RuntimeError: x. Failed core proc(s): {'EngineCore_0': -9}"], ROOT_CAUSES)
    assert cause is not None
    assert "EngineCore_0 was killed" in cause.message


def test_phases_follow_a_start_with_compilation_and_graphs() -> None:
    log = [
        "INFO non-default args: {}", "Resolved architecture: Qwen2ForCausalLM", "Initializing a V1 LLM engine",
        "Starting to load model /models/toy...", "Loading safetensors checkpoint shards:   0% Completed | 0/1",
        "Loading weights took 0.40 seconds", "Dynamo bytecode transform time: 3.20 s",
        "GPU KV cache size: 1,048,576 tokens",
        "Capturing CUDA graphs (decode, FULL):  10%|#",
        "init engine (profile, create kv cache, warmup model) took 20 s",
        "Application startup complete.",
    ]  # fmt: skip
    seen = [next(marker.phase for marker in PHASES if marker.pattern.search(line)) for line in log]
    assert seen == [
        "reading the model's configuration", "starting the engine core", "starting the workers", "building the model",
        "loading weights", "sizing the KV cache", "compiling", "preparing the KV cache",
        "capturing CUDA graphs", "starting the HTTP server", "generating the first token",
    ]  # fmt: skip


def test_the_kv_cache_size_is_read_as_a_fact() -> None:
    found = {fact.name: m[1] for fact in FACTS if (m := fact.pattern.search("GPU KV cache size: 1,048,576 tokens"))}
    assert found == {"kv_tokens": "1,048,576"}

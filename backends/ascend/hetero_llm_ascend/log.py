"""What the engine's log says on Ascend only: HCCL's and the driver's error codes, in words, with the way out.

The lines were taken from reports of vllm-ascend's users and from the messages in torch-npu 2.10 and vllm-ascend 0.23;
see tests/samples/ascend/logs. HCCL's result codes are those of its ``HcclResult``.
"""

from __future__ import annotations

from collections.abc import Mapping

from hetero_llm.plugin import RootCausePattern, vllm_log
from hetero_llm.plugin.vllm_log import cause
from hetero_llm_ascend import codes

PHASES = vllm_log.PHASES
FACTS = vllm_log.FACTS

_DOCTOR = "hetero-llm doctor ascend"
_SET_ENV = (
    "source /usr/local/Ascend/ascend-toolkit/set_env.sh",
    "source /usr/local/Ascend/nnal/atb/set_env.sh",
    _DOCTOR,
)
_MEMORY = ("use a smaller model, context or KV cache, or more devices (--tp)", "npu-smi info shows who uses the memory")
_IMAGE = ("start the node from the vllm-ascend image for its parts", _DOCTOR)
_SHOWN = ("HCCL_IF_IP", "HCCL_SOCKET_IFNAME", "HCCL_IF_BASE_PORT", "HCCL_CONNECT_TIMEOUT", "ASCEND_RT_VISIBLE_DEVICES")


def root_causes(env: Mapping[str, str]) -> tuple[RootCausePattern, ...]:
    """Return the patterns, Ascend's before vLLM's. HCCL's show the variables of `env` that decide about them."""
    return (*_setup(), *_versions(), *_hccl(_shown(env)), *_driver(), *_memory(), *vllm_log.ROOT_CAUSES)


def _shown(env: Mapping[str, str]) -> str:
    text = " ".join(f"{name}={env[name]}" for name in _SHOWN if name in env)
    # The patterns' texts are filled in by str.format.
    return "set were: " + (text.replace("{", "{{").replace("}", "}}") or "no HCCL variables")


def _setup() -> tuple[RootCausePattern, ...]:
    return (
        cause(
            r"(lib(?:atb|hccl|ascendcl|ascend_hal|acl_op_compiler|runtime|graph)\w*\.so[\w.]*): "
            r"cannot open shared object file",
            "{1} cannot be found: the environment of CANN and nnal is not set",
            *_SET_ENV,
        ),
        cause(
            r"Failed to infer device type",
            "vLLM's Ascend plugin could not be loaded, mostly because the environment of CANN and nnal is not set",
            *_SET_ENV,
        ),
        cause(
            r"ModuleNotFoundError: No module named '(vllm|vllm_ascend|torch_npu|torch|acl)(?:\.[\w.]+)?'",
            "{1} is not installed in the node's Python",
            *_IMAGE,
        ),
    )


def _versions() -> tuple[RootCausePattern, ...]:
    return (
        cause(
            r"Current device type: (?:AscendDeviceType\.)?(\w+) does not match the installed version's device type: "
            r"(?:AscendDeviceType\.)?(\w+)",
            "this vllm-ascend was built for {2}, the device is {1}",
            *_IMAGE,
        ),
        cause(
            r"Can not support soc_version: (\d+)",
            "vllm-ascend has no support for this part (torch_npu calls it number {1})",
            *_IMAGE,
        ),
        cause(
            r"Invalid vllm version (\S+) found",
            "vllm-ascend cannot tell which vLLM this is: {1}",
            *_IMAGE,
        ),
    )


def _hccl(shown: str) -> tuple[RootCausePattern, ...]:
    here = (shown, _DOCTOR)
    return (
        cause(
            r"(EJ0003|EI0019)\b|[Ff]ailed to bind the IP port|host nic listen start failed, port\[\d+\]",
            "HCCL's host port is bound by another process {1}",
            "start it again; another window of ports is chosen",
            "ss -ltnp | grep ':6[0-5]'",
            *here,
        ),
        cause(
            r"(EI0006)\b|[Gg]etting socket times out",
            "a rank of the group never came: it died before, started late, or cannot be reached {1}",
            "look for the first error of the other ranks and nodes",
            "check that the nodes reach each other at HCCL_IF_IP, with equal TLS settings (hccn_tool -i <NPU> -tls -g)",
            *here,
        ),
        cause(
            r"(EI0002)\b|wait execution of the Notify register times out",
            "a collective was waited for in vain: a rank died or hangs {1}",
            "look for the first error of the other ranks and nodes",
            *here,
        ),
        cause(
            r"(EJ0001)\b",
            "HCCL's helper on the device could not start: an earlier process has not let go of it yet ({1})",
            "npu-smi info shows who holds the device; wait, or end that process",
            *here,
        ),
        cause(
            r"(EJ0002)\b|The network port is down",
            "the network port of an NPU is down {1}",
            "hccn_tool -i <NPU> -link -g",
            *here,
        ),
        cause(
            r"(EI0004)\b|ranktable is invalid",
            "HCCL was given a rank table, and it is not valid {1}",
            "unset RANK_TABLE_FILE",
            *here,
        ),
        cause(
            r"(EI0008)\b",
            "the ranks run different versions of HCCL ({1})",
            "use the same CANN on all nodes of the group",
            *here,
        ),
        cause(r"(EI0009)\b|Transport init error", "two ranks could not connect their devices {1}", *here),
        cause(
            r"HCCL function error: ?(\w+).*error code is 11\b",
            "{1}: HCCL could not connect (code 11): another process has its host port, or rank 0 is not reachable",
            "start it again; another window of ports is chosen",
            *here,
        ),
        cause(
            r"HCCL function error: ?(\w+).*error code is 1\b",
            "{1}: HCCL refused its parameters (code 1): wrong address or interface, rank table, unusable device",
            "unset RANK_TABLE_FILE",
            *here,
        ),
        cause(
            r"HCCL function error: ?(\w+).*error code is 9\b",
            "{1}: HCCL waited in vain for another rank (code 9)",
            "look for the first error of the other ranks and nodes",
            *here,
        ),
        cause(r"HCCL function error: ?(\w+).*error code is (\d+)", "{1}: HCCL failed with code {2}", *here),
    )


def _driver() -> tuple[RootCausePattern, ...]:
    return (
        *(
            cause(rf"(?<![\w.-])({code})\b", codes.words(code).replace("{", "{{"), *codes.steps(code))
            for code in (codes.NOT_LOADED, codes.OCCUPIED)
        ),
        cause(
            r"drvRetCode[=:\s]*(\d+)",
            "the driver refused to open a device (drvRetCode={1}): in use elsewhere, not in this container, or sick",
            "npu-smi info",
            "in a container: pass /dev/davinciN, /dev/davinci_manager, /dev/devmm_svm and /dev/hisi_hdc",
            _DOCTOR,
        ),
        cause(
            r"NPU card health status is not OK",
            "the device reports that it is not healthy",
            "npu-smi info -t health -i <NPU>",
        ),
        cause(
            r"(?:NPU function error|NPU error): ?.*?[sS]etDevice.*?error code is (\d+)",
            "the device cannot be opened (error {1})",
            "npu-smi info",
            _DOCTOR,
        ),
    )


def _memory() -> tuple[RootCausePattern, ...]:
    return (
        cause(
            r"NPU out of memory\. Tried to allocate ([\d.]+ \w+) \(NPU (\d+); ([\d.]+ \w+) total capacity;"
            r".*?([\d.]+ \w+) free",
            "device {2} is out of memory: {1} more were wanted, {4} of {3} are free",
            *_MEMORY,
        ),
        cause(r"NPU out of memory\.(?:.*?ried to allocate ([\d.]+ \w+))?", "an NPU is out of memory {1}", *_MEMORY),
        cause(
            r"Free memory on device (?:\S+ )?\(([\d.]+)/([\d.]+) GiB\) on startup is less than desired GPU memory "
            r"utilization \(([\d.]+), ([\d.]+) GiB\)",
            "{1} of {2} GiB are free on a device, a share of {3} ({4} GiB) is wanted",
            "end the process that holds the memory (npu-smi info), or give a smaller gpu_memory_utilization",
        ),
        cause(
            r"(EL0004|EI0007)\b|NPU function error.*error code is 207001|[Mm]emory resources are exhausted",
            "a device is out of memory outside of torch's pool {1}",
            "give a smaller gpu_memory_utilization",
            *_MEMORY,
        ),
    )


ROOT_CAUSES = root_causes({})
"""The patterns without an environment to show."""

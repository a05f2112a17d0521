"""What `hetero-llm doctor ascend` looks at, each finding with both sides and the way out. Imports no vendor code."""

from __future__ import annotations

import grp
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from hetero_llm.plugin import Check
from hetero_llm.plugin.interfaces import interface_of
from hetero_llm.plugin.shared_memory import check_shared_memory
from hetero_llm.plugin.software import installed, platform_plugins
from hetero_llm_ascend import devnodes, discovery, isolated, npu_smi, ports, versions, visible
from hetero_llm_ascend.devnodes import ROOT

USER_GROUP = "HwHiAiUser"
LIBRARIES = ("libascendcl.so", "libhccl.so", "libatb.so")
COUNT_DEADLINE_S = 4.0
_NODES = ("davinci_manager", "devmm_svm", "hisi_hdc")
_SHM_BYTES = 1 << 30
_SET_ENV = (
    "source /usr/local/Ascend/ascend-toolkit/set_env.sh",
    "source /usr/local/Ascend/nnal/atb/set_env.sh",
)
_IMAGE = "start the node from the vllm-ascend image of one version"


def doctor(root: Path = ROOT, environ: Mapping[str, str] = os.environ) -> tuple[Check, ...]:
    """Return all checks; one that says there is no NPU here when nothing hints at any."""
    if not discovery.is_present(root):
        return (Check(name="ascend.devices", ok=None, text="no NPU here, and no driver for one"),)
    return (
        driver(root),
        device_nodes(root),
        counts(root),
        toolkit(root, environ),
        libraries(),
        plugin_version(),
        torch_version(),
        platform_plugin(),
        visible_devices(environ),
        rank_table(environ),
        port_window(),
        interface(environ),
        check_shared_memory("ascend", root / "dev/shm", _SHM_BYTES),
    )


def driver(root: Path = ROOT) -> Check:
    """Check that the driver is installed; its version is what firmware and CANN must fit."""
    version = versions.driver_version(root)
    if version is not None:
        return Check(name="ascend.driver", ok=True, text=f"driver {version}")
    if devnodes.in_container(root):
        advice = "-v /usr/local/Ascend/driver:/usr/local/Ascend/driver:ro"
        return Check(name="ascend.driver", ok=None, text="the driver's folder is not in this container", next=(advice,))
    advice = "install the driver (HDK) for this part, then restart"
    return Check(name="ascend.driver", ok=False, text="no /usr/local/Ascend/driver/version.info", next=(advice,))


def device_nodes(root: Path = ROOT, may_use: Callable[[Path], bool] | None = None) -> Check:
    """Check that the device files are there and that this user may use them."""
    usable = may_use or (lambda path: os.access(path, os.R_OK | os.W_OK))
    numbers = devnodes.physical_ids(root)
    wanted = [root / "dev" / name for name in (*(f"davinci{number}" for number in numbers), *_NODES)]
    missing = [path.name for path in wanted if not path.exists()]
    if not numbers or missing:
        what = ", ".join(missing) if numbers else "davinciN"
        advice = f"in a container: --device /dev/{missing[0] if numbers else 'davinci0'}; else load the driver"
        return Check(name="ascend.device-nodes", ok=False, text=f"missing in /dev: {what}", next=(advice,))
    closed = [path.name for path in wanted if not usable(path)]
    if closed:
        text = f"this user may not use /dev/{', /dev/'.join(closed)}{_membership()}"
        return Check(name="ascend.device-nodes", ok=False, text=text, next=(f"usermod -a -G {USER_GROUP} $USER",))
    return Check(name="ascend.device-nodes", ok=True, text=f"{len(numbers)} devices, all usable by this user")


def counts(root: Path = ROOT, deadline_s: float = COUNT_DEADLINE_S) -> Check:
    """Check that library, tool and device files agree on the number of NPUs."""
    readings = {"libdcmi": isolated.read("dcmi", deadline_s), "npu-smi": npu_smi.read(deadline_s)}
    found = {name: len(reading.chips) for name, reading in readings.items() if reading.failure is None}
    failed = [
        reading.failure for reading in readings.values() if reading.failure is not None and not reading.failure.missing
    ]
    found["/dev"] = len(devnodes.physical_ids(root))
    text = ", ".join(f"{name} {count}" for name, count in found.items())
    if failed:
        text = f"{'; '.join(failure.text for failure in failed)} ({text})"
        return Check(name="ascend.count", ok=False, text=text, next=failed[0].next)
    if len(set(found.values())) > 1:
        advice = ("npu-smi info", "npu-smi info -m", "in a container: pass every /dev/davinciN it was given")
        return Check(name="ascend.count", ok=False, text=f"the numbers of NPUs differ: {text}", next=advice)
    return Check(name="ascend.count", ok=True, text=text)


def toolkit(root: Path = ROOT, environ: Mapping[str, str] = os.environ) -> Check:
    """Check that CANN is installed and its environment set: without it vLLM finds no device and does not say why."""
    home, version = versions.toolkit_home(root, environ), versions.toolkit_version(root, environ)
    if home is None:
        advice = ("install the CANN toolkit", _IMAGE)
        return Check(name="ascend.cann", ok=False, text="the CANN toolkit is not installed", next=advice)
    if not environ.get("ASCEND_HOME_PATH"):
        text = f"CANN {version or 'of unknown version'} is in {home}, its environment (ASCEND_HOME_PATH) is not set"
        return Check(name="ascend.cann", ok=False, text=text, next=_SET_ENV)
    return Check(name="ascend.cann", ok=True, text=f"CANN {version or 'of unknown version'} in {home}")


def libraries(names: Iterable[str] = LIBRARIES) -> Check:
    """Check that the runtime, collective and kernel libraries can be loaded; a process of its own tries."""
    complaints = ((name, isolated.load_error(name)) for name in names)
    broken = [f"{name} ({complaint})" for name, complaint in complaints if complaint]
    if broken:
        text = f"cannot be loaded: {'; '.join(broken)}"
        return Check(name="ascend.libraries", ok=False, text=text, next=_SET_ENV)
    return Check(name="ascend.libraries", ok=True, text=f"{', '.join(names)} can be loaded")


def plugin_version(look_up: versions.Installed = installed) -> Check:
    """Check that vllm-ascend is installed and made for the vLLM beside it."""
    plugin, engine, mismatch = look_up("vllm-ascend"), look_up("vllm"), versions.plugin_mismatch(look_up)
    if plugin is None or engine is None:
        text = f"vllm-ascend is {plugin or 'not installed'}, vllm is {engine or 'not installed'}"
        return Check(name="ascend.vllm", ok=False, text=text, next=(_IMAGE,))
    if mismatch:
        advice = (f"pip install vllm=={versions.release(plugin)}", _IMAGE)
        return Check(name="ascend.vllm", ok=False, text=mismatch, next=advice)
    return Check(name="ascend.vllm", ok=True, text=f"vllm-ascend {plugin} with vllm {engine}")


def torch_version(look_up: versions.Installed = installed) -> Check:
    """Check that torch-npu is installed and made for the torch beside it."""
    plugin, engine, mismatch = look_up("torch-npu"), look_up("torch"), versions.torch_mismatch(look_up)
    if plugin is None or engine is None:
        text = f"torch-npu is {plugin or 'not installed'}, torch is {engine or 'not installed'}"
        return Check(name="ascend.torch", ok=False, text=text, next=(_IMAGE,))
    if mismatch:
        advice = (f"pip install torch=={versions.release(plugin)}", _IMAGE)
        return Check(name="ascend.torch", ok=False, text=mismatch, next=advice)
    return Check(name="ascend.torch", ok=True, text=f"torch-npu {plugin} with torch {engine}")


def platform_plugin(names: Iterable[str] | None = None) -> Check:
    """Check that vllm-ascend is the only out-of-tree platform plugin: vLLM loads one, and with two refuses to start."""
    found = sorted(entry.value for entry in platform_plugins()) if names is None else sorted(names)
    text = f"vLLM platform plugins: {', '.join(found) or 'none'}"
    if len(found) == 1 and found[0].startswith("vllm_ascend"):
        return Check(name="ascend.platform-plugin", ok=True, text=text)
    advice = _IMAGE if not found else "use a Python environment of its own for each kind"
    return Check(name="ascend.platform-plugin", ok=False, text=text, next=(advice,))


def visible_devices(environ: Mapping[str, str] = os.environ) -> Check:
    """Check how the user's own ASCEND_RT_VISIBLE_DEVICES is written."""
    text = environ.get(visible.VARIABLE)
    if text is None:
        return Check(name="ascend.visible-devices", ok=True, text=f"{visible.VARIABLE} is not set")
    complaint = visible.complaint(text)
    if complaint:
        advice = f"export {visible.VARIABLE}=0,1,4   (ascending, no blanks)"
        return Check(name="ascend.visible-devices", ok=False, text=complaint, next=(advice,))
    return Check(name="ascend.visible-devices", ok=True, text=f"{visible.VARIABLE}={text}")


def rank_table(environ: Mapping[str, str] = os.environ) -> Check:
    """Check for a rank table left over from another launcher. Engines are started without it; by hand it would bite."""
    path = environ.get("RANK_TABLE_FILE")
    if path is None:
        return Check(name="ascend.rank-table", ok=True, text="RANK_TABLE_FILE is not set")
    text = f"RANK_TABLE_FILE={path} is set; it silently replaces how ranks find each other"
    return Check(name="ascend.rank-table", ok=False, text=text, next=("unset RANK_TABLE_FILE",))


def port_window(is_free: Callable[[int], bool] | None = None) -> Check:
    """Check that the first replica's window of HCCL ports is free."""
    free = is_free or ports.port_is_free("0.0.0.0")
    wanted = range(ports.FIRST_PORT, ports.FIRST_PORT + ports.WINDOW_PORTS)
    taken = [port for port in wanted if not free(port)]
    window = f"{wanted[0]}-{wanted[-1]}"
    if not taken:
        return Check(name="ascend.ports", ok=True, text=f"HCCL's first ports {window} are free")
    advice = (
        f"ss -ltnp | grep -E ':({'|'.join(str(port) for port in taken[:3])}) '",
        f"sysctl -w net.ipv4.ip_local_reserved_ports={ports.FIRST_PORT}-{ports.LAST_BASE + ports.WINDOW_PORTS - 1}",
    )
    # A running replica has them, and the next one gets other ports.
    text = f"of HCCL's first ports {window}, taken: {', '.join(str(port) for port in taken[:3])}"
    return Check(name="ascend.ports", ok=None, text=text, next=advice)


def interface(environ: Mapping[str, str] = os.environ) -> Check:
    """Check that an HCCL_IF_IP the user set himself is an address of this machine."""
    address = environ.get("HCCL_IF_IP")
    if address is None:
        return Check(name="ascend.interface", ok=True, text="HCCL_IF_IP is not set; each replica gets its own")
    name = interface_of(address)
    if name is not None:
        return Check(name="ascend.interface", ok=True, text=f"HCCL_IF_IP={address} is on {name}")
    text = f"HCCL_IF_IP={address} is no address of this machine"
    return Check(name="ascend.interface", ok=False, text=text, next=("unset HCCL_IF_IP", "ip -brief address"))


def _membership() -> str:
    try:
        members = grp.getgrnam(USER_GROUP)
    except KeyError:
        return f"; the group {USER_GROUP} does not exist"
    return "" if members.gr_gid in os.getgroups() else f"; it is not in the group {USER_GROUP}"

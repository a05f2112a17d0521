"""A machine with NPUs that are not there: driver library, npu-smi, CANN's acl and /dev, all at the driver boundary.

The library is C, loaded by the real ctypes; npu-smi is a program that prints a captured sample; acl is a module file.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

SAMPLES = Path(__file__).parents[1] / "samples" / "ascend" / "npu-smi"
_SOURCE = Path(__file__).parent / "fake_dcmi.c"
_NONE = 0xFFFFFFFF


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeChip:
    """A chip of the fake driver; sizes are MiB. Zero memory, bus or die: the driver does not know it."""

    card: int
    chip: int = 0
    type: int = 0
    logical: int = 0
    physical: int = 0
    health: int = 0
    hbm: int = 65536
    used: int = 3000
    ddr: int = 0
    available: int = 0
    name: str = "910B2"
    npu_name: str = "-"
    domain: int = 0
    bus: int = 0xC1
    die: int = 0
    power: int = 964
    temp: int = 37
    util: int = 0

    def line(self) -> str:
        """Return the chip's line in the file that fake_dcmi.c reads."""
        c = self
        head = (c.card, c.chip, c.type, c.logical, c.physical, c.health, c.hbm, c.used, c.ddr, c.available)
        tail = (c.name, c.npu_name, c.domain, f"{c.bus:x}", f"{c.die:x}", c.power, c.temp, c.util)
        return " ".join(("chip", *map(str, (*head, *tail))))


class Machine:
    """A folder that stands for /, and the variables a process needs to believe in it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.bin, self.lib, self.python = root / "bin", root / "lib", root / "python"
        for folder in (self.bin, self.lib, self.python, root / "dev"):
            folder.mkdir(parents=True)

    def environment(self) -> dict[str, str]:
        """Return the variables; PATH has no real npu-smi because machines that run these tests have none."""
        return {
            "PATH": f"{self.bin}:{os.environ['PATH']}",
            "LD_LIBRARY_PATH": f"{self.lib}:{os.environ.get('LD_LIBRARY_PATH', '')}",
            "PYTHONPATH": f"{self.python}:{os.environ.get('PYTHONPATH', '')}",
            "FAKE_DCMI": str(self.root / "dcmi.txt"),
        }

    def dcmi(self, library: Path, chips: Iterable[FakeChip] = (), *lines: str) -> None:
        """Install the fake driver library with these chips, and extra lines of its file."""
        shutil.copy(library, self.lib / "libdcmi.so")
        text = "\n".join((*lines, *(chip.line() for chip in chips)))
        (self.root / "dcmi.txt").write_text(text + "\n")

    def npu_smi(self, answers: Mapping[str, str], *, hang: Iterable[str] = (), status: int = 0) -> None:
        """Install an npu-smi: arguments to the name of a sample, or to text when it contains a newline.

        It answers wrongly unless it is run with LC_ALL=C, and hangs for the arguments in `hang`.
        """
        cases = []
        for number, (arguments, answer) in enumerate(answers.items()):
            path = self.root / f"answer-{number}.txt"
            path.write_text(answer if "\n" in answer else (SAMPLES / answer).read_text())
            cases.append(f'"{arguments}") cat {path};;')
        cases += [f'"{arguments}") exec sleep 600;;' for arguments in hang]
        script = f"""\
            #!/bin/sh
            [ "$LC_ALL" = C ] || {{ echo "LC_ALL is not C"; exit 0; }}
            echo "$*" >> {self.root}/npu-smi.calls
            case "$*" in
            {" ".join(cases)}
            *) echo "Error parameter";;
            esac
            exit {status}
            """
        tool = self.bin / "npu-smi"
        tool.write_text(textwrap.dedent(script))
        tool.chmod(0o755)

    def acl(self, code: str) -> None:
        """Install a module `acl` with this code."""
        (self.python / "acl.py").write_text(textwrap.dedent(code))

    def nodes(self, *numbers: int) -> None:
        """Make /dev/davinciN and the driver's other device files."""
        for name in (*(f"davinci{number}" for number in numbers), "davinci_manager", "devmm_svm", "hisi_hdc"):
            (self.root / "dev" / name).touch()

    def pci(self, address: str, *, vendor: str = "0x19e5", kind: str = "0x120000", numa: int | None = None) -> None:
        """Put a device on the PCI bus."""
        folder = self.root / "sys/bus/pci/devices" / address
        folder.mkdir(parents=True)
        (folder / "vendor").write_text(f"{vendor}\n")
        (folder / "class").write_text(f"{kind}\n")
        if numa is not None:
            (folder / "numa_node").write_text(f"{numa}\n")


def build_dcmi(folder: Path) -> Path | None:
    """Compile the fake driver library, None where there is no C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return None
    library = folder / "libdcmi.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, _SOURCE], check=True, timeout=120)
    return library

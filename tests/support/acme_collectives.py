"""A vendor's collective backend, ``acme``: Gloo underneath, and one rank that misbehaves if asked to.

Imported by a rank's process (``--import acme_collectives``). ``ACME_FAULT`` in a rank's environment names what its
all-reduce does: ``wrong``, ``hang``, ``hang-locked`` (holds the interpreter's lock), ``raise``, ``die``.
"""

import ctypes
import os
import signal
import time

import torch.distributed as dist

__version__ = "7.1"


class AcmeGroup(dist.ProcessGroup):
    def __init__(self, store, rank, size, timeout):
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)

    def allreduce(self, tensors, options):
        fault = os.environ.get("ACME_FAULT")
        if fault == "hang":
            time.sleep(600)
        elif fault == "hang-locked":
            ctypes.PyDLL(None).sleep(600)
        elif fault == "raise":
            raise RuntimeError("acme: link 3 is down")
        elif fault == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        work = self._gloo.allreduce(tensors, options)
        work.wait()
        if fault == "wrong":
            tensors[0][5] += 1
        return work

    def getBackendName(self):  # noqa: N802 - torch's name
        return "acme"


dist.Backend.register_backend("acme", AcmeGroup, devices=["cpu"])

"""The CPU backend keeps the contract every plugin keeps."""

from hetero_llm.testing import BackendContract


class TestCpu(BackendContract):
    backend = "hetero_llm_cpu.plugin:CpuBackend"

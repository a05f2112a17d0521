import subprocess
import sys
from pathlib import Path

import pytest
from greedy import SIZES, greedy
from sandbox import Sandbox

SUPPORT = Path(__file__).parent.parent / "support"


@pytest.fixture(scope="session")
def model_cache(tmp_path_factory):
    """Converted models, shared by the whole run: the first `serve` of the demo model converts it."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """Return a function: name of a recipe → folder with that seeded random model."""
    made = {}

    def make(name):
        if name not in made:
            folder = tmp_path_factory.mktemp("models") / name
            subprocess.run([sys.executable, SUPPORT / "tiny_models.py", name, folder], check=True, capture_output=True)
            made[name] = folder
        return made[name]

    return make


def runs_engines(request):
    return request.node.get_closest_marker("vllm") is not None


@pytest.fixture
def sandbox(model_cache, request):
    box = Sandbox(model_cache, engines=runs_engines(request))
    yield box
    box.close()


@pytest.fixture(scope="module")
def module_sandbox(model_cache, request):
    box = Sandbox(model_cache, engines=runs_engines(request))
    yield box
    box.close()


@pytest.fixture(scope="session")
def on_one_device(model_cache, tiny_model):
    """What a real engine on one core says of tiny-qwen2: its greedy tokens, and the replica's status."""
    box = Sandbox(model_cache)
    try:
        env = {"HETERO_LLM_CPU_CORES_PER_DEVICE": "1"}
        serve = box.serve(str(tiny_model("tiny-qwen2")), "--kind", "cpu", "--tp", "1", *SIZES, env=env)
        serve.wait_ready()
        (replica,) = serve.replicas()
        tokens = greedy(serve)
        serve.interrupt()
        assert serve.wait() == 130
        assert box.leftovers() == []
    finally:
        box.close()
    return tokens, replica

import subprocess
import sys
from pathlib import Path

import pytest
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

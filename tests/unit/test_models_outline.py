"""A plan for a model that is only on the hub: a local HTTP server stands for the hub, the sockets are real."""

import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from hetero_llm.errors import UnknownModel
from hetero_llm.models import store
from hetero_llm.models.outline import fetch_outline

CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "max_position_embeddings": 2048,
    "vocab_size": 512,
    "torch_dtype": "bfloat16",
}
INDEX = {"metadata": {"total_size": 4000}, "weight_map": {"a": "model-00001-of-00002.safetensors"}}
HEADER = {
    "__metadata__": {"format": "pt"},
    "model.norm.weight": {"dtype": "BF16", "shape": [256], "data_offsets": [0, 512]},
    "lm_head.weight": {"dtype": "BF16", "shape": [512, 256], "data_offsets": [512, 262656]},
}


def safetensors(header=HEADER):
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(262656)


class Hub:
    """Files by path, and the requests that came."""

    def __init__(self, *, ranges=True):
        self.files, self.requests, self.status, self.ranges = {}, [], 200, ranges
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), self.handler())
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.05,))

    def put(self, model, **files):
        for name, content in files.items():
            path = f"/{model}/resolve/main/{name.replace('__', '.')}"
            self.files[path] = content if isinstance(content, bytes) else json.dumps(content).encode()

    def handler(self):
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                hub.requests.append((self.path.rpartition("/")[2], self.headers.get("authorization")))
                content = hub.files.get(self.path)
                status = hub.status if hub.status != 200 else 404 if content is None else 200
                body = content if status == 200 else b"{}"
                wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("range", ""))
                if status == 200 and wanted and hub.ranges:
                    status, body = 206, body[int(wanted[1]) : int(wanted[2]) + 1]
                self.send_response(status)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                try:
                    self.wfile.write(body)
                except (BrokenPipeError, ConnectionResetError):
                    self.close_connection = True

            def log_message(self, *_):
                pass

        return Handler


@pytest.fixture
def hub(monkeypatch, tmp_path, request):
    made = Hub(**getattr(request, "param", {}))
    made.thread.start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{made.server.server_port}/")
    monkeypatch.setenv("HETERO_LLM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    for name in ("HF_TOKEN", "HF_HUB_OFFLINE", "HF_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    yield made
    made.server.shutdown()
    made.thread.join()
    made.server.server_close()


def test_config_and_index_are_enough_for_the_facts(hub):
    hub.put("org/big", config__json=CONFIG, **{"model__safetensors__index__json": INDEX})
    found = store.resolve("org/big", prepare=False, ask_hub=True)
    assert (found.facts.layers, found.facts.kv_heads, found.facts.weights_bytes) == (2, 2, 4000)
    assert (found.prepared, found.facts.path) == (False, None)
    assert [name for name, _ in hub.requests] == ["config.json", "model.safetensors.index.json"]


def test_what_was_fetched_is_kept(hub):
    hub.put("org/big", config__json=CONFIG, **{"model__safetensors__index__json": INDEX})
    assert fetch_outline("org/big") == fetch_outline("org/big")
    assert len(hub.requests) == 2


@pytest.mark.parametrize("hub", [{"ranges": True}, {"ranges": False}], indirect=True)
def test_of_a_single_weights_file_only_the_header_is_needed(hub):
    hub.put("org/small", config__json=CONFIG, model__safetensors=safetensors())
    assert store.resolve("org/small", prepare=False, ask_hub=True).facts.weights_bytes == 262656


def test_the_token_is_sent(hub, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    hub.put("org/gated", config__json=CONFIG, **{"model__safetensors__index__json": INDEX})
    fetch_outline("org/gated")
    assert {authorization for _, authorization in hub.requests} == {"Bearer hf_secret"}


def test_a_model_the_hub_does_not_have_is_unknown_and_says_how_to_go_on(hub):
    with pytest.raises(UnknownModel) as caught:
        store.resolve("org/none", prepare=False, ask_hub=True)
    assert "404" in caught.value.report.cause
    assert any("hf download org/none" in step for step in caught.value.report.next)


@pytest.mark.parametrize("weights", [b"", b"\0" * 8, b"\xff" * 8, (20).to_bytes(8, "little") + b"no json, but 20 long"])
def test_a_weights_file_that_is_none_is_told(hub, weights):
    hub.put("org/bad", config__json=CONFIG, model__safetensors=weights)
    with pytest.raises(UnknownModel):
        store.resolve("org/bad", prepare=False, ask_hub=True)
    assert store.cache.outlines_dir().exists() is False


def test_a_hub_that_cannot_be_reached_is_told(hub, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(UnknownModel) as caught:
        store.resolve("org/big", prepare=False, ask_hub=True)
    assert "127.0.0.1:9" in caught.value.report.cause


def test_offline_nothing_is_asked(hub, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UnknownModel) as caught:
        store.resolve("org/big", prepare=False, ask_hub=True)
    assert caught.value.report.cause == "HF_HUB_OFFLINE is set"
    assert hub.requests == []


def test_serving_still_needs_the_download(hub):
    hub.put("org/big", config__json=CONFIG, **{"model__safetensors__index__json": INDEX})
    with pytest.raises(UnknownModel, match="is not on this machine"):
        store.resolve("org/big")

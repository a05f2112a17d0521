"""One `hetero-llm serve` of the bundled chat model, used the way people use it: OpenAI SDK, curl, kill -9, Ctrl-C."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import openai
import psutil
import pytest
from sandbox import engine_tree

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]

MODEL = "smollm2-135m"
QUESTION = [{"role": "user", "content": "Tell me the capital of France."}]


@pytest.fixture(scope="module")
def serve(module_sandbox):
    running = module_sandbox.serve()
    running.wait_ready()
    return running


@pytest.fixture(scope="module")
def client(serve):
    with openai.OpenAI(base_url=serve.ready["openai_base_url"], api_key="none", max_retries=0) as client:
        yield client


def ask(client, **options):
    return client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0, max_tokens=30, **options)


def post(serve, path, **options):
    with serve.client() as client:
        return client.post(path, **options)


def test_chat_knows_the_capital_of_france(client):
    answer = ask(client)
    assert "Paris" in answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop"


def test_a_streamed_answer_is_the_same_text_in_many_events(client):
    chunks = list(ask(client, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == ask(client).choices[0].message.content
    assert len(chunks) > 5
    assert chunks[-1].usage.completion_tokens > 0


def test_completions_work(client):
    answer = client.completions.create(model=MODEL, prompt="The capital of France is", temperature=0, max_tokens=5)
    assert "Paris" in answer.choices[0].text


def test_models_lists_the_one_model(client):
    (entry,) = client.models.list().data
    assert entry.id == MODEL


def test_usage_agrees_with_tokenize(client, serve):
    usage = ask(client).usage
    tokens = post(serve, "/tokenize", json={"model": MODEL, "messages": QUESTION}).json()
    assert usage.prompt_tokens == tokens["count"] == len(tokens["tokens"])
    answer = ask(client)
    text = post(serve, "/tokenize", json={"model": MODEL, "prompt": answer.choices[0].message.content}).json()
    # The end-of-text token is generated and counted, but is no part of the text.
    assert usage.completion_tokens == text["count"] + 1


def test_the_answer_says_who_gave_it(client, serve):
    raw = client.chat.completions.with_raw_response.create(model=MODEL, messages=QUESTION, max_tokens=1)
    (replica,) = serve.replicas()
    assert raw.headers["x-hetero-replica"] == replica["replica"]
    assert raw.headers["x-hetero-kind"] == "cpu"
    assert raw.headers["x-request-id"]


def in_cluster(sandbox, code):
    """Run `code`, which prints one JSON document, in a process that is connected to the sandbox's cluster."""
    (record,) = (sandbox.root / "state" / "serve").glob("*.json")
    head = (
        "import json, sys\n"
        "from hetero_llm.cluster.session import connect\n"
        "session = connect(sys.argv[1])\n"
        "import ray\n"
        "from ray import serve\n"
    )
    argv = [sys.executable, "-c", head + code + "\nsession.close()", json.loads(record.read_text())["address"]]
    done = subprocess.run(argv, env=sandbox.env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_ray_holds_our_resources_for_the_replica(serve, module_sandbox):
    code = "print(json.dumps([ray.cluster_resources(), ray.available_resources()]))"
    total, available = in_cluster(module_sandbox, code)
    (replica,) = serve.replicas()
    for name in ("hetero_cpu", f"hetero_cpu:{replica['accelerator']}"):
        assert total[name] >= 1
        assert available.get(name, 0) == total[name] - 1


def test_the_replica_actor_can_be_asked_directly(serve, module_sandbox):
    (replica,) = serve.replicas()
    body = {"model": MODEL, "prompt": "The capital of France is", "temperature": 0, "max_tokens": 5}
    code = (
        f"handle = serve.get_app_handle({replica['app']!r})\n"
        f"status, answer = handle.generate.remote({json.dumps(body).encode()!r}).result()\n"
        "values = [handle.health.remote().result(), handle.endpoint.remote().result(), status, json.loads(answer)]\n"
        "print(json.dumps([*values, handle.stats.remote().result()]))"
    )
    health, endpoint, status, answer, stats = in_cluster(module_sandbox, code)
    assert (health, endpoint, status) == ("ready", replica["endpoint"], 200)
    assert "Paris" in answer["choices"][0]["text"]
    assert stats["replica"] == replica["replica"]


def test_everything_of_the_cluster_listens_on_loopback_only(serve, module_sandbox):
    listening = [
        connection.laddr.ip
        for process in module_sandbox.processes()
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert listening
    assert {address.removeprefix("::ffff:") for address in listening} <= {"127.0.0.1", "::1"}


def test_the_engine_is_pinned_to_the_cores_it_leased(serve):
    (replica,) = serve.replicas()
    tree = engine_tree(replica["actor_pid"])
    assert len(tree) >= 3
    assert {tuple(process.cpu_affinity()) for process in tree} == {tuple(replica["cores"])}


def test_our_own_processes_are_small_and_load_no_torch(serve, module_sandbox):
    (replica,) = serve.replicas()
    engine = {process.pid for process in engine_tree(replica["actor_pid"])}
    limits_mb = {"hetero_llm.gateway": 120, "GatewayReplica": 150, "EngineReplica": 150, "ray::Scheduler": 150}
    seen = {}
    for process in module_sandbox.processes():
        command = " ".join(process.cmdline())
        name = next((name for name in limits_mb if name in command), None)
        if name and process.pid not in engine:
            maps = {Path(m.path).name for m in process.memory_maps()}
            assert not [library for library in maps if "torch" in library or "vllm" in library]
            seen[name] = process.memory_info().rss / 1e6
    assert seen.keys() == limits_mb.keys()
    assert {name: mb for name, mb in seen.items() if mb > limits_mb[name]} == {}


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"{not json", 400, "HL601"),
        (b"", 400, "HL601"),
        (b"[]", 400, "HL601"),
        (b'{"messages": []}', 400, "HL601"),
        (b'{"model": "nobody", "messages": []}', 404, "HL602"),
    ],
)
def test_a_bad_request_gets_an_openai_error_with_our_code(serve, body, status, code):
    answer = post(serve, "/v1/chat/completions", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == status
    assert answer.json()["error"]["code"] == code


def test_a_body_of_a_hundred_megabytes_is_refused_and_the_server_goes_on(serve, client):
    size = 100 << 20
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {size}\r\n\r\n"
    host, port = serve.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as raw:
        raw.sendall(head.encode())
        try:
            for _ in range(size >> 16):
                raw.sendall(b" " * (1 << 16))
        except (BrokenPipeError, ConnectionResetError):
            pass
        assert raw.recv(65536).startswith(b"HTTP/1.1 413 ")
    assert "Paris" in ask(client).choices[0].message.content


def test_an_engines_own_refusal_passes_through(serve):
    answer = post(serve, "/v1/chat/completions", json={"model": MODEL, "messages": QUESTION, "temperature": -5})
    assert answer.status_code == 400
    assert "temperature" in answer.json()["error"]["message"]


def test_reading_verbs_show_the_running_cluster(serve, module_sandbox):
    (replica,) = serve.replicas()
    status = module_sandbox.json("status")
    assert [one["replica"] for one in status["replicas"]] == [replica["replica"]]
    devices = [device for node in module_sandbox.json("devices")["nodes"] for device in node["devices"]]
    assert [device["held_by"] for device in devices if device["uid"] in replica["devices"]] == [replica["replica"]]
    log = module_sandbox.run("logs", replica["replica"])
    assert "Application startup complete" in log.stdout
    chat = module_sandbox.run("chat", "-m", QUESTION[0]["content"], "--temperature", "0", "--max-tokens", "30")
    assert "Paris" in chat.stdout


def test_a_second_serve_on_the_same_port_is_refused_at_once(serve, module_sandbox):
    port = serve.url.rsplit(":", 1)[1]
    began = time.monotonic()
    done = module_sandbox.run("serve", "--port", port)
    assert done.returncode == 1
    assert "error[HL103]" in done.stderr
    assert time.monotonic() - began < 10


def test_a_killed_gateway_is_back_at_the_same_address(serve, client, module_sandbox):
    (gateway,) = [p for p in module_sandbox.processes() if p.cmdline()[1:] == ["-m", "hetero_llm.gateway"]]
    gateway.kill()
    end = time.monotonic() + 60
    answer, refused = None, set()
    while answer is None and time.monotonic() < end:
        try:
            answer = ask(client)
        except openai.APIConnectionError:
            time.sleep(0.3)
        except openai.APIStatusError as error:
            refused.add(error.status_code)
            time.sleep(0.3)
    assert answer is not None
    assert refused <= {503}
    assert "Paris" in answer.choices[0].message.content


def test_killing_the_replica_actor_is_survived(serve, client):
    (before,) = serve.replicas()
    tree = engine_tree(before["actor_pid"])
    os.kill(before["actor_pid"], signal.SIGKILL)
    _gone, alive = psutil.wait_procs(tree, timeout=5.0)
    assert alive == []
    end = time.monotonic() + 240
    refused = set()
    while time.monotonic() < end:
        try:
            answer = ask(client)
            break
        except openai.APIStatusError as error:
            refused.add((error.status_code, error.response.headers.get("retry-after") is not None))
            time.sleep(0.5)
    else:
        pytest.fail(f"no answer after the replica was killed; refusals: {refused}")
    assert "Paris" in answer.choices[0].message.content
    assert refused <= {(503, True)}
    (after,) = [one for one in serve.replicas() if one["state"] == "ready"]
    assert after["replica"] != before["replica"]
    assert not psutil.pid_exists(before["engine_pid"])


def test_ctrl_c_leaves_nothing_behind(serve, module_sandbox):
    # The last of this module: it ends the server the other tests use.
    (replica,) = serve.replicas()
    assert replica["state"] == "ready"
    serve.interrupt()
    assert serve.wait() == 130
    assert module_sandbox.leftovers() == []
    host, port = serve.url.removeprefix("http://").split(":")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, int(port)))

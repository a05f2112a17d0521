"""The simulated engine over HTTP: OpenAI's shapes, vLLM's names."""

import json
import socket
import time

import pytest
from hetero_llm_sim.tokens import continuation, decode, encode
from openai import OpenAI


def sse(engine, path="/v1/completions", **body):
    body = {"model": "m", "prompt": "hello", "max_tokens": 4, "stream": True, **body}
    with engine.http.stream("POST", path, json=body) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: ")]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def test_a_completion_is_the_greedy_continuation_of_its_prompt(engine):
    answer = engine.complete("one two three", 12)
    assert answer["choices"][0]["text"] == decode(continuation(encode("one two three"), 12))
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 12


def test_a_stream_has_one_event_a_token_and_the_same_text(engine):
    *events, done = sse(engine, prompt="one two three", max_tokens=12)
    assert done == "[DONE]"
    assert len(events) == 12
    text = "".join(event["choices"][0]["text"] for event in events)
    assert text == engine.complete("one two three", 12)["choices"][0]["text"]
    assert [event["choices"][0]["finish_reason"] for event in events] == [None] * 11 + ["length"]


def test_a_prompt_of_token_ids_is_the_same_as_its_text(engine):
    by_text = engine.complete("one two three", 5)["choices"][0]["text"]
    assert engine.complete(encode("one two three"), 5)["choices"][0]["text"] == by_text


def test_usage_comes_at_the_end_of_a_stream_when_asked_for(engine):
    *_, usage, done = sse(engine, stream_options={"include_usage": True})
    assert done == "[DONE]"
    assert usage["choices"] == []
    assert usage["usage"]["total_tokens"] == usage["usage"]["prompt_tokens"] + 4


def test_cached_tokens_are_told_in_the_usage(engine):
    prompt = "a prompt of its own, " * 30
    first, again = engine.complete(prompt), engine.complete(prompt)
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    cached = again["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached == (again["usage"]["prompt_tokens"] - 1) // 16 * 16


def test_token_ids_are_given_when_asked_for(engine):
    prompt = encode("hello")
    whole = engine.complete("hello", 4, return_token_ids=True)["choices"][0]
    assert (whole["prompt_token_ids"], whole["token_ids"]) == (prompt, continuation(prompt, 4))
    *events, _ = sse(engine, return_token_ids=True)
    assert [token for event in events for token in event["choices"][0]["token_ids"]] == whole["token_ids"]
    assert events[0]["choices"][0]["prompt_token_ids"] == prompt


def test_the_openai_sdk_chats_with_it(engine):
    messages = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    with OpenAI(base_url=f"http://{engine.host}:{engine.port}/v1", api_key="x", max_retries=0) as client:
        whole = client.chat.completions.create(model="m", messages=messages, max_tokens=6)
        stream = client.chat.completions.create(model="m", messages=messages, max_tokens=6, stream=True)
        streamed = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert whole.choices[0].message.content == streamed
    assert whole.choices[0].message.role == "assistant"


def test_a_chat_without_a_limit_stops_by_itself(engine):
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    answer = engine.http.post("/v1/chat/completions", json=body).json()
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == 128


def test_tokens_and_text_turn_into_each_other(engine):
    tokens = engine.http.post("/tokenize", json={"model": "m", "prompt": "wörld €"}).json()
    assert tokens["count"] == len(tokens["tokens"])
    assert engine.http.post("/detokenize", json={"model": "m", "tokens": tokens["tokens"]}).json() == {
        "prompt": "wörld €"
    }


def test_the_model_list_names_the_model_and_its_context(engine):
    (model,) = engine.http.get("/v1/models").json()["data"]
    assert (model["id"], model["max_model_len"]) == ("m", 32768)


def test_the_version_says_that_it_is_a_simulation(engine):
    assert engine.http.get("/version").json()["version"].endswith("+sim")


def test_metrics_count_under_vllms_names(engine):
    before = engine.metric("vllm:generation_tokens_total")
    engine.complete("count me", 7)
    assert engine.metric("vllm:generation_tokens_total") == before + 7
    page = engine.http.get("/metrics").text
    for name in (
        "vllm:num_requests_running{",
        "vllm:num_requests_waiting{",
        "vllm:kv_cache_usage_perc{",
        "vllm:prefix_cache_queries_total{",
        "vllm:prefix_cache_hits_total{",
        "vllm:time_to_first_token_seconds_bucket{",
        "vllm:inter_token_latency_seconds_count{",
        "sim:event_lateness_seconds_bucket{",
    ):
        assert name in page


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"prompt": "x", "model": "other"}, 404, "model"),
        ({}, 400, "prompt"),
        ({"prompt": ""}, 400, "prompt"),
        ({"prompt": ["a", "b"]}, 400, "prompt"),
        ({"prompt": [1, -1]}, 400, "prompt"),
        ({"prompt": "x", "max_tokens": 0}, 400, "max_tokens"),
        ({"prompt": "x", "max_tokens": 40000}, 400, "max_tokens"),
        ({"prompt": [1] * 40000}, 400, "input_tokens"),
        ({"prompt": "x", "n": 2}, 400, "n"),
        ({"prompt": "x", "logprobs": 1}, 400, "logprobs"),
        ({"prompt": "x", "stop": ["."]}, 400, "stop"),
        ({"prompt": "x", "max_tokens": "many"}, 400, None),
    ],
)
def test_a_request_that_cannot_be_served_gets_an_openai_error(engine, body, status, param):
    answer = engine.http.post("/v1/completions", json=body)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == (status, param)
    assert error["message"]


def test_a_body_that_is_not_json_gets_an_error(engine):
    assert engine.http.post("/v1/completions", content=b"{no").status_code == 400


def test_unknown_routes_and_methods_get_an_error(engine):
    assert engine.http.get("/nothing").status_code == 404
    assert engine.http.get("/v1/completions").status_code == 405


def test_requests_sent_ahead_on_one_connection_are_answered_in_order(engine):
    body = json.dumps({"prompt": "x", "max_tokens": 2}).encode()
    post = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
    get = b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n"
    last = b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
    with socket.create_connection((engine.host, engine.port), timeout=20) as connection:
        connection.sendall(post + get * 50 + last)
        with connection.makefile("rb") as file:
            said = file.read()
    assert said.count(b"HTTP/1.1 200 OK") == 52
    assert said.index(b"text_completion") < said.index(b'{"version"')


def test_what_is_not_http_ends_the_connection(engine):
    with socket.create_connection((engine.host, engine.port), timeout=20) as connection:
        connection.sendall(b"\x16\x03\x01\x02\x00\x01\x00\x01\r\n\r\n")
        with connection.makefile("rb") as file:
            assert file.read().startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_stops_its_request(start_engine, stream):
    engine = start_engine("--profile", "slow")
    connection = _open(engine, {"prompt": "x", "max_tokens": 5000, "stream": stream})
    engine.eventually(lambda: engine.metric("vllm:generation_tokens_total") > 2)
    connection.close()
    engine.eventually(lambda: engine.metric("vllm:num_requests_running") == 0)
    assert engine.metric("vllm:request_success_total") == 1
    assert engine.metric("vllm:kv_cache_usage_perc") == 0


def test_a_full_queue_answers_503(start_engine):
    engine = start_engine("--profile", "slow", "--max-num-seqs", "1", "--max-num-queued-reqs", "1")
    waiting = [_open(engine, {"prompt": "x", "max_tokens": 5000}) for _ in range(2)]
    engine.eventually(lambda: engine.metric("vllm:num_requests_waiting") == 1)
    answer = engine.http.post("/v1/completions", json={"prompt": "x"})
    assert answer.status_code == 503
    assert "requests wait already" in answer.json()["error"]["message"]
    assert engine.metric("sim:requests_refused_total") == 1
    for connection in waiting:
        connection.close()
    engine.eventually(lambda: engine.metric("vllm:num_requests_waiting") == 0)
    assert engine.complete()["usage"]["completion_tokens"] == 5


def _open(engine, body):
    data = json.dumps(body).encode()
    connection = socket.create_connection((engine.host, engine.port), timeout=20)
    connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(data), data))
    return connection


def test_priority_is_refused_where_it_is_not_scheduled(start_engine):
    engine = start_engine("--scheduling-policy", "fcfs", "--speed", "20")
    answer = engine.http.post("/v1/completions", json={"prompt": "x", "priority": 1})
    assert answer.status_code == 400
    assert engine.complete(priority=0)


def test_two_engines_of_different_speed_give_the_same_text(start_engine):
    fast = start_engine("--profile", "fast", "--speed", "20")
    slow = start_engine("--profile", "slow", "--speed", "20")
    assert fast.complete("same", 30)["choices"] == slow.complete("same", 30)["choices"]


def test_in_real_time_a_stream_takes_about_what_the_profile_says(start_engine):
    engine = start_engine("--profile", "slow")
    engine.complete("warm", 1)
    began = time.monotonic()
    sse(engine, prompt=[7] * 400, max_tokens=11)
    # 400 / 2000 s for the prompt, then ten tokens at 41 ms. A busy machine may be later, never earlier.
    assert 0.59 <= time.monotonic() - began < 5
    assert engine.metric("vllm:inter_token_latency_seconds_sum") == pytest.approx(0.41, rel=0.001)
    assert engine.metric("vllm:time_to_first_token_seconds_sum") == pytest.approx(0.2, rel=0.01)


def test_an_engine_ends_cleanly_on_sigterm_with_a_request_under_way(start_engine):
    engine = start_engine("--profile", "slow")
    connection = _open(engine, {"prompt": "x", "max_tokens": 5000})
    engine.eventually(lambda: engine.metric("vllm:num_requests_running") == 1)
    assert engine.stop() == 0
    connection.close()

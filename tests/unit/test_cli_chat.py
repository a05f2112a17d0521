"""`chat` against an endpoint that answers as OpenAI's does."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

PIECES = ["Par", "is", "."]


class Endpoint(BaseHTTPRequestHandler):
    def do_GET(self):
        self._answer(200, "application/json", json.dumps({"data": [{"id": "m"}]}))

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.asked.append((body, self.headers.get("authorization")))
        if self.server.refuse:
            self._answer(401, "application/json", json.dumps({"error": {"message": "no key"}}))
            return
        events = [{"choices": [{"delta": {"role": "assistant"}}]}]
        events += [{"choices": [{"delta": {"content": piece}}]} for piece in PIECES]
        events += self.server.last
        text = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
        self._answer(200, "text/event-stream", text)

    def _answer(self, status, kind, text):
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *args):
        pass


@pytest.fixture
def endpoint():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Endpoint)
    server.asked, server.refuse, server.last = [], False, [{"choices": [], "usage": {"total_tokens": 3}}]
    server.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_one_message_prints_the_answer_and_nothing_else(cli, endpoint):
    outcome = cli("chat", "--url", endpoint.url, "-m", "capital of France?")
    assert (outcome.code, outcome.out, outcome.err) == (0, "Paris.\n", "")


def test_the_first_model_is_asked_with_what_was_given(cli, endpoint):
    cli("chat", "--url", endpoint.url, "-m", "hi", "--temperature", 0, "--max-tokens", 5, "--system", "be brief")
    body, _ = endpoint.asked[0]
    assert (body["model"], body["temperature"], body["max_tokens"], body["stream"]) == ("m", 0, 5, True)
    assert body["messages"] == [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]


def test_a_conversation_remembers_what_was_said(cli_process, endpoint):
    outcome = cli_process("chat", "--url", endpoint.url, input="one\n\ntwo\n")
    assert outcome.out == "Paris.\nParis.\n"
    body, _ = endpoint.asked[1]
    assert [message["content"] for message in body["messages"]] == ["one", "Paris.", "two"]


def test_the_key_is_taken_from_the_environment(cli, endpoint, monkeypatch):
    monkeypatch.setenv("HETERO_LLM_API_KEY", "sk-1")
    cli("chat", "--url", endpoint.url, "-m", "hi")
    assert endpoint.asked[0][1] == "Bearer sk-1"


def test_a_refused_key_is_told_with_what_to_do(cli, endpoint):
    endpoint.refuse = True
    outcome = cli("chat", "m", "--url", endpoint.url, "-m", "hi")
    assert outcome.code == 1
    assert "answered 401: no key" in outcome.err
    assert "--api-key" in outcome.err


def test_an_answer_that_breaks_off_is_an_error(cli, endpoint):
    endpoint.last = [{"error": {"message": "the replica died"}}]
    outcome = cli("chat", "m", "--url", endpoint.url, "-m", "hi")
    assert outcome.code == 1
    assert "the answer broke off: the replica died" in outcome.err


def test_an_endpoint_that_does_not_answer_is_an_error(cli):
    outcome = cli("chat", "m", "--url", "http://127.0.0.1:9", "-m", "hi")
    assert outcome.code == 1
    assert outcome.err.startswith("error[HL403]: http://127.0.0.1:9")

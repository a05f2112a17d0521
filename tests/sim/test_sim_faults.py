"""Every fault as a client sees it, over real sockets."""

import json
import signal
import socket
import time

import httpx
import pytest
from hetero_llm_sim.faults import FaultsInvalid, parse_faults
from hetero_llm_sim.tokens import continuation, decode, encode

BODY = {"model": "m", "prompt": "hello", "max_tokens": 20}
RIGHT = decode(continuation(encode("hello"), 20))


def stream(client, **more):
    """Return (events, error) of a streamed completion: what came until the end or until something broke."""
    events = []
    try:
        with client.stream("POST", "/v1/completions", json={**BODY, "stream": True, **more}) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: "):
                    events.append(line.removeprefix("data: "))
    except httpx.TransportError as error:
        return events, error
    return events, None


def texts(events):
    return [json.loads(event)["choices"][0]["text"] for event in events if event != "[DONE]"]


@pytest.fixture
def faulty(start_engine):
    return start_engine("--speed", "20")


# -- dying -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("streamed", [True, False])
def test_die_before_first_byte_cuts_the_connection_before_any_answer(faulty, streamed):
    faulty.faults("die_before_first_byte")
    with faulty.new_client() as client, pytest.raises(httpx.RemoteProtocolError, match="without sending a response"):
        client.post("/v1/completions", json={**BODY, "stream": streamed})
    assert faulty.process.wait(30) == -signal.SIGKILL


def test_die_after_tokens_sends_so_many_and_ends_without_an_end(faulty):
    faulty.faults("die_after_tokens=3")
    with faulty.new_client() as client:
        events, error = stream(client)
    assert len(texts(events)) == 3
    assert isinstance(error, httpx.RemoteProtocolError)
    assert "[DONE]" not in events
    assert faulty.process.wait(30) == -signal.SIGKILL


def test_a_dead_engine_has_said_why_in_its_log(faulty):
    faulty.faults("die_after_tokens=3")
    with faulty.new_client() as client:
        stream(client)
    faulty.process.wait(30)
    faulty.eventually(lambda: any("told to die: die_after_tokens" in line for line in faulty.log))


# -- silence -----------------------------------------------------------------------------------------------------------


def test_hang_takes_the_request_and_says_nothing(faulty):
    faulty.faults("hang")
    with faulty.new_client(timeout_s=0.5) as client, pytest.raises(httpx.ReadTimeout):
        client.post("/v1/completions", json=BODY)


@pytest.mark.parametrize("path", ["/health", "/metrics", "/v1/models"])
def test_a_hanging_engine_is_silent_on_every_route(faulty, path):
    faulty.faults("hang")
    with faulty.new_client(timeout_s=0.3) as client, pytest.raises(httpx.ReadTimeout):
        client.get(path)


def test_silent_after_tokens_sends_so_many_and_keeps_the_connection_open(faulty):
    faulty.faults("silent_after_tokens=3")
    with faulty.new_client(timeout_s=1.0) as client:
        events, error = stream(client)
    assert len(texts(events)) == 3
    assert isinstance(error, httpx.ReadTimeout)
    assert faulty.process.poll() is None


# -- refusing ----------------------------------------------------------------------------------------------------------


def refused(engine):
    try:
        socket.create_connection((engine.host, engine.port), timeout=5).close()
    except ConnectionRefusedError:
        return True
    return False


def test_refuse_refuses_new_connections_until_it_is_taken_back_on_the_old_one(faulty):
    faulty.faults("refuse")
    faulty.eventually(lambda: refused(faulty))
    faulty.faults("")
    faulty.eventually(lambda: not refused(faulty))
    assert faulty.complete("hello", 20)["choices"][0]["text"] == RIGHT


def test_refuse_ends_by_itself_after_its_time(faulty):
    faulty.faults("refuse:for_s=0.3")
    faulty.eventually(lambda: refused(faulty))
    faulty.eventually(lambda: not refused(faulty))


def test_unavailable_answers_503_and_so_does_health(faulty):
    faulty.faults("unavailable:times=1")
    assert faulty.http.get("/health").status_code == 503
    answer = faulty.http.post("/v1/completions", json=BODY)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, 503)
    assert faulty.http.post("/v1/completions", json=BODY).status_code == 200


# -- wrong answers -----------------------------------------------------------------------------------------------------


def test_garbage_is_a_200_that_is_not_json(faulty):
    faulty.faults("garbage")
    answer = faulty.http.post("/v1/completions", json=BODY)
    assert answer.status_code == 200
    with pytest.raises(ValueError):  # noqa: PT011
        json.loads(answer.content)


def test_empty_is_a_200_without_a_body(faulty):
    faulty.faults("empty")
    answer = faulty.http.post("/v1/completions", json=BODY)
    assert (answer.status_code, answer.content) == (200, b"")


def test_wrong_text_differs_from_every_other_replica(faulty):
    faulty.faults("wrong_text")
    text = faulty.complete("hello", 20)["choices"][0]["text"]
    assert len(text) == len(RIGHT)
    assert not set(zip(text.split(), RIGHT.split(), strict=True)) & {(word, word) for word in RIGHT.split()}


def test_wrong_text_may_begin_in_the_middle(faulty):
    faulty.faults("wrong_text=5")
    words = faulty.complete("hello", 20)["choices"][0]["text"].split()
    assert words[:5] == RIGHT.split()[:5]
    assert words[5:] != RIGHT.split()[5:]


# -- health ------------------------------------------------------------------------------------------------------------


def test_health_ok_lies_while_generation_hangs(faulty):
    faulty.faults("hang,health_ok")
    assert faulty.http.get("/health").status_code == 200
    with faulty.new_client(timeout_s=0.3) as client, pytest.raises(httpx.ReadTimeout):
        client.post("/v1/completions", json=BODY)


def test_health_fail_lies_while_generation_works(faulty):
    faulty.faults("health_fail")
    assert faulty.http.get("/health").status_code == 503
    assert faulty.complete("hello", 20)["choices"][0]["text"] == RIGHT


# -- slowness ----------------------------------------------------------------------------------------------------------


def test_slow_down_makes_every_step_that_many_times_as_long(faulty):
    faulty.complete("hello", 21)
    before = faulty.metric("vllm:inter_token_latency_seconds_sum")
    faulty.faults("slow_down=4")
    faulty.complete("hello", 21)
    slowed = faulty.metric("vllm:inter_token_latency_seconds_sum") - before
    assert slowed == pytest.approx(4 * before, rel=0.01)


def test_slow_down_ends_after_its_time(faulty):
    faulty.faults("slow_down=1000:for_s=0.05")
    faulty.eventually(lambda: faulty.http.get("/sim/faults").json() == {"faults": []})
    began = time.monotonic()
    faulty.complete("hello", 20)
    assert time.monotonic() - began < 4


def test_slow_start_does_not_listen_before_its_time(start_engine):
    began = time.monotonic()
    start_engine(HETERO_LLM_SIM_FAULTS="slow_start=0.8")
    assert time.monotonic() - began >= 0.8


# -- how faults are switched -------------------------------------------------------------------------------------------


def test_faults_of_the_environment_are_on_from_the_start(start_engine):
    engine = start_engine(HETERO_LLM_SIM_FAULTS="unavailable:skip=1")
    assert engine.http.post("/v1/completions", json=BODY).status_code == 200
    assert engine.http.post("/v1/completions", json=BODY).status_code == 503


def test_an_engine_told_to_refuse_from_the_start_never_accepts(start_engine):
    engine = start_engine(HETERO_LLM_SIM_FAULTS="refuse")
    engine.eventually(lambda: refused(engine))


def test_new_faults_replace_the_old_ones(faulty):
    faulty.faults("hang:times=2")
    faulty.faults("empty:skip=1:times=3")
    shown = faulty.http.get("/sim/faults").json()["faults"]
    assert shown == [{"name": "empty", "value": 0, "skip": 1, "times": 3, "for_s": None}]


def test_a_fault_is_over_after_its_number_of_requests(faulty):
    faulty.faults("unavailable:times=2")
    statuses = [faulty.http.post("/v1/completions", json=BODY).status_code for _ in range(4)]
    assert statuses == [503, 503, 200, 200]


def test_faults_cannot_be_set_from_another_machine(start_engine):
    """The address of another machine cannot be had here, so the check is made where the addresses are read."""
    from hetero_llm_sim.protocol import Protocol

    class Transport:
        def __init__(self, peer, own):
            self.ends = {"peername": (peer, 1), "sockname": (own, 2)}

        def get_extra_info(self, name):
            return self.ends[name]

    def is_local(peer, own):
        protocol = Protocol(lambda exchange: None, set())
        protocol.connection_made(Transport(peer, own))
        return protocol.from_this_machine()

    assert is_local("127.0.0.1", "127.0.0.1")
    assert is_local("::1", "::1")
    assert is_local("10.0.0.5", "10.0.0.5")
    assert not is_local("10.0.0.6", "10.0.0.5")
    assert not is_local("fe80::1%eth0", "fe80::2%eth0")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("explode", "'explode' is not a fault; there are die_before_first_byte"),
        ("hang=3", "hang takes no value"),
        ("die_after_tokens", "die_after_tokens takes a value: die_after_tokens=N"),
        ("die_after_tokens=1.5", "whole number"),
        ("slow_down=0", "above 0"),
        ("hang:often=3", "'often=3' is not an option of hang"),
        ("refuse:times=3", "'times=3' is not an option of refuse"),
        ("hang, hang:times=1", "hang is given twice"),
    ],
)
def test_a_line_of_faults_that_cannot_be_read_says_why(line, said):
    with pytest.raises(FaultsInvalid, match=said):
        parse_faults(line)


@pytest.mark.parametrize("body", ["{", "[]", '{"faults": 3}', '{"faults": "explode"}', '{"faults": "slow_start=3"}'])
def test_the_admin_route_refuses_what_it_cannot_do_and_leaves_things_as_they_are(engine, body):
    assert engine.http.post("/sim/faults", content=body).status_code == 400
    assert engine.http.get("/sim/faults").json() == {"faults": []}


def test_an_engine_with_unreadable_faults_does_not_start(start_engine):
    engine = start_engine(listens=False, HETERO_LLM_SIM_FAULTS="explode")
    assert engine.process.wait(30) == 1
    engine.eventually(lambda: any("FaultsInvalid: 'explode'" in line for line in engine.log))

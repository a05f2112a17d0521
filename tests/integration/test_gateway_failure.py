"""Engines that fail, clients that leave, deadlines that pass."""

import asyncio
import json
import time

import pytest
import pytest_asyncio
from fake_engine import (
    SSE_HEAD,
    FakeEngine,
    HangUp,
    answers,
    chunk,
    dies_before_head,
    dies_mid_stream,
    event,
    hangs,
    says,
    streams,
)
from gateway_process import Answer, GatewayProcess, eventually, gateway, post, table

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stage():
    async with gateway() as process:
        yield process


def last_event(answer: Answer) -> dict:
    last = answer.body.removesuffix(b"\n\n").rpartition(b"\n\n")[2]
    return json.loads(last.removeprefix(b"data: "))["error"]


# -- before the first byte --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "bad",
    [
        dies_before_head(),
        dies_before_head(reset=True),
        answers(status=502),
        answers(status=503),
        answers(status=504),
        says(b"SSH-2.0-OpenSSH\r\n"),
        says(b"HTTP/1.1 200 OK\r\ncontent-ty", then_hang_up=True),
    ],
    ids=["eof", "reset", "502", "503", "504", "not-http", "half-a-head"],
)
async def test_another_replica_answers_when_one_fails_before_its_first_byte(stage: GatewayProcess, bad):
    broken, sound = FakeEngine("broken", bad), FakeEngine("sound", answers())
    async with stage.serving(broken, sound):
        answer = await stage.request(post())
    assert (answer.status, answer.header("x-hetero-replica")) == (200, "sound")
    assert answer.header("x-hetero-attempts") == "2"
    assert [len(broken.requests), len(sound.requests)] == [1, 1]


async def test_another_replica_answers_when_one_refuses_the_connection(stage: GatewayProcess):
    gone, sound = FakeEngine("gone", answers()), FakeEngine("sound", answers())
    async with stage.serving(gone, sound):
        await gone.stop()
        replies = [await stage.request(post()) for _ in range(4)]
        await gone.start(gone.port)
    assert [answer.status for answer in replies] == [200] * 4
    assert [answer.header("x-hetero-attempts") for answer in replies] == ["2", "1", "1", "1"]


async def test_a_replica_that_came_back_is_found_again(stage: GatewayProcess):
    gone, sound = FakeEngine("gone", answers()), FakeEngine("sound", answers())
    async with stage.serving(gone, sound):
        await gone.stop()
        await stage.request(post())
        await gone.start(gone.port)
        async with asyncio.timeout(20):
            while not gone.requests:
                await stage.request(post())
                await asyncio.sleep(0.05)


async def test_the_second_replica_gets_the_same_bytes(stage: GatewayProcess):
    body = b'{"model": "m", "prompt": "%b"}' % (b"x" * 300_000)
    broken, sound = FakeEngine("broken", dies_before_head()), FakeEngine("sound", answers())
    async with stage.serving(broken, sound):
        await stage.request(post(body))
    assert sound.requests[0].body == body


async def test_there_are_two_tries_at_most(stage: GatewayProcess):
    bad = [FakeEngine(f"bad-{n}", dies_before_head()) for n in range(5)]
    async with stage.serving(*bad):
        answer = await stage.request(post())
    assert (answer.status, answer.error["code"]) == (502, "HL607")
    assert answer.header("x-hetero-attempts") == "2"
    assert answer.header("retry-after")
    assert sum(len(engine.requests) for engine in bad) == 2


async def test_an_engines_503_is_passed_on_when_nobody_else_is_there(stage: GatewayProcess):
    async with stage.serving(FakeEngine("full", answers(b'{"error": "queue full"}', 503))):
        answer = await stage.request(post())
    assert (answer.status, answer.body) == (503, b'{"error": "queue full"}')
    assert answer.header("retry-after")


async def test_an_internal_error_of_an_engine_is_not_retried(stage: GatewayProcess):
    pair = FakeEngine("a", answers(status=500)), FakeEngine("b", answers(status=500))
    async with stage.serving(*pair):
        assert (await stage.request(post())).status == 500
    assert len(pair[0].requests) + len(pair[1].requests) == 1


async def test_the_only_replica_that_cannot_be_reached_is_503_and_says_so(stage: GatewayProcess):
    gone = FakeEngine("gone", answers())
    async with stage.serving(gone):
        await gone.stop()
        answer = await stage.request(post())
        await gone.start(gone.port)
    assert (answer.status, answer.error["code"]) == (503, "HL606")
    assert answer.header("retry-after")
    assert "refused" in answer.error["message"]


async def test_a_known_model_without_replica_is_503_with_a_time_to_retry(stage: GatewayProcess):
    async with stage.serving(models=("m",)):
        answer = await stage.request(post())
    assert (answer.status, answer.error["code"]) == (503, "HL606")
    assert int(answer.header("retry-after") or "0") > 0


async def test_a_connection_the_engine_closed_meanwhile_is_replaced_without_counting_as_a_failure(
    stage: GatewayProcess,
):
    first = True

    async def closes_once(request, writer):
        nonlocal first
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
        await writer.drain()
        if not first:
            return
        first = False

    engine = FakeEngine("a", closes_once)
    async with stage.serving(engine):
        assert (await stage.request(post())).status == 200

        async def stale_then_sound(request, writer):
            if len(engine.requests) == 2:
                raise HangUp
            await closes_once(request, writer)

        engine.behave = stale_then_sound
        answer = await stage.request(post())
        metrics = await stage.metrics()
    assert (answer.status, answer.header("x-hetero-attempts")) == (200, "1")
    assert "hetero_llm_upstream_failures_total{" not in metrics


async def test_an_engine_restart_between_requests_is_not_seen_by_clients(stage: GatewayProcess):
    engine = FakeEngine("a", answers())
    async with stage.serving(engine):
        await stage.request(post())
        await engine.stop()
        await engine.start(engine.port)
        assert (await stage.request(post())).header("x-hetero-attempts") == "1"


# -- after the first byte ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reset", [False, True], ids=["eof", "reset"])
async def test_a_stream_that_breaks_ends_in_one_error_event_and_no_clean_end(stage: GatewayProcess, reset: bool):
    async with stage.serving(FakeEngine("a", dies_mid_stream(2, reset=reset)), FakeEngine("b", streams(), kind="x")):
        began_s = time.monotonic()
        answer = await stage.request(post(headers="x-hetero-kind: cpu\r\n"))
        took_s = time.monotonic() - began_s
    assert answer.body.startswith(event(0) + event(1))
    assert last_event(answer)["code"] == "HL607"
    assert answer.body.count(b'"error"') == 1
    assert b"[DONE]" not in answer.body
    assert not answer.complete
    assert took_s < 1.5


async def test_a_broken_stream_is_not_retried(stage: GatewayProcess):
    pair = FakeEngine("a", dies_mid_stream()), FakeEngine("b", dies_mid_stream())
    async with stage.serving(*pair):
        await stage.request(post())
    assert len(pair[0].requests) + len(pair[1].requests) == 1


async def test_half_an_event_is_ended_before_the_error_event(stage: GatewayProcess):
    async with stage.serving(FakeEngine("a", dies_mid_stream(1, tail=chunk(b'data: {"id": "c", "cho')))):
        answer = await stage.request(post())
    assert last_event(answer)["code"] == "HL607"


async def test_half_a_chunk_does_not_spoil_the_error_event(stage: GatewayProcess):
    async with stage.serving(FakeEngine("a", dies_mid_stream(1, tail=b"ff\r\ndata: {"))):
        answer = await stage.request(post())
    assert last_event(answer)["code"] == "HL607"
    assert not answer.complete


async def test_a_stream_that_ends_right_after_its_head_has_the_error_event_alone(stage: GatewayProcess):
    async with stage.serving(FakeEngine("a", dies_mid_stream(0))):
        answer = await stage.request(post())
    assert answer.body.startswith(b'data: {"error":')


async def test_garbage_in_the_chunks_of_a_stream_is_a_failure(stage: GatewayProcess):
    async with stage.serving(FakeEngine("a", dies_mid_stream(1, tail=b"zz\r\n"))):
        answer = await stage.request(post())
    assert last_event(answer)["code"] == "HL607"


async def test_no_error_event_follows_done(stage: GatewayProcess):
    async with stage.serving(FakeEngine("a", dies_mid_stream(1, tail=chunk(b"data: [DONE]\n\n")))):
        answer = await stage.request(post())
    assert answer.body == event(0) + b"data: [DONE]\n\n"
    assert not answer.complete


async def test_an_error_event_of_the_engine_is_the_last_even_if_the_engine_adds_done(stage: GatewayProcess):
    failed = b'data: {"error": {"message": "EngineCore died", "code": 500}}\n\n'
    raw = SSE_HEAD + chunk(event(0))
    engine = FakeEngine("a", says(raw, chunk(failed), chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"))
    async with stage.serving(engine):
        answer = await stage.request(post())
    assert answer.body == event(0) + failed
    assert not answer.complete


async def test_an_error_event_and_done_in_one_chunk_are_told_apart(stage: GatewayProcess):
    failed = b'data: {"error": {"message": "x"}}\n\n'
    engine = FakeEngine("a", says(SSE_HEAD + chunk(event(0)), chunk(failed + b"data: [DONE]\n\n") + b"0\r\n\r\n"))
    async with stage.serving(engine):
        answer = await stage.request(post())
    assert answer.body == event(0) + failed


async def test_a_whole_answer_that_breaks_is_cut_short_visibly(stage: GatewayProcess):
    engine = FakeEngine("a", says(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{", then_hang_up=True))
    async with stage.serving(engine):
        answer = await stage.request(post())
    assert (answer.body, answer.complete) == (b"{", False)


async def test_a_chunked_json_answer_that_breaks_gets_no_event(stage: GatewayProcess):
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
    async with stage.serving(FakeEngine("a", says(head + chunk(b"{"), then_hang_up=True))):
        answer = await stage.request(post())
    assert (answer.body, answer.complete) == (b"{", False)


# -- clients that leave -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("behave", [hangs(), streams(10_000, 0.01)], ids=["before-the-first-byte", "streaming"])
async def test_the_engine_is_stopped_when_the_client_leaves(stage: GatewayProcess, behave):
    engine = FakeEngine("a", behave)
    async with stage.serving(engine):
        async with stage.client() as client:
            await client.send(post())
            await engine.wait_for_requests(1)
            await asyncio.sleep(0.1)
        await asyncio.wait_for(engine.requests[0].hung_up.wait(), 1.0)


async def test_a_client_that_leaves_while_the_engine_is_silent_in_mid_stream_stops_it(stage: GatewayProcess):
    async def behave(request, writer):
        writer.write(SSE_HEAD + chunk(event(0)))
        await asyncio.sleep(3600)

    engine = FakeEngine("a", behave)
    async with stage.serving(engine):
        async with stage.client() as client:
            await client.send(post())
            await client.head()
        await asyncio.wait_for(engine.requests[0].hung_up.wait(), 1.0)


async def test_a_client_that_leaves_is_logged_as_499(stage: GatewayProcess):
    engine = FakeEngine("a", hangs())
    async with stage.serving(engine):
        async with stage.client() as client:
            await client.send(post(headers="x-request-id: left-1\r\n"))
            await engine.wait_for_requests(1)
        await eventually(lambda: any('"left-1"' in line and '"status":499' in line for line in stage.log))


async def test_a_client_that_leaves_in_the_middle_of_its_request_reaches_no_engine(stage: GatewayProcess):
    engine = FakeEngine("a", answers())
    async with stage.serving(engine):
        async with stage.client() as client:
            await client.send(post()[:-3])
            await asyncio.sleep(0.05)
        assert await stage.idle()
    assert engine.requests == []


async def test_a_client_that_leaves_with_a_second_request_waiting_stops_both(stage: GatewayProcess):
    engine = FakeEngine("a", hangs())
    async with stage.serving(engine):
        async with stage.client() as client:
            await client.send(post() + post())
            await engine.wait_for_requests(1)
        await asyncio.wait_for(engine.requests[0].hung_up.wait(), 1.0)
    assert len(engine.requests) == 1


async def test_counters_return_to_zero_after_every_kind_of_end(stage: GatewayProcess):
    behaviours = [answers(), streams(), dies_before_head(), dies_mid_stream(), answers(status=503), answers(status=400)]
    engine = FakeEngine("a", hangs())
    async with stage.serving(engine):
        for behave in behaviours:
            engine.behave = behave
            await stage.request(post())
        engine.behave = hangs()
        await stage.request(post(headers="x-request-timeout-s: 0.05\r\n"))
        async with stage.client() as client:
            await client.send(post())
            await asyncio.sleep(0.1)
        assert await stage.idle()


async def test_counters_return_to_zero_when_every_stream_is_cut_at_once(stage: GatewayProcess):
    engine = FakeEngine("a", streams(1000, 0.01))
    async with stage.serving(engine):
        requests = [asyncio.create_task(stage.request(post())) for _ in range(50)]
        await engine.wait_for_requests(50)
        await asyncio.sleep(0.1)
        await engine.stop(reset=True)
        replies = await asyncio.gather(*requests)
        assert await stage.idle()
        await engine.start(engine.port)
    assert all(last_event(answer)["code"] == "HL607" for answer in replies if answer.status == 200)


# -- deadlines --------------------------------------------------------------------------------------------------------


async def test_a_deadline_before_the_first_byte_is_408_and_stops_the_engine(stage: GatewayProcess):
    engine = FakeEngine("a", hangs())
    async with stage.serving(engine):
        answer = await stage.request(post(headers="x-request-timeout-s: 0.2\r\n"))
        await asyncio.wait_for(engine.requests[0].hung_up.wait(), 1.0)
    assert (answer.status, answer.error["code"]) == (408, "HL608")


async def test_a_deadline_inside_a_stream_is_an_error_event(stage: GatewayProcess):
    engine = FakeEngine("a", streams(1000, 0.02))
    async with stage.serving(engine):
        answer = await stage.request(post(headers="x-request-timeout-s: 0.3\r\n"))
        await asyncio.wait_for(engine.requests[0].hung_up.wait(), 1.0)
    assert last_event(answer)["code"] == "HL608"
    assert not answer.complete


async def test_a_deadline_that_is_kept_changes_nothing(stage: GatewayProcess):
    async with stage.serving(FakeEngine("a", streams())), stage.client() as client:
        for _ in range(3):
            await client.send(post(headers="x-request-timeout-s: 5\r\n"))
            assert (await client.answer()).complete


async def test_a_deadline_does_not_count_against_the_replica(stage: GatewayProcess):
    engine = FakeEngine("a", hangs())
    async with stage.serving(engine):
        for _ in range(5):
            await stage.request(post(headers="x-request-timeout-s: 0.02\r\n"))
        engine.behave = answers()
        assert (await stage.request(post())).status == 200


async def test_a_connection_that_is_never_accepted_is_given_up_and_another_replica_answers():
    sound = FakeEngine("sound", answers())
    async with gateway(sound, connect_timeout_s=0.3) as process:
        # TEST-NET-1 (RFC 5737): packets to it go nowhere, or the network says so at once.
        lost = FakeEngine("lost", answers())
        lost.host, lost.port = "192.0.2.1", 9
        await process.update(table([lost.target, sound.target]))
        answer = await process.request(post())
    assert (answer.status, answer.header("x-hetero-replica")) == (200, "sound")

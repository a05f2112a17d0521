"""Requests that go well: what the engine gets and what the client gets."""

import asyncio
import json
import time

import httpx
import psutil
import pytest
import pytest_asyncio
from fake_engine import SSE_HEAD, FakeEngine, answers, chunk, event, hangs, says, streams
from gateway_process import GatewayProcess, eventually, gateway, post, table

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stage():
    async with gateway() as process:
        yield process


async def test_the_body_reaches_the_engine_byte_for_byte(stage: GatewayProcess):
    body = b'{ "model" : "m", "tools": [{"x": 1.0, "\\u00e9": "\xc3\xa9"}],\n "content": [{"type":"text"}]}'
    engine = FakeEngine("a", answers())
    async with stage.serving(engine):
        await stage.request(post(body))
    assert engine.requests[0].body == body


async def test_an_answer_reaches_the_client_byte_for_byte(stage: GatewayProcess):
    body = b'{"b": 1, "a": [1.0, "\xc3\xa9"],\n\n "tool_calls": []} '
    async with stage.serving(FakeEngine("a", answers(body))):
        assert (await stage.request(post())).body == body


async def test_a_chunked_request_reaches_the_engine_whole(stage: GatewayProcess):
    body = b'{"model": "m", "prompt": "x"}'
    pieces = b"".join(chunk(body[at : at + 5]) for at in range(0, len(body), 5)) + b"0\r\n\r\n"
    engine = FakeEngine("a", answers())
    async with stage.serving(engine):
        await stage.request(post(pieces, headers="transfer-encoding: chunked\r\n"))
    assert engine.requests[0].body == body
    assert engine.requests[0].header("content-length") == str(len(body))


async def test_who_served_it_is_said_in_headers(stage: GatewayProcess):
    async with stage.serving(FakeEngine("rep-7", answers(), kind="ascend")):
        answer = await stage.request(post(headers="x-request-id: abc\r\n"))
    names = ("x-request-id", "x-hetero-replica", "x-hetero-kind", "x-hetero-attempts")
    assert [answer.header(name) for name in names] == ["abc", "rep-7", "ascend", "1"]
    assert int(answer.header("x-hetero-queue-ms") or "-1") >= 0


@pytest.mark.parametrize(("simulated", "said"), [(True, "true"), (False, None)])
async def test_an_answer_without_hardware_behind_it_is_marked(stage: GatewayProcess, simulated: bool, said: str | None):
    async with stage.serving(FakeEngine("a", answers(), simulated=simulated)):
        answer = await stage.request(post())
    assert answer.header("x-hetero-simulated") == said


async def test_the_engine_gets_the_request_id_but_not_the_key(stage: GatewayProcess):
    engine = FakeEngine("a", answers())
    async with stage.serving(engine):
        await stage.request(post(headers="authorization: Bearer sk\r\nx-request-id: abc\r\n"))
    assert engine.requests[0].header("x-request-id") == "abc"
    assert engine.requests[0].header("authorization") is None


async def test_an_engines_own_refusal_passes_unchanged_and_is_not_retried(stage: GatewayProcess):
    body = b'{"error": {"message": "too long", "code": 400}}'
    first, second = FakeEngine("a", answers(body, 400)), FakeEngine("b", answers(body, 400))
    async with stage.serving(first, second):
        answer = await stage.request(post())
    assert (answer.status, answer.body) == (400, body)
    assert len(first.requests) + len(second.requests) == 1


async def test_a_body_without_prompt_is_the_engines_to_refuse(stage: GatewayProcess):
    async with stage.serving(FakeEngine("a", answers(b'{"error": {}}', 422))):
        assert (await stage.request(post(b'{"model": "m"}'))).status == 422


async def test_tokens_arrive_one_by_one_as_the_engine_makes_them(stage: GatewayProcess):
    async with stage.serving(FakeEngine("a", streams(10, 0.1))), stage.client() as client:
        began_s = time.monotonic()
        await client.send(post())
        await client.head()
        arrivals = []
        while piece := await client.chunk():
            arrivals.append((time.monotonic() - began_s, piece))
    assert [piece for _, piece in arrivals] == [event(n) for n in range(10)] + [b"data: [DONE]\n\n"]
    assert arrivals[9][0] - arrivals[0][0] > 0.5
    assert arrivals[0][0] < 0.5


async def test_the_first_byte_is_not_held_until_there_are_more(stage: GatewayProcess):
    release = asyncio.Event()

    async def behave(request, writer):
        writer.write(SSE_HEAD + chunk(b": \n\n"))
        await release.wait()
        writer.write(b"0\r\n\r\n")

    async with stage.serving(FakeEngine("a", behave)), stage.client() as client:
        await client.send(post())
        assert (await client.head()).status == 200
        assert await client.chunk() == b": \n\n"
        release.set()
        assert await client.chunk() == b""


async def test_a_head_alone_is_passed_on_before_any_body(stage: GatewayProcess):
    release = asyncio.Event()

    async def behave(request, writer):
        writer.write(SSE_HEAD)
        await release.wait()
        writer.write(b"0\r\n\r\n")

    async with stage.serving(FakeEngine("a", behave)), stage.client() as client:
        await client.send(post())
        assert (await client.head()).header("content-type") == "text/event-stream; charset=utf-8"
        release.set()
        assert await client.chunk() == b""


async def test_a_large_stream_to_a_slow_client_is_complete_and_does_not_pile_up_in_the_gateway(stage: GatewayProcess):
    block = chunk(b"x" * 65536)

    async def behave(request, writer):
        writer.write(SSE_HEAD)
        for _ in range(1600):
            writer.write(block)
            await writer.drain()
        writer.write(b"0\r\n\r\n")

    memory = psutil.Process(stage.process.pid).memory_info
    before = memory().rss
    async with stage.serving(FakeEngine("a", behave)), stage.client() as client:
        await client.send(post())
        await client.head()
        client.writer.transport.pause_reading()
        await asyncio.sleep(1.0)
        grown = memory().rss - before
        client.writer.transport.resume_reading()
        total = 0
        while piece := await client.chunk():
            total += len(piece)
    assert piece == b""
    assert total == 1600 * 65536
    assert grown < 10_000_000


async def test_a_chunk_split_into_many_packets_is_put_together(stage: GatewayProcess):
    raw = SSE_HEAD + chunk(event(1)) + b"0\r\n\r\n"
    engine = FakeEngine("a", says(*(raw[at : at + 9] for at in range(0, len(raw), 9))))
    async with stage.serving(engine):
        answer = await stage.request(post())
    assert (answer.body, answer.complete) == (event(1), True)


async def test_an_answer_that_ends_with_its_connection_is_passed_on_whole(stage: GatewayProcess):
    engine = FakeEngine("a", says(b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\n\r\nhel", b"lo", then_hang_up=True))
    async with stage.serving(engine):
        answer = await stage.request(post())
    assert (answer.body, answer.complete) == (b"hello", True)


async def test_an_informational_answer_before_the_real_one_is_passed_over(stage: GatewayProcess):
    engine = FakeEngine(
        "a", says(b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n", b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
    )
    async with stage.serving(engine):
        assert (await stage.request(post())).body == b"ok"


async def test_an_answer_without_body_needs_none(stage: GatewayProcess):
    async with stage.serving(FakeEngine("a", says(b"HTTP/1.1 204 No Content\r\n\r\n"))), stage.client() as client:
        for _ in range(2):
            await client.send(post())
            answer = await client.head()
            assert answer.status == 204
            assert answer.header("transfer-encoding") is None


async def test_engine_connections_are_used_again(stage: GatewayProcess):
    engine = FakeEngine("a", streams())
    async with stage.serving(engine):
        for _ in range(5):
            await stage.request(post())
    assert (len(engine.requests), engine.connections) == (5, 1)


async def test_an_engine_that_says_close_gets_a_new_connection_each_time(stage: GatewayProcess):
    engine = FakeEngine("a", answers(headers="connection: close\r\n"))
    async with stage.serving(engine):
        assert [(await stage.request(post())).status for _ in range(3)] == [200, 200, 200]
    assert engine.connections == 3


async def test_a_kind_can_be_pinned(stage: GatewayProcess):
    async with stage.serving(FakeEngine("a", answers()), FakeEngine("b", answers(), kind="cuda")):
        replies = [await stage.request(post(headers="x-hetero-kind: cuda\r\n")) for _ in range(4)]
    assert {answer.header("x-hetero-replica") for answer in replies} == {"b"}


async def test_equal_replicas_share_the_load(stage: GatewayProcess):
    pair = FakeEngine("a", answers(after_s=0.05)), FakeEngine("b", answers(after_s=0.05))
    async with stage.serving(*pair):
        await asyncio.gather(*(stage.request(post()) for _ in range(20)))
    assert [len(engine.requests) for engine in pair] == [10, 10]


async def test_two_models_are_kept_apart(stage: GatewayProcess):
    async with stage.serving(FakeEngine("a", answers()), FakeEngine("b", answers(), model="n"), models=("m", "n")):
        answer = await stage.request(post(b'{"model": "n"}'))
    assert answer.header("x-hetero-replica") == "b"


@pytest.mark.parametrize(
    "path",
    ["/v1/completions", "/v1/embeddings", "/v1/responses", "/v1/messages", "/v1/score", "/v1/rerank", "/tokenize",
     "/detokenize", "/v1/audio/speech", "/v1/messages/count_tokens"],
)  # fmt: skip
async def test_every_inference_path_is_relayed(stage: GatewayProcess, path: str):
    engine = FakeEngine("a", answers())
    async with stage.serving(engine):
        assert (await stage.request(post(path=path + "?q=1"))).status == 200
    assert engine.requests[0].target == path + "?q=1"


async def test_an_audio_upload_is_routed_by_its_form_field(stage: GatewayProcess):
    engine = FakeEngine("a", answers())
    async with stage.serving(engine), httpx.AsyncClient() as client:
        answer = await client.post(
            f"{stage.url}/v1/audio/transcriptions", data={"model": "m"}, files={"file": ("a.wav", b"\0" * 5000)}
        )
    assert answer.status_code == 200
    assert b"\0" * 5000 in engine.requests[0].body


async def test_a_request_is_logged_in_one_line(stage: GatewayProcess):
    async with stage.serving(FakeEngine("a", answers())):
        await stage.request(post(headers="x-request-id: logged-1\r\n"))
    await eventually(lambda: any('"logged-1"' in line for line in stage.log))
    line = next(json.loads(line) for line in stage.log if '"logged-1"' in line)
    assert (line["status"], line["model"], line["replica"], line["attempts"]) == (200, "m", "a", 1)
    assert (line["bytes_in"], line["bytes_out"], line["path"]) == (14, 12, "/v1/chat/completions")


async def test_metrics_count_requests_bytes_and_first_tokens(stage: GatewayProcess):
    async with stage.serving(FakeEngine("a", answers())):
        await stage.request(post())
        lines = (await stage.metrics()).splitlines()
    labels = 'kind="cpu",model="m",replica="a"'
    assert f'hetero_llm_requests_total{{{labels},status="200"}} 1.0' in lines
    assert f"hetero_llm_request_bytes_total{{{labels}}} 14.0" in lines
    assert f"hetero_llm_response_bytes_total{{{labels}}} 12.0" in lines
    assert f"hetero_llm_routing_decisions_total{{{labels}}} 1.0" in lines
    assert 'hetero_llm_time_to_first_token_seconds_count{kind="cpu",model="m"} 1.0' in lines


async def test_a_request_under_way_goes_on_when_its_replica_leaves_the_table(stage: GatewayProcess):
    old, new = FakeEngine("old", streams(5, 0.1)), FakeEngine("new", answers())
    async with stage.serving(old, new):
        await stage.update(table([old.target]))
        async with stage.client() as client:
            await client.send(post())
            await client.head()
            await stage.update(table([new.target]))
            pieces = []
            while piece := await client.chunk():
                pieces.append(piece)
        assert len(pieces) == 6
        assert (await stage.request(post())).header("x-hetero-replica") == "new"


async def test_a_replica_gets_no_request_after_it_left_the_table(stage: GatewayProcess):
    gone, stays = FakeEngine("gone", answers()), FakeEngine("stays", answers())
    async with stage.serving(gone, stays):
        await stage.update(table([stays.target]))
        for _ in range(4):
            await stage.request(post())
    assert (len(gone.requests), len(stays.requests)) == (0, 4)


async def test_two_hundred_streams_at_once_are_all_complete(stage: GatewayProcess):
    pair = FakeEngine("a", streams(20, 0.005)), FakeEngine("b", streams(20, 0.005))
    async with stage.serving(*pair):
        replies = await asyncio.gather(*(stage.request(post()) for _ in range(200)))
    assert all(answer.complete and len(answer.chunks) == 21 for answer in replies)


async def test_a_limit_of_requests_per_replica_is_never_exceeded():
    pair = FakeEngine("a", hangs()), FakeEngine("b", hangs())
    async with gateway(*pair, max_in_flight_per_replica=5) as process:
        clients = [asyncio.create_task(process.request(post())) for _ in range(100)]
        done, waiting = await asyncio.wait(clients, timeout=3)
        assert [answer.result().status for answer in done] == [503] * 90
        assert (len(pair[0].requests), len(pair[1].requests)) == (5, 5)
        for client in waiting:
            client.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        assert await process.idle()


async def test_a_streamed_json_answer_is_readable_by_an_ordinary_client(stage: GatewayProcess):
    async with stage.serving(FakeEngine("a", answers(json.dumps({"x": "y" * 300_000}).encode()))):
        answer = await asyncio.to_thread(httpx.post, f"{stage.url}/v1/completions", json={"model": "m"})
    assert len(answer.json()["x"]) == 300_000

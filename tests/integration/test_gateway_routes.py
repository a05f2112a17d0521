"""The gateway's own routes, and the OpenAI SDK in front of all of it."""

import asyncio
import json

import openai
import pytest
import pytest_asyncio
from fake_engine import SSE_HEAD, FakeEngine, answers, chunk, dies_mid_stream, event, hangs, streams
from gateway_process import GatewayProcess, eventually, gateway, post, table

from hetero_llm.model import ReplicaState, ReplicaStatus

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stage():
    async with gateway() as process:
        yield process


def get(path: str) -> bytes:
    return post(b"", path, method="GET")


def starting(model: str) -> ReplicaStatus:
    return ReplicaStatus(
        replica="s", model=model, app="", kind="cpu", accelerator="x", node="n", state=ReplicaState.STARTING,
        phase="loading weights", started_unix_s=0.0,
    )  # fmt: skip


async def test_models_come_from_the_table_even_when_every_engine_is_dead(stage: GatewayProcess):
    engine = FakeEngine("a", hangs())
    async with stage.serving(engine, models=("m", "n")):
        await engine.stop()
        data = (await stage.request(get("/v1/models"))).json()["data"]
        await engine.start(engine.port)
    assert [card["id"] for card in data] == ["m", "n"]
    assert {card["object"] for card in data} == {"model"}
    assert [card["hetero"]["state"] for card in data] == ["ready", "unavailable"]
    assert data[0]["hetero"]["ready_by_kind"] == {"cpu": 1}


async def test_a_model_that_is_loading_says_so(stage: GatewayProcess):
    await stage.update(table([], replicas=[starting("m")]))
    card = (await stage.request(get("/v1/models/m"))).json()
    assert (card["hetero"]["state"], card["hetero"]["replicas_by_state"]) == ("starting", {"starting": 1})


async def test_a_model_name_may_contain_slashes(stage: GatewayProcess):
    async with stage.serving(models=("org/model",)):
        assert (await stage.request(get("/v1/models/org/model"))).json()["id"] == "org/model"


async def test_health_is_the_process_and_ready_is_a_replica(stage: GatewayProcess):
    async with stage.serving():
        assert (await stage.request(get("/health"))).status == 200
        unready = await stage.request(get("/ready"))
    async with stage.serving(FakeEngine("a", answers())):
        ready = await stage.request(get("/ready"))
    assert (unready.status, unready.json()["ready"]) == (503, False)
    assert unready.header("retry-after")
    assert (ready.status, ready.json()) == (200, {"ready": True, "models": {"m": "ready"}})


async def test_status_shows_replicas_and_requests_under_way(stage: GatewayProcess):
    engine = FakeEngine("a", hangs())
    async with stage.serving(engine), stage.client() as client:
        await client.send(post())
        await engine.wait_for_requests(1)
        status = await stage.status()
        assert status["gateway"]["in_flight"] == {"a": 1}
    assert status["models"][0]["id"] == "m"


async def test_status_stream_sends_an_event_at_each_change(stage: GatewayProcess):
    async with stage.client() as client:
        await client.send(get("/status/stream"))
        assert (await client.head()).header("content-type").startswith("text/event-stream")
        await client.chunk()
        await stage.tell(table([], models=("changed",)))
        event_text = await client.chunk()
    assert json.loads(event_text.removeprefix(b"data: "))["data"]["models"][0]["id"] == "changed"


@pytest.mark.parametrize("path", ["/", "/docs"])
async def test_pages_need_nothing_from_elsewhere(stage: GatewayProcess, path: str):
    page = await stage.request(get(path))
    assert page.header("content-type").startswith("text/html")
    assert b"<title>" in page.body
    assert b"http://" not in page.body
    assert b"https://" not in page.body


async def test_the_docs_name_every_path_that_is_relayed(stage: GatewayProcess):
    from hetero_llm.gateway.routes import INFERENCE_PATHS

    page = (await stage.request(get("/docs"))).body.decode()
    assert [path for path in INFERENCE_PATHS if path.decode() not in page and not path.endswith(b"/render")] == []


async def test_own_answers_carry_the_request_id(stage: GatewayProcess):
    answer = await stage.request(post(b"", "/health", method="GET", headers="x-request-id: abc\r\n"))
    assert answer.header("x-request-id") == "abc"


async def test_a_path_that_does_not_exist_is_logged_and_counted_with_its_code(stage: GatewayProcess):
    await stage.request(post(b"", "/nope", method="GET", headers="x-request-id: nope-1\r\n"))
    await eventually(lambda: any('"nope-1"' in line and '"HL609"' in line for line in stage.log))
    assert 'hetero_llm_refusals_total{code="HL609",status="404"}' in await stage.metrics()


async def test_metrics_do_not_grow_with_what_clients_invent(stage: GatewayProcess):
    for number in range(50):
        await stage.request(post(b'{"model": "invented-%d"}' % number))
    text = await stage.metrics()
    assert "invented" not in text
    assert 'hetero_llm_refusals_total{code="HL602",status="404"}' in text


# -- the SDK ----------------------------------------------------------------------------------------------------------

COMPLETION = {
    "id": "c", "object": "chat.completion", "created": 1, "model": "m",
    "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "Paris"}}],
    "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
}  # fmt: skip
HELLO = [{"role": "user", "content": "hi"}]


@pytest_asyncio.fixture(loop_scope="module")
async def sdk(stage: GatewayProcess):
    async with openai.AsyncOpenAI(base_url=f"{stage.url}/v1", api_key="none", max_retries=0) as client:
        yield client


async def test_sdk_chat(stage: GatewayProcess, sdk: openai.AsyncOpenAI):
    async with stage.serving(FakeEngine("a", answers(json.dumps(COMPLETION).encode()))):
        answer = await sdk.chat.completions.create(model="m", messages=HELLO)
    assert answer.choices[0].message.content == "Paris"


async def test_sdk_streaming_chat(stage: GatewayProcess, sdk: openai.AsyncOpenAI):
    async with stage.serving(FakeEngine("a", streams(5))):
        stream = await sdk.chat.completions.create(model="m", messages=HELLO, stream=True)
        text = "".join([piece.choices[0].delta.content async for piece in stream])
    assert text == "01234"


async def test_sdk_models(stage: GatewayProcess, sdk: openai.AsyncOpenAI):
    async with stage.serving(models=("m", "n")):
        assert [model.id async for model in sdk.models.list()] == ["m", "n"]


async def test_sdk_sees_an_unknown_model_as_not_found(stage: GatewayProcess, sdk: openai.AsyncOpenAI):
    async with stage.serving():
        with pytest.raises(openai.NotFoundError) as caught:
            await sdk.chat.completions.create(model="nobody", messages=HELLO)
    assert caught.value.code == "HL602"


async def test_sdk_sees_a_broken_stream_as_an_error(stage: GatewayProcess, sdk: openai.AsyncOpenAI):
    async with stage.serving(FakeEngine("a", dies_mid_stream(2))):
        stream = await sdk.chat.completions.create(model="m", messages=HELLO, stream=True)
        with pytest.raises(openai.APIError, match="failed while it answered"):
            async for _ in stream:
                pass


async def test_sdk_that_stops_reading_stops_the_engine(stage: GatewayProcess, sdk: openai.AsyncOpenAI):
    async def behave(request, writer):
        writer.write(SSE_HEAD + chunk(event(0)))
        await asyncio.sleep(3600)

    engine = FakeEngine("a", behave)
    async with stage.serving(engine):
        stream = await sdk.chat.completions.create(model="m", messages=HELLO, stream=True)
        await anext(aiter(stream))
        await stream.close()
        await asyncio.wait_for(engine.requests[0].hung_up.wait(), 1.0)

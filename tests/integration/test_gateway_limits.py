"""Everything a client can get wrong: each body gets an answer, and the server goes on serving."""

import asyncio

import httpx
import pytest
import pytest_asyncio
from fake_engine import FakeEngine, answers, chunk
from gateway_process import GatewayProcess, gateway, post

pytestmark = pytest.mark.asyncio(loop_scope="module")

LIMIT_BYTES = 1_000_000


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stage():
    engine = FakeEngine("a", answers())
    async with gateway(engine, max_body_bytes=LIMIT_BYTES) as process:
        yield process
        assert (await process.request(post())).status == 200


@pytest.mark.parametrize(
    ("request_bytes", "status", "code"),
    [
        (post(b"{"), 400, "HL601"),
        (post(b""), 400, "HL601"),
        (post(b"{}"), 400, "HL601"),
        (post(b"[]"), 400, "HL601"),
        (post(b'{"model": 5}'), 400, "HL601"),
        (post(b'{"model": "nobody"}'), 404, "HL602"),
        (post(headers="x-hetero-kind: tpu\r\n"), 400, "HL612"),
        (post(headers="content-encoding: gzip\r\n"), 400, "HL612"),
        (post(headers="x-request-timeout-s: soon\r\n"), 400, "HL601"),
        (post(path="/v1/nothing"), 404, "HL609"),
        (post(path="/v1/responses/resp_1", method="GET"), 404, "HL609"),
        (post(method="GET"), 405, "HL610"),
        (post(method="DELETE"), 405, "HL610"),
        (post(path="/v1/models"), 405, "HL610"),
        (post(path="/v1/models/nobody", method="GET"), 404, "HL602"),
        (post(headers=f"content-length: {LIMIT_BYTES + 1}\r\n"), 413, "HL605"),
        (post(headers="x-long: " + "x" * 200_000 + "\r\n"), 431, "HL613"),
        (post(headers="".join(f"x-{n}: {'y' * 100}\r\n" for n in range(2000))), 431, "HL613"),
        (post(path="/v1/completions?" + "x" * 100_000), 431, "HL613"),
        (post(path="/health", method="GET", headers="x-long: " + "x" * 100_000 + "\r\n"), 431, "HL613"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400, "HL601"),
        (b"GET\r\n\r\n", 400, "HL601"),
        (b"BREW /v1/models HTTP/1.1\r\n\r\n", 400, "HL601"),
        (b"POST /v1/completions HTTP/9.9\r\n\r\n", 400, "HL601"),
        (post(headers="content-length: x\r\n"), 400, "HL601"),
        (post(headers="content-length: -1\r\n"), 400, "HL601"),
        (post(headers="content-length: 5\r\ntransfer-encoding: chunked\r\n"), 400, "HL601"),
        (post(b"zz\r\n", headers="transfer-encoding: chunked\r\n"), 400, "HL601"),
        (b"CONNECT example.org:443 HTTP/1.1\r\nhost: example.org\r\n\r\n", 405, "HL610"),
    ],
)
async def test_what_is_wrong_gets_a_typed_answer(stage: GatewayProcess, request_bytes: bytes, status: int, code: str):
    answer = await stage.request(request_bytes)
    assert (answer.status, answer.error["code"]) == (status, code)
    assert answer.error["message"]
    assert answer.header("content-type") == "application/json"


async def test_a_header_without_end_is_refused_while_it_comes(stage: GatewayProcess):
    async with stage.client() as client:
        await client.send(b"GET /health HTTP/1.1\r\nx-long: ")
        for _ in range(20):
            await client.send(b"x" * 10_000)
            await asyncio.sleep(0.005)
        assert (await client.answer()).status == 431


async def test_after_a_small_mistake_the_connection_goes_on(stage: GatewayProcess):
    async with stage.client() as client:
        for body in (b"{", b"{}", b'{"model": "nobody"}'):
            await client.send(post(body))
            assert (await client.answer()).status in (400, 404)
        await client.send(post())
        assert (await client.answer()).status == 200


async def test_the_right_method_is_named(stage: GatewayProcess):
    assert (await stage.request(post(method="GET"))).header("allow") == "POST"


async def test_head_of_an_inference_path_is_405_without_a_body(stage: GatewayProcess):
    async with stage.client() as client:
        await client.send(post(b"", method="HEAD"))
        assert (await client.answer(bare=True)).status == 405
        await client.send(post())
        assert (await client.answer()).status == 200


async def test_a_body_of_a_hundred_megabytes_is_refused_and_the_client_reads_why(stage: GatewayProcess):
    async with httpx.AsyncClient(timeout=60) as client:
        answer = await client.post(f"{stage.url}/v1/chat/completions", content=b"x" * 100_000_000)
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "HL605")


async def test_the_refusal_of_a_large_body_does_not_wait_for_it(stage: GatewayProcess):
    async with stage.client() as client:
        await client.send(post(headers="content-length: 100000000\r\n") + b"x" * 1000)
        answer = await client.answer()
        assert (answer.status, answer.header("connection")) == (413, "close")


async def test_a_chunked_body_is_refused_when_the_limit_is_passed(stage: GatewayProcess):
    async def pieces():
        for _ in range(500):
            yield b"x" * 100_000

    async with httpx.AsyncClient(timeout=60) as client:
        answer = await client.post(f"{stage.url}/v1/chat/completions", content=pieces())
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "HL605")


async def test_a_refused_body_is_thrown_away_not_kept(stage: GatewayProcess):
    psutil = pytest.importorskip("psutil")
    process = psutil.Process(stage.process.pid)
    before = process.memory_info().rss
    async with httpx.AsyncClient(timeout=60) as client:
        await client.post(f"{stage.url}/v1/chat/completions", content=b"x" * 200_000_000)
    assert process.memory_info().rss - before < 20_000_000


async def test_nothing_after_a_refused_body_is_taken_for_a_request(stage: GatewayProcess):
    async with stage.client() as client:
        await client.send(post(headers=f"content-length: {LIMIT_BYTES + 1}\r\n") + post())
        assert (await client.answer()).status == 413
        assert await client.closed()


async def test_a_body_just_under_the_limit_is_served(stage: GatewayProcess):
    body = b'{"model": "m", "x": "%b"}' % (b"x" * (LIMIT_BYTES - 25))
    assert (await stage.request(post(body))).status == 200


async def test_a_client_that_asks_first_is_told_to_go_on(stage: GatewayProcess):
    async with stage.client() as client:
        await client.send(post(b"", headers="expect: 100-continue\r\ncontent-length: 14\r\n"))
        assert (await client.head()).status == 100
        await client.send(b'{"model": "m"}')
        assert (await client.answer()).status == 200


async def test_a_client_that_asks_first_is_refused_before_it_sends(stage: GatewayProcess):
    async with stage.client() as client:
        await client.send(post(b"", headers="expect: 100-continue\r\ncontent-length: 100000000\r\n"))
        assert (await client.answer()).status == 413


async def test_a_large_body_for_a_path_that_does_not_exist_is_404(stage: GatewayProcess):
    async with httpx.AsyncClient(timeout=60) as client:
        answer = await client.post(f"{stage.url}/v1/nothing", content=b"x" * 20_000_000)
    assert answer.status_code == 404


async def test_a_chunked_body_may_have_trailers_and_extensions(stage: GatewayProcess):
    body = b'e;name=value\r\n{"model": "m"}\r\n0\r\nx-trailer: 1\r\n\r\n'
    async with stage.client() as client:
        for _ in range(2):
            await client.send(post(body, headers="transfer-encoding: chunked\r\n"))
            assert (await client.answer()).status == 200


async def test_chunks_of_one_byte_are_fine(stage: GatewayProcess):
    body = b"".join(chunk(bytes([byte])) for byte in b'{"model": "m"}') + b"0\r\n\r\n"
    assert (await stage.request(post(body, headers="transfer-encoding: chunked\r\n"))).status == 200


async def test_hundreds_of_bad_connections_leave_nothing_behind(stage: GatewayProcess):
    async def bad(number: int) -> None:
        async with stage.client() as client:
            await client.send((b"\x00garbage", post()[: number % 90], post(b"{"), b"")[number % 4])

    await asyncio.gather(*(bad(number) for number in range(400)))
    for _ in range(1000):
        if (await stage.status())["gateway"]["client_connections"] == 1:
            break
        await asyncio.sleep(0.02)
    else:
        pytest.fail("connections are left")
    assert await stage.idle()

"""HTTP/1.1 towards clients: framing, keep-alive, pipelining, in whatever pieces the bytes come."""

import asyncio
import random

import pytest
import pytest_asyncio
from fake_engine import FakeEngine, answers, chunk, streams
from gateway_process import GatewayProcess, gateway, post

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def echo(request, writer):
    """Answer with the request's body."""
    await answers(request.body)(request, writer)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stage():
    async with gateway(FakeEngine("a", echo), max_body_bytes=10_000) as process:
        yield process


def numbered(number: int) -> bytes:
    return b'{"model": "m", "n": %d}' % number


async def test_a_connection_serves_many_requests(stage: GatewayProcess):
    async with stage.client() as client:
        for number in range(20):
            await client.send(post(numbered(number)))
            assert (await client.answer()).body == numbered(number)


async def test_pipelined_requests_are_answered_in_order(stage: GatewayProcess):
    async with stage.client() as client:
        await client.send(b"".join(post(numbered(number)) for number in range(50)))
        assert [(await client.answer()).body for _ in range(50)] == [numbered(number) for number in range(50)]


async def test_thousands_of_pipelined_requests_are_answered(stage: GatewayProcess):
    async with stage.client() as client:

        async def read() -> list[int]:
            return [(await client.answer()).status for _ in range(5000)]

        _, statuses = await asyncio.gather(client.send(b"".join(post(b"{") for _ in range(5000))), read())
    assert statuses == [400] * 5000


async def test_relayed_and_own_routes_keep_their_order_in_a_pipeline(stage: GatewayProcess):
    kinds = [post(numbered(1)), post(b"", "/health", method="GET"), post(b"{"), post(b"", "/v1/models", method="GET")]
    async with stage.client() as client:
        await client.send(b"".join(kinds * 5))
        statuses = [(await client.answer()).status for _ in range(20)]
    assert statuses == [200, 200, 400, 200] * 5


async def test_a_pipelined_request_may_come_in_two_halves(stage: GatewayProcess):
    both = post(numbered(1)) + post(numbered(2))
    async with stage.client() as client:
        await client.send(both[:-10])
        assert (await client.answer()).body == numbered(1)
        await client.send(both[-10:])
        assert (await client.answer()).body == numbered(2)


async def test_garbage_after_a_request_is_answered_after_its_answer(stage: GatewayProcess):
    async with stage.client() as client:
        await client.send(post(numbered(1)) + b"\x00\x01garbage\r\n\r\n")
        assert (await client.answer()).body == numbered(1)
        assert (await client.answer()).status == 400
        assert await client.closed()


async def test_a_refused_body_inside_a_pipeline_waits_for_its_turn(stage: GatewayProcess):
    big = b"".join(chunk(b"x" * 1000) for _ in range(20)) + b"0\r\n\r\n"
    async with stage.client() as client:
        await client.send(post(numbered(1)) + post(big, headers="transfer-encoding: chunked\r\n") + post(numbered(2)))
        assert (await client.answer()).body == numbered(1)
        assert (await client.answer()).status == 413


@pytest.mark.parametrize("where", range(0, 110, 1))
async def test_a_request_may_be_split_at_any_byte(stage: GatewayProcess, where: int):
    raw = post(numbered(7), headers="x-request-id: abc\r\n")
    async with stage.client() as client:
        await client.send(raw[:where])
        await asyncio.sleep(0.002)
        await client.send(raw[where:])
        answer = await client.answer()
    assert (answer.body, answer.header("x-request-id")) == (numbered(7), "abc")


async def test_requests_in_random_pieces_are_all_answered(stage: GatewayProcess):
    dice = random.Random(7)
    kinds = {
        200: post(numbered(3)),
        201: post(
            chunk(numbered(3)[:9]) + chunk(numbered(3)[9:]) + b"0\r\n\r\n", headers="transfer-encoding: chunked\r\n"
        ),
        400: post(b"not json"),
        404: post(b'{"model": "x"}'),
        405: post(b"", method="GET"),
    }
    order = [dice.choice(list(kinds)) for _ in range(120)]
    raw = b"".join(kinds[status] for status in order)
    async with stage.client() as client:

        async def send() -> None:
            at = 0
            while at < len(raw):
                size = dice.choice([1, 2, 3, 7, 40, 200])
                await client.send(raw[at : at + size])
                at += size
                if dice.random() < 0.2:
                    await asyncio.sleep(0)

        sending = asyncio.create_task(send())
        statuses = [(await client.answer()).status for _ in order]
        await sending
    assert statuses == [200 if status == 201 else status for status in order]


async def test_random_bytes_never_stop_the_server(stage: GatewayProcess):
    dice = random.Random(11)
    base = post(numbered(1))

    async def attack() -> None:
        raw = bytearray(base)
        for _ in range(dice.randint(1, 6)):
            raw[dice.randrange(len(raw))] = dice.randrange(256)
        async with stage.client() as client:
            try:
                await client.send(bytes(raw))
                client.writer.write_eof()
                await asyncio.wait_for(client.reader.read(), 20)
            except ConnectionError:
                return

    for _ in range(30):
        await asyncio.gather(*(attack() for _ in range(10)))
    assert (await stage.request(post(numbered(1)))).status == 200
    assert not [line for line in stage.log if "bug:" in line or "Traceback" in line]


async def test_connection_close_is_honoured(stage: GatewayProcess):
    async with stage.client() as client:
        await client.send(post(numbered(1), headers="connection: close\r\n"))
        answer = await client.answer()
        assert (answer.body, answer.header("connection")) == (numbered(1), "close")
        assert await client.closed()


async def test_a_client_of_http_1_0_gets_an_answer_it_understands(stage: GatewayProcess):
    async with stage.client() as client:
        await client.send(post(numbered(1), version="1.0"))
        assert (await client.answer()).body == numbered(1)
        assert await client.closed()


async def test_an_offer_of_http_2_is_declined_and_the_request_served(stage: GatewayProcess):
    offer = "connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABk\r\n"
    async with stage.client() as client:
        for number in range(3):
            await client.send(post(numbered(number), headers=offer))
            assert (await client.answer()).body == numbered(number)


async def test_an_offer_of_http_2_for_an_own_route_is_declined_too(stage: GatewayProcess):
    offer = "connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABk\r\n"
    assert (await stage.request(post(b"", "/health", headers=offer, method="GET"))).status == 200


async def test_the_absolute_form_of_a_target_is_understood(stage: GatewayProcess):
    assert (await stage.request(post(numbered(1), path="http://gateway/v1/completions"))).body == numbered(1)


async def test_a_stream_to_http_1_0_is_plain_bytes_until_the_end():
    async with gateway(FakeEngine("a", streams(2))) as process:
        answer = await process.request(post(version="1.0"))
    assert answer.header("transfer-encoding") is None
    assert answer.body.endswith(b"data: [DONE]\n\n")


async def test_an_idle_connection_is_closed_after_its_time():
    async with gateway(FakeEngine("a", answers()), keep_alive_s=0.3) as process:
        async with process.client() as quiet:
            assert await quiet.closed()
        async with process.client() as client:
            await client.send(post())
            await client.answer()
            assert await client.closed()


@pytest.mark.parametrize("end", [5, 40, -3], ids=["first-line", "headers", "body"])
async def test_a_client_that_stops_in_the_middle_of_a_request_is_given_up(end: int):
    async with gateway(FakeEngine("a", answers()), keep_alive_s=0.3) as process, process.client() as client:
        await client.send(post()[:end])
        assert await client.closed()


async def test_a_slow_answer_is_not_taken_for_an_idle_connection():
    async with gateway(FakeEngine("a", answers(after_s=1.0)), keep_alive_s=0.2) as process:
        assert (await process.request(post())).status == 200

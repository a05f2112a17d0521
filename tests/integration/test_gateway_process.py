"""The gateway as a process: start, table updates, stop."""

import asyncio
import json
import signal
import socket
import sys

import psutil
from fake_engine import FakeEngine, answers, hangs, streams
from gateway_process import PATIENCE_S, _spawned, gateway, post, table

from hetero_llm.gateway.auth import hash_key
from hetero_llm.gateway.options import GatewayOptions, KeyRecord


async def first_word(process) -> dict:
    return json.loads(await asyncio.wait_for(process.process.stdout.readline(), PATIENCE_S))


async def test_it_says_where_it_listens_and_its_pid():
    async with gateway() as process:
        assert process.listening == {"listening": f"127.0.0.1:{process.port}", "pid": process.process.pid}


async def test_its_first_word_comes_before_anything_it_logs():
    async with _spawned() as process:
        await process.tell(GatewayOptions(port=0))
        await first_word(process)
        assert process.log == []


async def test_a_port_in_use_is_reported_with_its_code_and_exit_status_1():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        async with _spawned() as process:
            await process.tell(GatewayOptions(port=port))
            error = (await first_word(process))["error"]
            assert await asyncio.wait_for(process.process.wait(), PATIENCE_S) == 1
    assert error["code"] == "HL103"
    assert str(port) in error["message"]
    assert error["next"]


async def test_an_address_of_another_machine_is_reported():
    async with _spawned() as process:
        await process.tell(GatewayOptions(host="192.0.2.1", port=0))
        assert (await first_word(process))["error"]["code"] == "HL100"
        assert await asyncio.wait_for(process.process.wait(), PATIENCE_S) == 1


async def test_options_that_are_none_are_reported():
    async with _spawned() as process:
        await process.tell({"port": "many"})
        assert (await first_word(process))["error"]["code"] == "HL100"


async def test_a_closed_pipe_before_any_option_ends_it():
    async with _spawned() as process:
        assert await process.end() == 1


async def test_it_listens_on_ipv6():
    async with gateway(FakeEngine("a", answers()), host="::1") as process:
        assert process.listening["listening"].startswith("[::1]:")
        assert (await process.request(post())).status == 200


async def test_an_engine_on_ipv6_is_reached():
    engine = FakeEngine("a", answers())
    await engine.start(host="::1")
    try:
        async with gateway() as process:
            await process.update(table([engine.target]))
            assert (await process.request(post())).status == 200
    finally:
        await engine.stop()
    assert engine.requests[0].header("host") == f"[::1]:{engine.port}"


async def test_the_end_of_the_pipe_ends_it_with_status_0():
    async with gateway() as process:
        assert await process.end() == 0


async def test_sigterm_ends_it_with_status_0():
    async with gateway() as process:
        process.process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.process.wait(), PATIENCE_S) == 0


async def test_a_running_stream_ends_whole_when_the_gateway_drains():
    engine = FakeEngine("a", streams(10, 0.1))
    async with gateway(engine) as process, process.client() as client:
        await client.send(post())
        await engine.wait_for_requests(1)
        process.process.send_signal(signal.SIGTERM)
        answer = await client.answer()
        assert answer.complete
        assert len(answer.chunks) == 11
        assert await client.closed()
        assert await asyncio.wait_for(process.process.wait(), PATIENCE_S) == 0


async def test_no_new_connection_is_taken_while_it_drains():
    engine = FakeEngine("a", streams(20, 0.1))
    async with gateway(engine) as process, process.client() as client:
        await client.send(post())
        await engine.wait_for_requests(1)
        process.process.send_signal(signal.SIGTERM)
        refused = False
        async with asyncio.timeout(10):
            while not refused:
                try:
                    async with process.client():
                        await asyncio.sleep(0.05)
                except ConnectionRefusedError:
                    refused = True
        assert (await client.answer()).complete


async def test_a_stream_longer_than_the_drain_ends_in_an_error_event():
    engine = FakeEngine("a", streams(1000, 0.05))
    async with gateway(engine, drain_s=0.5) as process, process.client() as client:
        await client.send(post())
        await engine.wait_for_requests(1)
        process.process.send_signal(signal.SIGTERM)
        answer = await client.answer()
        assert b'data: {"error"' in answer.body
        assert not answer.complete
        assert await asyncio.wait_for(process.process.wait(), PATIENCE_S) == 0


async def test_a_second_signal_does_not_wait():
    engine = FakeEngine("a", hangs())
    async with gateway(engine, drain_s=600) as process, process.client() as client:
        await client.send(post())
        await engine.wait_for_requests(1)
        process.process.send_signal(signal.SIGTERM)
        await asyncio.sleep(0.3)
        process.process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.process.wait(), PATIENCE_S) == 0


async def test_watchers_of_the_status_do_not_hold_up_the_end():
    async with gateway(drain_s=600) as process, process.client() as client:
        await client.send(post(b"", "/status/stream", method="GET"))
        await client.head()
        process.process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.process.wait(), PATIENCE_S) == 0


async def test_a_line_that_is_no_table_is_passed_over():
    engine = FakeEngine("a", answers())
    async with gateway(engine) as process:
        await process.tell({"version": "x"})
        await process.tell("nonsense")
        assert (await process.request(post())).status == 200


async def test_a_table_of_ten_thousand_replicas_is_read():
    engine = FakeEngine("a", answers())
    async with gateway(engine) as process:
        crowd = [engine.target.__class__(replica=f"r{n}", model="n", kind="cpu", accelerator="x", host="h", port=n)
                 for n in range(10_000)]  # fmt: skip
        await process.update(table([engine.target, *crowd], models=("m", "n")))
        assert (await process.request(post())).status == 200


async def test_it_stays_under_120_megabytes():
    async with gateway(FakeEngine("a", streams(50))) as process:
        for _ in range(5):
            await asyncio.gather(*(process.request(post()) for _ in range(100)))
        assert psutil.Process(process.process.pid).memory_info().rss < 120_000_000


async def test_it_loads_neither_ray_nor_torch_nor_vllm():
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        "import sys, hetero_llm.gateway.server; print(*{'ray', 'torch', 'vllm', 'transformers'} & set(sys.modules))",
        stdout=asyncio.subprocess.PIPE,
    )
    out, _ = await process.communicate()
    assert out.strip() == b""


async def test_a_wrong_key_is_401_and_a_right_one_is_served():
    engine = FakeEngine("a", answers())
    async with gateway(engine, keys=(KeyRecord(name="team-a", sha256=hash_key("sk-a")),)) as process:
        wrong = await process.request(post(headers="authorization: Bearer sk-x\r\n"))
        missing = await process.request(post())
        right = await process.request(post(headers="authorization: Bearer sk-a\r\n"))
        by_header = await process.request(post(headers="x-api-key: sk-a\r\n"))
        line = (await process.access_lines(4))[-1]
    assert (wrong.status, wrong.error["code"]) == (401, "HL604")
    assert (missing.status, missing.error["code"]) == (401, "HL603")
    assert missing.header("www-authenticate") == "Bearer"
    assert (right.status, by_header.status) == (200, 200)
    assert line["key"] == "team-a"
    assert len(engine.requests) == 2


async def test_with_keys_only_pulse_and_pages_are_open():
    paths = ("/health", "/ready", "/", "/docs", "/v1/models", "/status", "/status/stream", "/metrics")
    async with gateway(keys=(KeyRecord(name="a", sha256=hash_key("k")),)) as process:
        statuses = [(await process.request(post(b"", path, method="GET"))).status for path in paths]
    assert statuses == [200, 503, 200, 200, 401, 401, 401, 401]

"""CPU the gateway spends per request and per streamed chunk, and the time it adds.

Run with ``python -m benchmarks.relay_micro [--no-access-log]``.

The engine is a fake at protocol level; the gateway is the real process. CPU time is the gateway's own, read from the
kernel before and after, so noise of the machine matters little. Runs direct, gateway, gateway, direct.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import sys
import time

import msgspec
import psutil
import uvloop

from hetero_llm.gateway.options import GatewayOptions
from hetero_llm.model import ModelEntry, RoutingTable, Target

PROMPT = json.dumps([{"role": "user", "content": "word " * 200}])
WHOLE = f'{{"model":"m","messages":{PROMPT}}}'.encode()
STREAM = f'{{"model":"m","stream":true,"messages":{PROMPT}}}'.encode()
REQUESTS, CONNECTIONS, STREAMS = 6000, 16, 128


def request(body: bytes) -> bytes:
    """Return a request with the headers the OpenAI SDK sends."""
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:8000\r\nAccept-Encoding: gzip, deflate\r\n"
        "Connection: keep-alive\r\nAccept: application/json\r\nContent-Type: application/json\r\n"
        "User-Agent: AsyncOpenAI/Python 2.0.0\r\nX-Stainless-Lang: python\r\nX-Stainless-Package-Version: 2.0.0\r\n"
        "X-Stainless-OS: Linux\r\nX-Stainless-Arch: x64\r\nX-Stainless-Runtime: CPython\r\n"
        "Authorization: Bearer sk-none\r\n"
        f"x-stainless-retry-count: 0\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


class Client(asyncio.Protocol):
    """Sends one request after the other over one connection; counts answers by their last bytes."""

    def __init__(self, raw: bytes, count: int, end: bytes):
        self.raw, self.left, self.end = raw, count, end
        self.times: list[float] = []
        self.tail, self.first = b"", True
        self.done = asyncio.get_running_loop().create_future()

    def connection_made(self, transport):
        self.transport = transport
        self.send()

    def send(self):
        self.first, self.tail, self.sent = True, b"", time.perf_counter()
        self.transport.write(self.raw)

    def data_received(self, data):
        if self.first:
            self.first = False
            self.times.append(time.perf_counter() - self.sent)
        self.tail = (self.tail + data)[-16:]
        if not self.tail.endswith(self.end):
            return
        self.left -= 1
        if self.left:
            self.send()
        else:
            self.transport.close()
            self.done.set_result(None)


async def load(port: int, raw: bytes, connections: int, each: int, end: bytes) -> list[float]:
    """Run the load, return the times to the first byte in seconds."""
    loop = asyncio.get_running_loop()
    clients = [
        (await loop.create_connection(lambda: Client(raw, each, end), "127.0.0.1", port))[1] for _ in range(connections)
    ]
    await asyncio.gather(*(client.done for client in clients))
    return [seconds for client in clients for seconds in client.times]


async def measure(port: int, process: psutil.Process) -> dict[str, float]:
    """Measure one server: CPU of `process` per request and chunk in µs, first byte at concurrency 1 in ms."""

    def cpu() -> float:
        times = process.cpu_times()
        return times.user + times.system

    single = await load(port, request(WHOLE), 1, 500, b'"}}]}')
    before = cpu()
    await load(port, request(WHOLE), CONNECTIONS, REQUESTS // CONNECTIONS, b'"}}]}')
    per_request = (cpu() - before) / REQUESTS * 1e6
    before = cpu()
    await load(port, request(STREAM), STREAMS, 2, b"0\r\n\r\n")
    per_chunk = ((cpu() - before) * 1e6 - per_request * STREAMS * 2) / (STREAMS * 2 * 101)
    ordered = sorted(single)
    return {
        "us/request": per_request,
        "us/chunk": per_chunk,
        "first byte p50 ms": statistics.median(single) * 1e3,
        "first byte p99 ms": ordered[int(len(ordered) * 0.99)] * 1e3,
    }


def start_gateway(engine_port: int, *, access_log: bool) -> tuple[subprocess.Popen[bytes], int]:
    """Start the gateway with one replica; return it and its port."""
    process = subprocess.Popen(
        [sys.executable, "-m", "hetero_llm.gateway"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    target = Target(replica="r", model="m", kind="cpu", accelerator="x", host="127.0.0.1", port=engine_port)
    entry = ModelEntry(name="m", source="m", created_unix_s=0)
    lines = (GatewayOptions(port=0, access_log=access_log), RoutingTable(version=1, models=(entry,), targets=(target,)))
    assert process.stdin is not None
    assert process.stdout is not None
    for line in lines:
        process.stdin.write(msgspec.json.encode(line) + b"\n")
    process.stdin.flush()
    return process, int(json.loads(process.stdout.readline())["listening"].rpartition(":")[2])


def main() -> None:
    """Print a table."""
    engine = subprocess.Popen([sys.executable, "-m", "benchmarks.relay_micro.engine"], stdout=subprocess.PIPE)
    assert engine.stdout is not None
    engine_port = int(engine.stdout.readline())
    gateway, port = start_gateway(engine_port, access_log="--no-access-log" not in sys.argv)
    time.sleep(0.5)
    rows: list[tuple[str, dict[str, float]]] = []
    try:
        for name in ("direct", "gateway", "gateway", "direct"):
            where, process = (engine_port, engine) if name == "direct" else (port, gateway)
            run = measure(where, psutil.Process(process.pid))
            rows.append((name, asyncio.Runner(loop_factory=uvloop.new_event_loop).run(run)))
        rss = psutil.Process(gateway.pid).memory_info().rss / 1e6
    finally:
        for process in (gateway, engine):
            process.terminate()
            process.communicate()
    print("(CPU of `direct` is the fake engine's, for scale)")
    print(" | ".join(["server ", *rows[0][1]]))
    for name, numbers in rows:
        print(" | ".join([f"{name:7}", *(f"{value:{len(key)}.2f}" for key, value in numbers.items())]))
    print(f"gateway resident memory: {rss:.0f} MB")


if __name__ == "__main__":
    main()

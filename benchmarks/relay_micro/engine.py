"""A protocol-level engine for the benchmark: as little work per byte as Python allows."""

from __future__ import annotations

import asyncio
import sys

import uvloop

HEAD_JSON = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
HEAD_SSE = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
EVENT = (
    b'data: {"id":"chatcmpl-0","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,'
    b'"delta":{"content":" token"},"logprobs":null,"finish_reason":null}]}\n\n'
)
CHUNK = b"%x\r\n%b\r\n" % (len(EVENT), EVENT)
BODY = b'{"id": "x", "choices": [{"message": {"content": "' + b"a" * 400 + b'"}}]}'
WHOLE = HEAD_JSON % len(BODY) + BODY
CHUNKS_PER_STREAM = 100
GAP_S = 0.002


class Engine(asyncio.Protocol):
    """Answers each request with one JSON body, or with a stream of spaced chunks if the body asks for one."""

    def connection_made(self, transport):
        self.transport, self.buffer = transport, b""

    def data_received(self, data):
        self.buffer += data
        while (end := self.buffer.find(b"\r\n\r\n")) >= 0:
            at = self.buffer.lower().index(b"content-length: ") + 16
            whole = end + 4 + int(self.buffer[at : self.buffer.index(b"\r\n", at)])
            if len(self.buffer) < whole:
                return
            request, self.buffer = self.buffer[:whole], self.buffer[whole:]
            if b'"stream":true' in request:
                self.transport.write(HEAD_SSE)
                self.step(0)
            else:
                self.transport.write(WHOLE)

    def step(self, number):
        if number == CHUNKS_PER_STREAM:
            self.transport.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
            return
        self.transport.write(CHUNK)
        asyncio.get_running_loop().call_later(GAP_S, self.step, number + 1)


async def main():
    server = await asyncio.get_running_loop().create_server(Engine, "127.0.0.1", 0)
    sys.stdout.write(f"{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.Runner(loop_factory=uvloop.new_event_loop).run(main())

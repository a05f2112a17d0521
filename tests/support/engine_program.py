"""A small program that behaves like an inference engine seen from outside, or misbehaves as told by its flags.

A process boundary, so tests may fake it: HTTP routes, log lines, processes and shared memory are real, tokens are not.
Started as ``python engine_program.py --port N [flags]``; imports nothing of the project.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing import resource_tracker, shared_memory
from pathlib import Path

STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"


def parser() -> argparse.ArgumentParser:
    flags = argparse.ArgumentParser(prog="engine_program")
    add = flags.add_argument
    add("--host", default="127.0.0.1")
    add("--port", type=int, required=True)
    add("--served-model-name", default="m")
    add("--say", action="append", default=[], help="print this line at the start, once per flag")
    add("--flood-lines", type=int, default=0, help="print this many lines before listening")
    add("--start-s", type=float, default=0.0, help="time before it listens")
    add("--hang", choices=("start", "health", "token"), help="stop there for ever")
    add("--die", choices=("start", "token"), help="end there with --exit-code")
    add("--die-until", type=Path, help="end at the start until this file exists")
    add("--exit-code", type=int, default=1)
    add("--life-s", type=float, help="end with --exit-code after this time")
    add("--token-status", type=int, default=200, help="HTTP status of completions")
    add("--token-gap-s", type=float, default=0.0, help="time per token")
    add("--ignore-sigterm", action="store_true")
    add("--grandchildren", type=int, default=0, help="processes that ignore SIGTERM")
    add("--shared-memory", action="store_true", help="leave a mapped segment and a named semaphore behind")
    add("--node-rank", type=int, default=0, help="above 0 it serves nothing and only lives")
    add("--only-rank", type=int, help="flags that make it misbehave count on this node rank alone")
    add("--dump-env", type=Path, help="write the environment there as JSON")
    return flags


def say(text: str) -> None:
    print(f"(APIServer pid={os.getpid()}) INFO 12-01 04:20:37 [server.py:1] {text}", flush=True)


class Engine:
    def __init__(self, flags: argparse.Namespace) -> None:
        self.flags = flags
        self.running = 0
        self.lock = threading.Lock()
        self.kept: list[object] = []

    def run(self) -> None:
        flags = self.flags
        if flags.only_rank not in (None, flags.node_rank):
            flags.say, flags.die, flags.hang, flags.life_s = [], None, None, None
        for line in flags.say:
            print(line, flush=True)
        if flags.dump_env:
            flags.dump_env.write_text(json.dumps(dict(os.environ)))
        if flags.ignore_sigterm:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        for _ in range(flags.grandchildren):
            self.kept.append(subprocess.Popen([sys.executable, "-c", STUBBORN]))
        if flags.shared_memory:
            self.leave_shared_memory()
        for number in range(flags.flood_lines):
            print(f"{number:08d} {'x' * 1000}")
        say("Starting to load model")
        self.stop_at("start")
        time.sleep(flags.start_s)
        say("GPU KV cache size: 1,024 tokens")
        if flags.life_s is not None:
            threading.Timer(flags.life_s, self.die).start()
        if flags.node_rank > 0:
            threading.Event().wait()
        server = ThreadingHTTPServer((flags.host, flags.port), self.handler())
        server.daemon_threads = True
        server.serve_forever()

    def stop_at(self, place: str) -> None:
        if self.flags.hang == place:
            time.sleep(600)
        too_early = place == "start" and self.flags.die_until and not self.flags.die_until.exists()
        if self.flags.die == place or too_early:
            self.die()

    def die(self) -> None:
        sys.stdout.flush()
        os._exit(self.flags.exit_code)

    def leave_shared_memory(self) -> None:
        prefix = os.environ["HETERO_ENGINE_SHM_PREFIX"]
        for name in (None, f"psm_{prefix}"):
            segment = shared_memory.SharedMemory(name, create=True, size=4096)
            # As after SIGKILL: nobody unlinks it.
            resource_tracker.unregister(segment._name, "shared_memory")
            self.kept.append(segment)
            say(f"shared memory {segment.name}")
        Path("/dev/shm", f"sem.mp-{prefix}").touch()

    def handler(self) -> type[BaseHTTPRequestHandler]:
        engine, flags = self, self.flags

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                if self.path == "/health":
                    engine.stop_at("health")
                    self.answer(200, b"")
                elif self.path == "/metrics":
                    label = f'{{engine="0",model_name="{flags.served_model_name}"}}'
                    text = (
                        f"vllm:num_requests_running{label} {engine.running}.0\nvllm:num_requests_waiting{label} 0.0\n"
                    )
                    self.answer(200, text.encode())
                else:
                    self.answer(404, b"")

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                engine.stop_at("token")
                with engine.lock:
                    engine.running += 1
                try:
                    self.complete(body)
                finally:
                    with engine.lock:
                        engine.running -= 1

            def complete(self, body: dict[str, object]) -> None:
                if flags.token_status != 200:
                    self.answer(flags.token_status, b'{"error": {"message": "the engine is dead"}}')
                    return
                count = int(str(body.get("max_tokens", 4)))
                if not body.get("stream"):
                    time.sleep(count * flags.token_gap_s)
                    self.answer(200, json.dumps({"choices": [{"text": "x" * count}]}).encode())
                    return
                self.send_response(200)
                self.send_header("content-type", "text/event-stream")
                self.send_header("transfer-encoding", "chunked")
                self.end_headers()
                for number in range(count):
                    time.sleep(flags.token_gap_s)
                    self.event(json.dumps({"choices": [{"text": str(number)}]}))
                self.event("[DONE]")
                self.wfile.write(b"0\r\n\r\n")

            def event(self, data: str) -> None:
                text = f"data: {data}\n\n".encode()
                self.wfile.write(b"%x\r\n%b\r\n" % (len(text), text))

            def answer(self, status: int, body: bytes) -> None:
                self.send_response(status)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        return Handler


if __name__ == "__main__":
    Engine(parser().parse_args()).run()

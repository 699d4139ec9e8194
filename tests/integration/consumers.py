"""Runs the real consumers of the feed, and asks them. Each lives in its own virtual environment."""

from __future__ import annotations

import http.server
import json
import os
import signal
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from contextlib import contextmanager

from kvoffload.chain import BlockChain, GroupLayout
from kvoffload.config import EventsConfig
from kvoffload.events.publisher import FeedPublisher
from kvoffload.manager.base import OffloadingEvent

BLOCK = 16
DYNAMO = os.environ.get("KVOFFLOAD_DYNAMO_PYTHON")
ROUTER = os.environ.get("KVOFFLOAD_VLLM_ROUTER_PYTHON")


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def wait_for(condition, timeout=10.0, step=0.05):
    deadline = time.monotonic() + timeout
    while True:
        found = condition()
        if found:
            return found
        assert time.monotonic() < deadline, "timed out"
        time.sleep(step)


def call(url, body=None, timeout=5.0):
    """Send JSON and return JSON (or text)."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=timeout) as answer:
        text = answer.read().decode()
    try:
        return json.loads(text)
    except ValueError:
        return text


@contextmanager
def program(arguments, ready_url, log):
    """Run a program until the block ends; the block starts when `ready_url` answers."""
    with log.open("wb") as output:
        process = subprocess.Popen(arguments, stdout=output, stderr=output, start_new_session=True)
    try:

        def ready():
            assert process.poll() is None, log.read_text()[-3000:]
            try:
                call(ready_url)
            except urllib.error.HTTPError:
                return True
            except OSError:
                return False
            return True

        wait_for(ready, 30)
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(5)


class Dynamo:
    """A running `dynamo.indexer`."""

    def __init__(self, url):
        self.url = url

    def register(self, feed, model, *, instance=1, rank=0, lane=0):
        body = {
            "instance_id": instance, "endpoint": feed.endpoints[lane], "replay_endpoint": feed.replay_endpoints[lane],
            "model_name": model, "block_size": BLOCK, "dp_rank": rank,
        }  # fmt: skip
        return call(self.url + "/register", body)

    def unregister(self, model, instance=1):
        return call(self.url + "/unregister", {"instance_id": instance, "model_name": model})

    def matched(self, tokens, model, instance=1):
        """Return {longest_matched, gpu, cpu, disk} in tokens, zeros when the indexer knows nothing; tiers cumulate."""
        answer = call(self.url + "/query", {"token_ids": list(tokens), "model_name": model})
        found = answer["instances"].get(str(instance), {})
        return {name: found.get(name, 0) for name in ("longest_matched", "gpu", "cpu", "disk")}


@contextmanager
def dynamo(log):
    port = free_port()
    arguments = [DYNAMO, "-m", "dynamo.indexer", "--port", str(port), "--threads", "2"]
    with program(arguments, f"http://127.0.0.1:{port}/workers", log):
        yield Dynamo(f"http://127.0.0.1:{port}")


def chain(seed: int, blocks: int, **options) -> BlockChain:
    tokens = [(seed * 7919 + i) % 100_000 for i in range(blocks * BLOCK)]
    return BlockChain([GroupLayout(BLOCK, options.pop("factor", 1))], tokens, **options)


def store(feed, chain, first=0, last=None):
    keys = list(chain.keys())[first:last]
    infos = {key: chain.info(first + i) for i, key in enumerate(keys)}
    feed.publish([OffloadingEvent(keys, "CPU", False)], infos)


def remove(feed, chain, first=0, last=None):
    feed.publish([OffloadingEvent(list(chain.keys())[first:last], "CPU", True)], {})


@contextmanager
def publisher(consumer, **options):
    settings = {
        "endpoint": f"tcp://127.0.0.1:{free_port()}", "replay_endpoint": f"tcp://127.0.0.1:{free_port()}",
        "consumer": consumer, "batch_window_seconds": 0.01, "heartbeat_seconds": 0.3, **options,
    }  # fmt: skip
    name = settings.pop("instance_id", "pod")
    with FeedPublisher(EventsConfig(**settings), model_name="m", instance_id=name, engine_block_size=BLOCK) as feed:
        yield feed


class Worker(http.server.ThreadingHTTPServer):
    """A stand-in for an engine behind vllm-router: it answers its own port, and renders prompts of numbers."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _WorkerHandler)
        self.port = self.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02})

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_exc):
        self.shutdown()
        self.server_close()
        self.thread.join(5)


class _WorkerHandler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self._answer({"status": "ok"})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}")
        if self.path.endswith("/render"):
            prompt = body.get("prompt", "")
            self._answer([{"token_ids": [int(word) for word in prompt.split()]}])
            return
        port = self.server.server_address[1]
        self._answer(
            {"id": "1", "object": "text_completion", "model": "m", "choices": [{"index": 0, "text": str(port)}]}
        )

    def _answer(self, value):
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_args):
        """Say nothing."""


class Router:
    """A running vllm-router in front of some workers."""

    def __init__(self, url):
        self.url = url

    def route(self, tokens) -> int:
        """Return the port of the worker that a prompt was sent to."""
        prompt = " ".join(str(token) for token in tokens)
        answer = call(self.url + "/v1/completions", {"model": "m", "prompt": prompt, "max_tokens": 1})
        return int(answer["choices"][0]["text"])


@contextmanager
def router(log, workers, feeds, extra=()):
    port, metrics = free_port(), free_port()
    arguments = [
        ROUTER, "-m", "vllm_router.launch_router", "--host", "127.0.0.1", "--port", str(port), "--policy", "kv_aware",
        "--worker-urls", *(worker.url for worker in workers), "--kv-event-block-size", str(BLOCK),
        "--kv-event-model", "m", "--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics),
        *(
            argument
            for worker, feed in zip(workers, feeds, strict=True)
            for argument in (
                "--kv-event-source", f"{worker.url}={feed.endpoints[0]}",
                "--kv-event-replay-source", f"{worker.url}={feed.replay_endpoints[0]}",
            )
        ),
        *extra,
    ]  # fmt: skip
    with program(arguments, f"http://127.0.0.1:{port}/health", log):
        yield Router(f"http://127.0.0.1:{port}")

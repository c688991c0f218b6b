"""A loopback server that speaks both wire formats from a script, for the real SDKs: replies, and every way to fail."""

import json
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

USAGE = {"in": 1000, "cached": 400, "written": 50, "out": 200}


@dataclass(kw_only=True)
class Say:
    """One answer. `status` other than 200 is an error with `body`; `then` breaks the stream: drop, silent or error."""

    text: str = ""
    tool: object = None  # an object, or the raw text of a tool call's input
    finish: str = ""
    refusal: str = ""
    usage: dict | None = field(default_factory=lambda: dict(USAGE))
    status: int = 200
    error: dict = field(default_factory=dict)
    headers: dict = field(default_factory=dict)
    then: str = ""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_POST(self):
        length = int(self.headers["content-length"])
        request = json.loads(self.rfile.read(length))
        self.server.requests.append(request)
        self.server.headers_seen.append(dict(self.headers))
        script = self.server.script
        say = script(request) if callable(script) else script.pop(0)
        if say.then == "close":
            self.close_connection = True
            return
        if say.then == "mute":
            self.server.closing.wait(10)
            self.close_connection = True
            return
        if say.status != 200:
            self._error(say)
        else:
            self._stream(say, ANTHROPIC if self.path.endswith("/messages") else OPENAI)

    def _error(self, say):
        data = json.dumps(say.error).encode()
        self.send_response(say.status)
        for name, value in {"content-type": "application/json", **say.headers}.items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _stream(self, say, wire):
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("connection", "close")
        self.end_headers()
        self.close_connection = True
        events = wire(say)
        if say.then:
            events = events[: max(1, len(events) // 2)]
        for event in events:
            self.wfile.write(event.encode())
            self.wfile.flush()
        if say.then == "silent":
            self.server.closing.wait(10)
        if say.then == "drip":
            while not self.server.closing.wait(0.05):
                self.wfile.write(PING if wire is ANTHROPIC else events[0].encode())
                self.wfile.flush()
        if say.then == "error":
            self.wfile.write(f"event: error\ndata: {json.dumps(say.error)}\n\n".encode())


PING = b'event: ping\ndata: {"type": "ping"}\n\n'


def tool_text(tool):
    return tool if isinstance(tool, str) else json.dumps(tool)


def halves(text):
    return [text[: len(text) // 2], text[len(text) // 2 :]]


def OPENAI(say):
    chunks = [{"role": "assistant", "content": ""}]
    chunks += [{"content": half} for half in halves(say.text) if half]
    if say.refusal:
        chunks.append({"refusal": say.refusal})
    if say.tool is not None:
        function = {"name": "propose_kernel", "arguments": ""}
        chunks.append({"tool_calls": [{"index": 0, "id": "call_1", "type": "function", "function": function}]})
        chunks += [
            {"tool_calls": [{"index": 0, "function": {"arguments": half}}]} for half in halves(tool_text(say.tool))
        ]
    finish = say.finish or ("tool_calls" if say.tool is not None else "stop")
    bodies = [{"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in chunks]
    bodies.append({"choices": [{"index": 0, "delta": {}, "finish_reason": finish}]})
    if say.usage:
        usage = {
            "prompt_tokens": say.usage["in"] + say.usage["cached"] + say.usage["written"],
            "completion_tokens": say.usage["out"],
            "total_tokens": sum(say.usage.values()),
            "prompt_tokens_details": {
                "cached_tokens": say.usage["cached"],
                "cache_write_tokens": say.usage["written"],
            },
        }
        bodies.append({"choices": [], "usage": usage})
    common = {"id": "c1", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    return [f"data: {json.dumps({**common, **body})}\n\n" for body in bodies] + ["data: [DONE]\n\n"]


def ANTHROPIC(say):
    usage = say.usage or {"in": 0, "cached": 0, "written": 0, "out": 0}
    message = {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {
            "input_tokens": usage["in"],
            "output_tokens": 1,
            "cache_read_input_tokens": usage["cached"],
            "cache_creation_input_tokens": usage["written"],
        },
    }
    events = [{"type": "message_start", "message": message}]
    index = 0
    if say.text or say.refusal:
        events.append(_start(index, {"type": "text", "text": ""}))
        for half in halves(say.text or say.refusal):
            events.append(_delta(index, {"type": "text_delta", "text": half}))
        events.append({"type": "content_block_stop", "index": index})
        index += 1
    if say.tool is not None:
        events.append(_start(index, {"type": "tool_use", "id": "toolu_1", "name": "propose_kernel", "input": {}}))
        for half in halves(tool_text(say.tool)):
            events.append(_delta(index, {"type": "input_json_delta", "partial_json": half}))
        events.append({"type": "content_block_stop", "index": index})
    finish = {"length": "max_tokens", "content_filter": "refusal"}.get(say.finish, say.finish)
    stop = "refusal" if say.refusal else finish or ("tool_use" if say.tool is not None else "end_turn")
    delta = {"stop_reason": stop, "stop_sequence": None}
    events.append({"type": "message_delta", "delta": delta, "usage": {"output_tokens": usage["out"]}})
    events.append({"type": "message_stop"})
    return [f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in events]


def _start(index, block):
    return {"type": "content_block_start", "index": index, "content_block": block}


def _delta(index, delta):
    return {"type": "content_block_delta", "index": index, "delta": delta}


@contextmanager
def serving(script):
    """A server for `script`: a list of answers, or a function from request to answer."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.script, server.requests, server.headers_seen = script, [], []
    server.closing = threading.Event()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.closing.set()
        server.shutdown()
        server.server_close()
        thread.join(5)


def in_a_second():
    """An HTTP date one to two seconds from now."""
    return time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(time.time() + 2))

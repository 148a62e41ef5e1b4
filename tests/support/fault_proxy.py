"""An HTTP proxy on the loopback interface that misbehaves as told, for tests and benchmarks.

    with FaultProxy("127.0.0.1", server.port) as proxy:
        proxy.rules = [Rule("reset", method="GET", after_bytes=1000, count=2)]

It runs in its own thread. The Host header goes through unchanged, since S3 signatures cover it: sign for the proxy.
"""

import asyncio
import random
import re
import socket
import struct
import threading
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal, Self

Kind = Literal["latency", "reset", "close", "stall", "status", "flip", "reset_upload", "drop_reply"]
BLOCK_BYTES = 64 * 1024


@dataclass
class Rule:
    """What to do to a request that matches, and how often.

    latency       wait `seconds` before the request is forwarded
    reset, close  end the connection (RST, FIN) after `after_bytes` of the response body
    stall         send nothing for `seconds` after `after_bytes` of the response body
    status        answer `status` with `retry_after`, without forwarding
    flip          invert one bit of the byte at `after_bytes` of the response body
    reset_upload  end both connections after `after_bytes` of the request body
    drop_reply    forward, read the whole answer, and close without passing it on
    """

    kind: Kind
    method: str = ""
    path: str = ""
    after_bytes: int = 0
    seconds: float = 0.0
    status: int = 503
    retry_after: int | None = None
    count: int = 1
    """How many requests it befalls; -1 is all."""
    probability: float = 1.0
    hits: int = field(default=0, init=False)

    def matches(self, request: "Head", chance: random.Random) -> bool:
        if self.count == 0 or self.method not in ("", request.method) or not re.search(self.path, request.path):
            return False
        return self.probability >= 1 or chance.random() < self.probability


@dataclass
class Stats:
    """Requests seen, and the bytes of their bodies each way."""

    connections: int = 0
    requests: int = 0
    faults: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    by_method: dict[str, int] = field(default_factory=dict)


class FaultProxy:
    """Forwards to one server. `rules` and `rate_bytes_per_second` may be set at any time, from any thread."""

    def __init__(
        self, target_host: str, target_port: int, *, rate_bytes_per_second: float | None = None, seed: int = 0
    ) -> None:
        self.target = (target_host, target_port)
        self.rules: list[Rule] = []
        self.rate_bytes_per_second = rate_bytes_per_second
        self.stats = Stats()
        self.port = 0
        self._chance = random.Random(seed)
        self._free_at = {"up": 0.0, "down": 0.0}
        self._connections: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._stopping = asyncio.Event()
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fault-proxy", daemon=True)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self._thread.start()
        self._started.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._connection, "127.0.0.1", 0, limit=4 * BLOCK_BYTES)
        self.port = server.sockets[0].getsockname()[1]
        self._started.set()
        await self._stopping.wait()
        server.close()
        # A connection that is just being made, or ends, may start another task.
        while others := asyncio.all_tasks() - {asyncio.current_task()}:
            for task in others:
                task.cancel()
            await asyncio.wait(others, timeout=1)
        await self._loop.shutdown_asyncgens()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One client connection, with one connection to the server behind it."""
        self.stats.connections += 1
        # Kept, since the event loop keeps no task alive that waits for a connection nobody holds any more.
        task = asyncio.current_task()
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)
        client = Peer(reader, writer)
        server: Peer | None = None
        try:
            server = Peer(*await asyncio.open_connection(*self.target, limit=4 * BLOCK_BYTES))
            while await self._exchange(client, server):
                pass
        except (OSError, EOFError, asyncio.CancelledError, Reset):
            client.reset()
        finally:
            await client.close()
            if server is not None:
                await server.close()

    async def _exchange(self, client: "Peer", server: "Peer") -> bool:
        """Pass one request and its answer; False when the connection is over."""
        request = await client.read_head()
        if request is None:
            return False
        self.stats.requests += 1
        self.stats.by_method[request.method] = self.stats.by_method.get(request.method, 0) + 1
        rule = self._rule_for(request)
        kind = rule.kind if rule else None
        if rule and kind == "status":
            return await self._refuse(client, request, rule)
        if rule and kind == "latency":
            await asyncio.sleep(rule.seconds)
        server.writer.write(request.raw)
        upload = asyncio.ensure_future(self._upload(client, server, request, rule))
        try:
            return await self._download(client, server, request, rule, upload)
        finally:
            upload.cancel()
            with suppress(asyncio.CancelledError, OSError, EOFError, Reset):
                await upload

    def _rule_for(self, request: "Head") -> Rule | None:
        for rule in self.rules:
            if rule.matches(request, self._chance):
                rule.count -= rule.count > 0
                rule.hits += 1
                self.stats.faults += 1
                return rule
        return None

    async def _refuse(self, client: "Peer", request: "Head", rule: Rule) -> bool:
        if request.expects_continue:
            client.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        async for block, num_bytes in client.body(request.framing(request=True)):
            await self._count("up", block, num_bytes)
        retry_after = f"Retry-After: {rule.retry_after}\r\n" if rule.retry_after is not None else ""
        client.writer.write(f"HTTP/1.1 {rule.status} Fault\r\n{retry_after}Content-Length: 0\r\n\r\n".encode())
        await client.writer.drain()
        return True

    async def _upload(self, client: "Peer", server: "Peer", request: "Head", rule: Rule | None) -> None:
        sent = 0
        async for block, num_bytes in client.body(request.framing(request=True)):
            await self._count("up", block, num_bytes)
            sent += num_bytes
            if rule and rule.kind == "reset_upload" and sent > rule.after_bytes:
                server.reset()
                client.reset()
                raise Reset
            server.writer.write(block)
            await server.writer.drain()

    async def _download(
        self, client: "Peer", server: "Peer", request: "Head", rule: Rule | None, upload: "asyncio.Future[None]"
    ) -> bool:
        dropped = rule is not None and rule.kind == "drop_reply"
        response = await self._answer(client, server, upload)
        if not dropped:
            client.writer.write(response.raw)
        position = 0
        async for block, num_bytes in server.body(response.framing(request=False, method=request.method)):
            if dropped:
                continue
            await self._count("down", block, num_bytes)
            await self._pass(client, block, num_bytes, position, rule)
            position += num_bytes
        if dropped:
            await upload
            raise Reset
        await client.writer.drain()
        if rule and rule.kind in ("reset", "close") and position <= rule.after_bytes:
            return self._end(client, rule)
        if not upload.done() and response.status >= 300:
            return False  # the server has said no without reading the body
        await upload
        return not response.closes

    async def _answer(self, client: "Peer", server: "Peer", upload: "asyncio.Future[None]") -> "Head":
        """The final answer; those before it, such as 100 Continue, go straight through."""
        while True:
            waiting = asyncio.ensure_future(server.read_head())
            await asyncio.wait({waiting, upload}, return_when=asyncio.FIRST_COMPLETED)
            if upload.done() and upload.exception() is not None:
                waiting.cancel()
                raise Reset
            response = await waiting
            if response is None:
                raise Reset
            if response.status >= 200:
                return response
            client.writer.write(response.raw)
            await client.writer.drain()

    async def _pass(self, client: "Peer", block: bytes, num_bytes: int, position: int, rule: Rule | None) -> None:
        inside = rule is not None and num_bytes > 0 and position <= rule.after_bytes < position + num_bytes
        if rule is None or not inside or rule.kind not in ("reset", "close", "stall", "flip"):
            client.writer.write(block)
            await client.writer.drain()
            return
        cut = rule.after_bytes - position
        if rule.kind == "flip":
            client.writer.write(block[:cut] + bytes([block[cut] ^ 1]) + block[cut + 1 :])
            return
        client.writer.write(block[:cut])
        await client.writer.drain()
        if rule.kind == "stall":
            await asyncio.sleep(rule.seconds)
            client.writer.write(block[cut:])
        elif not self._end(client, rule):
            raise Reset

    def _end(self, client: "Peer", rule: Rule) -> bool:
        if rule.kind == "reset":
            client.reset()
        else:
            client.writer.close()
        return False

    async def _count(self, hop: Literal["up", "down"], block: bytes, num_bytes: int) -> None:
        """Note the bytes, and wait until the line, which all connections share, has had time for them."""
        if hop == "up":
            self.stats.bytes_up += num_bytes
        else:
            self.stats.bytes_down += num_bytes
        rate = self.rate_bytes_per_second
        if rate:
            now = self._loop.time()
            self._free_at[hop] = max(now, self._free_at[hop]) + len(block) / rate
            await asyncio.sleep(self._free_at[hop] - now)


class Reset(Exception):
    """This exchange is over and so are both connections."""


@dataclass
class Head:
    """The first line and the headers of a request or a response."""

    raw: bytes
    first: list[str]
    headers: dict[str, str]

    @property
    def method(self) -> str:
        return self.first[0]

    @property
    def path(self) -> str:
        return self.first[1]

    @property
    def status(self) -> int:
        return int(self.first[1])

    @property
    def closes(self) -> bool:
        return self.headers.get("connection", "").lower() == "close"

    @property
    def expects_continue(self) -> bool:
        return self.headers.get("expect", "").lower() == "100-continue"

    def framing(self, *, request: bool, method: str = "") -> int | Literal["chunked", "to the end"]:
        """How long the body is."""
        if not request and (method == "HEAD" or self.status in (204, 304)):
            return 0
        if "chunked" in self.headers.get("transfer-encoding", "").lower():
            return "chunked"
        if "content-length" in self.headers:
            return int(self.headers["content-length"])
        return 0 if request else "to the end"


class Peer:
    """One end of a connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def read_head(self) -> Head | None:
        try:
            raw = await self.reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:
            return None
        first, *lines = raw[:-4].decode("latin-1").split("\r\n")
        pairs = (line.split(":", 1) for line in lines)
        return Head(raw, first.split(" ", 2), {name.strip().lower(): value.strip() for name, value in pairs})

    async def body(self, framing: int | Literal["chunked", "to the end"]) -> AsyncIterator[tuple[bytes, int]]:
        """Blocks as they stand on the wire, each with the number of its bytes that belong to the body."""
        if framing == "chunked":
            async for block in self._chunks():
                yield block
            return
        left = framing if isinstance(framing, int) else 1 << 62
        while left > 0:
            data = await self.reader.read(min(left, BLOCK_BYTES))
            if not data:
                if isinstance(framing, int):
                    raise EOFError
                return
            left -= len(data)
            yield data, len(data)

    async def _chunks(self) -> AsyncIterator[tuple[bytes, int]]:
        size = -1
        while size != 0:
            line = await self.reader.readuntil(b"\r\n")
            yield line, 0
            size = left = int(line.split(b";")[0], 16)
            while left > 0:
                data = await self.reader.readexactly(min(left, BLOCK_BYTES))
                left -= len(data)
                yield data, len(data)
            if size:
                yield await self.reader.readexactly(2), 0
        while line != b"\r\n":  # trailers, then the empty line
            line = await self.reader.readuntil(b"\r\n")
            yield line, 0

    def reset(self) -> None:
        """End the connection with RST: with no lingering, the kernel drops what is left to send."""
        with suppress(OSError):
            connection: socket.socket | None = self.writer.get_extra_info("socket")
            if connection is not None:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()

    async def close(self) -> None:
        self.writer.close()
        with suppress(OSError, asyncio.CancelledError):
            await self.writer.wait_closed()

"""Probes over real sockets: a storm proved from inside, and a collector that fails in every way an engine can meet.

The engine is the reference engine in a process of its own. What matters most is what does not change: whatever is
wrong at the collector's end, the engine's clients get the same output.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import socket
import subprocess
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from stopguard.probe import wire
from tests.integration.serving import Server, ended, start

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]

TOKEN = "a-token-that-both-sides-know"
ENVIRONMENT = {"STOPGUARD_COLLECTOR_TOKEN": TOKEN}


@pytest.fixture
def address(tmp_path: Path) -> str:
    return str(tmp_path / "probe.sock")


class ProbedEngine:
    """A reference engine that reports; `lines` are what it has said on stderr when it has ended."""

    def __init__(self, process: subprocess.Popen[str], url: str) -> None:
        self.process, self.url = process, url

    def end(self) -> list[str]:
        self.process.send_signal(signal.SIGTERM)
        _, said = self.process.communicate(timeout=30)
        return [line for line in said.splitlines() if line]


@contextlib.contextmanager
def probed_engine(address: str, *arguments: str, token: str = TOKEN) -> Iterator[ProbedEngine]:
    environment = {"STOPGUARD_COLLECTOR_TOKEN": token}
    process = start("refengine", "serve", "--port", "0", "--probe", address, *arguments, environment=environment)
    with ended(process):
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("refengine ready: "), line
        yield ProbedEngine(process, line.split()[2])


class Control(Server):
    """`stopguard serve` or `stopguard watch`, ready."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stderr is not None
        super().__init__(process, process.stderr)
        self.ready = self.event("ready")
        self.admin: str = self.ready["admin"]
        self.url: str = self.ready["listen"][0] if self.ready["listen"] else ""
        # Read on, so that it never waits for us.
        self._reader = threading.Thread(target=self._read_on, daemon=True)
        self._reader.start()

    def _read_on(self) -> None:
        with contextlib.suppress(ValueError):
            for line in self._stream:
                self.lines.append(line.rstrip("\n"))

    def finish(self) -> int:
        self.signal(signal.SIGTERM)
        code = self.process.wait(30)
        self._reader.join(10)
        return code


@contextlib.contextmanager
def control(command: str, engine: str, address: str, *arguments: str, kind: str = "ref") -> Iterator[Control]:
    listen = ("--listen", "127.0.0.1:0") if command == "serve" else ()
    process = start(
        command,
        *("--engine", f"{kind}={engine}", "--probe", address, *listen),
        *("--admin", "127.0.0.1:0", "--log-format", "json"),
        *arguments,
        environment=ENVIRONMENT,
    )
    with ended(process):
        yield Control(process)


class Client:
    """Requests at an engine or a gateway, and questions to the admin port."""

    def __init__(self) -> None:
        self.http = httpx.AsyncClient(trust_env=False, timeout=60.0, limits=httpx.Limits(max_connections=400))

    async def get(self, url: str) -> Any:
        return (await self.http.get(url)).json()

    async def until(self, question: Callable[[], Any], *, seconds: float = 30.0) -> Any:
        """Ask until the answer is true, and give it."""
        async with asyncio.timeout(seconds):
            while not (answer := await question()):  # noqa: ASYNC110 (another process has no events for us)
                await asyncio.sleep(0.05)
            return answer

    async def probed(self, admin: str) -> dict[str, Any]:
        """Wait until the engine has a probe that is not in a gap."""

        async def question() -> Any:
            (row,) = (await self.get(f"{admin}/engines"))["engines"]
            good = row["probed"] and row["probes"] and not row["probes"][0]["in_gap"]
            return row if good else None

        row: dict[str, Any] = await self.until(question)
        return row

    async def settled(self, admin: str) -> dict[str, Any]:
        """Wait until no request is open; the page of the books."""

        async def question() -> Any:
            page = await self.get(f"{admin}/books")
            return None if page["open_requests"] else page

        try:
            page: dict[str, Any] = await self.until(question)
        except TimeoutError:
            rows = (await self.get(f"{admin}/requests?state=open"))["requests"]
            detail = await self.get(f"{admin}/requests/{rows[0]['id']}") if rows else None
            raise AssertionError(f"{len(rows)} requests stay open, the first: {detail}") from None
        return page

    async def chat(self, base: str, number: int, tokens: int = 30, *, patience: float = 60.0, n: int = 1) -> str:
        """The text of one answer, or "gone" when we left before it was whole."""
        body = {
            "model": "base",
            "messages": [{"role": "user", "content": f"request {number} " + "word " * (number % 40)}],
            "max_tokens": tokens,
            "n": n,
        }
        try:
            async with asyncio.timeout(patience):
                answer = await self.http.post(f"{base}/v1/chat/completions", json=body)
                return "".join(choice["message"]["content"] for choice in answer.json()["choices"])
        except TimeoutError:
            return "gone"

    async def some(self, base: str, numbers: range) -> list[str]:
        return await asyncio.gather(*(self.chat(base, number) for number in numbers))

    async def leave(self, base: str, number: int, events: int, n: int) -> str:
        """Ask for a long stream and close the connection after so many events of it."""
        body = {
            "model": "base",
            "messages": [{"role": "user", "content": f"request {number}"}],
            "max_tokens": 400,
            "n": n,
            "stream": True,
        }
        async with self.http.stream("POST", f"{base}/v1/chat/completions", json=body) as answer:
            seen = 0
            async for line in answer.aiter_lines():
                seen += line.startswith("data:")
                if seen >= events:
                    break
        return "gone"

    async def storm(self, base: str, requests: int, seed: int) -> list[str]:
        """Many at once, half of which leave in the middle of their stream; what those got that stayed."""
        chance = random.Random(seed)

        async def one(number: int) -> str:
            children = chance.choice([1, 1, 1, 2])
            if chance.random() < 0.5:
                return await self.leave(base, number, chance.choice([1, 2, 5, 12]), children)
            return await self.chat(base, number, chance.randint(5, 60), n=children)

        return await asyncio.gather(*(one(number) for number in range(requests)))


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    one = Client()
    yield one
    await one.http.aclose()


def total(page: dict[str, Any], account: str) -> int:
    return sum(row["balances"].get(account, 0) for row in page["totals"])


def no_gap_left(row: dict[str, Any]) -> bool:
    return all(not probe["in_gap"] for probe in row["probes"])


# ---- it proves --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["vllm", "sglang"])
async def test_a_storm_is_proved_from_inside(policy: str, address: str, client: Client) -> None:
    with (
        probed_engine(address, "--policy", policy, "--blocks", "256") as engine,
        control("serve", engine.url, address) as gateway,
    ):
        row = await client.probed(gateway.admin)
        assert (row["best_evidence"], row["doors"][0]) == ("probe", "probe")
        await client.storm(gateway.url, 120, seed=1)
        page = await client.settled(gateway.admin)
        assert page["leaks_found"] == page["book_errors"] == page["written_off"] == 0
        assert total(page, "link.acknowledged") > 30
        metrics = (await client.http.get(f"{gateway.admin}/metrics")).text
        acks = [line for line in metrics.splitlines() if line.startswith("stopguard_abort_to_ack_seconds_count")]
        proved = sum(float(line.split()[-1]) for line in acks if 'evidence="probe"' in line)
        assert proved > 30, acks
        assert all('evidence="probe"' in line for line in acks if not line.endswith(" 0.0")), acks
        assert 'stopguard_probes{engine="ref"} 1.0' in metrics

        async def compared() -> Any:
            (now,) = (await client.get(f"{gateway.admin}/engines"))["engines"]
            known = [one for one in now["differences"] if one["expected"] is not None and one["reported"] is not None]
            assert not any(one["persistent"] for one in known), known
            return len(known) == 2 and all(one["expected"] == one["reported"] == 0 for one in known)

        await client.until(compared)
        assert gateway.finish() == 0


async def test_a_request_that_no_scheduler_sees_is_closed_too(address: str, client: Client) -> None:
    with probed_engine(address) as engine, control("serve", engine.url, address) as gateway:
        await client.probed(gateway.admin)
        answer = await client.http.post(f"{gateway.url}/v1/chat/completions", json={"model": "base"})
        assert answer.status_code == 400
        page = await client.settled(gateway.admin)
        assert page["leaks_found"] == 0


async def test_a_block_that_is_not_given_back_is_named(address: str, client: Client) -> None:
    faults = ("--fault", "blocks-leaked-on-abort")
    with (
        probed_engine(address, *faults) as engine,
        control("serve", engine.url, address, "--config", _patience(address)) as gateway,
    ):
        await client.probed(gateway.admin)
        assert await client.chat(gateway.url, 1, 2000, patience=0.3) == "gone"

        async def leaked() -> Any:
            return (await client.get(f"{gateway.admin}/leaks"))["leaks"]

        (leak,) = await client.until(leaked)
        assert (leak["ledger"], leak["account"], leak["open"]) == ("kv", "held", True)
        assert leak["amount"] > 0
        assert leak["id"].startswith("sg-")


def _patience(address: str) -> str:
    """A configuration in which what is not released in a second is a leak."""
    file = Path(address).with_name("stopguard.toml")
    file.write_text("[stops]\nsettle_seconds = 1.0\n")
    return str(file)


# ---- out of the path ------------------------------------------------------------------------------------------


async def test_watching_engines_whose_traffic_goes_elsewhere(address: str, client: Client) -> None:
    with probed_engine(address, "--blocks", "256") as engine, control("watch", engine.url, address) as watch:
        assert watch.url == ""
        row = await client.probed(watch.admin)
        assert row["doors"] == ["probe"]
        await client.storm(engine.url, 120, seed=2)
        page = await client.settled(watch.admin)
        assert page["opened"] == 120
        assert page["leaks_found"] == page["book_errors"] == page["written_off"] == 0
        assert total(page, "link.acknowledged") > 30, "stops that others have carried out"
        assert total(page, "output.delivered") > 1000
        assert total(page, "stream.sent") == 0, "no byte of it came by here"
        assert watch.finish() == 0


# ---- it harms nobody ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plain() -> list[str]:
    """What the requests 0 to 23 get from an engine without a probe."""
    process = start("refengine", "serve", "--port", "0")
    with ended(process):
        assert process.stdout is not None
        url = process.stdout.readline().split()[2]

        async def ask() -> list[str]:
            one = Client()
            try:
                return await one.some(url, range(24))
            finally:
                await one.http.aclose()

        return asyncio.run(ask())


async def test_a_collector_that_is_killed_in_a_storm(address: str, client: Client, plain: list[str]) -> None:
    with probed_engine(address, "--blocks", "256") as engine:
        with control("watch", engine.url, address) as watch:
            await client.probed(watch.admin)
            storm = asyncio.create_task(client.storm(engine.url, 150, seed=3))

            async def under_way() -> Any:
                (row,) = (await client.get(f"{watch.admin}/engines"))["engines"]
                return row["probes"][0]["frames"] > 20

            await client.until(under_way)
            watch.process.kill()
            watch.process.wait(30)
        assert await client.some(engine.url, range(24)) == plain
        lasting = [asyncio.create_task(client.chat(engine.url, number, 600)) for number in range(8)]
        with control("watch", engine.url, address) as again:
            row = await client.probed(again.admin)
            assert row["probes"][0]["gaps"] >= 1, "the books know that they have missed something"
            metrics = (await client.http.get(f"{again.admin}/metrics")).text
            gaps = next(line for line in metrics.splitlines() if line.startswith("stopguard_probe_gaps_total{"))
            assert float(gaps.split()[-1]) >= 1
            await storm
            assert all(await asyncio.gather(*lasting))
            page = await client.settled(again.admin)
            assert page["opened"] >= 8, "those that were there came by the snapshot"
            assert page["leaks_found"] == page["book_errors"] == 0
            assert again.finish() == 0
        said = engine.end()
    assert len(said) <= 3, "one line for each time that nobody was there: before, in between, and afterwards"
    assert all("no collector" in line for line in said), said


async def test_a_gateway_whose_probe_comes_and_goes(address: str, client: Client) -> None:
    """A relay between probe and gateway is cut in a storm: a gap, a snapshot, and books that close by the probe."""
    with Relay(address) as relay, probed_engine(relay.address, "--blocks", "256") as engine:
        with control("serve", engine.url, address) as gateway:
            await client.probed(gateway.admin)
            storm = asyncio.create_task(client.storm(gateway.url, 150, seed=4))
            for _ in range(3):
                await asyncio.sleep(0.15)
                relay.cut()
            await storm
            page = await client.settled(gateway.admin)
            assert page["leaks_found"] == page["written_off"] == 0
            row = await client.probed(gateway.admin)
            assert no_gap_left(row)
            assert gateway.finish() == 0
        engine.end()


async def test_a_probe_that_stays_away_is_given_up(address: str, client: Client) -> None:
    with Relay(address) as relay, probed_engine(relay.address) as engine:
        config = Path(address).with_name("gone.toml")
        config.write_text("[probe]\ngone_seconds = 0.3\n")
        with control("serve", engine.url, address, "--config", str(config)) as gateway:
            await client.probed(gateway.admin)
            running = asyncio.create_task(client.chat(gateway.url, 1, 300))
            leaving = asyncio.create_task(client.chat(gateway.url, 2, 3000, patience=1.5))
            await asyncio.sleep(0.3)
            relay.close()

            async def lowered() -> Any:
                (row,) = (await client.get(f"{gateway.admin}/engines"))["engines"]
                return row["best_evidence"] == "gauge" and not row["probed"]

            await client.until(lowered)
            assert len(await running) > 0
            assert await leaving == "gone"
            page = await client.settled(gateway.admin)
            assert page["leaks_found"] == page["written_off"] == 0
            assert gateway.finish() == 0
        engine.end()


class Relay:
    """Between a probe and its collector, so that the connection can be cut without ending either."""

    def __init__(self, target: str) -> None:
        self.address = f"{target}.relay"
        self._target = target
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.address)
        self._listener.listen()
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Relay:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(5)
        self.cut()

    def cut(self) -> None:
        pairs, self._pairs = self._pairs, []
        for pair in pairs:
            for end in pair:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

    def _run(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.socket(socket.AF_UNIX)
            try:
                far.connect(self._target)
            except OSError:
                near.close()
                far.close()
                continue
            self._pairs.append((near, far))
            for source, target in ((near, far), (far, near)):
                threading.Thread(target=_pipe, args=(source, target), daemon=True).start()


def _pipe(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
    for end in (source, target):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
        end.close() if end is source else None


async def test_a_wrong_token(address: str, client: Client, plain: list[str]) -> None:
    with (
        probed_engine(address, token="quite-another-token") as engine,
        control("serve", engine.url, address) as gateway,
    ):
        assert await client.some(engine.url, range(24)) == plain
        assert await client.some(gateway.url, range(24)) == plain
        (row,) = (await client.get(f"{gateway.admin}/engines"))["engines"]
        assert (row["probed"], row["probes"], row["best_evidence"]) == (False, [], "gauge")
        await client.settled(gateway.admin)
        assert gateway.finish() == 0
        said = engine.end()
    tokens = [line for line in said if "STOPGUARD_COLLECTOR_TOKEN must be the gateway's probe token" in line]
    assert len(tokens) == 1, said


async def test_an_old_schema(address: str, client: Client, plain: list[str]) -> None:
    def answer(connection: socket.socket) -> None:
        connection.recv(4096)
        connection.sendall(wire.encode(wire.Challenge(wire.SCHEMA_VERSION - 1, b"n" * wire.NONCE_BYTES, b"p" * 32)))

    with bad_collector(address, answer) as met, probed_engine(address) as engine:
        assert await client.some(engine.url, range(24)) == plain
        assert await asyncio.to_thread(met.wait, 20)
        said = engine.end()
    assert ["same version of StopGuard" in line for line in said] == [True], said


async def test_a_full_socket(address: str, client: Client, plain: list[str]) -> None:
    """A collector that takes the probe and then reads nothing: the buffers fill, and the engine does not notice."""

    def answer(connection: socket.socket) -> None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        greeting = _read(connection)
        assert isinstance(greeting, wire.Greeting)
        nonce = b"n" * wire.NONCE_BYTES
        proof = wire.collector_proof(TOKEN, greeting.nonce, nonce)
        connection.sendall(wire.encode(wire.Challenge(wire.SCHEMA_VERSION, nonce, proof)))
        _read(connection)
        connection.sendall(wire.encode(wire.Welcome()))

    with bad_collector(address, answer) as met, probed_engine(address) as engine:
        assert await asyncio.to_thread(met.wait, 20)
        for _ in range(4):
            await client.some(engine.url, range(100, 160))
        assert await client.some(engine.url, range(24)) == plain
        engine.end()


def _read(connection: socket.socket) -> wire.FromEngine:
    size = int.from_bytes(connection.recv(4, socket.MSG_WAITALL), "big")
    return wire.decode_from_engine(connection.recv(size, socket.MSG_WAITALL))


@contextlib.contextmanager
def bad_collector(address: str, answer: Callable[[socket.socket], None]) -> Iterator[threading.Event]:
    """Listens, answers each connection with `answer`, and keeps it open. The event: somebody was answered."""
    met = threading.Event()
    held: list[socket.socket] = []
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen()

    def run() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            held.append(connection)
            with contextlib.suppress(OSError):
                answer(connection)
            met.set()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield met
    finally:
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(5)
        for connection in held:
            connection.close()

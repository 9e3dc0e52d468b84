"""`stopguard top`: engines and stops in progress, in a terminal, over the admin API.

On a terminal it redraws until `q`; in a pipe it prints one moment and ends. What it shows comes from clients, so
nothing in it may move the cursor or change a colour: characters that do not print are replaced.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import click

from stopguard.errors import StopGuardError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import httpx
    from rich.console import Console, RenderableType
    from rich.table import Table
    from rich.text import Text

__all__ = ["AdminUnreachable", "command", "fetch", "render"]

DEFAULT_ADMIN = "http://127.0.0.1:9090"
PLAIN_WIDTH = 160
TIMEOUT_SECONDS = 5.0
INTERVAL_LIMITS = (0.2, 60.0)
STOPS_SHOWN_ONCE = 50
MARKS = (("queue", "q"), ("kv", "kv"), ("output", "out"), ("link", "ack"), ("stream", "str"))
STATE_ORDER = ("running", "queued", "preempted", "draining", "settling")
_IN_ASCII = str.maketrans({"✓": "+", "✗": "-", "–": "-", "·": "-", "…": "...", "µ": "u"})


class AdminUnreachable(StopGuardError):
    """The admin API did not answer, or not with what it should."""

    exit_code = 2


@click.command()
@click.option(
    "--admin",
    metavar="URL",
    default=DEFAULT_ADMIN,
    envvar="STOPGUARD_ADMIN",
    show_default=True,
    show_envvar=True,
    help="The admin port, as URL or HOST:PORT. Its token is read from STOPGUARD_ADMIN_TOKEN.",
)
@click.option("--once", is_flag=True, help="Print one moment and end, as it does without a terminal.")
@click.option("--json", "as_json", is_flag=True, help="Print one moment as JSON and end.")
@click.option(
    "--interval",
    type=click.FloatRange(*INTERVAL_LIMITS),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="How often it looks.",
)
def command(admin: str, once: bool, as_json: bool, interval: float) -> None:
    """Watch engines and stops in progress.

    Marks of a stop are its five ledgers, ✓ closed, ✗ open, ! overdue: q queue, kv cache blocks, out in-flight
    output, ack the engine's word, str the client's stream.
    """
    from rich.console import Console

    base_url = _base_url(admin)
    with _client(base_url, os.environ.get("STOPGUARD_ADMIN_TOKEN", "")) as client:
        if as_json:
            import json

            click.echo(json.dumps(fetch(client), indent=2))
            return
        console = Console(highlight=False)  # honours NO_COLOR, TERM=dumb and COLUMNS by itself
        if once or not console.is_terminal or console.is_dumb_terminal:
            if not console.is_terminal:
                console = Console(highlight=False, no_color=True, width=PLAIN_WIDTH)
            _print_once(console, fetch(client))
            return
        from stopguard.cli.top_screen import watch

        watch(console, client, interval)


def fetch(client: httpx.Client) -> dict[str, Any]:
    """The overview now. `AdminUnreachable` says in one line what is wrong and what to do."""
    import httpx

    where = str(client.base_url).rstrip("/")
    try:
        response = client.get("/overview")
    except httpx.ConnectError as error:
        raise AdminUnreachable(
            f"nothing answers at {where} ({_reason(error)}): is `stopguard serve` running, and is this its admin port?"
        ) from None
    except (httpx.TransportError, httpx.InvalidURL) as error:
        raise AdminUnreachable(f"{where} does not answer as an admin port does: {_reason(error)}") from None
    if response.status_code == 401:
        raise AdminUnreachable(f"{where} asks for its admin token: set STOPGUARD_ADMIN_TOKEN")
    if response.status_code != 200:
        raise AdminUnreachable(f"{where} answered {response.status_code}: {_detail(response)}")
    try:
        document = response.json()
        version = document["schema_version"]
    except (ValueError, KeyError, TypeError):
        raise AdminUnreachable(f"{where} is no admin port of StopGuard: it answered with something else") from None
    if version != 1:
        raise AdminUnreachable(f"{where} is a newer StopGuard (schema {version}): update the one that runs `top`")
    return dict(document)


def render(overview: Mapping[str, Any], *, stops_max: int, width: int) -> Iterator[RenderableType]:
    """What is shown of one moment: the summary, what is wrong, the engines, the stops in progress."""
    from rich.text import Text

    yield _summary(overview)
    for line in [*overview["reasons"], *overview["warnings"]]:
        yield Text(f"! {printable(line)}", style="bold yellow")
    yield from _leaks(overview)
    yield Text()
    yield _engines(overview["engines"], width)
    yield Text()
    yield from _stops(overview, stops_max, width)


def printable(value: object) -> str:
    """The text with every character that does not print replaced: what clients write must not steer a terminal."""
    text = str(value)
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else "\N{REPLACEMENT CHARACTER}" for one in text)


# ---- parts --------------------------------------------------------------------------------------------------------


def _summary(overview: Mapping[str, Any]) -> Text:
    from rich.text import Text

    states = overview["states"]
    inside = ", ".join(f"{states[name]} {name}" for name in STATE_ORDER if states.get(name))
    text = Text.assemble(
        ("stopguard ", "bold"),
        (printable(overview["version"]), "bold"),
        f"  up {_age(overview['uptime_seconds'])}",
        ("  shutting down" if overview["draining"] else "", "bold yellow"),
    )
    parts: list[tuple[str, str]] = [
        (f"open {overview['open_requests']:,}" + (f" ({inside})" if inside else ""), ""),
        (f"stopping {overview['stops_total']:,}", "yellow" if overview["stops_total"] else ""),
        (f"stops/min {overview['stops_per_minute']:g}", ""),
        (f"settled {overview['settled']:,}", ""),
        (f"wasted {overview['tokens_wasted']:,} tokens", ""),
    ]
    if overview["written_off"]:
        parts.append((f"written off {overview['written_off']:,}", "red"))
    if overview["overdue_requests"]:
        parts.append((f"LEAKING {overview['overdue_requests']:,}", "bold red"))
    elif overview["leaks_found"]:
        parts.append((f"leaks 0 open, {overview['leaks_found']:,} found", "yellow"))
    else:
        parts.append(("leaks none", "green"))
    for words, style in parts:
        text.append("  ·  ", style="dim")
        text.append(words, style=style)
    return text


def _leaks(overview: Mapping[str, Any]) -> Iterator[Text]:
    from rich.text import Text

    open_leaks = [leak for leak in overview["leaks"] if leak["open"]]
    for leak in open_leaks[:3]:
        yield Text(
            f"! leak: {leak['ledger']}.{leak['account']} {leak['amount']:,} {leak['unit']} of {printable(leak['id'])} "
            f"({printable(leak['engine'])}), overdue for {_age(leak['overdue_seconds'])}",
            style="red",
        )
    if len(open_leaks) > 3:
        yield Text(f"! … and {len(open_leaks) - 3} more", style="red")


def _engines(engines: list[dict[str, Any]], width: int) -> Table:
    from rich.text import Text

    columns = ["ENGINE", "KIND", "STATE", "RUN", "QUEUE", "STOPPING"]
    columns += ["KV%", "STOPS/MIN", "P50", "P99", "WASTE", "LEAKS"]
    left = {"ENGINE", "KIND", "STATE"}
    narrow = width < 100
    if narrow:
        columns = [name for name in columns if name not in ("KIND", "WASTE", "STOPS/MIN")]
    table = _table(columns, left)
    for engine in engines:
        leaks = engine["leaks_open"] or engine["leaks_found"]
        cells: dict[str, Text | str] = {
            "ENGINE": Text(printable(engine["name"]), style="bold"),
            "KIND": printable(engine["kind"]) or "–",
            "STATE": Text("up", style="green") if engine["healthy"] else Text("down", style="bold red"),
            "RUN": f"{engine['running']:,}",
            "QUEUE": f"{engine['queued']:,}",
            "STOPPING": Text(f"{engine['stopping']:,}", style="yellow" if engine["stopping"] else ""),
            "KV%": "–" if engine["kv_used"] is None else f"{engine['kv_used'] * 100:.0f}",
            "STOPS/MIN": f"{engine['stops_per_minute']:g}",
            "P50": _time(engine["settle_p50_seconds"]),
            "P99": _time(engine["settle_p99_seconds"]),
            "WASTE": f"{engine['tokens_wasted']:,}",
            "LEAKS": Text(f"{leaks:,}", style="bold red" if engine["leaks_open"] else "yellow" if leaks else ""),
        }
        table.add_row(*(cells[name] for name in columns))
    return table


def _stops(overview: Mapping[str, Any], stops_max: int, width: int) -> Iterator[RenderableType]:
    from rich.text import Text

    total, stops = overview["stops_total"], overview["stops"]
    if not stops:
        settle = next((step for step in overview["steps"] if step["name"] == "settle"), None)
        words = "no stop in progress"
        if settle is not None and settle["stops"]:
            words += (
                f"; the last {settle['stops']:,} settled in {_time(settle['p50_seconds'])} (p50), "
                f"{_time(settle['p99_seconds'])} (p99)"
            )
        yield Text(words, style="dim")
        return
    columns = ["STOP", "AGE", "STAGE", "TRIES", "LEDGERS", "EVIDENCE", "WHY", "ENGINE"]
    if width < 100:
        columns = [name for name in columns if name not in ("EVIDENCE", "ENGINE")]
    table = _table(columns, {"STOP", "STAGE", "LEDGERS", "EVIDENCE", "WHY", "ENGINE"})
    for one in stops[:stops_max]:
        request, stop = one["request"], one["request"]["stop"]
        late = bool(request["overdue"])
        source, reason = printable(stop["source"]), printable(stop["reason"])
        cells: dict[str, Text | str] = {
            "STOP": printable(request["id"])[: 14 if width < 130 else 35],
            "AGE": _age(stop["age_seconds"]),
            "STAGE": Text("overdue" if late else one["stage"], style="bold red" if late else ""),
            "TRIES": str(stop["attempts"]),
            "LEDGERS": _marks(request),
            "EVIDENCE": printable(stop["evidence"]),
            "WHY": f"{printable(stop['semantics'])}: {source if source == reason else f'{source} {reason}'}",
            "ENGINE": printable(request["engine"]) or "–",
        }
        table.add_row(*(cells[name] for name in columns))
    yield table
    if total > min(len(stops), stops_max):
        yield Text(f"… and {total - min(len(stops), stops_max):,} more", style="dim")


def _marks(request: Mapping[str, Any]) -> Text:
    from rich.text import Text

    text = Text()
    for number, (ledger, label) in enumerate(MARKS):
        mark, style = ("✓", "green")
        if ledger in request["overdue"]:
            mark, style = "!", "bold red"
        elif ledger in request["open"]:
            mark, style = "✗", "yellow"
        text.append(f"{' ' if number else ''}{label}{mark}", style=style)
    return text


def _table(columns: list[str], left: set[str]) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold dim")
    for name in columns:
        flexible = name in ("ENGINE", "WHY", "KIND")
        table.add_column(
            name,
            justify="left" if name in left else "right",
            no_wrap=True,
            overflow="ellipsis",
            max_width=28 if flexible else None,
        )
    return table


def _print_once(console: Console, overview: Mapping[str, Any]) -> None:
    with console.capture() as capture:
        for part in render(overview, stops_max=STOPS_SHOWN_ONCE, width=console.width):
            console.print(part, soft_wrap=not console.is_terminal)
    text = capture.get()
    if not console.is_terminal:
        text = "\n".join(line.rstrip() for line in text.splitlines()) + "\n"
    encoding = sys.stdout.encoding or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        text = text.translate(_IN_ASCII).encode(encoding, "replace").decode(encoding)
    click.echo(text, nl=False)


# ---- words --------------------------------------------------------------------------------------------------------


def _time(seconds: float | None) -> str:
    from stopguard.ledger.timeline import duration

    return "–" if seconds is None else duration(seconds)


def _age(seconds: float) -> str:
    from stopguard.ledger.timeline import duration

    return f"{max(0.0, seconds):.1f} s" if seconds < 10 else f"{seconds:.0f} s" if seconds < 59.5 else duration(seconds)


def _base_url(admin: str) -> str:
    """`--admin` as a URL: `HOST:PORT`, as `serve --admin` takes it, is one too."""
    if admin == "off":
        raise click.UsageError("the admin port is off (STOPGUARD_ADMIN=off): give --admin URL")
    url = admin if "://" in admin else f"http://{admin}"
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        usable = False
    if not usable:
        raise click.UsageError(f"--admin: {admin!r} is neither a URL nor HOST:PORT")
    return url.rstrip("/")


def _client(base_url: str, token: str) -> httpx.Client:
    import ssl

    import httpx

    if not token.isascii() or any(character.isspace() for character in token):
        raise click.UsageError("STOPGUARD_ADMIN_TOKEN is no token: it has spaces, or letters that are not ASCII")
    # The system's authorities, and SSL_CERT_FILE where it is set; making the context takes time, so only for https.
    verify: ssl.SSLContext | bool = ssl.create_default_context() if base_url.startswith("https:") else False
    headers = {"authorization": f"Bearer {token}"} if token else {}
    return httpx.Client(base_url=base_url, headers=headers, verify=verify, timeout=TIMEOUT_SECONDS, trust_env=False)


def _reason(error: Exception) -> str:
    text = str(error)
    return text.partition("] ")[2] or text or type(error).__name__


def _detail(response: httpx.Response) -> str:
    try:
        return printable(response.json()["detail"])[:300]
    except (ValueError, KeyError, TypeError):
        return "it does not say why"

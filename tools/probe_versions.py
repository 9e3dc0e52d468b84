"""What StopGuard's probe finds in which version of an engine: the tables in docs/engines/vllm.md and sglang.md.

    python -m tools.probe_versions                              both engines, all versions of the tables
    python -m tools.probe_versions vllm --version 0.31.0        one
    python -m tools.probe_versions --json seen.json --markdown versions.md

Each version is really installed, in an environment of its own (some gigabytes and minutes; taken away again, unless it
is the one that the tests use or was there before), and started with the plugin, in front of it a gateway that hears
its probe. Some requests are then sent, left and preempted, and their books say what was proved. What comes of each is
written into the file `--json` and kept there, so that versions can be looked at one by one.
"""

from __future__ import annotations

import asyncio
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from time import monotonic
from typing import Any, Final

import click
import msgspec

from stopguard.engines import EngineUnreachable
from stopguard.gateway.probing import ProbeFacts, ProbeSettings, Probing
from stopguard.ledger import Account, Evidence, Ledger, RequestLedgers
from stopguard.ledger.accounts import CLOSING_ACCOUNTS, Role
from stopguard.testing import rig
from stopguard.testing.conformance import Closed, Subject
from stopguard_sglang.rig import SGLangRecipe
from stopguard_vllm.rig import VLLMRecipe

__all__ = ["Seen", "Trial", "grade", "in_short", "lines_of_ours", "table", "worst"]

TOKEN: Final = "0123456789abcdef0123456789abcdef"
SLOTS: Final = 8
LEDGERS: Final = (Ledger.QUEUE, Ledger.KV, Ledger.OUTPUT, Ledger.LINK)
NOTHING_THERE: Final = ""
SOCKET: Final = "probe_versions.sock"
_FAILURE_CHARACTERS_MAX: Final = 400
_COLOURS: Final = re.compile(r"\x1b\[[0-9;]*m")


class _Kind(msgspec.Struct, frozen=True):
    versions: tuple[str, ...]
    recipe: Callable[[str], rig.Recipe]
    options: dict[str, Any]
    long_tokens: int


KINDS: Final = {
    "vllm": _Kind(("0.30.0", "0.31.0", "0.32.0"), VLLMRecipe, {"max_num_seqs": SLOTS}, 2000),
    "sglang": _Kind(("0.5.21", "0.5.22", "0.5.23"), SGLangRecipe, {"running_requests": SLOTS}, 600),
}


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """One request: what was done with it, and what its books say. `grades` are by ledger, in words (see `grade`).

    `released_seconds` is from the stop to the release of its KV, where it was stopped.
    """

    name: str
    outcome: str
    grades: dict[str, str]
    released_seconds: float | None = None


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one version. `failure` says why it could not be looked at, else it is empty."""

    kind: str
    version: str
    failure: str = ""
    started_seconds: float = 0.0
    hooks_attached: tuple[str, ...] = ()
    hooks_missing: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()
    trials: tuple[Trial, ...] = ()
    blocks_used_at_the_end: int | None = None


# ---- reading books and logs ---------------------------------------------------------------------------------


def grade(ledgers: RequestLedgers, ledger: Ledger, probed: bool) -> str:
    """How one ledger of a request was closed: the least evidence of what left it, `open`, `leak`, or nothing.

    Where there is a probe tokens are counted by it alone, so that one with any is proved when it is closed.
    """
    if any(leak.ledger is ledger for leak in ledgers.leaks or ()):
        return "leak"
    if any(ledgers.balances[CLOSING_ACCOUNTS[ledger]]):
        return "open"
    left = [
        entry.evidence
        for entry in ledgers.entries
        if entry.state.moves and entry.debit.ledger is ledger and _ends(entry.debit, entry.credit)
    ]
    if ledger is Ledger.OUTPUT and probed and left:
        return Evidence.PROBE.label
    return min(left).label if left else NOTHING_THERE


def _ends(debit: Account, credit: Account) -> bool:
    return debit.role is Role.OPEN and credit.role is not Role.OPEN


def lines_of_ours(log: str) -> tuple[str, ...]:
    """What the plugin has said of this engine in its log, each once, from our name on (not what of the collector)."""
    found: dict[str, None] = {}
    for line in log.splitlines():
        at = line.find("StopGuard")
        if at >= 0 and SOCKET not in line:
            found.setdefault(_COLOURS.sub("", line[at:]).strip())
    return tuple(found)


def in_short(error: Exception) -> str:
    """What it is, and the last two lines of what it quotes."""
    first, *rest = (f"{type(error).__name__}: {error}").splitlines()
    return "\n".join([first[:_FAILURE_CHARACTERS_MAX], *rest[-2:]])


def worst(grades: Iterable[str]) -> str:
    """Of how a ledger ended in several requests the weakest; nothing where there was nothing in any."""
    order = ["leak", "open", *(each.label for each in Evidence)]
    there = [each for each in grades if each != NOTHING_THERE]
    return min(there, key=order.index) if there else NOTHING_THERE


# ---- looking at one version -----------------------------------------------------------------------------------


def look_at(kind: str, version: str, keep: bool, say: rig.Say = rig.say_to_stderr) -> Seen:
    """Install, start and try one version. Whatever goes wrong is in the answer."""
    recipe = KINDS[kind].recipe(version)
    home = rig.home_of(recipe)
    ours_to_remove = not keep and not (home / "installed").exists() and version != rig.recipe_of(kind).version
    try:
        return _look_at(kind, recipe, say)
    except Exception as error:  # not installed, not started, no answer, books that stay open: all are told
        log = "\n".join(path.read_text(errors="replace") for path in home.glob("serve-*.log"))
        return Seen(kind=kind, version=version, failure=in_short(error), lines=lines_of_ours(log))
    finally:
        if ours_to_remove:
            shutil.rmtree(home, ignore_errors=True)
            home.with_name(home.name + ".lock").unlink(missing_ok=True)


def _look_at(kind: str, recipe: rig.Recipe, say: rig.Say) -> Seen:
    with tempfile.TemporaryDirectory() as folder:
        socket = str(Path(folder) / SOCKET)
        environment = {"STOPGUARD_COLLECTOR": socket, "STOPGUARD_COLLECTOR_TOKEN": TOKEN}
        probes = ProbeSettings(listen=(socket,), token=TOKEN)
        with rig.start(recipe, environment=environment, options=KINDS[kind].options, say=say) as engine:
            try:
                return _behind_a_gateway(kind, recipe.version, engine, probes, say)
            except EngineUnreachable as error:  # no probe came: this version is proved from outside
                say(f"  {error}")
                return _behind_a_gateway(kind, recipe.version, engine, None, say)


def _behind_a_gateway(
    kind: str, version: str, engine: rig.RunningEngine, probes: ProbeSettings | None, say: rig.Say
) -> Seen:
    long_tokens = KINDS[kind].long_tokens
    with Subject(kind, engine.url, model=engine.model, slots=SLOTS, long_tokens=long_tokens, probes=probes) as subject:
        probing = subject.gateway.probing
        facts = [] if probing is None else probing.facts()
        trials = subject.run(lambda: _try(subject, say))
        used = None if probing is None else subject.run(lambda: _blocks_used(subject, probing))
        return Seen(
            kind=kind,
            version=version,
            started_seconds=engine.started_seconds,
            hooks_attached=_of_all(facts, lambda each: each.hooks_attached),
            hooks_missing=_of_all(facts, lambda each: each.hooks_missing),
            commands=_of_all(facts, lambda each: each.commands),
            lines=lines_of_ours(engine.log.read_text(errors="replace")),
            trials=tuple(trials),
            blocks_used_at_the_end=used,
        )


def _of_all(facts: Sequence[ProbeFacts], what: Callable[[ProbeFacts], Sequence[str]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for each in facts for name in what(each)))


async def _try(subject: Subject, say: rig.Say) -> list[Trial]:
    probing = subject.gateway.probing
    probed = probing is not None
    trials = [_trial("finish", await _finish(subject), probed)]
    for state, name in (("decode", "cancel, decode"), ("queued", "cancel, queued"), ("many_choices", "cancel, n = 3")):
        trials.append(_trial(name, await subject.leave_in(state), probed))
    if probing is not None:
        outcome, closed = await _preempt(subject, probing)
        trials.append(_trial("preempt, resume", closed, probed, outcome))
    for trial in trials:
        say(f"  {trial}")
    return trials


def _trial(name: str, closed: Closed, probed: bool, outcome: str = "") -> Trial:
    stop = closed.stop
    stopped = stop.semantics == "cancel" and stop.released_at is not None
    return Trial(
        name=name,
        outcome=outcome or f"{stop.semantics} {stop.outcome}",
        grades={ledger.label: grade(closed.ledgers, ledger, probed) for ledger in LEDGERS},
        released_seconds=(stop.released_at or 0.0) - stop.observed_at if stopped else None,
    )


async def _finish(subject: Subject) -> Closed:
    exchange = await subject.ask(subject.shape.prompt(subject.number()))
    await subject.text_of(exchange)
    return await subject.closed_book(subject.id_of(exchange))


async def _preempt(subject: Subject, probing: Probing) -> tuple[str, Closed]:
    """Preempted in the middle and resumed: whether the text is the one that it has alone."""
    prompt, tokens = subject.shape.prompt(subject.number()), subject.shape.long_tokens
    alone = await subject.text_of(await subject.ask(prompt, tokens=tokens))
    exchange = await subject.ask(prompt, tokens=tokens)
    reply, request_id = exchange.reply, subject.id_of(exchange)
    await subject.through.wait(lambda: reply.events > 10 or reply.ended, subject.shape.patience_seconds)
    preempted = (await probing.order(subject.kind, "preempt", request_id)).answer
    await asyncio.sleep(0.2)
    resumed = (await probing.order(subject.kind, "resume", request_id)).answer
    same = await subject.text_of(exchange) == alone
    told = preempted in ("applied", "accepted") and resumed in ("applied", "accepted")
    outcome = f"preempt {preempted}, resume {resumed}, {'same' if same else 'other'} text"
    return ("same text" if told and same else outcome), await subject.closed_book(request_id)


async def _blocks_used(subject: Subject, probing: Probing) -> int | None:
    """Blocks in use by the scheduler's own totals, when nothing is there any more."""
    await subject.idle()
    probing.want_names(subject.kind)
    await asyncio.sleep(1.5)
    gauges = probing.gauges(subject.kind, monotonic())
    return None if gauges is None else gauges.blocks_used


# ---- the table ---------------------------------------------------------------------------------------------------


def table(seen: Sequence[Seen]) -> str:
    """Markdown: a row for each version, and below it what the plugin has said there, or why it was not tried."""
    head = ["version", "hooks attached", "not there", *(ledger.label for ledger in LEDGERS)]
    head += ["stop → released (decode, queued)", "preempted and resumed", "blocks in use at the end"]
    rows = [head, ["---"] * len(head), *(_row(each) for each in seen)]
    lines = [f"| {' | '.join(row)} |" for row in rows]
    for each in seen:
        told = list(each.lines)
        if each.failure:
            told.append(each.failure)
        lines += ["", f"{each.version}, in the log:", "", "```", *(told or ["(nothing: all of it is there)"]), "```"]
    return "\n".join(lines) + "\n"


def _row(seen: Seen) -> list[str]:
    if seen.failure:
        return [seen.version, "not tried", *[""] * (len(LEDGERS) + 4)]
    trials = {trial.name: trial for trial in seen.trials}
    proved = [worst(trial.grades.get(ledger.label, "") for trial in seen.trials) or "-" for ledger in LEDGERS]
    times = [_milliseconds(trials.get(name)) for name in ("cancel, decode", "cancel, queued")]
    missing = ", ".join(f"`{name}`" for name in seen.hooks_missing) or "-"
    preempted = trials.get("preempt, resume")
    used = "not said" if seen.blocks_used_at_the_end is None else str(seen.blocks_used_at_the_end)
    outcome = preempted.outcome if preempted is not None else "-"
    return [seen.version, str(len(seen.hooks_attached)), missing, *proved, ", ".join(times), outcome, used]


def _milliseconds(trial: Trial | None) -> str:
    if trial is None or trial.released_seconds is None:
        return "-"
    return f"{trial.released_seconds * 1000:.0f} ms"


def _ordered(seen: dict[str, Seen]) -> list[Seen]:
    return [
        seen[version] for version in sorted(seen, key=lambda text: [int(part) for part in re.findall(r"\d+", text)])
    ]


@click.command(help=__doc__)
@click.argument("kinds", nargs=-1, type=click.Choice(sorted(KINDS)))
@click.option("--version", "versions", multiple=True, help="Only this version (may be repeated).")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Keeps what was seen, version by version.")
@click.option("--markdown", "markdown_file", type=click.Path(path_type=Path), help="Write the tables here too.")
@click.option("--keep", is_flag=True, help="Leave the environments where they are.")
def main(
    kinds: tuple[str, ...],
    versions: tuple[str, ...],
    json_file: Path | None,
    markdown_file: Path | None,
    keep: bool,
) -> None:
    """Look at KINDS, print the tables; ends with 1 when a version could not be tried."""
    seen: dict[str, dict[str, Seen]] = {}
    if json_file is not None and json_file.exists():
        seen = msgspec.json.decode(json_file.read_bytes(), type=dict[str, dict[str, Seen]])
    failed = False
    for kind in kinds or tuple(sorted(KINDS)):
        for version in versions or KINDS[kind].versions:
            one = seen.setdefault(kind, {})[version] = look_at(kind, version, keep)
            failed |= bool(one.failure)
            if json_file is not None:
                json_file.write_bytes(msgspec.json.format(msgspec.json.encode(seen)))
    text = "\n".join(f"## {kind}\n\n{table(_ordered(each))}" for kind, each in seen.items())
    click.echo(text)
    if markdown_file is not None:
        markdown_file.write_text(text)
    if failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()

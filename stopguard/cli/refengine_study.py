"""`stopguard refengine study`: victim policies and ways to preempt, side by side, over seeded loads in virtual time."""

from __future__ import annotations

from pathlib import Path

import click

__all__ = ["command"]


@click.command()
@click.option("--policy", "policies", multiple=True, metavar="NAME", help="Only this arm; may be repeated.")
@click.option("--load", "loads", multiple=True, metavar="NAME", help="Only this load; may be repeated.")
@click.option("--hostile", is_flag=True, help="The hostile loads: exit 1 when one of them does harm.")
@click.option(
    "--seeds", type=click.IntRange(1, 100), default=3, show_default=True, help="Runs of each, with seeds 1 to N."
)
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True)
@click.option(
    "--plots", type=click.Path(file_okay=False, path_type=Path), help="Write the pictures into this folder too."
)
def command(
    policies: tuple[str, ...], loads: tuple[str, ...], hostile: bool, seeds: int, form: str, plots: Path | None
) -> None:
    """Compare victim policies: urgent latency, makespan, tokens recomputed, fairness.

    Arms are `arrival` and `native` (which do not preempt), the victim policies, `gateway`, and `slots` with
    `slots gateway` (an engine with few slots and no preemption). The same seeds give the same figures.
    """
    from stopguard.errors import ConfigurationError
    from stopguard.testing.preemption_loads import HOSTILE, LOADS
    from stopguard.testing.preemption_study import ARMS, render_json, render_text, study

    known = {arm.name: arm for arm in ARMS}
    for name in policies:
        if name not in known:
            raise ConfigurationError(f"there is no arm {name!r}; there are: {', '.join(known)}")
    arms = [known[name] for name in policies] or list(ARMS)
    chosen = list(loads) or [name for name in LOADS if (name in HOSTILE) is hostile]
    rows = study(chosen, arms, range(1, seeds + 1), told=lambda load: click.echo(f"{load} done", err=True))
    click.echo((render_json if form == "json" else render_text)(rows), nl=False)
    if plots is not None:
        from stopguard.preemption import POLICIES
        from stopguard.testing.preemption_plots import bars_of_first_tokens, cost_and_gain

        plots.mkdir(parents=True, exist_ok=True)
        for load in chosen:
            (plots / f"preemption_{load}.svg").write_text(bars_of_first_tokens(rows, load), encoding="utf-8")
        if any(row.arm in POLICIES for row in rows):
            (plots / "preemption_cost.svg").write_text(cost_and_gain(rows, chosen), encoding="utf-8")
    if any(row.load in HOSTILE and not row.holds for row in rows):
        raise click.exceptions.Exit(1)

"""`stopguard refengine compare`: five ways to stop, side by side, measured in staged runs."""

from __future__ import annotations

import click

__all__ = ["command"]


@click.command()
@click.option("--policy", "policies", multiple=True, metavar="NAME", help="Only this policy; may be repeated.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Seed of the staged loads.")
@click.option("--format", "form", type=click.Choice(["text", "json", "markdown"]), default="text", show_default=True)
def command(policies: tuple[str, ...], seed: int, form: str) -> None:
    """Stage stops and preemptions under each policy, in virtual time, and show how they differ.

    The words are derived from what was measured in the runs; the figures are printed beside them.
    """
    from stopguard.refengine.compare import compare, render_json, render_markdown, render_text

    render = {"text": render_text, "json": render_json, "markdown": render_markdown}[form]
    click.echo(render(compare(policies, seed)), nl=False)

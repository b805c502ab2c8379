"""``eagle3 plan``: gains, memory and costs of speculation, computed without hardware."""

from __future__ import annotations

import typer

from eagle3_jax.cli._options import grouped
from eagle3_jax.cli.plan import cost, memory, rollout, roofline, speedup

app = typer.Typer(
    help="Plan speculation: speed-up, memory, roofline, cost, rollout.",
    epilog="Example: eagle3 plan roofline --target Llama-3.3-70B --weights fp8 --gpu H200",
    rich_markup_mode=None,
)
app.command("speedup", epilog=speedup.EXAMPLE)(grouped(speedup.speedup))
app.command("memory", epilog=memory.EXAMPLE)(grouped(memory.memory))
app.command("roofline", epilog=roofline.EXAMPLE)(grouped(roofline.roofline))
app.command("cost", epilog=cost.EXAMPLE)(grouped(cost.cost))
app.command("rollout", epilog=rollout.EXAMPLE)(grouped(rollout.rollout))

"""``eagle3 plan``: the gains, the memory and the costs of speculation, computed without hardware."""

from __future__ import annotations

import typer

from eagle3_jax.cli import plan_cost, plan_memory, plan_rollout, plan_roofline, plan_speedup
from eagle3_jax.cli._options import grouped

app = typer.Typer(
    help="Plan speculation: speed-up, memory, roofline, cost, rollout.",
    epilog="Example: eagle3 plan roofline --target Llama-3.3-70B --weights fp8 --gpu H200",
    rich_markup_mode=None,
)
app.command("speedup", epilog=plan_speedup.EXAMPLE)(grouped(plan_speedup.speedup))
app.command("memory", epilog=plan_memory.EXAMPLE)(grouped(plan_memory.memory))
app.command("roofline", epilog=plan_roofline.EXAMPLE)(grouped(plan_roofline.roofline))
app.command("cost", epilog=plan_cost.EXAMPLE)(grouped(plan_cost.cost))
app.command("rollout", epilog=plan_rollout.EXAMPLE)(grouped(plan_rollout.rollout))

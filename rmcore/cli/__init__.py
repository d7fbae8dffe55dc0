"""The commands that need no orchestrator; `rm-opt` mounts them beside its own."""

import typer

from rmcore.cli import (
    active,
    analyze,
    benchmark,
    card,
    data,
    data_noise,
    ensemble,
    explain,
    export,
    measure,
    overoptimize,
    probe,
    push,
    score,
    serve,
    soup,
    train,
)

app = typer.Typer(no_args_is_help=True)
app.command("train")(train.train)
app.command("evaluate")(measure.evaluate)
app.command("analyze")(analyze.analyze)
app.command("score")(score.score)
app.command("benchmark")(benchmark.benchmark)
app.command("probe")(probe.probe)
app.command("explain")(explain.explain)
app.command("diff")(measure.diff)
app.command("ensemble")(ensemble.ensemble)
app.command("soup", hidden=True)(soup.soup)  # the root page is full; the page of `ensemble` names it
app.command("overoptimize")(overoptimize.overoptimize)
app.command("export")(export.export)
app.command("card")(card.card)
app.command("push")(push.push)
app.command("serve")(serve.serve)
app.command("publish")(serve.publish)
data.app.command("noise")(data_noise.noise)
app.add_typer(data.app, name="data")
app.add_typer(active.app, name="active")
app.add_typer(measure.readiness_app, name="readiness")

"""`chairlift`: the command line."""

import typer

from chairlift_client.commands import (
    bench,
    chat,
    generate,
    plan,
    probe,
    profile,
    serve,
    top,
    trace,
    tune,
)

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
    help="Serve a language model with continuous batching, and talk to it.",
)
app.command()(serve.serve)
app.command()(generate.generate)
app.command()(chat.chat)
app.command()(bench.bench)
app.command()(tune.tune)
app.command()(top.top)
app.command()(profile.profile)
app.command()(trace.trace)
app.command()(probe.probe)
# The arguments belong to the model directory's own script.
app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(plan.plan)

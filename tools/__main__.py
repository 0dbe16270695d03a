"""`python -m tools COMMAND`."""

from .cli import app

app(prog_name="python -m tools")

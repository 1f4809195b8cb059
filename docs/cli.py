"""Writes cli.md, the reference of the command line, from what `--help` says.

python docs/cli.py
"""

from pathlib import Path

import click

from vitrail.cli import main

HEADER = """# The command line

What `vitrail --help` and the help of each verb say; `python docs/cli.py` writes this page.
"""


def reference() -> str:
    """The whole page."""
    parts = [HEADER, block(main, "vitrail")]
    for name, command in main.commands.items():
        parts += [f"## {name}\n", block(command, f"vitrail {name}")]
    return "\n".join(parts)


def block(command: click.Command, name: str) -> str:
    """The help of one verb, at a width that does not depend on the terminal."""
    context = click.Context(
        command,
        info_name=name,
        terminal_width=100,
        max_content_width=100,
        help_option_names=["-h", "--help"],
    )
    return f"```\n{command.get_help(context)}\n```\n"


if __name__ == "__main__":
    Path(__file__).with_name("cli.md").write_text(reference(), encoding="utf-8")

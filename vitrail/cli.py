"""The command line: one function per verb, in the order data flows.

Imports inside the verbs keep `--help` from waiting for torch.
"""

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from vitrail import __version__
from vitrail.errors import VitrailError


class Verbs(click.Group):
    """Lists verbs as they were written, and turns a user's mistake into one line."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except VitrailError as error:
            click.echo(f"Error: {error}", err=True)
            sys.exit(error.exit_code)


@click.group(cls=Verbs, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="vitrail")
def main() -> None:
    """The Vision Transformer paper as one tool.

    MODEL is a weights file or folder in any supported format (Google .npz, timm, Hugging Face
    transformers, torchvision, Vitrail's own), or a published name that `vitrail models` lists.
    """


@main.command()
@click.argument("pattern", default="")
@click.option("--json", "as_json", is_flag=True, help="One JSON value on stdout.")
def models(pattern: str, as_json: bool) -> None:
    """Every variant and published checkpoint: parameters, GMACs, published accuracy.

    PATTERN keeps the names that contain it; * and ? are wildcards.
    """
    from vitrail.weights.listing import listing

    rows = listing(pattern)
    if not rows:
        raise VitrailError(f"no model has '{pattern}' in its name; `vitrail models` lists all")
    if as_json:
        click.echo(json.dumps(rows, ensure_ascii=False))
        return
    from vitrail.console import table

    columns = ("name", "parameters", "GMACs", "pixels", "tokens", "ImageNet top-1", "from")
    table(columns, [models_row(row) for row in rows])


def models_row(row: dict[str, Any]) -> Sequence[str]:
    """A line of the table."""
    top1 = "" if row["top1"] is None else f"{row['top1']:.2f} %"
    numbers = (
        f"{row['parameters']:,}",
        f"{row['gmacs']:.2f}",
        f"{row['size']}",
        f"{row['tokens']}",
    )
    return (row["name"], *numbers, top1, row["cited"])


@main.command()
@click.argument("source", metavar="SRC")
@click.argument("target", metavar="DST", type=click.Path(path_type=Path))
@click.option(
    "--to",
    required=True,
    type=click.Choice(["google", "timm", "huggingface", "torchvision", "vitrail"]),
    help="The format to write.",
)
@click.option("--size", help="Interpolate the positions to images of SIDE or ROWSxCOLUMNS pixels.")
@click.option("--json", "as_json", is_flag=True, help="One JSON value on stdout.")
def convert(source: str, target: Path, to: Any, size: str | None, as_json: bool) -> None:
    """Any published checkpoint format to any other, with a numeric parity report.

    SRC is any MODEL. The suffix of DST picks the container: .npz for google, .safetensors or .pth,
    or no suffix for a folder with config.json.
    """
    from vitrail.weights.converting import convert

    parity = convert(source, target, to=to, size=None if size is None else parse_size(size))
    if as_json:
        click.echo(json.dumps(parity.to_dict()))
    else:
        click.echo("\n".join(parity.lines()))
    if not parity.holds:
        click.echo(f"Error: {target} does not give the same answers; do not use it", err=True)
        sys.exit(1)


def parse_size(text: str) -> int | tuple[int, int]:
    """`384` or `384x512`."""
    match = re.fullmatch(r"(\d+)(?:x(\d+))?", text)
    if not match or int(match[1]) < 1:
        raise VitrailError(f"--size {text}: expected pixels, as 384 or 384x512")
    return int(match[1]) if match[2] is None else (int(match[1]), int(match[2]))

"""The command line: one function per verb, in the order data flows.

Imports inside the verbs keep `--help` from waiting for torch.
"""

import json
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import click

from vitrail import __version__
from vitrail.console import echo, escaped
from vitrail.errors import FailureError, VitrailError, one_line, out_of_memory


class Verbs(click.Group):
    """Lists verbs as they were written, and turns a user's mistake into one line."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except click.ClickException as error:
            vars(error)["message"] = escaped(error.message)
            raise
        except VitrailError as error:
            fail(str(error), error.exit_code)
        except RecursionError:
            fail("something in the input is nested too deeply to be read")
        except (MemoryError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and not out_of_memory(error):
                raise
            fail(f"out of memory ({one_line(error)}); try a smaller batch or fewer workers")


def fail(message: str, code: int = 1) -> NoReturn:
    """Ends with one line."""
    echo(f"Error: {escaped(message)}", err=True)
    sys.exit(code)


@click.group(cls=Verbs, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="vitrail")
def main() -> None:
    """The Vision Transformer paper as one tool.

    MODEL is a run folder, a weights file or folder in any supported format (Google .npz, timm,
    Hugging Face transformers, torchvision, Vitrail's own), a published name that `vitrail models`
    lists, or `builtin`, which needs no download. DATA is a folder with one sub-folder per class
    (also train/ val/ test/ above them), tar shards, or a catalog name (digits, cifar10,
    flower_photos, pets, …). SETTINGS are section.key=value; `vitrail config` explains every one.
    """


AS_JSON = click.option("--json", "as_json", is_flag=True, help="One JSON value on stdout.")
DEVICE = click.option("--device", default="auto", help="auto, cpu, cuda, cuda:1 or mps.")
SPLIT = click.option(
    "--split",
    type=click.Choice(["train", "val", "test", "all"]),
    callback=lambda _context, _option, value: value or "",
    help="Default: test of the data MODEL was trained on, all of a folder it never saw.",
)
SETTINGS = click.argument("settings", nargs=-1, metavar="[SETTINGS]...")


@main.command()
@click.option("--out", default="runs/demo", show_default=True, help="The run folder.")
def demo(out: str) -> None:
    """The whole story on embedded data, on a CPU, in about two minutes."""
    from vitrail.training.train import demo

    demo(out)


@main.command()
@click.argument("pattern", default="")
@AS_JSON
def models(pattern: str, as_json: bool) -> None:
    """Every variant and published checkpoint: parameters, GMACs, published accuracy.

    PATTERN keeps the names that contain it; * and ? are wildcards.
    """
    from vitrail.weights.published import listing

    rows = listing(pattern)
    if not rows:
        raise VitrailError(f"no model has '{pattern}' in its name; `vitrail models` lists all")
    if as_json:
        echo(json.dumps(rows, ensure_ascii=False))
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
@click.argument("data")
@SETTINGS
@click.option("--check", is_flag=True, help="Decode every image; list broken ones and why.")
@click.option("--duplicates", is_flag=True, help="Find equal and nearly equal images.")
@click.option(
    "--against",
    metavar="DATA",
    multiple=True,
    help="Find images that also occur in DATA; repeatable.",
)
@click.option("--mirrored", is_flag=True, help="Count mirror images as duplicates.")
@click.option("--report", metavar="FILE", default="", help="Write a page about duplicates.")
@click.option(
    "--filtered",
    metavar="FILE",
    default="",
    help="Write the training images that have no duplicate in val or test.",
)
@click.option("--sheet", is_flag=True, help="Write a contact sheet, NAME-sheet.jpg.")
@click.option(
    "--pack", metavar="DST", default="", help="Write decoded images to a memory-mapped store."
)
@click.option("--split", is_flag=True, help="List which image is in which split.")
@click.option("--workers", default=0, show_default=True, help="Processes that decode.")
@AS_JSON
def data(data: str, settings: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Count, check, split, pack, find duplicates, draw a contact sheet.

    Without options: classes and counts. SETTINGS are those of [data], such as data.val=0.2.
    """
    from vitrail.data.check import CheckOptions, inspect_dataset, show_result

    result = inspect_dataset(data, CheckOptions(**options), settings)
    if as_json:
        plain = {
            key: value.to_dict() if hasattr(value, "to_dict") else value
            for key, value in result.items()
        }
        echo(json.dumps(plain, ensure_ascii=False))
    else:
        # With --split, only the list, for a pipe.
        show_result(result, table=options["check"] or not options["split"])


@main.command()
@click.argument("recipe", default="")
@SETTINGS
def config(recipe: str, settings: tuple[str, ...]) -> None:
    """Every setting, explained; the output is itself a recipe.

    Without RECIPE: the names of all recipes.
    """
    from vitrail import settings as recipes

    if not recipe:
        echo("\n".join(recipes.recipes()))
    else:
        echo(recipes.to_toml(recipes.load(recipe, settings)), end="")


@main.command()
@click.argument("what", metavar="RECIPE|FOLDER")
@SETTINGS
@click.option("--out", help="The run folder.  [default: runs/NAME, numbered where it exists]")
@click.option("--resume", is_flag=True, help="Continue an interrupted run.")
@DEVICE
def train(what: str, settings: tuple[str, ...], out: str | None, resume: bool, device: str) -> None:
    """Pre-train, fine-tune, self-supervise: the recipe decides.

    A FOLDER of labeled pictures (or any DATA) is short for the recipe finetune/folder with
    data.source=FOLDER. A run folder with --resume goes on with that run; without --out, --resume
    continues the newest unfinished run with the same settings.
    """
    from vitrail.training.train import train

    run = train(what, settings, out=out, resume=resume, device=device)
    if run.info().get("status") == "stopped":
        sys.exit(1)


@main.command()
@click.argument("what", nargs=-1, required=True, metavar="RECIPE|FOLDER... [SETTINGS]...")
@click.option("--seeds", default=3, show_default=True, help="Runs with the chosen settings.")
@click.option("--out", help="The folder of its runs.  [default: runs/NAME-sweep, numbered]")
@DEVICE
@AS_JSON
def sweep(what: tuple[str, ...], seeds: int, out: str | None, device: str, as_json: bool) -> None:
    """Grid on a held-out part of train, retrain on all of train, test once per seed.

    A setting with a list is tried at each value: optim.lr=[0.003,0.01,0.03]. Several recipes, as
    flowers/vit flowers/resnet, are swept alike and compared on one page. With several data sets in
    data.source, as vtab/vit has them, one setting is chosen for all of them. The same command goes
    on where an interrupted sweep stopped.
    """
    from vitrail.console import is_main
    from vitrail.training.sweep import compare, sweep

    settings = [word for word in what if "=" in word]
    recipes = [word for word in what if "=" not in word]
    if len(recipes) == 1:
        result = sweep(recipes[0], settings, seeds=seeds, out=out, device=device)
    else:
        result = compare(recipes, settings, seeds=seeds, out=out, device=device)
    if not is_main():
        return
    if as_json:
        echo(json.dumps(result))
    else:
        show_sweeps(result)


def show_sweeps(result: dict[str, Any]) -> None:
    """Every seed, mean and deviation, and where the page is; several data sets as a table."""
    from vitrail.console import table
    from vitrail.reporting.sweeps import tasks

    for one in result.get("sweeps", [result]):
        if "tasks" in one:
            found = tasks(one, one["name"])
            table(found.columns, found.rows)
            echo(found.note)
            continue
        for row in one["seeds"]:
            echo(f"seed {row['seed']}  test {100 * row['top1']:.2f} %  {row['run']}")
        spread = "" if one["std"] is None else f" ± {100 * one['std']:.2f}"
        count = f"n = {one['n']:,}, {len(one['seeds'])} seeds"
        echo(f"{one['name']}  test {100 * one['mean']:.2f}{spread} % ({count})")
        echo(f"next  vitrail predict {shlex.quote(one['seeds'][0]['run'])} photo.jpg")
    echo(f"report  {result['report']}")


@main.command()
@click.argument("model")
@click.argument("data")
@SPLIT
@click.option(
    "--labels",
    type=click.Choice(["imagenet", "real", "objectnet", "objectnet-unmasked"]),
    help="Ask a model of ImageNet's classes about other labels or pictures.",
)
@click.option("--batch", default=64, show_default=True, help="Pictures at a time.")
@click.option("--workers", default=0, show_default=True, help="Processes that decode.")
@DEVICE
@AS_JSON
def evaluate(model: str, data: str, labels: str | None, as_json: bool, **options: Any) -> None:
    """Top-1, top-5, per-class precision, recall and F1, confusion, calibration."""
    from vitrail.console import is_main
    from vitrail.evaluation.evaluate import evaluate
    from vitrail.evaluation.presentation import show

    result = evaluate(model, data, labels=labels or "", **options)
    if not is_main():
        return
    if as_json:
        examples = [one for pair in result["confused"] for one in pair["examples"]]
        for mistake in (*result["mistakes"], *examples):
            mistake.pop("thumbnail", None)
        echo(json.dumps(result, ensure_ascii=False))
    else:
        show(result)


@main.command()
@click.argument("model")
@click.argument("data")
@click.option("--shots", default="1,5,10,25", show_default=True, help="Pictures of each class.")
@click.option("--seeds", default=3, show_default=True, help="Choices of pictures.")
@click.option("--ridge", default="1024", show_default=True, help="Strengths, as 1,32,1024.")
@SPLIT
@DEVICE
@AS_JSON
def fewshot(
    model: str, data: str, shots: str, seeds: int, ridge: str, as_json: bool, **options: Any
) -> None:
    """Closed-form linear accuracy on frozen features, k-NN beside it.

    A few pictures of each class of train are shown, all pictures of the split are asked about.
    Nothing is trained, and features are kept for the next time.
    """
    from vitrail.console import is_main
    from vitrail.evaluation.fewshot import fewshot
    from vitrail.evaluation.presentation import show_fewshot

    whole, numbers = parse_numbers("--shots", shots), parse_numbers("--ridge", ridge, float)
    result = fewshot(model, data, shots=whole, seeds=seeds, ridges=numbers, **options)
    if not is_main():
        return
    if as_json:
        echo(json.dumps(result, ensure_ascii=False))
    else:
        show_fewshot(result)


@main.command()
@click.argument("model")
@click.argument("images", nargs=-1, required=True, metavar="IMAGE|FOLDER...")
@click.option("--top", default=5, show_default=True, help="Guesses for each picture.")
@click.option("--csv", "csv_path", metavar="FILE", default="", help="Write CSV; - is stdout.")
@click.option("--features", metavar="FILE", default="", help="Write vectors, .npz or .parquet.")
@click.option("--batch", default=0, help="Pictures at a time.  [default: what fits]")
@click.option("--workers", default=0, help="Threads that decode and judge.  [default: all cores]")
@DEVICE
@click.option("--json", "as_json", is_flag=True, help="One JSON object per line on stdout.")
def predict(model: str, images: tuple[str, ...], **options: Any) -> None:
    """Top guesses, as a table, CSV or JSON lines, in the order given.

    Folders are searched however deep; - is a picture on standard input. A file that cannot be read
    is one line, and the rest goes on.
    """
    from vitrail.prediction.writing import write

    write(model, images, **options)


@main.command()
@click.argument("model")
@click.argument("images", nargs=-1, metavar="[IMAGE]...")
@click.option("--out", required=True, metavar="DIR", help="The folder for pictures and numbers.")
@click.option("--layers", help="Layers to show, as 0,5,-1; all distances and four maps if not set.")
@click.option("--size", help="Show the images at SIDE or ROWSxCOLUMNS pixels.")
@click.option(
    "--class", "target", help="Class of gradient-weighted rollout.  [default: the answer]"
)
@DEVICE
@AS_JSON
def inspect(model: str, images: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Filters, positions, attention distance, rollout, as pictures.

    Without IMAGE: what the weights alone show, which is filters and positions.
    """
    from vitrail.inspection.inspecting import inspect

    if options["layers"] is not None:
        options["layers"] = parse_numbers("--layers", options["layers"])
    options["size"] = None if options["size"] is None else parse_size(options["size"])
    found = inspect(model, list(images), **options)
    for name, reason in found["broken"]:
        echo(f"left out  {name}: {reason}", err=True)
    if as_json:
        echo(json.dumps(found, ensure_ascii=False))
    else:
        show_inside(found)


def show_inside(found: dict[str, Any]) -> None:
    """What `vitrail inspect` found, for a terminal."""
    echo(found["model"])
    for row in (found["attention_distance"] or {"layers": ()})["layers"]:
        heads = "  ".join(f"{pixels:6.1f}" for pixels in row["heads"])
        echo(f"layer {row['layer']:>2}  {heads}  px; {row['uniform']:.1f} if everywhere alike")
    for what, reason in found["absent"].items():
        echo(f"no {what}: {reason}")
    for pictures in (found["files"], *(image["files"] for image in found["images"])):
        echo(pictures["page"])


@main.command()
@click.argument("models", nargs=-1, required=True, metavar="MODEL...")
@click.option("--sizes", default="", help="Pixels, as 64,128,224,384,512; else each model's own.")
@click.option("--batches", default="", help="Batch sizes, as 1,64; else 1, 2, 4 … to the peak.")
@click.option("--train", is_flag=True, help="Forward and backward in place of forward alone.")
@click.option("--peers", is_flag=True, help="timm's model of the same name beside ours.")
@click.option(
    "--precision",
    type=click.Choice(["auto", "float32", "bfloat16", "float16"]),
    default="auto",
    show_default=True,
    help="auto: bfloat16 where a GPU has it.",
)
@click.option("--seconds", default=20.0, show_default=True, help="For one model at one size.")
@click.option("--memory", default=0.0, help="GiB a CPU may use; by default half of what is free.")
@DEVICE
@AS_JSON
def benchmark(
    models: tuple[str, ...], sizes: str, batches: str, as_json: bool, **options: Any
) -> None:
    """Images per second, latency, memory, largest batch, GMACs.

    A variant's name, as B/16, is built fresh; any other MODEL is loaded.
    """
    from vitrail.benchmarking.benchmark import benchmark, show

    options["sizes"] = parse_numbers("--sizes", sizes)
    options["batches"] = parse_numbers("--batches", batches)
    result = benchmark(models, **options)
    if as_json:
        echo(json.dumps(result))
    else:
        show(result)


def parse_numbers(option: str, text: str, kind: type[Any] = int) -> tuple[Any, ...]:
    """`64,128`; nothing gives none."""
    try:
        return tuple(kind(word) for word in text.split(",") if text.strip())
    except ValueError:
        raise VitrailError(f"{option} {text}: expected numbers, as 1,5,10") from None


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
@click.option(
    "--heads",
    type=click.IntRange(min=1),
    help="Number of attention heads, where SRC does not state it.",
)
@click.option(
    "--gelu",
    type=click.Choice(["erf", "tanh"]),
    help="GELU of SRC, where that is not the one its format implies.",
)
@AS_JSON
def convert(
    source: str,
    target: Path,
    to: Any,
    size: str | None,
    heads: int | None,
    gelu: Any,
    as_json: bool,
) -> None:
    """Any published checkpoint format to any other, with a numeric parity report.

    SRC is any MODEL. The suffix of DST picks the container: .npz for google, .safetensors or .pth,
    or no suffix for a folder with config.json.
    """
    from vitrail.weights.convert import convert

    pixels = None if size is None else parse_size(size)
    parity = convert(source, target, to=to, size=pixels, heads=heads, gelu=gelu)
    if as_json:
        echo(json.dumps(parity.to_dict()))
    else:
        echo("\n".join(parity.lines()))
    if not parity.holds:
        fail(f"{target} does not give the same answers; do not use it")


def parse_size(text: str) -> int | tuple[int, int]:
    """`384` or `384x512`."""
    match = re.fullmatch(r"(\d+)(?:x(\d+))?", text)
    if not match or int(match[1]) < 1:
        raise VitrailError(f"--size {text}: expected pixels, as 384 or 384x512")
    return int(match[1]) if match[2] is None else (int(match[1]), int(match[2]))


@main.command()
@click.argument("model")
@click.argument("target", metavar="DST", type=click.Path(path_type=Path))
@click.option(
    "--format",
    "kind",
    type=click.Choice(["onnx", "pt2", "hub"]),
    help="[default: what the name of DST ends in]",
)
@click.option("--int8", is_flag=True, help="8-bit numbers for CPUs, calibrated on DATA (onnx).")
@click.option("--data", metavar="DATA", default="", help="Print accuracy before and after.")
@click.option("--dynamic-size", is_flag=True, help="Any size at run time, where the model allows.")
@click.option(
    "--preprocessing",
    type=click.Choice(["inside", "beside"]),
    default="inside",
    show_default=True,
    help="In the graph, or described in a JSON file beside it.",
)
@click.option("--to", type=click.Choice(["timm", "transformers"]), help="Who loads the hub folder.")
@click.option("--upload", metavar="NAME", default="", help="Send the hub folder to OWNER/NAME.")
@AS_JSON
def export(model: str, target: Path, as_json: bool, **options: Any) -> None:
    """A file that runs without Vitrail, checked against the original.

    DST is a name that ends in .onnx or .pt2, or a folder for --format hub.
    """
    from vitrail.exporting.choosing import export

    parity = export(model, target, **options)
    echo(json.dumps(parity.to_dict()) if as_json else "\n".join(parity.lines()))
    if not parity.holds:
        raise FailureError(f"{target} does not give the same answers; do not use it")


@main.command()
@click.argument("runs", nargs=-1, required=True, metavar="RUN...")
@click.option(
    "--out", help="Where the page goes.  [default: the run's folder; report.html for several runs]"
)
def report(runs: tuple[str, ...], out: str | None) -> None:
    """report.html of a run, or of `builtin`; several runs give one comparison."""
    from vitrail.reporting.page import report

    echo(str(report(runs, out)))


@main.command()
@click.argument("models", nargs=-1, required=True, metavar="MODEL...")
@click.option("--host", default="127.0.0.1", show_default=True, help="Other hosts need a token.")
@click.option("--port", default=8000, show_default=True, help="0: any that is free.")
@click.option("--token", envvar="VITRAIL_TOKEN", default="", help="Also as VITRAIL_TOKEN.")
@click.option("--insecure", is_flag=True, help="Let other hosts in without a token.")
@click.option("--origin", multiple=True, help="Site whose pages may use it; may be repeated.")
@click.option("--batch", default=32, show_default=True, help="Pictures computed together.")
@click.option("--wait", default=5.0, show_default=True, help="Milliseconds to wait for others.")
@click.option("--queue", default=256, show_default=True, help="Pictures waiting; then 503.")
@click.option("--images", default=32, show_default=True, help="Pictures in one request.")
@click.option("--megabytes", default=16.0, show_default=True, help="Size of one request.")
@click.option("--megapixels", default=50.0, show_default=True, help="Size of one picture.")
@click.option("--seconds", default=30.0, show_default=True, help="For one request.")
@click.option("--connections", default=512, show_default=True, help="Open at once.")
@click.option("--idle", default=10.0, show_default=True, help="Seconds for a request to begin.")
@DEVICE
def serve(
    models: tuple[str, ...],
    host: str,
    port: int,
    token: str,
    insecure: bool,
    origin: tuple[str, ...],
    device: str,
    **limits: Any,
) -> None:
    """Web page and JSON API, on localhost unless told otherwise.

    Several models are called by the names of their folders, or as NAME=MODEL.
    """
    from vitrail.serving.limits import Limits
    from vitrail.serving.server import serve

    serve(
        models,
        host=host,
        port=port,
        token=token,
        insecure=insecure,
        origins=origin,
        device=device,
        limits=Limits(**limits),
    )


@main.command()
@click.argument("folder", default="runs")
@AS_JSON
def runs(folder: str, as_json: bool) -> None:
    """The table of runs below FOLDER (runs/ by default)."""
    from vitrail.console import table
    from vitrail.runs import find, row

    rows = [row(run) for run in find(Path(folder))]
    if as_json:
        echo(json.dumps(rows, ensure_ascii=False))
        return
    if not rows:
        raise VitrailError(f"no runs below {folder}; `vitrail demo` makes one")
    columns = ("run", "status", "top-1", "n", "part", "parameters", "time", "started")
    table(columns, [runs_row(row) for row in rows])


def runs_row(row: dict[str, Any]) -> Sequence[str]:
    """A line of the table."""
    from vitrail.console import duration

    top1 = "" if row["top1"] is None else f"{100 * row['top1']:.2f} %"
    parameters = "" if row["parameters"] is None else f"{row['parameters']:,}"
    return (
        *(row["run"], row["status"], top1, f"{row['n']:,}" if row["n"] else "", row["split"]),
        *(parameters, duration(row["seconds"]), row["started"]),
    )

"""The command line: one function per command.

Imports inside the commands keep `--help` from waiting for torch.
"""

import json
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import click

from vitrail import __version__
from vitrail.console import echo, escaped, is_main
from vitrail.errors import FailureError, VitrailError, one_line, out_of_memory


class Commands(click.Group):
    """Lists commands in source order, and prints a user's mistake as one line."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args:  # click's help
            return super().parse_args(ctx, args)
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            fail_usage(error)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except click.UsageError as error:
            fail_usage(error)
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


def fail_usage(error: click.UsageError) -> NoReturn:
    """Print one line instead of click's four, and name the --help to read."""
    message = error.format_message()
    if not message.endswith("?") and error.ctx is not None:
        message = f"{message.removesuffix('.')}; see `{error.ctx.command_path} --help`"
    fail(message, error.exit_code)


def fail(message: str, code: int = 1) -> NoReturn:
    """Print the error as one line and exit."""
    echo(f"Error: {escaped(message)}", err=True)
    sys.exit(code)


def print_result(result: Any, as_json: bool, show: Callable[[Any], None]) -> None:
    """One JSON value, or what `show` prints; of several processes, only the main one prints."""
    if not is_main():
        return
    if as_json:
        echo(json.dumps(result, ensure_ascii=False))
    else:
        show(result)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="vitrail")
def main() -> None:
    """Train, evaluate, inspect, convert, export and serve Vision Transformers.

    MODEL is a run folder, a weights file or folder in any supported format (Google .npz, timm,
    Hugging Face transformers, torchvision, Vitrail), the name of a published checkpoint (see
    `vitrail models`), or `builtin`, which needs no download. DATA is a folder with one sub-folder
    per class (optionally inside train/, val/ and test/), tar shards, a packed store, or a catalog
    name (digits, cifar10, flower_photos, pets, …). SETTINGS are section.key=value pairs; `vitrail
    config RECIPE` explains all of them.
    """


AS_JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON value to stdout.")
DEVICE = click.option("--device", default="auto", help="Device: auto, cpu, cuda, cuda:1 or mps.")
FAST = click.option(
    "--fast", is_flag=True, help="Use the fastest form of MODEL that keeps 99% of its predictions."
)
SPLIT = click.option(
    "--split",
    type=click.Choice(["train", "val", "test", "all"]),
    callback=lambda _context, _option, value: value or "",
    help="[default: test of the data MODEL was trained on or of data with a test split, else all]",
)
SETTINGS = click.argument("settings", nargs=-1, metavar="[SETTINGS]...")


@main.command()
@click.option("--out", default="runs/demo", show_default=True, help="Run folder.")
def demo(out: str) -> None:
    """Train a ViT on digits, on a CPU, in about two minutes."""
    from vitrail.training.train import demo

    demo(out)


@main.command()
@click.argument("pattern", default="")
@AS_JSON
def models(pattern: str, as_json: bool) -> None:
    """List model variants and published checkpoints.

    Shows parameters, GMACs and published accuracy. PATTERN selects names that contain it; * and ?
    are wildcards.
    """
    from vitrail.weights.published import listing

    rows = listing(pattern)
    if not rows:
        raise VitrailError(f"no model name contains '{pattern}'; `vitrail models` lists them all")
    if as_json:
        echo(json.dumps(rows, ensure_ascii=False))
        return
    from vitrail.console import print_table

    columns = ("name", "parameters", "GMACs", "pixels", "tokens", "ImageNet top-1", "from")
    print_table(columns, [models_row(row) for row in rows])


def models_row(row: dict[str, Any]) -> Sequence[str]:
    """A line of the table."""
    top1 = "" if row["top1"] is None else f"{row['top1']:.2f}%"
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
@click.option("--check", is_flag=True, help="Decode every image; list broken files and why.")
@click.option("--duplicates", is_flag=True, help="Find identical and near-identical images.")
@click.option(
    "--against",
    metavar="DATA",
    multiple=True,
    help="Find images that also occur in DATA; repeatable.",
)
@click.option("--mirrored", is_flag=True, help="Count mirror images as duplicates.")
@click.option("--report", metavar="FILE", default="", help="Write an HTML page of the duplicates.")
@click.option(
    "--filtered",
    metavar="FILE",
    default="",
    help="Write the names of the training images that have no duplicate in val, test or DATA.",
)
@click.option("--sheet", is_flag=True, help="Write a contact sheet, NAME-sheet.jpg.")
@click.option("--pack", metavar="DST", default="", help="Write decoded images to a packed store.")
@click.option("--split", is_flag=True, help="List the images of each split.")
@click.option("--workers", default=0, show_default=True, help="Decoding processes.")
@AS_JSON
def data(data: str, settings: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Describe, check, split and pack a dataset; find duplicates.

    Without options, prints classes and image counts. SETTINGS are those of [data], for example
    data.val=0.2.
    """
    from vitrail.data.check import CheckOptions, check_dataset, show_result

    result = check_dataset(data, CheckOptions(**options), settings)
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
    """Print every setting of a recipe with its explanation.

    The output is itself a recipe. Without RECIPE, lists the names of all recipes.
    """
    from vitrail import config as recipes

    if not recipe:
        echo("\n".join(recipes.recipe_names()))
    else:
        echo(recipes.to_toml(recipes.load_config(recipe, settings)), end="")


@main.command()
@click.argument("what", metavar="RECIPE|FOLDER")
@SETTINGS
@click.option("--out", help="Run folder.  [default: runs/NAME, numbered if it exists]")
@click.option("--resume", is_flag=True, help="Continue an interrupted run.")
@DEVICE
def train(what: str, settings: tuple[str, ...], out: str | None, resume: bool, device: str) -> None:
    """Pre-train or fine-tune a model, with or without labels.

    The recipe decides which. A FOLDER of labeled images (or any DATA) is short for the recipe
    finetune/folder with data.source=FOLDER. With --resume, a run folder continues that run; a
    recipe or FOLDER without --out continues the newest unfinished run with the same settings.
    """
    from vitrail.training.train import train

    run = train(what, settings, out=out, resume=resume, device=device)
    if run.info().get("status") == "stopped":
        sys.exit(1)


@main.command()
@click.argument("what", nargs=-1, required=True, metavar="RECIPE|FOLDER... [SETTINGS]...")
@click.option(
    "--seeds", default=3, show_default=True, help="Number of final runs with the best settings."
)
@click.option(
    "--out", help="Folder for the runs.  [default: runs/NAME-sweep, numbered if it exists]"
)
@click.option("--best", is_flag=True, help="Retrain only the best trial of all recipes.")
@DEVICE
@AS_JSON
def sweep(what: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Grid search on val, retrain, and test once per seed.

    A list gives the values to try: optim.lr=[0.003,0.01,0.03]. Several recipes, such as flowers/vit
    flowers/resnet, are swept with the same settings and compared in one report; one model on
    several datasets also gets their average. With --best, the recipes are one grid on the data of
    the first. With several datasets in data.source, as in vtab/vit, one setting is chosen for all
    of them. Run the same command again to continue an interrupted sweep.
    """
    from vitrail.training.sweep import compare, sweep

    settings = [word for word in what if "=" in word]
    recipes = [word for word in what if "=" not in word]
    best = options.pop("best")
    if best and len(recipes) < 2:
        raise VitrailError("--best compares several recipes; name two or more")
    if len(recipes) == 1:
        result = sweep(recipes[0], settings, **options)
    else:
        result = compare(recipes, settings, best=best, **options)
    print_result(result, as_json, show_sweeps)


def show_sweeps(result: dict[str, Any]) -> None:
    """Every seed, mean and deviation, and where the page is; several datasets as a table."""
    from vitrail.console import mean_std, plural
    from vitrail.evaluation.show import average_table, task_table

    for one in result.get("sweeps", [result]):
        if "tasks" in one:
            show_table(task_table(one, one["name"]))
            continue
        if "seeds" not in one:
            vals = [trial["val_top1"] for trial in one["trials"] if trial["val_top1"] is not None]
            echo(f"{one['name']}  val {mean_std(max(vals, default=None))}%, not retrained")
            continue
        for row in one["seeds"]:
            echo(f"seed {row['seed']}  test {100 * row['top1']:.2f}%  {row['run']}")
        count = f"n = {one['n']:,}, {plural(len(one['seeds']), 'seed')}"
        echo(f"{one['name']}  test {mean_std(one['mean'], one['std'])}% ({count})")
        echo(f"next  vitrail predict {shlex.quote(one['seeds'][0]['run'])} photo.jpg")
    if "average" in result:
        show_table(average_table(result["average"]))
    if Path(result["report"]).exists():  # unless vitrail.reporting was deleted
        echo(f"report  {result['report']}")


def show_table(table: Any) -> None:
    """The rows and the note of a table."""
    from vitrail.console import print_table

    print_table(table.columns, table.rows)
    echo(table.note)


@main.command()
@click.argument("model")
@click.argument("data")
@SPLIT
@click.option(
    "--labels",
    type=click.Choice(["imagenet", "real", "objectnet", "objectnet-unmasked"]),
    help="Score an ImageNet-1k model with ImageNet, ReaL or ObjectNet labels.",
)
@click.option("--batch", default=64, show_default=True, help="Images per batch.")
@click.option(
    "--workers", default=-1, help="Decoding processes.  [default: all cores with a GPU, else none]"
)
@DEVICE
@AS_JSON
def evaluate(model: str, data: str, labels: str | None, as_json: bool, **options: Any) -> None:
    """Measure accuracy, per-class metrics, confusion and calibration.

    Reports top-1, top-5, loss, calibration error and, for every class, precision, recall and F1.
    With --labels objectnet, images are resized and cropped as in BiT: the short side is resized to
    512/480 of the model's size, and the center is cropped.
    """
    from vitrail.evaluation.evaluate import evaluate
    from vitrail.evaluation.show import show

    result = evaluate(model, data, labels=labels or "", **options)
    examples = [one for pair in result["confused"] for one in pair["examples"]]
    for mistake in (*result["mistakes"], *examples):
        mistake.pop("thumbnail", None)
    print_result(result, as_json, show)


@main.command()
@click.argument("model")
@click.argument("data")
@click.option("--shots", default="1,5,10,25", show_default=True, help="Training images per class.")
@click.option(
    "--seeds", default=3, show_default=True, help="Random draws of training images to average over."
)
@click.option("--ridge", default="1024", show_default=True, help="Ridge strengths, e.g. 1,32,1024.")
@SPLIT
@DEVICE
@AS_JSON
def fewshot(
    model: str, data: str, shots: str, seeds: int, ridge: str, as_json: bool, **options: Any
) -> None:
    """Measure the few-shot accuracy of frozen features.

    Fits a closed-form linear classifier and k-NN on k training images per class and evaluates on
    the whole split. The model is not trained; its features are cached.
    """
    from vitrail.evaluation.fewshot import fewshot
    from vitrail.evaluation.show import show_fewshot

    whole, numbers = parse_numbers("--shots", shots), parse_numbers("--ridge", ridge, float)
    result = fewshot(model, data, shots=whole, seeds=seeds, ridges=numbers, **options)
    print_result(result, as_json, show_fewshot)


@main.command()
@click.argument("model")
@click.argument("images", nargs=-1, required=True, metavar="IMAGE|FOLDER...")
@click.option("--top", default=5, show_default=True, help="Number of classes per image.")
@click.option(
    "--csv", "csv_path", metavar="FILE", default="", help="Write CSV to FILE; - is stdout."
)
@click.option(
    "--features", metavar="FILE", default="", help="Write features to a .npz or .parquet file."
)
@click.option("--batch", default=0, help="Images per batch.  [default: automatic]")
@click.option("--workers", default=0, help="Threads that decode and predict.  [default: automatic]")
@FAST
@DEVICE
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per line to stdout.")
def predict(model: str, images: tuple[str, ...], **options: Any) -> None:
    """Predict the classes of images, as a table, CSV or JSON lines.

    MODEL may also be an exported file (.onnx, .pt2). Results are in the order of the input. Folders
    are searched recursively; - reads an image from standard input. A file that cannot be read is
    reported, and the others are still predicted.
    """
    from vitrail.evaluation.writers import write_predictions

    write_predictions(model, images, **options)


@main.command()
@click.argument("model")
@click.argument("images", nargs=-1, metavar="[IMAGE]...")
@click.option("--out", required=True, metavar="DIR", help="Output folder.")
@click.option(
    "--layers", help="Layers to show, e.g. 0,5,-1.  [default: distances of all, maps of four]"
)
@click.option("--size", help="Input size: SIDE or ROWSxCOLUMNS pixels.")
@click.option("--class", "target", help="Class for gradient-weighted rollout.  [default: top-1]")
@DEVICE
@AS_JSON
def inspect(model: str, images: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Draw filters, positions, attention distance and rollout.

    Without IMAGE, draws only what the weights show: filters and positions.
    """
    from vitrail.inspection.inspect_model import inspect, show

    if options["layers"] is not None:
        options["layers"] = parse_numbers("--layers", options["layers"])
    options["size"] = None if options["size"] is None else parse_size(options["size"])
    result = inspect(model, list(images), **options)
    for name, reason in result["broken"]:
        echo(f"skipped  {name}: {reason}", err=True)
    print_result(result, as_json, show)


@main.command()
@click.argument("models", nargs=-1, required=True, metavar="MODEL...")
@click.option(
    "--sizes", default="", help="Image sizes, e.g. 64,128,224,384,512.  [default: the model's]"
)
@click.option(
    "--batches", default="", help="Batch sizes, e.g. 1,64.  [default: from 1 to the peak]"
)
@click.option("--depths", default="", help="Numbers of blocks of a ViT, e.g. 6,12,24.")
@click.option("--train", is_flag=True, help="Measure forward and backward passes.")
@click.option("--peers", is_flag=True, help="Also measure timm's model of the same name.")
@click.option(
    "--precision",
    type=click.Choice(["auto", "float32", "bfloat16", "float16"]),
    default="auto",
    show_default=True,
    help="auto is bfloat16 on GPUs that support it.",
)
@click.option("--seconds", default=20.0, show_default=True, help="Time per model and image size.")
@click.option(
    "--memory",
    default=0.0,
    help="Memory budget on a CPU in GiB.  [default: half of the free memory]",
)
@DEVICE
@AS_JSON
def benchmark(
    models: tuple[str, ...], sizes: str, batches: str, depths: str, as_json: bool, **options: Any
) -> None:
    """Measure images per second, latency, memory and largest batch.

    A variant such as B/16 is built with random weights; any other MODEL is loaded. Under torchrun,
    all processes together are measured, at the given --batches.
    """
    from vitrail.benchmarking.benchmark import benchmark, show

    options["sizes"] = parse_numbers("--sizes", sizes)
    options["batches"] = parse_numbers("--batches", batches)
    options["depths"] = parse_numbers("--depths", depths)
    print_result(benchmark(models, **options), as_json, show)


def parse_numbers(option: str, text: str, kind: type[Any] = int) -> tuple[Any, ...]:
    """`64,128`; an empty text gives no numbers."""
    try:
        return tuple(kind(word) for word in text.split(",") if text.strip())
    except ValueError:
        raise VitrailError(
            f"{option} {text}: expected comma-separated numbers, e.g. 1,5,10"
        ) from None


@main.command()
@click.argument("source", metavar="SRC")
@click.argument("target", metavar="DST", type=click.Path(path_type=Path))
@click.option(
    "--to",
    required=True,
    type=click.Choice(["google", "timm", "huggingface", "torchvision", "vitrail"]),
    help="Output format.",
)
@click.option("--size", help="Interpolate positions to images of SIDE or ROWSxCOLUMNS pixels.")
@click.option(
    "--heads",
    type=click.IntRange(min=1),
    help="Number of attention heads, if SRC does not state it.",
)
@click.option(
    "--gelu",
    type=click.Choice(["erf", "tanh"]),
    help="GELU of SRC, if it is not the one its format implies.",
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
    """Convert a checkpoint to another format and verify the result.

    SRC is any MODEL. The suffix of DST selects the container: .npz for google, .safetensors or
    .pth, or no suffix for a folder with config.json.
    """
    from vitrail.weights.convert import convert

    pixels = None if size is None else parse_size(size)
    parity = convert(source, target, to=to, size=pixels, heads=heads, gelu=gelu)
    if as_json:
        echo(json.dumps(parity.to_dict()))
    else:
        echo("\n".join(parity.lines()))
    if not parity.holds:
        fail(f"{target} does not give the same outputs; do not use it")


def parse_size(text: str) -> int | tuple[int, int]:
    """`384` or `384x512`."""
    match = re.fullmatch(r"(\d+)(?:x(\d+))?", text)
    if not match or int(match[1]) < 1:
        raise VitrailError(f"--size {text}: expected pixels, e.g. 384 or 384x512")
    return int(match[1]) if match[2] is None else (int(match[1]), int(match[2]))


@main.command()
@click.argument("model")
@click.argument("target", metavar="DST", type=click.Path(path_type=Path))
@click.option(
    "--format",
    "kind",
    type=click.Choice(["onnx", "pt2", "hub"]),
    help="[default: from the suffix of DST]",
)
@click.option("--int8", is_flag=True, help="Quantize to int8 for CPUs, calibrated on DATA (onnx).")
@click.option(
    "--data", metavar="DATA", default="", help="Measure accuracy on DATA before and after."
)
@click.option("--dynamic-size", is_flag=True, help="Accept any image size, if the model allows it.")
@click.option(
    "--preprocessing",
    type=click.Choice(["inside", "beside"]),
    default="inside",
    show_default=True,
    help="Make preprocessing part of the graph, or describe it in a JSON file next to it.",
)
@click.option(
    "--to", type=click.Choice(["timm", "transformers"]), help="Library that loads the hub folder."
)
@click.option("--upload", metavar="NAME", default="", help="Upload the hub folder to OWNER/NAME.")
@AS_JSON
def export(model: str, target: Path, as_json: bool, **options: Any) -> None:
    """Export to a file that runs without Vitrail, and verify it.

    DST ends in .onnx or .pt2, or is a folder with --format hub.
    """
    from vitrail.exporting.export import export

    parity = export(model, target, **options)
    echo(json.dumps(parity.to_dict()) if as_json else "\n".join(parity.lines()))
    if not parity.holds:
        raise FailureError(f"{target} does not give the same outputs; do not use it")


@main.command()
@click.argument("what", nargs=-1, metavar="[NAME...] [SETTINGS]...")
@click.option(
    "--scale",
    default="small",
    show_default=True,
    help="smoke (a minute on a CPU), tiny (about an hour on a CPU), small (minutes on one GPU), "
    "medium (hours), published (the authors' weights) or full (the paper's).",
)
@click.option("--plan", is_flag=True, help="Print the estimated cost without running anything.")
@click.option(
    "--jobs", default=1, show_default=True, help="Number of runs at a time on the device."
)
@click.option(
    "--minutes",
    default=0.0,
    help="Time limit in minutes; runs that would exceed it are not started.",
)
@click.option("--out", help="Folder of the study.  [default: runs/paper-SCALE]")
@DEVICE
@AS_JSON
def paper(what: tuple[str, ...], scale: str, plan: bool, as_json: bool, **options: Any) -> None:
    """Re-run the paper's experiments and test its claims.

    NAME is an experiment (table8), a table or figure it covers (table6), a TOML file, or `all`;
    without NAME, the experiments are listed. Results, pages and the scoreboard of claims are kept
    in a folder, which several processes and hosts can share: run the same command again to
    continue.
    """
    settings = [word for word in what if "=" in word]
    names = [word for word in what if "=" not in word]
    if not names:
        from vitrail.reproduction.experiment import list_experiments, show_experiments

        print_result(list_experiments(), as_json, show_experiments)
        return
    from vitrail.reproduction import paper as paper_

    if plan:
        print_result(paper_.plan_paper(names, settings, scale=scale), as_json, paper_.show_plans)
    else:
        result = paper_.paper(names, settings, scale=scale, **options)
        print_result(result, as_json, paper_.show)
        if result["failures"]:
            fail(f"{len(result['failures'])} runs failed; the first: {result['failures'][0]}")


@main.command()
@click.argument("runs", nargs=-1, required=True, metavar="RUN...")
@click.option(
    "--out",
    help="Output file.  [default: RUN/report.html; ./report.html for builtin or several runs]",
)
def report(runs: tuple[str, ...], out: str | None) -> None:
    """Write the report of a run, or a comparison of several runs.

    RUN is a run folder or `builtin`.
    """
    from vitrail.reporting.page import report

    echo(str(report(runs, out)))


@main.command()
@click.argument("models", nargs=-1, required=True, metavar="MODEL...")
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    help="Address to bind to; other than localhost, requires --token or --insecure.",
)
@click.option("--port", default=8000, show_default=True, help="Port; 0 picks a free one.")
@click.option(
    "--token", envvar="VITRAIL_TOKEN", default="", help="Access token; also VITRAIL_TOKEN."
)
@click.option("--insecure", is_flag=True, help="Allow other hosts without a token.")
@click.option(
    "--origin", multiple=True, help="Allow requests from pages of this origin; repeatable."
)
@click.option("--batch", default=32, show_default=True, help="Largest batch size.")
@click.option(
    "--wait",
    default=5.0,
    show_default=True,
    help="Longest wait for a batch to fill, in milliseconds.",
)
@click.option(
    "--queue",
    default=256,
    show_default=True,
    help="Maximum number of images in the queue; further requests get 503.",
)
@click.option(
    "--images", default=32, show_default=True, help="Maximum number of images per request."
)
@click.option(
    "--megabytes", default=16.0, show_default=True, help="Size limit of a request in MiB."
)
@click.option("--megapixels", default=50.0, show_default=True, help="Size limit of an image.")
@click.option(
    "--seconds",
    default=30.0,
    show_default=True,
    help="Time limit for an upload, and again for the response, in seconds.",
)
@click.option(
    "--connections", default=512, show_default=True, help="Maximum number of open connections."
)
@click.option(
    "--idle", default=10.0, show_default=True, help="Time limit for request headers, in seconds."
)
@FAST
@DEVICE
def serve(
    models: tuple[str, ...],
    host: str,
    port: int,
    token: str,
    insecure: bool,
    origin: tuple[str, ...],
    device: str,
    **options: Any,
) -> None:
    """Serve models with a web page and a JSON API.

    Listens on localhost by default. MODEL may also be an exported file (.onnx, .pt2). With several
    models, each is named after its folder, or explicitly as NAME=MODEL.
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
        fast=options.pop("fast"),
        limits=Limits(**options),
    )


@main.command()
@click.argument("folder", default="runs")
@AS_JSON
def runs(folder: str, as_json: bool) -> None:
    """List the runs in FOLDER (default: runs/)."""
    from vitrail.console import print_table
    from vitrail.runs import find_runs

    rows = [run.summary() for run in find_runs(Path(folder))]
    if as_json:
        echo(json.dumps(rows, ensure_ascii=False))
        return
    if not rows:
        raise VitrailError(f"no runs found in {folder}; `vitrail demo` creates one")
    columns = ("run", "status", "top-1", "n", "split", "parameters", "time", "started")
    print_table(columns, [runs_row(row) for row in rows])


def runs_row(row: dict[str, Any]) -> Sequence[str]:
    """A line of the table."""
    from vitrail.console import duration

    top1 = "" if row["top1"] is None else f"{100 * row['top1']:.2f}%"
    parameters = "" if row["parameters"] is None else f"{row['parameters']:,}"
    return (
        *(row["run"], row["status"], top1, f"{row['n']:,}" if row["n"] else "", row["split"]),
        *(parameters, duration(row["seconds"]), row["started"]),
    )

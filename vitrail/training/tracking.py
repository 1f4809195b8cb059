"""Metrics to TensorBoard, Weights & Biases or Trackio as well: one small adapter for all three."""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from vitrail.errors import VitrailError

Track = Callable[[dict[str, Any]], None]
"""Takes an event of metrics.jsonl."""


def tracker(
    name: Literal["none", "tensorboard", "wandb", "trackio"], run: Path, settings: dict[str, Any]
) -> tuple[Track, Callable[[], None]]:
    """A function to call with every event, and one to call at the end."""
    if name == "none":
        return (lambda event: None), (lambda: None)
    if name == "tensorboard":
        writer = imported("torch.utils.tensorboard", "tensorboard").SummaryWriter(str(run))

        def to_tensorboard(event: dict[str, Any]) -> None:
            for key, value in numbers(event).items():
                writer.add_scalar(key, value, event["step"])

        return to_tensorboard, writer.close
    # Trackio keeps to the interface of wandb.
    library = imported(name, name)
    library.init(project="vitrail", name=run.name, config=settings)
    return (lambda event: library.log(numbers(event), step=event["step"])), library.finish


def numbers(event: dict[str, Any]) -> dict[str, float]:
    """The figures of an event under names like `val/top1`."""
    told = {key: value for key, value in event.items() if isinstance(value, (int, float))}
    return {f"{event['event']}/{key}": value for key, value in told.items() if key != "step"}


def imported(module: str, package: str) -> Any:
    """An optional package, or what to install."""
    try:
        return import_module(module)
    except ImportError:
        raise VitrailError(
            f"system.tracker={package} needs the package: pip install {package}"
        ) from None

"""Sends metrics to TensorBoard, Weights & Biases or Trackio."""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from vitrail.errors import VitrailError

Track = Callable[[dict[str, Any]], None]
"""Called with every event of metrics.jsonl."""


def tracker(
    name: Literal["none", "tensorboard", "wandb", "trackio"], run: Path, settings: dict[str, Any]
) -> tuple[Track, Callable[[], None]]:
    """A function to call with every event, and one to call at the end."""
    if name == "none":
        return (lambda event: None), (lambda: None)
    if name == "tensorboard":
        writer = _imported("torch.utils.tensorboard", "tensorboard").SummaryWriter(str(run))

        def to_tensorboard(event: dict[str, Any]) -> None:
            for key, value in _numbers(event).items():
                writer.add_scalar(key, value, event["step"])

        return to_tensorboard, writer.close
    # Trackio keeps to the interface of wandb.
    library = _imported(name, name)
    library.init(project="vitrail", name=run.name, config=settings)
    return (lambda event: library.log(_numbers(event), step=event["step"])), library.finish


def _numbers(event: dict[str, Any]) -> dict[str, float]:
    """The numbers of an event under names like `val/top1`."""
    values = {key: value for key, value in event.items() if isinstance(value, (int, float))}
    return {f"{event['event']}/{key}": value for key, value in values.items() if key != "step"}


def _imported(module: str, package: str) -> Any:
    try:
        return import_module(module)
    except ImportError:
        raise VitrailError(
            f"system.tracker={package} needs the package: pip install {package}"
        ) from None

"""The paper's protocol (R43, R54, R56): choose on a held-out part of train, retrain on all of it
with several seeds, and touch test once per seed."""

import itertools
import json
import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from vitrail import runs
from vitrail.config import Config, shown
from vitrail.console import say
from vitrail.errors import FailureError, VitrailError
from vitrail.runs import Run
from vitrail.settings import build, put, read, to_flat
from vitrail.training.loop import DivergedError
from vitrail.training.training import open_parts, train


@dataclass(frozen=True)
class Trial:
    """One point of the grid."""

    settings: Mapping[str, Any]
    run: Run

    @cached_property
    def val(self) -> dict[str, Any]:
        """Its evaluation on val with the weights it would keep; empty if it never came so far."""
        events = [event for event in self.run.events() if event.get("event") == "val"]
        if not events:
            return {}
        if read(self.run.folder / "config.toml")["train.keep"] == "last":
            return events[-1]
        return max(events, key=lambda event: event["top1"])

    def rank(self) -> tuple[float, float]:
        """What the best trial has most of; a few held-out images often tie on top-1."""
        return self.val.get("top1", -1.0), -self.val.get("loss", math.inf)

    def title(self) -> str:
        return ", ".join(f"{name}={shown(value)}" for name, value in self.settings.items())


def sweep(
    config: Config, out: Path, *, seeds: int = 3, device: str = "auto", facts: Mapping[str, Any]
) -> dict[str, Any]:
    """The whole protocol, in folders below `out`; what is finished there is not done again."""
    if not config.sweep:
        raise VitrailError(
            "nothing to try: give a list, as optim.lr=[0.003,0.01,0.03], or a recipe with [sweep]"
        )
    if seeds < 1:
        raise VitrailError(f"--seeds {seeds}: expected at least one")
    parts = open_parts(config)
    if parts.val is None or not config.train.evaluations:
        raise VitrailError("a sweep chooses on held-out images; set data.val and train.evaluations")
    if parts.test is None:
        raise VitrailError("a sweep ends with a test; set data.test, such as data.test=0.1")
    trials = [try_point(config, point, out, device, facts) for point in points(config)]
    best = max(trials, key=Trial.rank)
    if not best.val:
        raise FailureError(f"every trial failed; the last: {trials[-1].run.info().get('message')}")
    say(f"chosen   {best.title()}  val {100 * best.val['top1']:.2f} %")
    finals = [retrain(config, best, seed, out, device, facts) for seed in range(seeds)]
    result = summary(trials, best, finals)
    runs.write_text(out / "sweep.json", json.dumps(result, indent=2) + "\n")
    return result


def points(config: Config) -> list[dict[str, Any]]:
    """Every combination of the grid's values."""
    names = list(config.sweep)
    return [
        dict(zip(names, values, strict=True))
        for values in itertools.product(*(config.sweep[name] for name in names))
    ]


def with_point(config: Config, settings: Mapping[str, Any]) -> Config:
    """The run that a point of the grid stands for."""
    values = {k: v for k, v in to_flat(config).items() if not k.startswith("sweep.")}
    for name, value in settings.items():
        put(values, name, list(value) if isinstance(value, tuple) else value)
    return build(values)


def try_point(
    config: Config, point: Mapping[str, Any], out: Path, device: str, facts: Mapping[str, Any]
) -> Trial:
    """Trains with one point of the grid, without looking at test."""
    named = [f"{key.replace('system.', 'system-')}={shown(value)}" for key, value in point.items()]
    folder = out / "trials" / runs.name_of("trial", named)
    run = finished(folder, with_point(config, point))
    if run is None:
        say(f"trial    {', '.join(f'{k}={shown(v)}' for k, v in point.items())}")
        try:
            run = train(
                with_point(config, point),
                folder,
                resume=True,
                device=device,
                facts=facts,
                test=False,
            )
        except DivergedError as error:
            say(f"failed   {error}")  # a learning rate too high is an answer too
            run = Run(folder)
        refuse_stopped(run)
    return Trial(point, run)


def retrain(
    config: Config, best: Trial, seed: int, out: Path, device: str, facts: Mapping[str, Any]
) -> Run:
    """The chosen settings on all of train, then test, once."""
    folder = out / f"seed{seed}"
    chosen = {**best.settings, "seed": seed, "data.train_on": "train+val", "train.keep": "last"}
    run = finished(folder, with_point(config, chosen))
    if run is None:
        say(f"retrain  seed {seed} on train and val")
        run = train(with_point(config, chosen), folder, resume=True, device=device, facts=facts)
        refuse_stopped(run)
    return run


def finished(folder: Path, config: Config) -> Run | None:
    """The run in a folder, if it is complete, or diverged, as it would again.

    One with other settings is an error, not an answer.
    """
    run = Run(folder)
    if runs.is_run(folder) and not config.train.hyperrule:
        runs.refuse_other(folder, config)
    info = run.info()
    diverged = info.get("status") == "failed" and info.get("message", "").startswith("loss is ")
    return run if info.get("status") == "finished" or diverged else None


def refuse_stopped(run: Run) -> None:
    """A sweep whose run was interrupted ends with it."""
    if run.info().get("status") == "stopped":
        raise FailureError(f"{run.info().get('message')}; the same command goes on from there")


def summary(trials: list[Trial], best: Trial, finals: list[Run]) -> dict[str, Any]:
    """What was tried and chosen, and mean and standard deviation on test."""
    tested = [run.evaluation("test") for run in finals]
    scores = [result["top1"] for result in tested if result]
    return {
        "trials": [
            {
                "settings": dict(trial.settings),
                "val_top1": trial.val.get("top1"),
                "val_loss": trial.val.get("loss"),
                "run": str(trial.run.folder),
            }
            for trial in trials
        ],
        "chosen": dict(best.settings),
        "seeds": [
            {"seed": i, "top1": r.get("top1"), "n": r.get("n"), "run": str(run.folder)}
            for i, (run, r) in enumerate(zip(finals, tested, strict=True))
        ],
        "mean": statistics.fmean(scores) if scores else None,
        "std": statistics.stdev(scores) if len(scores) > 1 else None,
        "n": tested[0].get("n") if tested else None,
    }

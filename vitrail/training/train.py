"""`vitrail train`: from a recipe or a folder to a run folder with a trained and tested model."""

import shlex
import shutil
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vitrail import runs
from vitrail.config import Config
from vitrail.console import TrainingBar, count_progress, duration, is_main, optional, say
from vitrail.data.contents import content_hashes
from vitrail.data.dataset import Source, Splits, subset
from vitrail.data.loader import TrainingBatch, derive
from vitrail.data.opening import open_parts
from vitrail.data.preprocessing import Preprocessing
from vitrail.devices import Devices, choose, devices, spread, too_large
from vitrail.errors import VitrailError, one_line, out_of_memory
from vitrail.evaluation.classify import evaluate
from vitrail.evaluation.features import cached
from vitrail.evaluation.parts import trained_on
from vitrail.files import cache, move
from vitrail.model import Classifier, build
from vitrail.objectives.classify import Classify
from vitrail.objectives.masked import MaskedPatches
from vitrail.runs import Run
from vitrail.settings import load as load_config
from vitrail.settings import to_flat
from vitrail.training import checkpoint, cost, optim
from vitrail.training.build import apply_hyperrule, build_model, length_of
from vitrail.training.checkpoint import Counters, Learner
from vitrail.training.hooks import NAMED_BROKEN, Hooks, Signals
from vitrail.training.inputs import (
    Inputs,
    evaluation_batch,
    features_for,
    images_for,
    validated_by_loss,
    workers_for,
)
from vitrail.training.loop import Length, Loop
from vitrail.training.optim import EMA, Schedule
from vitrail.training.resolve import Settings, resolve_config
from vitrail.training.summary import BY_CONTENT, describe, fingerprint, lines
from vitrail.training.tracking import tracker
from vitrail.weights.load import load, save
from vitrail.weights.published import count

BEGUN_BEFORE = (
    ", not bit-exactly: it was begun by a version that drew augmentation and masks differently"
)


def train(
    what: str | Path,
    settings: Settings = (),
    *,
    out: str | Path | None = None,
    resume: bool = False,
    device: str = "auto",
) -> Run:
    """Pre-train or fine-tune as a recipe says, or on a FOLDER; the run folder holds the result."""
    resolved = resolve_config(what, settings)
    folder, numbered = resolved.run_folder(out, resume)
    run = Run(folder)
    if resume and run.info().get("status") == "finished":
        if not resolved.config.train.hyperrule:  # whose settings depend on the data
            runs.refuse_other(folder, resolved.config)
        say(f"{folder} holds {runs.described(run)}")
        if not (run.inspected() and (folder / "report.html").exists()):
            finish_run(run, device)  # a kill after training left it without
        return run
    options: dict[str, Any] = {"resume": resume, "device": device, "facts": resolved.facts()}
    run = train_config(resolved.config, folder, numbered=numbered, **options)
    if run.writes:
        finish_run(run, device)
    return run


def finish_run(run: Run, device: str) -> None:
    """The report, and the last lines."""
    info = run.info()
    if info["status"] == "finished" and not run.inspected():
        inspect_run(run, device)
    page = optional("reporting.page", "the report is")
    target: Path | None = page.write(run.folder) if page else None
    top1, split, n = runs.score(run)
    parts = [f"done in {duration(info.get('total_seconds', info['seconds']))}"]
    if info["status"] != "finished":
        return
    if top1 is not None:
        parts.append(f"{split} {100 * top1:.2f} % (n = {n:,})")
    run.say(" · ".join(parts))
    say_skipped(run, target or run.folder / "run.json")
    if target:
        run.say(f"report   {target}")
    folder = shlex.quote(str(run.folder))
    if load_config(run.folder / "config.toml").train.objective == "masked":
        run.say(f"next     vitrail train DATA model.init={folder}")
    else:
        run.say(f"next     vitrail predict {folder} photo.jpg   or vitrail serve {folder}")


def say_skipped(run: Run, target: Path) -> None:
    """How many images could not be decoded, and where all are named; training named the first few
    that it met, so those of test are named here."""
    tested = run.evaluation("test").get("broken", [])
    for _, reason in tested[:NAMED_BROKEN]:
        run.say(f"skipped  {reason}")
    if n := len(run.info()["data"]["broken"]) + len(tested):
        run.say(f"skipped  {n:,} in all, which {target} lists")


def inspect_run(run: Run, device: str) -> None:
    """What the model of a run looks at, for its report; nothing is lost where that fails."""
    summary = optional("inspection.summary", "inspection is")
    if summary is None:
        return
    try:
        data = open_parts(load_config(run.folder / "config.toml"))
        split = next(name for name in ("test", "val", "train") if name in data.parts)
        model = load(run.folder).to(choose(device))
        # No longer than training took: a run of seconds is not worth many of them.
        seconds = min(summary.SECONDS, float(run.info().get("seconds", 0.0)))
        summary.summarize(model, data.part(split), split, run.folder / "inspection", seconds)
    except (VitrailError, RuntimeError, OSError) as error:
        run.say(f"inside   not looked at: {one_line(error)}")


def demo(out: str | Path = "runs/demo") -> Run:
    """The whole story on embedded data: a ViT learns handwritten digits on a CPU."""
    folder = Path(out)
    before = Run(folder).info()
    if before.get("recipe") == "digits/vit" and " demo" in before.get("command", ""):
        shutil.rmtree(folder)  # the last demo's
    say("A small ViT learns 8 × 8 handwritten digits (scikit-learn's), on this machine's CPU.")
    return train("digits/vit", out=folder, device="cpu")


def train_config(
    config: Config,
    out: Path,
    *,
    numbered: bool = False,
    resume: bool = False,
    device: str = "auto",
    facts: Mapping[str, Any] | None = None,
    test: bool = True,
) -> Run:
    """Trains as the settings say, measures on the test part once, and leaves all of it in `out`.

    `numbered` takes OUT-2, OUT-3, … where `out` is taken. `facts` go into run.json; without
    `test`, the test part is not touched (a sweep's trial).
    """
    system = config.system
    with devices(device, system.precision, system.deterministic) as where, ExitStack() as stack:
        data = open_parts(config, (facts or {}).get("changed", ()))
        config = apply_hyperrule(config, data)
        if where.main:
            out = stack.enter_context((runs.claimed if numbered else runs.held)(out))
            runs.create(out, config, dict(facts or {}), resume)
        out = where.shared(out)
        run = Run(out, writes=where.main)
        keep_head = where.shared(kept_head(run, config))
        try:
            return Training(config, data, where, run, keep_head).go(test)
        except BaseException as error:
            kind = "stopped" if isinstance(error, KeyboardInterrupt) else "failed"
            full = isinstance(error, RuntimeError) and out_of_memory(error)
            told = too_large(where) if full else error
            run.update(status=kind, message=str(told) or type(told).__name__)
            if full:
                raise told from None
            raise


@dataclass
class Training:
    """One run while it goes on."""

    config: Config
    data: Splits
    where: Devices
    run: Run
    keep_head: bool = False
    broken: dict[str, str] = field(default_factory=dict)
    """Pictures that earlier sessions could not decode, and why."""

    def go(self, test: bool) -> Run:
        """From the first line on the terminal to the last."""
        torch.manual_seed(derive(self.config.seed))
        masked = self.config.train.objective == "masked"
        labels = () if masked else self.data.labels
        model = build_model(self.config.model, self.config.data, labels, self.keep_head)
        self.data = untested(self.data, model, self.config.model.init)
        model.activation = "sigmoid" if self.config.train.objective == "sigmoid" else "softmax"
        model.activation_checkpointing = self.config.system.recompute
        length = length_of(self.config, len(self.data.part("train").targets))
        found = self.where.shared(self.recognize(model) if self.where.main else "")
        told = describe(self.config, self.data, model, self.where, length, found)
        told["model"]["keep_head"] = self.keep_head
        if self.run.has_checkpoint():
            refuse_other_data(self.run, told["data"])
            self.broken = dict(told["data"]["broken"])
        self.run.update(**told)
        for line in lines(self.config, self.run.info() | told, self.run.folder):
            self.run.say(line)
        signals = Signals()
        loop = self.fit(model, length, signals)
        return self.conclude(loop, signals, test)

    def recognize(self, model: Classifier) -> str:
        """The fingerprint of the training images, which are recorded in a new run."""
        source, resumed = self.data.part("train"), self.run.has_checkpoint()
        began = self.run.info().get("data", {}).get("fingerprint", "")
        if resumed and not began.startswith(BY_CONTENT):
            return fingerprint(source)  # as the version that began the run did
        with count_progress("reading train") as advance:
            hashes = content_hashes(source, advance)
        if not resumed:
            # What the weights it starts from learned from, it has learned from as well.
            before = runs.training_images(model.file)
            known = hashes if before is None else np.concatenate([hashes, before])
            self.run.record_training_images(known)
        return fingerprint(source, hashes)

    def fit(self, model: Classifier, length: Length, signals: Signals) -> Loop:
        """The loop, from the beginning or from the last checkpoint, to its end."""
        meter = cost.start(self.run, self.where, self.config, model)
        feed = features_for if self.config.train.freeze else images_for
        began = time.perf_counter()
        inputs = feed(model, self.data, self.config, self.where)
        prepared = time.perf_counter() - began
        meter = replace(meter, features=inputs.computed)
        learner = self.learner(inputs.trained)
        if self.config.train.objective == "masked":
            inputs = validated_by_loss(
                inputs, checkpoint.bare(learner.task), self.data, self.config, self.where
            )
        loop = self.loop(learner, length, inputs)
        self.go_on(loop)
        loop.counters.prepared += prepared
        loop.length = length = length.less(loop.counters.prepared)
        keep = partial(self.keep, model, learner, inputs)
        with ExitStack() as stack:
            hooks = self.hooks(inputs, signals, stack)
            hooks.note_broken(inputs.broken)
            hooks.keep = keep
            hooks.done = length.done(loop.counters)
            hooks.flops_per_image = self.flops(model)
            hooks.cost = meter.read
            if not loop.counters.stopped_early and hooks.done < 1:
                # Before and after, nothing needs to be written first.
                stack.enter_context(signals.watched())
                loop.run(inputs.batches(loop.counters.step), hooks)
        self.run.name_broken(self.where.union(hooks.broken))
        self.run.update(cost=meter.read(loop.counters.step))
        if not signals.asked and (self.config.train.keep == "last" or loop.counters.best is None):
            with learner.averaged():
                keep()
        return loop

    def go_on(self, loop: Loop) -> None:
        """Takes the loop to where the last checkpoint, if there is one, left it."""
        if self.where.any(self.run.has_checkpoint()):
            last, previous = self.run.checkpoint, self.run.previous_checkpoint
            used, state, loop.counters, problems = checkpoint.read_newest(
                (last, previous), self.where
            )
            loop.learner.restore(state, used)
            why = "".join(f"  ({problem}; using {used.name})" for problem in problems)
            exactly = "" if loop.counters.draws == Counters.draws else BEGUN_BEFORE
            self.run.say(f"resumed  at step {loop.counters.step}{exactly}{why}")
            if problems and self.run.writes:
                # Or the next checkpoint would push the good one out and keep the damaged one.
                move(previous, last)
        self.run.forget_after(loop.counters.step)

    def hooks(self, inputs: Inputs, signals: Signals, stack: ExitStack) -> Hooks:
        """What happens between updates."""
        train, system = self.config.train, self.config.system
        name = system.tracker if self.where.main else "none"
        track, close = tracker(name, self.run.folder, to_flat(self.config))
        stack.callback(close)
        return Hooks(
            run=self.run,
            images=len(self.data.part("train").targets),
            evaluations=train.evaluations,
            patience=train.patience,
            validate=inputs.validate,
            keep_best=train.keep == "best",
            balanced=train.class_weights == "balanced",
            log_steps=system.log_steps,
            checkpoint_steps=system.checkpoint_steps,
            checkpoint_seconds=60 * system.checkpoint_minutes,
            bar=stack.enter_context(TrainingBar(self.where.main)),
            track=track,
            signals=signals,
            first=partial(self.draw, inputs),
            broken=self.broken,
        )

    def flops(self, model: Classifier) -> float:
        """Floating-point operations of one image's forward pass."""
        return 0.0 if self.config.train.freeze else 2e9 * count(model.architecture).gmacs

    def learner(self, trained: nn.Module) -> Learner:
        """The objective around what is trained, with its optimizer and average, on the devices."""
        settings = self.config.train
        weights = None
        if settings.class_weights == "balanced":
            weights = balance(self.data.part("train"))
        task = self.objective(trained, weights)
        spread_task = spread(task, self.config.system.parallel, self.where)
        if self.config.system.compile and not settings.freeze:
            # A classifier by itself, so that evaluation is compiled as well.
            compiled = task if settings.objective == "masked" else trained
            graphs = self.config.system.graphs and self.where.device.type == "cuda"
            compiled.compile(mode="reduce-overhead" if graphs else None)
        ema = EMA(task, settings.ema, settings.ema_ramp) if settings.ema else None
        half = self.where.precision is torch.float16 and self.where.device.type == "cuda"
        return Learner(
            task=spread_task,
            optimizer=optim.build(task, self.config.optim, self.where.device),
            ema=ema,
            scaler=torch.amp.GradScaler(self.where.device.type, enabled=half),
        )

    def objective(self, trained: nn.Module, weights: Tensor | None) -> nn.Module:
        """What is learned, around what is trained."""
        settings = self.config.train
        if settings.objective != "masked":
            smoothing, labels = settings.label_smoothing, self.data.labels
            return Classify(trained, len(labels), settings.objective, smoothing, weights)
        pre = trained.preprocess
        assert isinstance(pre, Preprocessing)
        return MaskedPatches(
            trained,
            target=settings.masked,
            share=settings.masked_share,
            mean=pre.mean,
            std=pre.std,
        )

    def loop(self, learner: Learner, length: Length, inputs: Inputs) -> Loop:
        """The loop at its beginning."""
        optim = self.config.optim
        schedule = Schedule(
            peak=optim.lr,
            warmup=optim.warmup,
            decay=optim.decay,
            floor=optim.floor,
            milestones=optim.milestones,
        )
        return Loop(
            learner=learner,
            devices=self.where,
            schedule=schedule,
            length=length,
            batch=self.config.train.batch,
            clip=optim.clip,
            seed=self.config.seed,
            microbatch=self.config.system.microbatch,
            prepare=inputs.prepare,
        )

    def draw(self, inputs: Inputs, batch: TrainingBatch) -> None:
        """The sheet of augmented training images."""
        if self.run.writes and inputs.sheet is not None:
            inputs.sheet(batch).save(self.run.folder / "augmented.jpg", quality=85)

    def keep(self, model: Classifier, learner: Learner, inputs: Inputs) -> None:
        """Writes the present weights as the run's model."""
        tensors = learner.weights()
        if not self.run.writes:
            return
        if inputs.trained is not model:
            tensors = {f"head.{key}": x for key, x in tensors.items()}
            tensors = {key: x.cpu() for key, x in model.state_dict().items()} | tensors
        with torch.device("meta"):
            kept = build(model.architecture)
        kept.load_state_dict(tensors, assign=True)
        kept.labels, kept.preprocess = model.labels, model.preprocess
        kept.training_data, kept.activation = model.training_data, model.activation
        save(kept, self.run.weights)

    def conclude(self, loop: Loop, signals: Signals, test: bool) -> Run:
        """What became of the run, and how good its model is on test."""
        counters = loop.counters
        facts: dict[str, Any] = {"step": counters.step, "best": counters.best}
        facts["seconds"] = round(counters.spent, 1)
        if signals.asked:
            message = f"stopped by {signals.asked} at step {counters.step}"
            self.run.update(status="stopped", message=message, **facts)
            command = f"; `{runs.resume_command(self.run.folder)}` continues it" if test else ""
            self.run.say(f"{message}; last.pt is written{command}")
            return self.run
        self.where.wait()
        classifies = self.config.train.objective != "masked"
        began = time.perf_counter()
        if test and classifies and self.data.test is not None:
            self.evaluate("test", self.data.test)
        facts["total_seconds"] = round(counters.spent + time.perf_counter() - began, 1)
        message = ""
        if counters.stopped_early:
            message = f"stopped early: no better val for {counters.since_best} evaluations"
            self.run.say(message)
        self.run.update(status="finished", message=message, **facts)
        return self.run

    def evaluate(self, split: str, source: Source) -> None:
        """Measures the kept model, read back from its file, on one part of the data."""
        model = load(self.run.weights).to(self.where.device)
        # A frozen run's features serve `fewshot` and `evaluate` afterwards.
        features = cached(model, self.where.precision, cache(), begin=self.config.train.freeze)
        with count_progress(f"evaluating {split}", self.where.main) as advance, features as asked:
            result = evaluate(
                asked,
                source,
                data=self.data.name,
                split=split,
                model_name=self.run.folder.name,
                batch=evaluation_batch(self.config, self.where),
                precision=self.where.precision,
                workers=workers_for(self.config, self.where),
                progress=advance,
            )
        self.run.write_evaluation(split, result)


def kept_head(run: Run, config: Config) -> bool:
    """Whether a run keeps a head that knows the classes; before `model.keep_head`, all runs did."""
    if not run.has_checkpoint():
        return config.model.keep_head
    return run.info().get("model", {}).get("keep_head", True)


def untested(data: Splits, model: Classifier, init: str) -> Splits:
    """The data, its test part without images that the weights a run starts from learned from."""
    recorded = runs.training_images(model.file)
    if recorded is None or data.test is None:
        return data
    seen = trained_on(data.test, recorded)
    if seen.all():
        raise VitrailError(
            f"model.init = {init} was trained on all {len(seen)} images of test; hold out others"
        )
    if not seen.any():
        return data
    if is_main():
        say(f"{seen.sum():,} images of test are left out: model.init = {init} was trained on them")
    return replace(data, test=subset(data.test, ~seen))


def refuse_other_data(run: Run, data: dict[str, Any]) -> None:
    """A run goes on with the pictures it began with, and keeps what it found wrong with them."""
    began = run.info().get("data", {})
    if began.get("fingerprint", data["fingerprint"]) != data["fingerprint"]:
        then, now = began.get("train"), data["train"]
        counts = f"{then} then, {now} now" if then != now else f"{now} as now, but not the same"
        raise VitrailError(
            f"{run.folder} was begun with other training images ({counts}); bring them back to "
            "resume it, or choose another folder with --out"
        )
    data["broken"] = began.get("broken", [])


def balance(source: Source) -> Tensor:
    """The inverse of each class's share, scaled so that the mean weight of an image is one."""
    counts = np.bincount(source.targets, minlength=len(source.labels))
    present = counts > 0
    weights = np.zeros(len(counts), dtype=np.float32)
    weights[present] = len(source.targets) / (present.sum() * counts[present])
    return torch.from_numpy(weights)

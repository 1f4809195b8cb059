"""`vitrail train`: from a recipe or a folder to a run folder with a trained and tested model."""

import io
import shlex
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, redirect_stderr
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vitrail import runs
from vitrail.config import Config, load_config, to_flat
from vitrail.console import TrainingBar, count_progress, duration, import_optional, say
from vitrail.data.contents import content_hashes
from vitrail.data.dataset import Splits, subset
from vitrail.data.draws import derive_seed
from vitrail.data.loader import TrainingBatch
from vitrail.data.opening import open_run_data
from vitrail.devices import (
    Devices,
    choose_device,
    graph_forward,
    out_of_memory_error,
    parallelize,
    release_memory,
    setup_devices,
)
from vitrail.errors import VitrailError, one_line, out_of_memory
from vitrail.evaluation.evaluate import evaluate_dataset
from vitrail.evaluation.features import existing_cache, open_cache
from vitrail.evaluation.held_out import is_recorded
from vitrail.evaluation.predictor import Predictor
from vitrail.files import cache_folder, keep_compiled, make_folder, move
from vitrail.model import Classifier, build_meta
from vitrail.runs import Run
from vitrail.training import checkpoint
from vitrail.training.build import (
    apply_hyperrule,
    build_model,
    build_schedule,
    choose_microbatch,
    planned_steps,
)
from vitrail.training.checkpoint import Counters, TrainState
from vitrail.training.cost import plan_compilation, start_meter, total_cost
from vitrail.training.fewshot import FewshotData, build_probe, open_fewshot_data
from vitrail.training.hooks import SKIPPED_SHOWN, Hooks
from vitrail.training.inputs import decoding_workers, evaluation_batch
from vitrail.training.loop import Loop
from vitrail.training.objectives import Objective, build_objective
from vitrail.training.optim import EMA, build_optimizer
from vitrail.training.resolve import Settings, resolve_config
from vitrail.training.summary import BY_CONTENT, data_fingerprint, header_lines, run_facts
from vitrail.training.tracking import tracker
from vitrail.weights.load import load, save
from vitrail.weights.published import model_cost

_OTHER_DRAWS = (
    ", not bit-exactly: it was started by another version, or with augmentation on another kind of "
    "device"
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
    resume = resume and not numbered  # a new folder has nothing to resume
    run = Run(folder)
    if resume and run.info().get("status") == "finished":
        if not resolved.config.train.hyperrule:  # whose settings depend on the data
            runs.check_same_config(folder, resolved.config)
        say(f"{folder} holds {run.describe()}")
        if not (run.has_inspection() and (folder / "report.html").exists()):
            _finish(run, device)  # a kill after training left it without
        return run
    options: dict[str, Any] = {"resume": resume, "device": device, "facts": resolved.facts()}
    run = train_config(resolved.config, folder, numbered=numbered, **options)
    if run.writes:
        _finish(run, device)
    return run


def demo(out: str | Path = "runs/demo") -> Run:
    """An end-to-end demo on bundled data: a ViT learns handwritten digits on a CPU."""
    folder = Path(out)
    before = Run(folder).info()
    if shlex.split(before.get("command", ""))[1:2] == ["demo"]:
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
    """Trains as the settings say, evaluates on test once, and writes everything to `out`.

    `numbered` takes OUT-2, OUT-3, … where `out` is taken. `facts` go into run.json; without
    `test`, the test split is not touched (a sweep's trial).
    """
    system = config.system
    with (
        setup_devices(device, system.precision, system.deterministic) as devices,
        ExitStack() as stack,
    ):
        data = open_run_data(config, (facts or {}).get("changed", ()))
        config = apply_hyperrule(config, data)
        if devices.main:
            out = stack.enter_context(runs.open_folder(out, numbered))
            runs.create(out, config, dict(facts or {}), resume)
        run = Run(devices.broadcast(out), writes=devices.main)
        try:
            return _train_and_test(config, data, devices, run, test)
        except BaseException as error:
            status = "stopped" if isinstance(error, KeyboardInterrupt) else "failed"
            memory = isinstance(error, RuntimeError) and out_of_memory(error)
            shown = out_of_memory_error(devices) if memory else error
            run.update(status=status, message=str(shown) or type(shown).__name__)
            if memory:
                raise shown from None
            raise
        finally:
            if devices.device.type == "cuda":  # graphs hold memory until they are collected
                release_memory()


def _train_and_test(config: Config, data: Splits, devices: Devices, run: Run, test: bool) -> Run:
    torch.manual_seed(derive_seed(config.seed))
    keep_head = devices.broadcast(_keeps_head(run, config))
    labels = data.labels if config.train.uses_labels else ()
    planned_steps(config, len(data.part("train").targets))  # an error comes before a download
    model = build_model(config, labels, keep_head)
    _fuse(model, config, devices)
    data = _without_trained_on(data, model, config.model.init)
    few = open_fewshot_data(config, data, model)
    fingerprint = devices.broadcast(_record_images(data, model, run) if devices.main else "")
    skipped = _record_and_print_facts(config, data, model, devices, run, fingerprint, keep_head)
    counters, stop_signal = _run_training(config, data, few, model, devices, run, skipped)
    facts: dict[str, Any] = {"step": counters.step, "best": counters.best}
    facts["seconds"] = round(counters.spent, 1)
    facts["input_wait"] = round(min(counters.waited / max(counters.seconds, 1e-9), 1.0), 4)
    if stop_signal:
        message = f"stopped by {stop_signal} at step {counters.step}"
        run.update(status="stopped", message=message, **facts)
        command = f"; `{runs.resume_command(run.folder)}` continues it" if test else ""
        run.say(f"{message}; last.pt is written{command}")
        return run
    devices.barrier()
    began = time.perf_counter()
    if test and config.train.uses_labels and data.test is not None:
        _evaluate_on_test(config, data, devices, run)
    facts["total_seconds"] = round(counters.spent + time.perf_counter() - began, 1)
    message = ""
    if counters.stopped_early:
        message = f"early stopping: no improvement on val in {counters.since_best} evaluations"
        run.say(message)
    run.update(status="finished", message=message, **facts)
    return run


def _record_and_print_facts(
    config: Config,
    data: Splits,
    model: Classifier,
    devices: Devices,
    run: Run,
    fingerprint: str,
    keep_head: bool,
) -> dict[str, str]:
    """Writes the facts of the run to run.json and its first lines to the terminal; returns the
    images that earlier sessions could not decode."""
    facts = run_facts(config, data, model, devices, fingerprint)
    facts["model"]["keep_head"] = keep_head
    if run.has_checkpoint():
        _refuse_other_data(run, facts["data"])
    run.update(**facts)
    for line in header_lines(config, run.info() | facts, run.folder):
        run.say(line)
    return dict(facts["data"]["broken"])


def _run_training(
    config: Config,
    data: Splits,
    few: FewshotData | None,
    model: Classifier,
    devices: Devices,
    run: Run,
    skipped: dict[str, str],
) -> tuple[Counters, str]:
    """Trains, from the beginning or from the last checkpoint; returns the counters and the signal
    that stopped it, if one did."""
    meter = start_meter(run, devices, config, model)
    began = time.perf_counter()
    objective = build_objective(config, model, data, devices)
    prepared = time.perf_counter() - began
    compiled, _ = plan_compilation(config, len(data.part("train").targets), model, devices)
    records = not compiled and _records(objective, config, devices)
    state = _train_state(config, objective, devices, compiled, records)
    _resume(state, run, devices)
    counters = state.counters
    counters.prepared += prepared
    loop = Loop(
        state=state,
        schedule=build_schedule(config, len(data.part("train").targets), counters.prepared),
        devices=devices,
        batch=config.train.batch,
        clip=config.optim.clip,
        seed=config.seed,
        microbatch=_microbatch(config, model, devices, run),
        reuses_outputs=compiled,
    )

    def cost(step: int) -> dict[str, Any]:
        return meter.read(step, objective.features_computed)

    def save_cost() -> dict[str, float] | None:
        return total_cost(cost(counters.step), config.model.init)

    with ExitStack() as stack:
        tracker_name = config.system.tracker if devices.main else "none"
        track, close = tracker(tracker_name, run.folder, to_flat(config))
        stack.callback(close)
        hooks = Hooks(
            run=run,
            config=config,
            data=data,
            save_model=partial(_save_model, run, model, state, save_cost),
            fewshot=build_probe(config, objective, few),
            cost=cost,
            flops_per_image=0.0
            if config.train.freeze
            else 2e9 * model_cost(model.architecture).gmacs,
            bar=stack.enter_context(TrainingBar(devices.main)),
            track=track,
            skipped=skipped,
            done=loop.done,
        )
        hooks.note_skipped(objective.skipped)
        if not counters.stopped_early and loop.done < 1:
            # Before and after, nothing needs to be written first.
            stack.enter_context(hooks.watch_signals())
            # Threads that load images must not call CUDA while graphs are recorded.
            blank = _blank_batch(objective, config, devices) if records else None
            loop.run(objective.batches(counters.step), hooks, blank)
    run.record_broken_images(devices.union(hooks.skipped))
    run.update(cost=cost(counters.step))
    if not hooks.stop_signal and (config.train.keep == "last" or counters.best is None):
        with state.averaged():
            hooks.save_model(run.weights)
    return counters, hooks.stop_signal


def _microbatch(config: Config, model: Classifier, devices: Devices, run: Run) -> int:
    chosen = choose_microbatch(config, model, devices)
    if chosen != config.system.microbatch:
        run.say(f"memory   computing {chosen:,} of {config.train.batch:,} images at a time")
    return chosen


def _train_state(
    config: Config, objective: Objective, devices: Devices, compiled: bool, records: bool
) -> TrainState:
    """The objective on the devices, its optimizer and its EMA."""
    train, system = config.train, config.system
    wrapped = parallelize(objective, system.parallel, devices)
    if compiled:
        keep_compiled()
        graphs = system.graphs is True and devices.device.type == "cuda"
        objective.compiled.compile(mode="reduce-overhead" if graphs else None)
    elif records:
        graph_forward(objective.compiled, train.batch)
    float16 = devices.precision is torch.float16 and devices.device.type == "cuda"
    return TrainState(
        wrapped=wrapped,
        ema=EMA(objective, train.ema, train.ema_ramp) if train.ema else None,
        optimizer=build_optimizer(objective, config.optim, devices.device),
        scaler=torch.amp.GradScaler(devices.device.type, enabled=float16),
    )


def _records(objective: Objective, config: Config, devices: Devices) -> bool:
    """Whether forward and backward pass are recorded as CUDA graphs."""
    alone = devices.device.type == "cuda" and devices.world == 1
    changes = config.train.freeze or objective.model.activation_checkpointing
    parts = 0 < config.system.microbatch < config.train.batch  # a whole batch is recorded
    return config.system.graphs is not False and alone and not changes and not parts


def _blank_batch(objective: Objective, config: Config, devices: Devices) -> TrainingBatch:
    pre, batch = objective.inputs.preprocessing, config.train.batch
    shape = (batch, len(pre.mean), *pre.size)
    return TrainingBatch(
        images=torch.zeros(shape, dtype=torch.uint8, device=devices.device),
        targets=torch.zeros(batch, dtype=torch.int64, device=devices.device),
    )


def _fuse(model: Classifier, config: Config, devices: Devices) -> None:
    """Chooses the kernels that the settings name."""
    system = config.system
    sharded = devices.world > 1 and system.parallel == "fsdp"
    if system.kernels != "plain" and not sharded:
        model.fuse(devices.device, devices.precision)
    if system.kernels == "fused" and not model.fused:
        raise VitrailError(
            "system.kernels=fused needs an A100 or later, half precision, and a ResNet or a ViT "
            "without dropout, LayerScale or system.recompute; use system.kernels=auto"
        )


def _resume(state: TrainState, run: Run, devices: Devices) -> None:
    """Restores the last checkpoint, if there is one."""
    if devices.any(run.has_checkpoint()):
        last, previous = run.checkpoint, run.previous_checkpoint
        path, tensors, counters, problems = checkpoint.read_newest((last, previous), devices)
        state.restore(tensors, counters, path)
        why = "".join(f"  ({problem}; using {path.name})" for problem in problems)
        exactly = "" if counters.draws == state.objective.draws else _OTHER_DRAWS
        run.say(f"resumed  at step {counters.step}{exactly}{why}")
        if problems and run.writes:
            # Or the next checkpoint would push the good one out and keep the damaged one.
            move(previous, last)
    state.counters.draws = state.objective.draws
    run.drop_after(state.counters.step)


def _save_model(
    run: Run,
    model: Classifier,
    state: TrainState,
    cost: Callable[[], dict[str, float] | None],
    path: Path,
) -> None:
    """Writes the current weights as a model."""
    tensors, spent = state.weights(), cost()
    if not run.writes:
        return
    if state.objective.model is not model:  # a linear probe trains the head alone
        tensors = {f"head.{key}": x for key, x in tensors.items()}
        tensors = {key: x.cpu() for key, x in model.state_dict().items()} | tensors
    copy = build_meta(model.architecture)
    copy.load_state_dict(tensors, assign=True)
    copy.labels, copy.preprocess = model.labels, model.preprocess
    copy.training_data, copy.activation = model.training_data, model.activation
    copy.training_cost = spent
    make_folder(path.parent)
    save(copy, path)


def _evaluate_on_test(config: Config, data: Splits, devices: Devices, run: Run) -> None:
    """Evaluates the saved model, read back from its file."""
    source = data.part("test")
    model = load(run.weights).to(devices.device)
    _fuse(model, config, devices)
    # A frozen run's features serve `fewshot` and `evaluate` afterwards.
    features = (open_cache if config.train.freeze else existing_cache)(
        model, devices.precision, cache_folder()
    )
    predictor = Predictor(model, source.labels, precision=devices.precision, cache=features)
    with count_progress("evaluating test", devices.main) as advance:
        result = evaluate_dataset(
            predictor,
            source,
            data=data.name,
            split="test",
            model_name=run.folder.name,
            batch=evaluation_batch(config, devices),
            workers=decoding_workers(config, devices),
            progress=advance,
        )
    run.write_evaluation("test", result)


def _keeps_head(run: Run, config: Config) -> bool:
    """Whether a head that knows the classes is kept; before `model.keep_head`, all runs did."""
    if not run.has_checkpoint():
        return config.model.keep_head
    return run.info().get("model", {}).get("keep_head", True)


def _without_trained_on(data: Splits, model: Classifier, init: str) -> Splits:
    """The data, its test split without images that the initial weights were trained on."""
    recorded = runs.training_image_hashes(model.file)
    if recorded is None or data.test is None:
        return data
    seen = is_recorded(data.test, recorded)
    if seen.all():
        raise VitrailError(
            f"model.init = {init} was trained on all {len(seen)} test images; hold out others"
        )
    if not seen.any():
        return data
    say(f"excluded {seen.sum():,} test images that model.init = {init} was trained on")
    return replace(data, test=subset(data.test, ~seen))


def _record_images(data: Splits, model: Classifier, run: Run) -> str:
    """Hashes the training images, unless the hashes are cached; a new run records them. Returns the
    fingerprint of the training set."""
    source, resumed = data.part("train"), run.has_checkpoint()
    began = run.info().get("data", {}).get("fingerprint", "")
    if resumed and not began.startswith(BY_CONTENT):
        return data_fingerprint(source)  # as the version that started the run did
    with count_progress("reading train") as advance:
        hashes = content_hashes(source, advance)
    if not resumed:
        # What the initial weights were trained on counts as well.
        before = runs.training_image_hashes(model.file)
        known = hashes if before is None else np.concatenate([hashes, before])
        run.record_training_images(known)
    return data_fingerprint(source, hashes)


def _refuse_other_data(run: Run, data: dict[str, Any]) -> None:
    """A run is resumed with the images it was started with; those it had to skip stay listed."""
    began = run.info().get("data", {})
    if began.get("fingerprint", data["fingerprint"]) != data["fingerprint"]:
        then, now = began.get("train"), data["train"]
        counts = (
            f"{then} then, {now} now" if then != now else f"{now} both times, but not the same ones"
        )
        raise VitrailError(
            f"{run.folder} was started with other training images ({counts}); restore them to "
            "resume it, or choose another folder with --out"
        )
    data["broken"] = began.get("broken", [])


def _finish(run: Run, device: str) -> None:
    """The report, and the last lines."""
    info = run.info()
    finished = info["status"] == "finished"
    if finished and not run.has_inspection():
        inspect_run(run, device)
    page = import_optional("reporting.page", "the report is")
    target: Path | None = page.write(run.folder) if page else None
    if not finished:
        return
    top1, split, n = run.score()
    parts = [f"done in {duration(info.get('total_seconds', info['seconds']))}"]
    if top1 is not None:
        parts.append(f"{split} {100 * top1:.2f}% (n = {n:,})")
    run.say(" · ".join(parts))
    _list_skipped(run, target or run.folder / "run.json")
    if target:
        run.say(f"report   {target}")
    folder = shlex.quote(str(run.folder))
    if load_config(run.folder / "config.toml").train.uses_labels:
        run.say(f"next     vitrail predict {folder} photo.jpg   or vitrail serve {folder}")
    else:
        run.say(f"next     vitrail train DATA model.init={folder}")


def _list_skipped(run: Run, target: Path) -> None:
    """How many images could not be decoded, and where all are listed; training named the first few
    of its own, so those of test are named here."""
    tested = run.evaluation("test").get("broken", [])
    for _, reason in tested[:SKIPPED_SHOWN]:
        run.say(f"skipped  {reason}")
    if n := len(run.info()["data"]["broken"]) + len(tested):
        run.say(f"skipped  {n:,} in all, listed in {target}")


def inspect_run(run: Run, device: str) -> None:
    """Inspects the model of a run for its report; nothing is lost where that fails."""
    inspection = import_optional("inspection.inspect_model", "inspection is")
    if inspection is None:
        return
    try:
        with redirect_stderr(io.StringIO()):  # training has said what is left out
            data = open_run_data(load_config(run.folder / "config.toml"))
        split = next(name for name in ("test", "val", "train") if name in data.parts)
        model = load(run.folder).to(choose_device(device))
        # No longer than training took: a run of seconds is not worth many of them.
        seconds = min(inspection.SUMMARY_SECONDS, float(run.info().get("seconds", 0.0)))
        inspection.summarize(model, data.part(split), split, run.folder / "inspection", seconds)
    except (VitrailError, RuntimeError, OSError) as error:
        run.say(f"inspect  failed: {one_line(error)}")

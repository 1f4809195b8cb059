"""How the settings choose where training images are decoded, kept and augmented."""

import json

import pytest
import torch
from click.testing import CliRunner

from tests.data.pictures import write_classes
from vitrail.cli import main
from vitrail.config import load_config
from vitrail.data.draws import ON_CPU, ON_DEVICE
from vitrail.data.opening import open_run_data
from vitrail.data.preprocessing import Preprocessing
from vitrail.data.store import pack_data
from vitrail.devices import Devices
from vitrail.errors import VitrailError
from vitrail.model import create
from vitrail.runs import Run
from vitrail.training.inputs import ImageInputs, augments_on_device
from vitrail.training.train import train

TINY = {
    **{"model.width": 48, "model.depth": 2, "model.heads": 4, "model.mlp": 96},
    **{"train.batch": 32, "train.evaluations": 2, "optim.warmup": 10},
}
CPU = Devices(torch.device("cpu"), torch.float32)


def trained(out, **more) -> Run:
    settings = TINY | {"train.steps": 6} | {k.replace("__", "."): v for k, v in more.items()}
    return train("digits/vit", settings, out=out, device="cpu")


@pytest.fixture
def inputs(tmp_path, monkeypatch, capsys):
    """Of a run on small images, and what it printed."""
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))
    folder = write_classes(tmp_path / "photos", {"a": 9, "b": 9})

    def make(*settings: str) -> tuple[ImageInputs, str]:
        given = (f"data.source={folder}", "data.size=16", "train.epochs=3", "data.val=0.2")
        config = load_config("digits/vit", [*given, *settings])
        model = create("Ti/4", classes=2, size=16, width=24, depth=1, heads=2, mlp=48)
        model.preprocess = Preprocessing(size=(16, 16))
        capsys.readouterr()
        made = ImageInputs(model, open_run_data(config), config, CPU)
        return made, capsys.readouterr().err

    return make


@pytest.mark.parametrize(
    ("settings", "kept", "said"),
    [
        ((), False, ""),
        (("system.cache=none",), False, ""),
        (("system.cache=disk",), False, "system.cache=disk needs system.augment=device"),
        (("system.augment=device",), True, "13 decoded images, 0.0 MB in memory"),
        (("system.augment=device", "system.cache=device"), True, "in memory"),
        (("system.augment=device", "system.cache=disk"), True, "in the disk cache"),
        (("system.augment=device", "system.cache=none"), False, ""),
        (("system.augment=device", "train.epochs=1"), False, ""),
        (("system.augment=device", "train.epochs=1", "system.cache=memory"), True, "in memory"),
    ],
)
def test_where_images_are_kept(inputs, settings, kept, said):
    made, printed = inputs(*settings)
    assert (made.decoded is not None) == kept
    assert said in printed
    assert bool(said) == bool(printed)
    assert made.draws == (ON_DEVICE if "system.augment=device" in settings else ON_CPU)


def test_a_packed_store_needs_no_cache_even_for_one_pass(inputs, tmp_path):
    made, _ = inputs("data.val=0", "data.test=0")
    pack_data(made.data, tmp_path / "store")
    given = (f"data.source={tmp_path / 'store'}", "system.augment=device", "train.epochs=1")
    made, printed = inputs(*given, "augment.crop=inception")
    assert "in the packed store" in printed
    assert made.decoded is not None


def test_each_validation_starts_its_progress_anew(inputs):
    made, _ = inputs()
    first = made.val.progress
    assert made.val.progress is not first
    assert made.val is made.val


def test_what_the_device_cannot_do_is_refused_or_done_by_the_processor():
    bicubic = Preprocessing(interpolation="bicubic", antialias=False)
    config = load_config("digits/vit", ["system.augment=device"])
    with pytest.raises(VitrailError, match=r"without antialiasing.*use system\.augment=cpu"):
        augments_on_device(config, bicubic, CPU)
    apple = Devices(torch.device("mps"), torch.float32)
    with pytest.raises(VitrailError, match=r"cannot use mps.*use system\.augment=cpu"):
        augments_on_device(config, Preprocessing(), apple)
    gpu = Devices(torch.device("cuda"), torch.float32)
    auto = load_config("digits/vit")
    assert not augments_on_device(auto, bicubic, gpu)
    assert augments_on_device(auto, Preprocessing(), gpu)
    assert not augments_on_device(auto, Preprocessing(), CPU)
    assert not augments_on_device(auto, Preprocessing(), apple)


@pytest.mark.parametrize("cache", ["memory", "disk", "none"])
def test_broken_images_are_counted_and_named_once(tmp_path, capsys, cache):
    folder = write_classes(tmp_path / "photos", {"a": 12, "b": 12})
    for name in ("a/1.png", "b/7.png"):
        (folder / name).write_bytes(b"torn")
    settings = {"data.source": str(folder), "data.val": 0.0, "data.test": 0.0, "data.size": 16}
    settings |= {"system.augment": "device", "system.cache": cache, "train.steps": 4}
    run = train("digits/vit", TINY | settings, out=tmp_path / "run", device="cpu")
    broken = run.info()["data"]["broken"]
    assert sorted(name for name, _ in broken) == ["a/1.png", "b/7.png"]
    assert capsys.readouterr().err.count("7.png is not an image") == 1
    assert run.log().count("1.png is not an image") == 1


def test_how_long_the_device_waits_is_written_and_shown(tmp_path):
    run = trained(tmp_path / "run", system__augment="device", system__log_steps=2)
    shares = [event["input_wait"] for event in run.events() if event["event"] == "train"]
    assert len(shares) == 3
    assert all(0 < share <= 1 for share in shares)
    assert 0 < run.info()["input_wait"] <= 1
    assert "waiting for images" in (run.folder / "report.html").read_text("utf-8")
    listed = CliRunner().invoke(main, ["runs", str(tmp_path), "--json"])
    assert json.loads(listed.output)[0]["status"] == "finished"


def test_augmentation_on_the_device_teaches_as_much(tmp_path):
    scores = []
    for where in ("cpu", "device"):
        run = trained(tmp_path / where, train__steps=240, system__augment=where)
        scores.append(run.evaluation("test")["top1"])
    assert min(scores) > 0.8
    assert abs(scores[0] - scores[1]) < 0.05

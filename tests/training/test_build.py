import json

import pytest
import torch

import vitrail
from vitrail.config import load_config, with_settings
from vitrail.data.opening import open_run_data
from vitrail.data.preprocessing import Preprocessing
from vitrail.devices import Devices
from vitrail.errors import VitrailError
from vitrail.runs import Run
from vitrail.training import build as build_module
from vitrail.training.build import activation_bytes, build_model, choose_microbatch
from vitrail.training.objectives.classification import Classification
from vitrail.training.train import _records, train_config

DIGITS = tuple("0123456789")
SHAPE = {"width": 16, "depth": 1, "heads": 2, "mlp": 16, "hidden": 16}
SHORT = ["data.source=digits", "data.size=8", "train.steps=2", "train.batch=8"]


@pytest.fixture(scope="module")
def weights(tmp_path_factory) -> str:
    """A trained model with a tanh layer that knows the ten digits."""
    model = vitrail.create("Ti/4", classes=10, size=8, **SHAPE)
    assert model.head is not None
    torch.nn.init.normal_(model.head.weight)
    model.labels, model.preprocess = DIGITS, Preprocessing(size=(8, 8))
    path = tmp_path_factory.mktemp("weights") / "digits.safetensors"
    vitrail.save(model, path)
    return str(path)


def build(*given: str, labels: tuple[str, ...] = DIGITS) -> vitrail.Classifier:
    config = load_config(None, [*SHORT, *given])
    return build_model(config, labels)


def test_fine_tuning_starts_from_a_zero_head_even_where_the_classes_are_the_same(weights):
    model = build(f"model.init={weights}")
    assert model.architecture.hidden == 0
    assert not any(x.count_nonzero() for x in model.head.state_dict().values())


def test_mistakes_in_settings_are_found_before_weights_are_fetched(weights, monkeypatch, tmp_path):
    def no_download(*_args, **_options):
        raise AssertionError("weights were loaded")

    monkeypatch.setattr(build_module, "load", no_download)
    with pytest.raises(VitrailError, match=r"unknown variant 'Q/16'"):
        build("model.init=B/16-augreg-in21k", "model.variant=Q/16")
    given = [*SHORT, "model.init=B/16-augreg-in21k", "train.steps=0", "train.epochs=0"]
    with pytest.raises(VitrailError, match="no training length"):
        train_config(load_config(None, given), tmp_path / "run", device="cpu")


def test_a_head_can_be_kept_with_its_hidden_layer(weights):
    model, before = build(f"model.init={weights}", "model.keep_head=true"), vitrail.load(weights)
    assert all(x.equal(before.state_dict()[key]) for key, x in model.state_dict().items())


def test_a_head_of_other_classes_cannot_be_kept(weights):
    with pytest.raises(VitrailError, match=r"model.keep_head=true: the classes of .*0, 1, 2"):
        build(f"model.init={weights}", "model.keep_head=true", labels=tuple("abcdefghij"))
    with pytest.raises(VitrailError, match=r"model.keep_head requires weights"):
        build("model.variant=Ti/4", "model.keep_head=true")


def test_a_run_from_before_the_setting_resumes_with_the_head_that_it_kept(weights, tmp_path):
    given = [*SHORT, f"model.init={weights}", "train.evaluations=0"]
    begun = load_config(None, [*given, "model.keep_head=true"])
    run = train_config(begun, tmp_path, device="cpu")
    before = vitrail.load(run.folder).state_dict()
    info = run.info()
    del info["model"]["keep_head"]
    (tmp_path / "run.json").write_text(json.dumps(info))
    text = (tmp_path / "config.toml").read_text()
    lines = [line for line in text.splitlines() if not line.startswith("keep_head")]
    (tmp_path / "config.toml").write_text("\n".join(lines))
    for _ in range(2):  # it is known the second time, too
        train_config(load_config(None, given), tmp_path, resume=True, device="cpu")
    after = vitrail.load(Run(tmp_path).folder).state_dict()
    assert all(x.equal(before[key]) for key, x in after.items())


def test_the_root_is_a_setting_and_weights_keep_theirs(tmp_path):
    narrow = ("model.variant=R14x0.125", "data.size=8")
    model = build(*narrow, "model.root=small")
    assert model.architecture.root == "small"
    assert build(*narrow).architecture.root == "imagenet"
    path = tmp_path / "small.safetensors"
    vitrail.save(model, path)
    for same in ((), ("model.root=small",), narrow):
        assert build(f"model.init={path}", *same).architecture.root == "small"
    with pytest.raises(VitrailError, match=r"with root small, but .*imagenet; remove model\.root"):
        build(f"model.init={path}", "model.root=imagenet")
    with pytest.raises(
        VitrailError, match=r"with width 0\.125, but .* 0\.25; remove model\.variant"
    ):
        build(f"model.init={path}", "model.variant=R14x0.25")
    with pytest.raises(
        VitrailError, match="root and backbone_width describe the ResNet of a hybrid"
    ):
        build("model.variant=Ti/4", "model.root=small")
    with pytest.raises(VitrailError, match="ResNet18 has no option 'root'"):
        build("model.variant=ResNet18", "model.root=small")


def test_stopping_early_needs_a_val_part():
    with pytest.raises(VitrailError, match=r"train.patience needs a val split"):
        open_run_data(load_config(None, [*SHORT, "data.val=0", "train.patience=2"]))


@pytest.mark.parametrize(
    ("settings", "device", "world", "recorded"),
    [
        ([], "cuda", 1, True),
        (["system.graphs=true"], "cuda", 1, True),
        (["system.graphs=false"], "cuda", 1, False),
        (["train.freeze=true", "model.init=B/16"], "cuda", 1, False),
        (["system.recompute=true"], "cuda", 1, False),
        ([], "cuda", 2, False),
        ([], "cpu", 1, False),
    ],
)
def test_what_is_recorded(settings, device, world, recorded):
    config = load_config(None, [*SHORT, *settings])
    model = vitrail.create("ResNet18", classes=10, size=8)
    model.activation_checkpointing = config.system.recompute
    devices = Devices(torch.device(device), torch.bfloat16, world=world)
    assert _records(Classification(model, 10), config, devices) == recorded


@pytest.mark.parametrize("variant", ["Ti/4", "R26x1", "R26+S/32", "ResNet18"])
def test_activations_are_counted_before_there_are_any(variant):
    model = vitrail.create(variant, size=64, classes=10)
    saved: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    weights = {x.untyped_storage().data_ptr() for x in model.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        outputs = model.eval()(torch.randn(1, 3, 64, 64))
    real = sum(x.untyped_storage().nbytes() for at, x in saved.items() if at not in weights)
    assert outputs.requires_grad
    # The attention of the CPU saves less than the formula.
    assert 0.95 * real < activation_bytes(model.architecture) < 4 * real


def test_batches_on_a_cpu_fit_into_memory(monkeypatch, tmp_path):
    config = load_config(
        None,
        [
            *SHORT,
            "model.variant=Ti/4",
            *(f"model.{k}={v}" for k, v in SHAPE.items() if k != "hidden"),
        ],
    )
    model = build_model(config, DIGITS)
    cpu = Devices(torch.device("cpu"), torch.float32)
    assert choose_microbatch(config, model, cpu) == 0
    whole = train_config(config, tmp_path / "whole")
    monkeypatch.setattr(
        build_module, "total_memory", lambda: 9 * activation_bytes(model.architecture)
    )
    assert choose_microbatch(config, model, cpu) == 2
    assert choose_microbatch(with_settings(config, {"system.microbatch": 5}), model, cpu) == 5
    assert choose_microbatch(config, model, Devices(torch.device("cuda"), torch.bfloat16)) == 0
    parts = train_config(config, tmp_path / "parts")
    assert "computing 2 of 8 images at a time" in (tmp_path / "parts" / "log.txt").read_text()
    for name, tensor in vitrail.load(whole.folder).state_dict().items():
        torch.testing.assert_close(vitrail.load(parts.folder).state_dict()[name], tensor)

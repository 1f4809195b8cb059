import json
import shutil
from dataclasses import replace

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

import vitrail
from tests.models import noisy, small
from vitrail.files import cached_path
from vitrail.model.positions import resize_grid
from vitrail.weights import load as load_module
from vitrail.weights.load import to_contents
from vitrail.weights.published import NAMES


@pytest.fixture
def saved(tmp_path):
    model = small("vit", gelu="erf")
    vitrail.save(model, tmp_path / "timm.safetensors", to="timm")
    return tmp_path / "timm.safetensors"


def change(path, edit) -> None:
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path)


def test_every_missing_unexpected_and_misshapen_key_is_named(saved):
    def edit(tensors):
        del tensors["blocks.1.attn.qkv.bias"], tensors["norm.weight"]
        tensors["head_dist.weight"] = torch.zeros(3)
        tensors["blocks.0.mlp.fc2.bias"] = torch.zeros(5)

    change(saved, edit)
    with pytest.raises(vitrail.VitrailError) as error:
        vitrail.load(saved)
    assert str(error.value).endswith(
        "; 2 missing: blocks.1.attn.qkv.bias, norm.weight; 1 unexpected: head_dist.weight; "
        "1 misshapen: blocks.0.mlp.fc2.bias (5,) instead of (192,)"
    )


@pytest.mark.parametrize("to", ["google", "timm", "huggingface", "torchvision"])
def test_any_one_damaged_tensor_is_one_line(to, tmp_path):
    """Another shape, another rank, or gone: never a traceback, whichever tensor it is."""
    good = to_contents(small("vit"), tmp_path / ("m.npz" if to == "google" else "m.pth"), to)
    for key, tensor in good.tensors.items():
        others = {name: x for name, x in good.tensors.items() if name != key}
        damaged = [others | {key: x} for x in (tensor[..., :-1], tensor[None], torch.zeros(()))]
        # Without positions the file is one of a model that has none.
        for tensors in damaged if "pos_embed" in key else [*damaged, others]:
            load_module.write(replace(good, tensors=tensors))
            with pytest.raises(vitrail.VitrailError) as error:
                vitrail.load(good.path)
            assert "\n" not in str(error.value)


def test_a_config_of_nonsense_is_one_line(saved, tmp_path):
    for to, wrong in (
        ("timm", {"model_args": {"num_heads": "many"}}),
        ("timm", {"model_args": {}, "num_heads": "many"}),
        ("timm", {"model_args": 3}),
        ("timm", {"pretrained_cfg": {"input_size": 7}}),
        ("timm", {"pretrained_cfg": {"mean": 3}}),
        ("huggingface", {"num_attention_heads": [1]}),
        ("huggingface", {"hidden_act": "relu"}),
        ("huggingface", {"id2label": {"x": "y"}}),
    ):
        folder = tmp_path / to
        vitrail.save(vitrail.load(saved), folder, to=to)
        config = json.loads((folder / "config.json").read_text()) | wrong
        (folder / "config.json").write_text(json.dumps(config))
        with pytest.raises(vitrail.VitrailError) as error:
            vitrail.load(folder)
        assert "\n" not in str(error.value)
        assert str(folder) in str(error.value)


def test_a_published_name_brings_the_size_and_crop_it_was_published_with(tmp_path, monkeypatch):
    """The file of a name, put into the cache as if it had been fetched."""
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path))

    def cached(name: str, to: str, model) -> vitrail.Classifier:
        path = cached_path(NAMES[name].source, tmp_path)
        vitrail.save(model, path, to=to)
        return vitrail.load(name)

    resnet = cached("R50x1-bit-in21k-in1k", "google", small("resnet", classes=1000))
    assert resnet.architecture.size == resnet.preprocess.size == (448, 448)
    vit = small("vit", size=384, classes=1000)
    swag = cached("B/16-torchvision-swag-in1k-384", "torchvision", vit)
    assert (swag.preprocess.short_side, swag.preprocess.interpolation) == (384, "bicubic")
    large = cached("L/16-torchvision-in1k", "torchvision", small("vit", size=224, classes=1000))
    assert (large.preprocess.short_side, large.preprocess.interpolation) == (242, "bilinear")
    assert large.labels[985] == "daisy"


def test_a_head_of_another_size_is_replaced_only_on_request(saved):
    images = torch.randn(2, 3, 64, 64)
    kept = vitrail.load(saved)
    assert kept(images).shape == (2, 7)
    assert kept.head.weight.any()
    same = vitrail.load(saved, classes=7)
    assert torch.equal(same.head.weight, kept.head.weight)
    new = vitrail.load(saved, classes=3)
    assert torch.equal(new(images), torch.zeros(2, 3))
    assert torch.equal(new.features(images), kept.features(images))
    assert vitrail.load(saved, classes=0).head is None


def test_regularization_can_be_set_and_the_shape_cannot(saved):
    model = vitrail.load(saved, dropout=0.1, drop_path=0.2)
    assert model.architecture.dropout == 0.1
    assert not model.training
    with pytest.raises(vitrail.VitrailError, match="cannot change depth"):
        vitrail.load(saved, depth=3)
    vitrail.save(small("resnet"), saved.with_name("bit.safetensors"))
    with pytest.raises(vitrail.VitrailError, match="takes no dropout"):
        vitrail.load(saved.with_name("bit.safetensors"), dropout=0.1)


def test_gelu_and_epsilon_follow_the_family(tmp_path):
    model = small("vit")
    for to, suffix, gelu, eps in (
        ("google", ".npz", "tanh", 1e-6),
        ("timm", ".pth", "erf", 1e-6),
        ("torchvision", ".pth", "erf", 1e-6),
        ("huggingface", "", "erf", 1e-12),
    ):
        vitrail.save(model, tmp_path / f"{to}{suffix}", to=to)
        loaded = vitrail.load(tmp_path / f"{to}{suffix}").architecture
        assert (loaded.gelu, loaded.eps, loaded.interpolation) == (gelu, eps, to)


def test_heads_are_told_by_the_file_where_the_table_would_guess_wrong(tmp_path):
    model = small("vit-b", gelu="erf")  # as wide as S, with twice its heads
    vitrail.save(model, tmp_path / "b.safetensors", to="timm")
    assert vitrail.load(tmp_path / "b.safetensors").architecture.heads == 12
    with pytest.raises(vitrail.VitrailError, match="heads 6 instead of 12, because this file type"):
        vitrail.save(model, tmp_path / "b.pth", to="timm")
    odd = noisy(vitrail.create("Ti/16", depth=1, width=100, heads=5, size=64))
    with pytest.raises(vitrail.VitrailError, match="cannot tell the number of heads"):
        vitrail.save(odd, tmp_path / "odd.pth", to="timm")
    assert not list(tmp_path.glob("*.pth"))


@pytest.mark.parametrize("to", ["google", "timm", "huggingface"])
@pytest.mark.parametrize(("old", "new"), [(224, (112, 448)), (96, (64, 144)), (96, (48, 192))])
def test_a_wished_size_with_as_many_patches_is_still_interpolated(to, old, new, tmp_path):
    """7 × 28 patches are as many as 14 × 14, and lie elsewhere."""
    model = small("vit", size=old, gelu="erf", eps=1e-12)
    path = tmp_path / ("m.npz" if to == "google" else "m")
    vitrail.save(model, path, to=to)
    rows, columns = new[0] // 16, new[1] // 16
    expected = resize_grid(model.positions[0].table, (old // 16,) * 2, (rows, columns), to)
    assert torch.equal(vitrail.load(path, size=new).positions[0].table, expected)


def test_hybrids_of_any_rectangle_are_read_with_the_grid_they_have(tmp_path):
    model = small("hybrid", size=(90, 130), gelu="erf")
    assert model.architecture.grid == (3, 5)
    for to, suffix in (("google", ".npz"), ("timm", ".safetensors")):
        parity = vitrail.convert(saved_native(model, tmp_path), tmp_path / f"h{suffix}", to=to)
        assert parity.holds
        loaded = vitrail.load(tmp_path / f"h{suffix}", size=(90, 130))
        assert torch.equal(loaded.positions[0].table, model.positions[0].table)


def saved_native(model, folder):
    vitrail.save(model, folder / "native.safetensors")
    return folder / "native.safetensors"


def test_a_rectangle_that_would_be_read_as_a_square_is_not_written(tmp_path):
    model = small("vit", size=(64, 256))  # 4 × 16 patches, as many as 8 × 8
    with pytest.raises(vitrail.VitrailError, match=r"size \(128, 128\) instead of \(64, 256\)"):
        vitrail.save(model, tmp_path / "m.npz", to="google")


def test_a_zero_head_hides_nothing_from_convert(tmp_path, monkeypatch):
    """The features are compared too: here the file is damaged between writing and reading."""
    source = saved_native(vitrail.create("Ti/16", depth=1, size=64), tmp_path)
    write = load_module.write

    def damaging(contents, folder=False):
        key = next(key for key in contents.tensors if key.endswith("qkv.weight"))
        write(
            replace(contents, tensors=contents.tensors | {key: contents.tensors[key] * 2}), folder
        )

    monkeypatch.setattr(load_module, "write", damaging)
    parity = vitrail.convert(source, tmp_path / "x.safetensors", to="timm")
    assert parity.difference == 0
    assert parity.features > 1e-3
    assert not parity.holds


def test_a_damaged_file_of_our_own_is_not_mended_by_resizing(tmp_path):
    path = saved_native(small("vit"), tmp_path)
    good = load_module.read(path)
    for key, tensor in good.tensors.items():
        load_module.write(replace(good, tensors=good.tensors | {key: tensor[..., :-1]}))
        with pytest.raises(vitrail.VitrailError, match="instead of"):
            vitrail.load(path, size=96)


def test_a_conversion_within_a_family_keeps_its_gelu_and_epsilon(tmp_path):
    model = small("vit", gelu="tanh", eps=1e-3)
    model.origin = "huggingface"
    vitrail.save(model, tmp_path / "a.b", to="huggingface")  # a folder, in spite of the dot
    parity = vitrail.convert(tmp_path / "a.b", tmp_path / "c.d", to="huggingface")
    assert (parity.switch, parity.gelu, parity.eps) == (0, "tanh", 1e-3)
    assert parity.holds
    timm = small("vit", gelu="tanh")
    timm.origin = "timm"
    vitrail.save(timm, tmp_path / "timm", to="timm")
    assert vitrail.load(tmp_path / "timm").architecture.gelu == "tanh"


def test_a_folder_written_again_keeps_nothing_of_before(tmp_path):
    model = vitrail.load(saved_native(small("vit", gelu="erf"), tmp_path))
    for to in ("huggingface", "timm", "vitrail"):
        vitrail.save(model, tmp_path / "folder", to=to)
    assert [path.name for path in (tmp_path / "folder").iterdir()] == ["model.safetensors"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_any_precision_predicts(dtype, saved, tmp_path):
    half = {key: x.to(dtype) for key, x in load_file(saved).items()}
    save_file(half, tmp_path / "half.safetensors")
    model = vitrail.load(tmp_path / "half.safetensors")
    assert model.head.weight.dtype == dtype
    model.train()
    assert len(model.predict(Image.effect_noise((80, 100), 64))) == 5
    assert model.training
    mixed = half | {key: x.float() for key, x in half.items() if "norm" in key}
    save_file(mixed, tmp_path / "mixed.safetensors")
    assert vitrail.load(tmp_path / "mixed.safetensors").predict(Image.new("RGB", (64, 64)))
    save_file(half | {"norm.bias": half["norm.bias"].int()}, tmp_path / "whole.safetensors")
    with pytest.raises(vitrail.VitrailError, match="of integers"):
        vitrail.load(tmp_path / "whole.safetensors")


def test_what_cannot_be_saved_or_converted_is_one_line(tmp_path):
    path = saved_native(small("vit"), tmp_path)
    with pytest.raises(vitrail.VitrailError, match="is the source itself"):
        vitrail.convert(path, path, to="vitrail")
    with torch.device("meta"):
        empty = vitrail.create("Ti/16", depth=1)
    with pytest.raises(vitrail.VitrailError, match="expected a model with weights"):
        vitrail.save(empty, tmp_path / "x.safetensors")
    model = small("vit")
    model.preprocess = lambda picture: picture
    with pytest.raises(vitrail.VitrailError, match="Preprocessing"):
        vitrail.save(model, tmp_path / "x.safetensors")


def test_a_rectangle_without_its_sides_must_be_told_them(tmp_path):
    model = small("vit", size=(64, 112), gelu="erf")
    vitrail.save(model, tmp_path / "m.pth", to="timm")
    with pytest.raises(
        vitrail.VitrailError, match=r"29 positions are not a square grid; pass size="
    ):
        vitrail.load(tmp_path / "m.pth")
    loaded = vitrail.load(tmp_path / "m.pth", size=(64, 112))
    images = torch.randn(1, 3, 64, 112)
    assert (loaded(images) - model(images)).abs().max() < 1e-5


def test_preprocessing_follows_the_size(saved):
    assert vitrail.load(saved).preprocess.size == (64, 64)
    larger = vitrail.load(saved, size=128).preprocess
    assert larger.size == (128, 128)
    assert larger.short_side == pytest.approx(2 * vitrail.load(saved).preprocess.short_side, abs=1)


def test_predict_answers_for_one_picture(saved, tmp_path):
    model = vitrail.load(saved)
    model.labels = tuple("abcdefg")
    picture = Image.effect_noise((80, 100), 64)
    picture.save(tmp_path / "p.png")
    answers = model.predict(tmp_path / "p.png", top=3)
    assert len(answers) == 3
    assert answers == model.predict(picture.convert("RGB"), top=3)
    with torch.inference_mode():
        probabilities = model(model.preprocess(picture)[None]).softmax(-1)[0]
    assert answers[0] == ("abcdefg"[probabilities.argmax()], probabilities.max().item())
    assert sum(p for _, p in model.predict(picture, top=100)) == pytest.approx(1, abs=1e-5)


def test_a_checkpoint_of_imagenets_classes_knows_their_names(checkpoint, tmp_path):
    path = shutil.copy(checkpoint, tmp_path)
    change(path, lambda tensors: tensors["head.bias"].index_fill_(0, torch.tensor(985), 1e4))
    model = vitrail.load(path)
    assert model.predict(Image.effect_noise((80, 100), 64), top=1) == [("daisy", 1.0)]


def test_weights_carry_their_activation_and_older_ones_take_it_from_their_run(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    model = small("vit")
    model.activation = "sigmoid"
    vitrail.save(model, run / "model.safetensors")
    assert vitrail.load(run / "model.safetensors").activation == "sigmoid"
    assert vitrail.load(run / "model.safetensors", classes=3).activation == "softmax"
    header = json.loads(load_module.read(run / "model.safetensors").metadata["vitrail"])
    del header["activation"]
    tensors = load_file(run / "model.safetensors")
    save_file(tensors, run / "model.safetensors", {"vitrail": json.dumps(header)})
    for text, expected in {"sigmoid": "sigmoid", "softmax": "softmax", '"': "softmax"}.items():
        (run / "config.toml").write_text(f'[train]\nobjective = "{text}"\n')
        assert vitrail.load(run).activation == expected
    (run / "config.toml").unlink()
    assert vitrail.load(run).activation == "softmax"


def test_the_cost_of_training_is_kept_and_older_files_have_none(tmp_path):
    model = small("vit")
    vitrail.save(model, tmp_path / "m.safetensors")
    assert vitrail.load(tmp_path / "m.safetensors").training_cost is None
    header = json.loads(load_module.read(tmp_path / "m.safetensors").metadata["vitrail"])
    del header["training_cost"]
    tensors = load_file(tmp_path / "m.safetensors")
    save_file(tensors, tmp_path / "m.safetensors", {"vitrail": json.dumps(header)})
    model = vitrail.load(tmp_path / "m.safetensors")
    assert model.training_cost is None
    model.training_cost = {"exaflops": 2.5, "device_days": 0}
    vitrail.save(model, tmp_path / "known.safetensors")
    assert vitrail.load(tmp_path / "known.safetensors").training_cost == model.training_cost
    assert vitrail.load(tmp_path / "known.safetensors", size=64).training_cost is not None


COSTS = (None, "1", True, -1.0, float("nan"), float("inf"), 10**400, [1])
"""What no file may give as a cost; a number without end overflows."""


def test_our_own_header_is_checked(tmp_path):
    vitrail.save(small("vit"), tmp_path / "m.safetensors")
    tensors = load_file(tmp_path / "m.safetensors")
    described = json.loads(load_module.read(tmp_path / "m.safetensors").metadata["vitrail"])
    changes = ({"labels": 5}, {"labels": ["a"]}, {"activation": "relu"}, {"activation": []})
    wrong = [described | change for change in changes]
    wrong += [described | {"preprocessing": value} for value in (5, {"size": 3})]
    costs = (5, {}, {"exaflops": 1.0}, *({"exaflops": x, "device_days": 1} for x in COSTS))
    wrong += [described | {"training_cost": value} for value in costs]
    for field, value in (("depth", None), ("family", ["vit"]), ("eps", "x"), ("backbone", "ab")):
        wrong.append(described | {"architecture": described["architecture"] | {field: value}})
    headers = ["{}", "nonsense", '{"version": 1, "architecture": {"family": "rnn"}}', "[]"]
    for header in [*headers, *map(json.dumps, wrong)]:
        save_file(tensors, tmp_path / "bad.safetensors", {"vitrail": header})
        with pytest.raises(vitrail.VitrailError) as error:
            vitrail.load(tmp_path / "bad.safetensors")
        assert "\n" not in str(error.value)


def test_what_is_assumed_is_said_once(checkpoint, tmp_path, capsys):
    path = shutil.copy(checkpoint, tmp_path)
    for _ in range(2):
        vitrail.load(path)
    assert capsys.readouterr().err.count("does not fully describe its model") == 1

"""Exported files answer as the original does, and run without Vitrail."""

import io
import json
import re
import subprocess
import sys
import threading
import zipfile
from base64 import b64decode
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from PIL import Image

import vitrail
from tests.models import SMALL, small
from vitrail import VitrailError
from vitrail.cli import main
from vitrail.data.preprocessing import Preprocessing
from vitrail.exporting import export as exporting
from vitrail.weights.exported import open_model

pytest.importorskip("onnxruntime")
PAGE = Path(__file__).parents[2] / "docs" / "export.md"
LABELS = ("blue", "green", "red")


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> Path:
    """Forty-eight pictures of three classes."""
    folder = tmp_path_factory.mktemp("data") / "photos"
    chance = np.random.default_rng(0)
    for number in range(48):
        place = folder / LABELS[number % 3]
        place.mkdir(parents=True, exist_ok=True)
        pixels = chance.normal(90 + 30 * (number % 3), 60, (40, 56, 3)).clip(0, 255)
        Image.fromarray(pixels.astype(np.uint8)).save(place / f"{number:02}.png")
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("model") / "model.safetensors"
    vitrail.save(ready(small("vit", size=32, classes=3)), path)
    return path


def ready(model):
    size = model.architecture.size
    model.preprocess = Preprocessing(size=size, short_side=min(size) + 4, interpolation="bicubic")
    model.labels = LABELS if model.architecture.classes == 3 else ()
    return model


def invoke(*arguments: object):
    return CliRunner().invoke(main, ["export", *map(str, arguments)])


@pytest.mark.parametrize("kind", ["onnx", "pt2"])
@pytest.mark.parametrize("preprocessing", ["inside", "beside"])
def test_answers_are_the_originals_at_every_batch_size(model, tmp_path, kind, preprocessing):
    parity = vitrail.export(model, tmp_path / f"m.{kind}", kind=kind, preprocessing=preprocessing)
    assert parity.batches == (1, 2, 7)
    assert parity.holds
    assert parity.difference < 1e-4
    assert (tmp_path / "m.json").exists() == (preprocessing == "beside")


@pytest.mark.parametrize(
    "kind",
    ["vit-gap", "hybrid", "resnet", "vit-relative", "hybrid-small-root", "resnet-small-root"],
)
def test_every_family_goes_into_onnx(kind, tmp_path):
    found = ready(small(kind, size=64))
    assert vitrail.export(found, tmp_path / "m.onnx", preprocessing="beside").holds


def test_what_onnx_cannot_hold_is_one_line(tmp_path):
    with pytest.raises(VitrailError, match="this model; use --format pt2"):
        vitrail.export(ready(small("axial-vit", size=64)), tmp_path / "m.onnx")
    assert list(tmp_path.iterdir()) == []


ANY_SIZE: dict[str, Any] = {"preprocessing": "beside", "dynamic_size": True}


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("classic-resnet", {}),
        ("vit-sincos", {}),
        ("vit", {"interpolation": "google"}),
        ("vit", {"interpolation": "huggingface"}),
    ],
)
def test_pictures_of_any_size_where_the_model_takes_them(kind, options, tmp_path):
    found = ready(small(kind, size=64, **options))
    assert vitrail.export(found, tmp_path / "m.onnx", **ANY_SIZE).holds
    if kind != "vit":
        assert vitrail.export(found, tmp_path / "m.pt2", kind="pt2", **ANY_SIZE).holds
    else:
        with pytest.raises(VitrailError, match="only for --format onnx"):
            vitrail.export(found, tmp_path / "m.pt2", kind="pt2", **ANY_SIZE)


def test_the_callers_model_stays_as_it_was(model, tmp_path):
    loaded = vitrail.load(model).to(torch.bfloat16).train()
    vitrail.export(loaded, tmp_path / "m.pt2", kind="pt2")
    assert loaded.training
    assert next(loaded.parameters()).dtype == torch.bfloat16
    assert next(loaded.parameters()).requires_grad


def test_pt2_is_measured_on_images_too(model, photos, tmp_path):
    parity = vitrail.export(model, tmp_path / "m.pt2", data=photos)
    assert parity.kept == 1
    assert parity.n > 0


def test_int8_is_smaller_and_says_what_became_of_accuracy(model, photos, tmp_path):
    floats = vitrail.export(model, tmp_path / "m.onnx", data=photos)
    assert floats.before == floats.after
    assert floats.kept == 1
    result = invoke(model, tmp_path / "m8.onnx", "--int8", "--data", photos, "--json")
    assert result.exit_code == 0, result.output
    parity = json.loads(result.stdout)
    assert parity["n"] == floats.n > 0
    assert parity["kept"] >= 0.95
    assert parity["difference"] > 0
    assert parity["bytes"] < 0.8 * floats.bytes


@pytest.mark.parametrize("arguments", [[], ["--json"]])
def test_a_file_that_answers_otherwise_is_a_failure(model, tmp_path, monkeypatch, arguments):
    monkeypatch.setattr(exporting, "TOLERANCE", -1.0)
    result = invoke(model, tmp_path / "m.pt2", "--format", "pt2", *arguments)
    assert result.exit_code == 1
    assert "does not give the same outputs" in result.stderr


SNIPPETS = re.findall(r"```python\n((?:.*\n)*?)```", PAGE.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("place", "options"),
    [
        (0, ["flowers.onnx"]),
        (1, ["flowers.onnx", "--preprocessing", "beside"]),
        (2, ["flowers.pt2"]),
    ],
)
def test_the_documented_snippet_runs_without_vitrail(
    model, photos, tmp_path, monkeypatch, place, options
):
    monkeypatch.chdir(tmp_path)
    assert invoke(model, *options).exit_code == 0
    picture = photos / "red" / "02.png"
    Image.open(picture).save(tmp_path / "photo.png")
    code = "import sys\nsys.modules['vitrail'] = None\n" + SNIPPETS[place]
    code = code.replace("photo.jpg", "photo.png")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    said = dict(line.rsplit(maxsplit=1) for line in done.stdout.splitlines())
    expected = dict(vitrail.load(model).predict(picture))
    assert {label: float(p) for label, p in said.items()} == pytest.approx(expected, abs=2e-4)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["x"], "expected a name that ends in .onnx or .pt2"),
        (["x.pt2", "--format", "onnx"], "expected a name that ends in .onnx"),
        (["x.onnx", "--int8"], "images for calibration; add --data"),
        (["x.pt2", "--int8", "--data", "y"], "--int8 is only for --format onnx"),
        (["x.onnx", "--dynamic-size"], "--preprocessing beside"),
        (["x.onnx", "--to", "timm"], "for --format hub"),
        (["x", "--format", "hub", "--int8"], "--int8 does not apply to --format hub"),
    ],
)
def test_mistakes_are_one_line(model, arguments, complaint):
    result = invoke(model, *arguments)
    assert result.exit_code == 2
    assert complaint in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("kind", ["vit", "vit-gap", "vit-deit3", "vit-registers", "R50x1"])
def test_timm_loads_the_folder(kind, tmp_path):
    timm = pytest.importorskip("timm")
    if kind in SMALL:
        found = ready(small(kind, size=64, classes=3))
    else:
        found = ready(vitrail.create(kind, size=64, classes=3).eval())
    vitrail.save(found, tmp_path / "m.safetensors")
    assert vitrail.export(tmp_path / "m.safetensors", tmp_path / "hub", kind="hub").holds
    theirs = timm.create_model(f"local-dir:{tmp_path / 'hub'}", pretrained=True).eval()
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        assert (theirs(images) - found(images)).abs().max() < 1e-4
    assert theirs.pretrained_cfg["label_names"] == list(LABELS)


def test_transformers_loads_the_folder_and_an_upload_is_offered(model, tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers")
    monkeypatch.setenv("HF_TOKEN", "hf_test")
    result = invoke(model, tmp_path / "hub", "--format", "hub", "--to", "transformers")
    assert result.exit_code == 0, result.output
    assert "--upload OWNER/NAME" in result.stderr
    theirs = transformers.AutoModelForImageClassification.from_pretrained(tmp_path / "hub").eval()
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert (theirs(images).logits - vitrail.load(model)(images)).abs().max() < 1e-3
    assert theirs.config.id2label[2] == "red"


class Hub(BaseHTTPRequestHandler):
    """As much of the hub as an upload needs; what arrives is kept."""

    arrived: dict[str, bytes]
    here = ""

    def do_GET(self) -> None:
        known = "whoami" in self.path and self.headers.get("Authorization") == "Bearer hf_test"
        self.say({"name": "me", "type": "user", "orgs": []} if known else {}, 200 if known else 401)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if "/preupload/" in self.path:
            files = json.loads(body)["files"]
            modes = [
                {"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in files
            ]
            self.say({"files": modes})
        elif "/commit/" in self.path:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.arrived[line["value"]["path"]] = b64decode(line["value"]["content"])
            self.say({"commitUrl": f"{self.here}/me/m/commit/1", "commitOid": "1", "success": True})
        else:
            self.say({"url": f"{self.here}/me/m", "name": "me/m", "id": "1"})

    def say(self, value: object, status: int = 200) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", f"{len(data)}")
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *words: object) -> None: ...


UPLOAD = """
import sys
from vitrail.cli import main
main(["export", sys.argv[1], sys.argv[2], "--format", "hub", "--upload", "me/m"])
"""


@pytest.mark.parametrize("token", ["hf_test", "hf_wrong", ""])
def test_an_upload_sends_the_folder_where_the_user_is_known(model, tmp_path, token):
    pytest.importorskip("huggingface_hub")
    hub = type("OneHub", (Hub,), {"arrived": {}})
    server = ThreadingHTTPServer(("127.0.0.1", 0), hub)
    hub.here = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    folder = tmp_path / "hub"
    folder.mkdir()
    (folder / "diary.txt").write_text("nobody's business")
    environment = {
        "HF_ENDPOINT": hub.here,
        "HF_HOME": str(tmp_path / "home"),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "PATH": "",
        "PYTHONPATH": ":".join(sys.path),
    } | ({"HF_TOKEN": token} if token else {})
    command = [sys.executable, "-c", UPLOAD, str(model), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    server.shutdown()
    server.server_close()
    if token == "hf_test":
        assert done.returncode == 0, done.stderr
        assert set(hub.arrived) == {"README.md", "config.json", "model.safetensors"}
        assert hub.arrived["README.md"] == (folder / "README.md").read_bytes()
    else:
        assert done.returncode == (1 if token else 2)
        assert ("the hub rejected your login" if token else "hf auth login") in done.stderr
        assert not hub.arrived


def test_a_card_has_the_results_and_the_command_of_its_run(photos, tmp_path):
    settings = {
        **{"model.variant": "Ti/8", "model.width": 24, "model.depth": 1, "model.heads": 2},
        **{"model.mlp": 48, "model.init": "", "data.size": 16, "train.steps": 2, "train.batch": 8},
    }
    run = vitrail.train(photos, settings, out=tmp_path / "run", device="cpu")
    vitrail.export(run.folder, tmp_path / "hub", kind="hub")
    card = (tmp_path / "hub" / "README.md").read_text(encoding="utf-8")
    tested = run.evaluation("test")
    assert f"Top-1 {tested['top1']:.2%}" in card
    assert f"n = {tested['n']}" in card
    assert run.info()["command"] in card
    assert all(f"| {label} |" in card for label in LABELS)
    yaml = pytest.importorskip("yaml")
    header = yaml.safe_load(card.split("---")[1])
    (found,) = header["model-index"][0]["results"]
    assert found["metrics"][0]["value"] == round(tested["top1"], 4)


EXPORTS = [("onnx", "inside"), ("onnx", "beside"), ("pt2", "inside"), ("pt2", "beside")]


@pytest.fixture(scope="module")
def exported(model, photos, tmp_path_factory) -> dict[str, Path]:
    """The model in every kind of file."""
    folder = tmp_path_factory.mktemp("exported")
    files = {}
    for kind, place in EXPORTS:
        files[f"{kind} {place}"] = path = folder / f"{place}.{kind}"
        vitrail.export(model, path, preprocessing=place)
    files["int8"] = folder / "int8.onnx"
    vitrail.export(model, files["int8"], int8=True, data=photos)
    return files


@pytest.mark.parametrize("kind", [" ".join(words) for words in EXPORTS])
def test_exported_files_predict_as_the_model(model, exported, photos, kind):
    expected = list(vitrail.predict(model, photos, top=3))
    found = list(vitrail.predict(exported[kind], photos, top=3))
    assert len(expected) == len(found) == 48
    for one, other in zip(expected, found, strict=True):
        assert one["top"][0]["label"] == other["top"][0]["label"]
        probabilities = {row["label"]: row["probability"] for row in one["top"]}
        assert probabilities == pytest.approx(
            {row["label"]: row["probability"] for row in other["top"]}, abs=1e-4
        )


def test_int8_predicts_almost_as_the_model(model, exported, photos):
    rows = (vitrail.predict(model, photos), vitrail.predict(exported["int8"], photos))
    same = [
        one["top"][0]["label"] == two["top"][0]["label"] for one, two in zip(*rows, strict=True)
    ]
    assert sum(same) >= 0.95 * len(same) > 0


@pytest.mark.parametrize("options", [{"size": (32, 48)}, {"size": 33, "classes": 0}])
def test_other_sizes_and_models_without_classes(options, photos, tmp_path):
    found = ready(small("vit-gap", **options))
    vitrail.export(found, tmp_path / "m.onnx")
    headless = found.head is None
    expected = next(vitrail.predict(found, photos, features=headless))
    row = next(vitrail.predict(tmp_path / "m.onnx", photos, features=headless))
    assert len(row["top"]) == len(expected["top"])
    if headless:
        assert np.abs(row["features"] - expected["features"]).max() < 1e-4
    else:
        assert row["top"][0]["label"] == expected["top"][0]["label"]
        assert row["top"][0]["probability"] == pytest.approx(
            expected["top"][0]["probability"], abs=1e-4
        )


@pytest.mark.parametrize("kind", ["onnx inside", "pt2 beside"])
def test_exported_files_are_served(model, exported, photos, kind):
    testclient = pytest.importorskip("starlette.testclient")
    from vitrail.serving.app import application
    from vitrail.serving.models import open_models

    served = open_models([f"whole={model}", f"file={exported[kind]}"], torch.device("cpu"))
    picture = (photos / "red" / "02.png").read_bytes()
    with testclient.TestClient(application(served)) as client:
        whole, file = (
            client.post(f"/predict?model={name}", content=picture).json()["results"][0]["top"]
            for name in ("whole", "file")
        )
        assert [row["label"] for row in whole] == [row["label"] for row in file]
        assert whole[0]["probability"] == pytest.approx(file[0]["probability"], abs=1e-4)
        about = client.get("/model?model=file").json()
        assert about | {"name": 0, "heads": 0, "grid": 0, "patches": 0} == client.get(
            "/model?model=whole"
        ).json() | {"name": 0, "heads": 0, "grid": 0, "patches": 0}
        for path, code in (("embed", "no_features"), ("attention", "no_attention")):
            response = client.post(f"/{path}?model=file", content=picture)
            assert response.status_code == 404
            assert response.json()["error"]["code"] == code


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["inspect", "{file}", "--out", "x"], "only predict and serve take"),
        (["convert", "{file}", "x.npz", "--to", "google"], "only predict and serve take"),
        (["evaluate", "{file}", "digits"], "only predict and serve take"),
        (["predict", "{file}", "{photos}", "--features", "x.npz"], "gives no features"),
        (["predict", "{file}", "{photos}", "--fast"], "a single form"),
        (["predict", "{file}", "{photos}", "--device", "cuda"], "run on the CPU"),
        (["predict", "nowhere.onnx", "{photos}"], "neither a file nor a published name"),
        (["serve", "{file}", "--fast", "--port", "0"], "a single form"),
    ],
)
def test_what_an_exported_file_cannot_do_is_one_line(exported, photos, arguments, complaint):
    words = [word.format(file=exported["onnx inside"], photos=photos) for word in arguments]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 2
    assert complaint in result.stderr
    assert result.stderr.count("\n") == 1


def test_foreign_files_and_images_that_the_graph_resizes_otherwise(model, exported, tmp_path):
    import onnx

    (tmp_path / "bad.onnx").write_bytes(b"not a model")
    with pytest.raises(VitrailError, match="not a readable exported file"):
        open_model(tmp_path / "bad.onnx")
    graph = onnx.load(exported["onnx beside"])
    del graph.metadata_props[:]
    onnx.save(graph, tmp_path / "foreign.onnx")
    with pytest.raises(VitrailError, match="write it with vitrail export"):
        open_model(tmp_path / "foreign.onnx")
    found = vitrail.load(model)
    found.preprocess = Preprocessing(size=(32, 32), antialias=False)
    vitrail.export(found, tmp_path / "m.onnx")
    with pytest.raises(VitrailError, match="--preprocessing beside"):
        open_model(tmp_path / "m.onnx")


class Trap:
    """Unpickled, it leaves a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self):
        return Path.touch, (self.file,)


def pickled(value: object) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


@pytest.mark.parametrize("trap", ["inputs", "member", "flag", "target", "size", "name", "guard"])
def test_no_code_runs_from_a_pt2_file(exported, tmp_path, trap):
    sprung, bad = tmp_path / "sprung", tmp_path / "bad.pt2"
    call = f"__import__('pathlib').Path('{sprung}').touch()"
    edits = {
        "flag": ('"use_pickle": false', '"use_pickle": true'),
        "target": ("torch.ops.aten.linear.default", "torch.os.system"),
        "size": ("Symbol('", f"{call} or Symbol('"),
        "name": ('"name": "linear"', f'"name": "linear={call}"'),
        "guard": ('"guards_code": []', f'"guards_code": ["{call}"]'),
    }
    with zipfile.ZipFile(exported["pt2 inside"]) as old, zipfile.ZipFile(bad, "w") as new:
        for name in old.namelist():
            data = old.read(name)
            if trap == "inputs" and name.endswith("sample_inputs/model.pt"):
                data = pickled(Trap(sprung))
            elif trap in edits and name.endswith(".json"):
                before, after = edits[trap]
                data = data.decode().replace(before, after).encode()
            new.writestr(name, data)
        if trap == "member":
            top = old.namelist()[0].partition("/")[0]
            new.writestr(f"{top}/data/weights/model.pt", pickled(Trap(sprung)))
    with pytest.raises(
        VitrailError, match="may run code" if trap != "inputs" else "not a readable"
    ):
        open_model(bad)
    assert not sprung.exists()

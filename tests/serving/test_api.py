"""What the API answers, and how it says no."""

import asyncio
import io
import json
import re

import numpy as np
import pytest
import torch
from PIL import Image
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.malformed import decodes, form, uploads
from tests.pictures import many_scans
from tests.serving.conftest import LABELS, clients, image, ready, served
from vitrail.errors import VitrailError
from vitrail.inspection.attention import analyze_attention, on_grid, record
from vitrail.inspection.tracer import Tracer
from vitrail.serving.limits import Limits
from vitrail.serving.models import open_models, serve_model, split_name


def code(answer) -> tuple[int, str]:
    """Status and code of an error, which has a message and nothing else."""
    assert set(answer.json()) == {"error"}
    assert set(answer.json()["error"]) == {"code", "message"}
    assert "\n" not in answer.json()["error"]["message"]
    return answer.status_code, answer.json()["error"]["code"]


def test_a_picture_as_bytes_gets_what_the_model_predicts(client, model):
    answer = client.post("/predict", content=image()).json()
    expected = model.predict(Image.open(io.BytesIO(image())))
    assert answer["model"] == "a"
    assert set(answer["milliseconds"]) == {"decode", "model"}
    top = [(one["label"], one["probability"]) for one in answer["results"][0]["top"]]
    assert [label for label, _ in top] == [label for label, _ in expected]
    assert [p for _, p in top] == pytest.approx([p for _, p in expected], abs=1e-5)


def test_many_pictures_of_a_form_come_back_in_order_with_their_names(client, model):
    files = [("file", (f"{n}.png", image(n))) for n in range(5)]
    answer = client.post("/predict?top=1", files=files).json()
    assert [one["name"] for one in answer["results"]] == [f"{n}.png" for n in range(5)]
    for number, one in enumerate(answer["results"]):
        expected = model.predict(Image.open(io.BytesIO(image(number))), top=1)[0]
        assert one["top"][0]["label"] == expected[0]
        assert one["top"][0]["probability"] == pytest.approx(expected[1], abs=1e-5)


@pytest.mark.parametrize("top", [1, 3, 7, 1000])
def test_so_many_guesses_as_wanted_and_as_there_are(client, top):
    answer = client.post(f"/predict?top={top}", content=image()).json()
    assert len(answer["results"][0]["top"]) == min(top, 7)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "GIF", "WEBP", "BMP", "TIFF", "PPM", "AVIF"])
def test_every_usual_format_is_read_whatever_type_it_is_said_to_be(client, kind):
    answer = client.post(
        "/predict", content=image(kind=kind), headers={"content-type": "text/html"}
    )
    assert answer.status_code == 200


def test_embeddings_are_the_features_of_the_model(client, model):
    answer = client.post("/embed", content=image()).json()
    with torch.inference_mode():
        expected = model.features(model.preprocess(Image.open(io.BytesIO(image())))[None])[0]
    assert answer["results"][0]["embedding"] == pytest.approx(expected.tolist(), abs=1e-4)


def recorded(model):
    pixels = model.preprocess(Image.open(io.BytesIO(image())))
    return record(model, pixels[None], gradient=False)


def test_rollout_is_that_of_vitrail_inspect(client, model):
    answer = client.post("/attention", content=image()).json()
    tracer = Tracer(model)
    expected = tracer.trace(tracer.preprocess(Image.open(io.BytesIO(image()))), "it").rollout
    only = answer["maps"][0]
    assert (only["layer"], only["head"], only["patch"], only["grid"]) == (None, None, None, [4, 4])
    assert len(answer["maps"]) == 1
    assert only["values"] == pytest.approx(expected.flatten().tolist(), rel=1e-3)


def test_every_layer_and_head_comes_after_rollout(client, model):
    maps = client.post("/attention?layer=all", content=image()).json()["maps"]
    names = [(one["layer"], one["head"]) for one in maps]
    assert names == [(None, None), *((layer, head) for layer in range(2) for head in range(3))]
    heads = analyze_attention(recorded(model), [0, 1]).heads
    for one in maps[1:]:
        expected = heads[one["layer"]][one["head"]].flatten().tolist()
        assert one["values"] == pytest.approx(expected, rel=1e-3)


def test_the_mean_of_heads_is_one_map(client):
    each = client.post("/attention?layer=1", content=image()).json()["maps"]
    mean = client.post("/attention?layer=1&head=mean", content=image()).json()["maps"]
    assert [one["head"] for one in mean] == [None]
    expected = np.mean([one["values"] for one in each], axis=0)
    assert mean[0]["values"] == pytest.approx(expected.tolist(), rel=1e-3)


def test_every_patch_says_what_it_attends_to(client, model):
    maps = client.post("/attention?layer=1&head=2&patch=all", content=image()).json()["maps"]
    assert [one["patch"] for one in maps] == list(range(16))
    pixels = model.preprocess(Image.open(io.BytesIO(image())))[None]
    with torch.no_grad():
        weights = model.attention(pixels, [1])[1][0, 2]
    expected = on_grid(weights[1:], (4, 4)).flatten(1)
    found = torch.tensor([one["values"] for one in maps])
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-6)
    one = client.post("/attention?layer=1&head=2&patch=5", content=image()).json()["maps"]
    assert one == [maps[5]]


def test_rollout_from_patches_multiplies_all_layers(client, model):
    maps = client.post("/attention?patch=all", content=image()).json()["maps"]
    pixels = model.preprocess(Image.open(io.BytesIO(image())))[None]
    with torch.no_grad():
        first, last = (model.attention(pixels)[n][0].mean(0) for n in (0, 1))
    identity = torch.eye(17)
    product = (last + identity) / 2 @ ((first + identity) / 2)
    expected = on_grid(product[1:], (4, 4)).flatten(1)
    found = torch.tensor([one["values"] for one in maps])
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(
    "query", ["", "?layer=rollout", "?layer=1", "?layer=0&head=2", "?patch=3&layer=1"]
)
def test_one_map_over_the_picture_is_a_png_file(client, query):
    answer = client.post(f"/attention.png{query}", content=image())
    assert answer.headers["content-type"] == "image/png"
    drawn = Image.open(io.BytesIO(answer.content))
    assert (drawn.format, drawn.size) == ("PNG", (256, 256))
    assert len(set(drawn.convert("L").tobytes())) > 20


def test_what_the_model_is_shown_of_a_picture_is_told(client):
    left, top, right, bottom = client.post("/attention", content=image()).json()["crop"]
    # 80 x 100 becomes 72 x 90, of which the middle 64 x 64 are cropped.
    assert (left, right) == pytest.approx((4 / 72, 68 / 72))
    assert (top, bottom) == pytest.approx((13 / 90, 77 / 90))


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("?layer=2", (404, "not_found")),
        ("?layer=1&head=3", (404, "not_found")),
        ("?patch=16", (404, "not_found")),
        ("?layer=first", (400, "bad_parameter")),
        ("?layer=-1", (400, "bad_parameter")),
        ("?head=", (400, "bad_parameter")),
        ("?layers=1", (400, "bad_parameter")),
        ("?layer=1&layer=0", (400, "bad_parameter")),
        ("?model=b", (404, "unknown_model")),
    ],
)
def test_a_wrong_parameter_is_named(client, query, expected):
    answer = client.post(f"/attention{query}", content=image())
    assert code(answer) == expected


@pytest.mark.parametrize("kind", ["resnet", "classic-resnet"])
def test_a_model_without_attention_says_so_and_predicts(kind):
    with clients(ready(kind)) as client:
        assert code(client.post("/attention", content=image())) == (404, "no_attention")
        assert client.post("/predict", content=image()).status_code == 200
        assert client.get("/model").json()["heads"] == []


@pytest.mark.parametrize("kind", ["vit-gap", "vit-attention-pool", "hybrid", "axial-vit"])
def test_other_families_have_maps_too(kind):
    with clients(ready(kind)) as client:
        for query in ("?layer=all", "?layer=0&head=mean&patch=0"):
            answer = client.post(f"/attention{query}", content=image())
            assert answer.status_code == 200, answer.text
            for one in answer.json()["maps"]:
                assert sum(one["values"]) == pytest.approx(1, abs=1e-3)


def test_layers_that_see_different_patches_cannot_be_asked_about_one():
    with clients(ready("axial-resnet")) as client:
        answer = client.post("/attention?layer=all", content=image())
        assert len({tuple(one["grid"]) for one in answer.json()["maps"]}) > 1
        assert code(client.post("/attention?patch=0", content=image())) == (404, "no_attention")
        assert client.get("/model").json()["patches"] is False


def test_a_model_without_classes_only_embeds():
    with clients(ready(classes=0)) as client:
        assert code(client.post("/predict", content=image())) == (404, "no_classes")
        assert client.post("/embed", content=image()).status_code == 200


def test_several_models_are_asked_by_name(model):
    with clients(model, ready("vit-gap")) as client:
        first = client.post("/embed", content=image()).json()
        second = client.post("/embed?model=b", content=image()).json()
        assert (first["model"], second["model"]) == ("a", "b")
        assert first["results"] != second["results"]
        assert [one["name"] for one in client.get("/models").json()["models"]] == ["a", "b"]


def test_the_model_describes_itself(client):
    found = client.get("/model").json()
    assert found["labels"] == list(LABELS)
    assert (found["classes"], found["size"], found["grid"]) == (7, [64, 64], [4, 4])
    assert found["heads"] == [3, 3]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", (400, "no_image")),
        (b"hello", (422, "not_an_image")),
        (image()[:200], (422, "not_an_image")),
        (
            b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n",
            (422, "not_an_image"),
        ),
        (image(size=(2100, 500)), (413, "too_many_pixels")),
        (image(size=(1, 3000)), (413, "too_many_pixels")),
        (bytes(1 << 20) + b"0", (413, "too_large")),
    ],
)
def test_bad_uploads_are_refused_with_their_reason(model, content, expected):
    with clients(model, megabytes=1.0, megapixels=1.0) as client:
        assert code(client.post("/predict", content=content)) == expected


def test_a_broken_picture_among_others_is_named(client):
    files = [("file", ("good.png", image())), ("file", ("notes.txt", b"hello"))]
    answer = client.post("/predict", files=files)
    assert code(answer) == (422, "not_an_image")
    assert answer.json()["error"]["message"].startswith("notes.txt is not")


def test_too_many_pictures_are_refused(model):
    with clients(model, images=2) as client:
        files = [("file", (f"{n}.png", image())) for n in range(3)]
        assert code(client.post("/predict", files=files)) == (400, "too_many_images")
        assert client.post("/predict", files=files[:2]).status_code == 200
        assert code(client.post("/attention", files=files[:2])) == (400, "too_many_images")


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (b"nothing", "multipart/form-data; boundary=x"),
        (b"nothing", "multipart/form-data"),
        (
            b'--x\r\nContent-Disposition: form-data; name="a"\r\n\r\nword\r\n--x--\r\n',
            "multipart/form-data; boundary=x",
        ),
        (
            b"--x\r\nContent-Disposition: form-data\r\n\r\nword\r\n--x--\r\n",
            "multipart/form-data; boundary=x",
        ),
        (b"--x\r\n\r\nword\r\n--x--\r\n", "multipart/form-data; boundary=x; charset=klingon"),
    ],
)
def test_broken_forms_are_refused(client, body, kind):
    answer = client.post("/predict", content=body, headers={"content-type": kind})
    assert answer.status_code == 400
    assert code(answer)[1] in {"bad_form", "no_image"}


def test_a_form_of_too_many_parts_is_refused_before_all_are_read(client):
    part = b'--x\r\nContent-Disposition: form-data; name="a"\r\n\r\n\r\n'
    kind = {"content-type": "multipart/form-data; boundary=x"}
    # What follows the last part that is allowed breaks the form, but is never parsed.
    answer = client.post("/predict", content=part * 65 + b"--y", headers=kind)
    assert code(answer) == (400, "too_many_parts")
    answer = client.post("/predict", content=part * 64 + b"--x--\r\n", headers=kind)
    assert code(answer) == (400, "no_image")


def test_a_jpeg_file_of_thousands_of_scans_is_refused_before_it_is_decoded(client):
    answer = client.post("/predict", content=many_scans(4000))
    assert code(answer) == (422, "not_an_image")
    assert "more than 64 scans" in answer.json()["error"]["message"]
    assert client.post("/predict", content=many_scans(60)).status_code == 200


def test_four_hundred_broken_uploads_get_200_or_4xx(client):
    statuses = set()
    for number, data in enumerate(uploads(400, seed=3)):
        if number % 4 == 3:
            body, kind = form(data, number // 4)
            answer = client.post("/predict", content=body, headers={"content-type": kind})
            assert answer.status_code in {200, 400, 413, 422}
        else:
            answer = client.post("/predict", content=data)
            # Where the limits of this small model decide, not the decoder, both are right.
            if answer.status_code != 413:
                assert (answer.status_code == 200) == decodes(data), (number, answer.text)
        statuses.add(answer.status_code)
    assert statuses == {200, 400, 413, 422}


def test_paths_and_methods_that_do_not_exist(client):
    assert code(client.get("/nothing")) == (404, "not_found")
    answer = client.get("/predict")
    assert code(answer) == (405, "wrong_method")
    assert answer.headers["allow"] == "POST"
    assert code(client.get("/health?verbose=1")) == (400, "bad_parameter")


def test_a_fault_of_ours_tells_the_client_nothing():
    model = ready()
    with clients(model) as client:
        model.head = torch.nn.Linear(3, 3)
        answer = client.post("/predict", content=image())
    assert code(answer) == (500, "internal")
    assert "Traceback" not in answer.text
    assert "mat" not in answer.text


def test_a_token_is_asked_for_everywhere_but_on_the_page(model):
    with clients(model, token="s3cret") as client:
        for path in ("/", "/health", "/openapi.json"):
            assert client.get(path).status_code == 200
        for given in ({}, {"authorization": "Bearer wrong"}, {"authorization": "s3cret"}):
            answer = client.post("/predict", content=image(), headers=given)
            assert code(answer) == (401, "unauthorized")
            assert answer.headers["www-authenticate"] == "Bearer"
            assert code(client.get("/model", headers=given)) == (401, "unauthorized")
        right = {"authorization": "Bearer s3cret"}
        assert client.post("/predict", content=image(), headers=right).status_code == 200
        described = client.get("/openapi.json").json()
        assert described["paths"]["/predict"]["post"]["security"] == [{"token": []}]
        assert "security" not in described["paths"]["/health"]["get"]


def test_a_foreign_name_that_leads_here_is_refused(model):
    with clients(model, hosts=("localhost", "127.0.0.1")) as client:
        for host in ("evil.example", "localhost.evil.example", ""):
            answer = client.get("/models", headers={"host": host})
            assert code(answer) == (403, "wrong_host")
        assert client.get("/models", headers={"host": "localhost:8000"}).status_code == 200


MALFORMED = (b"ev{il}.example", b"x/health?", b"localhost/", b"a@localhost", b"localhost:", b"")


@pytest.mark.parametrize("hosts", [("localhost", "127.0.0.1", "::1"), ()])
@pytest.mark.parametrize(
    "given", [[], [b"localhost"] * 2, [b"localhost", b"evil.example"], *([x] for x in MALFORMED)]
)
def test_a_host_header_that_is_absent_repeated_or_malformed_is_refused(model, hosts, given):
    sent = answered(served(model, hosts=hosts), "/models", [(b"host", host) for host in given])
    assert (sent["status"], sent["error"]["code"]) == (403, "wrong_host")


@pytest.mark.parametrize("host", [b"localhost", b"LOCALHOST:80", b"127.0.0.1:8000", b"[::1]:8000"])
def test_a_name_of_this_machine_is_served_however_it_is_written(model, host):
    app = served(model, hosts=("localhost", "127.0.0.1", "::1"))
    assert answered(app, "/models", [(b"host", host)])["status"] == 200


@pytest.mark.parametrize("host", [b"localhost/health?", b"localhost/health#", b"localhost"])
def test_a_host_header_cannot_make_a_path_look_open(model, host):
    sent = answered(served(model, token="s3cret"), "/models", [(b"host", host)])
    assert sent["status"] in {401, 403}


FOREIGN = (
    {b"origin": b"https://evil.example"},
    {b"origin": b"null"},
    {b"origin": b"http://localhost:3000"},
    {b"sec-fetch-site": b"cross-site"},
    {b"sec-fetch-site": b"same-site", b"origin": b"http://localhost:8000"},
)


@pytest.mark.parametrize("path", ["/predict", "/attention", "/attention.png", "/embed"])
@pytest.mark.parametrize("headers", FOREIGN)
def test_pages_of_other_sites_are_refused_before_the_body_is_read(model, path, headers):
    sent = [(b"host", b"localhost:8000"), *headers.items()]
    refused = answered(served(model), path, sent, method="POST")
    assert (refused["status"], refused["error"]["code"]) == (403, "foreign_origin")


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"origin": "http://testserver"},
        {"sec-fetch-site": "same-origin", "origin": "https://behind-a.proxy"},
        {"sec-fetch-site": "none"},
    ],
)
def test_own_pages_and_other_programs_are_served(client, headers):
    assert client.post("/predict", content=image(), headers=headers).status_code == 200


def test_a_link_on_another_site_leads_to_the_page(client):
    headers = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
    assert client.get("/", headers=headers).status_code == 200


def test_pages_of_an_allowed_origin_can_use_the_models(model):
    site = {"origin": "https://example.org", "sec-fetch-site": "cross-site"}
    with clients(model, origins=("https://example.org",), token="s3cret") as client:
        asked = {"access-control-request-method": "POST"}
        asked["access-control-request-headers"] = "authorization"
        assert client.options("/predict", headers=site | asked).status_code == 200
        token = {"authorization": "Bearer s3cret"}
        answer = client.post("/predict", content=image(), headers=site | token)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == "https://example.org"
        other = site | token | {"origin": "https://evil.example"}
        answer = client.post("/predict", content=image(), headers=other)
        assert code(answer) == (403, "foreign_origin")
        assert "access-control-allow-origin" not in answer.headers


def answered(app, path: str, headers: list[tuple[bytes, bytes]], method: str = "GET") -> dict:
    """Status and body of a request whose headers no client library has corrected."""
    sent = []

    async def receive():
        raise AssertionError("the body is not to be read")

    async def send(message):
        sent.append(message)

    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "headers": headers,
        "query_string": b"",
        "server": ("127.0.0.1", 8000),
    }
    asyncio.run(app(scope, receive, send))
    return {"status": sent[0]["status"]} | json.loads(sent[1]["body"])


def test_metrics_count_requests_pictures_and_batches(client):
    client.post("/predict", files=[("file", ("a.png", image())), ("file", ("b.png", image()))])
    client.post("/predict", content=b"hello")
    client.get("/no/such/path")
    answer = client.get("/metrics")
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    families = list(text_string_to_metric_families(answer.text))
    assert {family.name: family.type for family in families} == {
        "vitrail_requests": "counter",
        "vitrail_images_waiting": "gauge",
        "vitrail_request_seconds": "histogram",
        "vitrail_batch_images": "histogram",
        "vitrail_batch_seconds": "histogram",
    }
    values = {
        (sample.name, *sample.labels.items()): sample.value
        for family in families
        for sample in family.samples
    }
    predict, other, model = ("path", "/predict"), ("path", "other"), ("model", "a")
    assert values["vitrail_requests_total", predict, ("status", "200")] == 1
    assert values["vitrail_requests_total", predict, ("status", "422")] == 1
    assert values["vitrail_requests_total", other, ("status", "404")] == 1
    assert values["vitrail_batch_images_sum", model] == 2
    assert values["vitrail_batch_seconds_count", model] == 1
    assert values["vitrail_request_seconds_bucket", ("le", "+Inf"), predict] == 2
    assert values["vitrail_images_waiting", model] == 0
    assert not [name for name, *_ in values if name.endswith("_created")]


def test_samples_can_be_asked_about(client):
    names = [one["name"] for one in client.get("/samples").json()["samples"]]
    assert "daisy" in names
    for name in names:
        answer = client.get(f"/samples/{name}")
        assert answer.headers["content-type"] == "image/jpeg"
        assert client.post("/predict", content=answer.content).status_code == 200
    assert code(client.get("/samples/../secret")) == (404, "not_found")
    assert code(client.get("/samples/tulip")) == (404, "not_found")


def test_the_page_may_fetch_from_here_alone(client):
    answer = client.get("/")
    rules = answer.headers["content-security-policy"]
    assert rules.startswith("default-src 'none'; connect-src 'self';")
    assert not re.search(r"(src|href)=.?https?:", answer.text)
    assert "{{" not in answer.text


def test_limits_that_cannot_be_kept_are_refused():
    with pytest.raises(VitrailError, match="--batch 0: expected a positive number"):
        Limits(batch=0)
    with pytest.raises(VitrailError, match="never be answered"):
        Limits(images=33, queue=32)


def test_models_need_names_of_their_own(weights, tmp_path):
    cpu = torch.device("cpu")
    assert split_name(f"mine={weights}") == ("mine", str(weights))
    assert split_name(str(weights)) == ("model", str(weights))
    with pytest.raises(VitrailError, match="two models are called 'model'"):
        open_models([weights, weights], cpu)
    with pytest.raises(VitrailError, match="no model to serve"):
        open_models([], cpu)
    names = [one.name for one in open_models([weights, f"other={weights}"], cpu)]
    assert names == ["model", "other"]


def test_a_model_without_preprocessing_cannot_be_served(model):
    bare = ready()
    bare.preprocess = None
    with pytest.raises(VitrailError, match="has no preprocessing"):
        serve_model(bare, "bare")

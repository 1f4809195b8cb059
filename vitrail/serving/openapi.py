"""The API as OpenAPI describes one."""

from collections.abc import Sequence
from typing import Any

from vitrail import __version__
from vitrail.serving.limits import FIELDS, Limits

Described = dict[str, Any]

STRING: Described = {"type": "string"}
COUNT: Described = {"type": "integer", "minimum": 0}
PLACE: Described = {"type": "integer", "minimum": 0, "maximum": 999_999_999}
NUMBER: Described = {"type": "number"}
ERRORS = {
    400: "A parameter, the form or the question is wrong.",
    401: "The token is missing or wrong.",
    404: "There is no such model, layer, head, patch or sample.",
    408: "The upload took too long.",
    413: "Too many bytes or pixels.",
    422: "A picture cannot be decoded, or not in reasonable time.",
    503: "Too much at once, or a restart: try again after the seconds in Retry-After.",
    504: "No answer in time.",
}
PICTURES = ("image/jpeg", "image/png", "image/webp", "image/gif")
UPLOAD_ERRORS = (400, 404, 408, 413, 422, 503, 504)


def description(limits: Limits, models: Sequence[str], *, secured: bool) -> Described:
    """Paths, parameters and answers."""
    model = query("model", {"type": "string", "enum": list(models)}, "Default: the first.")
    top = query("top", {"type": "integer", "minimum": 1, "maximum": 999_999_999, "default": 5})
    paths = {
        "/predict": {
            "post": operation("The most likely classes", "Predictions", (model, top))
            | {"requestBody": body(limits.images)}
        },
        "/attention": {
            "post": operation("Maps of attention", "Attention", (model, *MAPS))
            | {"requestBody": body(1)}
        },
        "/attention.png": {
            "post": operation("One map over the picture", "image/png", (model, *ONE_MAP))
            | {"requestBody": body(1)}
        },
        "/embed": {
            "post": operation("The vectors that the head reads", "Embeddings", (model,))
            | {"requestBody": body(limits.images)}
        },
        "/model": {"get": operation("One model with its labels", "Model", (model,), (400, 404))},
        "/models": {"get": operation("All models", "Models", (), (400,))},
        "/health": {"get": operation("Whether the server is well", "Health", (), (400, 503))},
        "/metrics": {"get": operation("Counters for Prometheus", "text/plain", (), (400,))},
        "/samples": {"get": operation("Pictures to try", "Samples", (), (400,))},
        "/samples/{name}": {"get": operation("One sample", "image/jpeg", (SAMPLE,), (400, 404))},
        "/openapi.json": {"get": operation("This description", "Any", (), (400,))},
        "/": {"get": operation("The page", "text/html", (), (400,))},
    }
    components: Described = {"schemas": SCHEMAS}
    if secured:
        components["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        for path, methods in paths.items():
            if path not in ("/", "/health", "/openapi.json"):
                for one in methods.values():
                    one["security"] = [{"token": []}]
                    one["responses"]["401"] = failure(401)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Vitrail", "version": __version__},
        "paths": paths,
        "components": components,
    }


def body(most: int) -> Described:
    """A picture by itself, or a form with at most so many."""
    picture = {"type": "string", "format": "binary"}
    files = listed(picture, minItems=1, maxItems=most)
    form = {
        "schema": {"type": "object", "properties": {"file": files}, "required": ["file"]},
        "encoding": {"file": {"contentType": ", ".join(PICTURES)}},
    }
    told = "The bytes decide, whatever type they are said to be. "
    return {
        "required": True,
        "description": told + f"A form has 1 to {most} files, of any field's name, and up to "
        f"{FIELDS} other fields.",
        "content": {kind: {"schema": picture} for kind in PICTURES} | {"multipart/form-data": form},
    }


def operation(
    summary: str,
    answer: str,
    parameters: Sequence[Described],
    errors: Sequence[int] = UPLOAD_ERRORS,
) -> Described:
    """One path and method; the answer is a media type or the name of a schema."""
    kind = answer if "/" in answer else "application/json"
    content = {"schema": STRING if "/" in answer else {"$ref": f"#/components/schemas/{answer}"}}
    if answer.startswith("image/"):
        content = {"schema": {}}
    found: Described = {
        "summary": summary,
        "operationId": summary.lower().replace(" ", "-"),
        "responses": {
            "200": {"description": summary, "content": {kind: content}},
            **{str(status): failure(status) for status in errors},
        },
    }
    return found | ({"parameters": list(parameters)} if parameters else {})


def failure(status: int) -> Described:
    """An error's answer."""
    found: Described = {
        "description": ERRORS[status],
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
    }
    if status == 503:
        found["headers"] = {"Retry-After": {"required": True, "schema": {"type": "integer"}}}
    return found


def query(name: str, schema: Described, told: str = "") -> Described:
    """A parameter behind the question mark."""
    return {"name": name, "in": "query", "schema": schema, "description": told}


def numbered(*words: str) -> Described:
    """A whole number, or one of some words."""
    return {"oneOf": [PLACE, {"type": "string", "enum": list(words)}]}


def record(**properties: Described) -> Described:
    """An object whose properties are all there, and no others."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def listed(of: Described, **more: int) -> Described:
    """A list."""
    return {"type": "array", "items": of, **more}


def or_nothing(of: Described) -> Described:
    """A value, or null."""
    return {**of, "type": [of["type"], "null"]}


READ = "Whose attention. Default: what the classifier reads."
MAPS = (
    query("layer", numbered("rollout", "all"), "Default: rollout. all: rollout and every layer."),
    query("head", numbered("mean"), "Default: each head."),
    query("patch", numbered("all"), READ),
)
ONE_MAP = (
    query("layer", numbered("rollout"), "Default: rollout."),
    query("head", numbered("mean"), "Default: mean."),
    query("patch", PLACE, READ),
)
SAMPLE = {"name": "name", "in": "path", "required": True, "schema": STRING}
PAIR = listed({"type": "integer", "minimum": 1}, minItems=2, maxItems=2)
TIMES = record(decode=NUMBER, model=NUMBER)
MODEL = {
    "name": STRING,
    "variant": STRING,
    "parameters": COUNT,
    "classes": COUNT,
    "size": PAIR,
    "features": COUNT,
    "heads": listed(COUNT),
    "grid": or_nothing(PAIR),
    "patches": {"type": "boolean"},
}
SHARE: Described = {"type": "number", "minimum": 0, "maximum": 1.0001}
SCHEMAS: Described = {
    "Any": {"type": "object"},
    "Error": record(error=record(code=STRING, message=STRING)),
    "Health": record(
        status={"const": "ok"}, waiting={"type": "object", "additionalProperties": COUNT}
    ),
    "Model": record(**MODEL, labels=listed(STRING)),
    "Models": record(models=listed(record(**MODEL), minItems=1)),
    "Samples": record(samples=listed(record(name=STRING, by=STRING))),
    "Predictions": record(
        model=STRING,
        milliseconds=TIMES,
        results=listed(
            record(name=STRING, top=listed(record(label=STRING, probability=SHARE), minItems=1)),
            minItems=1,
        ),
    ),
    "Embeddings": record(
        model=STRING,
        milliseconds=TIMES,
        results=listed(record(name=STRING, embedding=listed(NUMBER)), minItems=1),
    ),
    "Attention": record(
        model=STRING,
        milliseconds=TIMES,
        name=STRING,
        crop=listed(SHARE, minItems=4, maxItems=4),
        maps=listed(
            record(
                layer=or_nothing(COUNT),
                head=or_nothing(COUNT),
                patch=or_nothing(COUNT),
                grid=PAIR,
                values=listed(SHARE, minItems=1),
            ),
            minItems=1,
        ),
    ),
}

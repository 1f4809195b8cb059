"""The OpenAPI description of the API; routes take their methods and parameters from it."""

from collections.abc import Sequence
from typing import Any

from vitrail import __version__
from vitrail.serving.limits import EXTRA_FIELDS, Limits

_Json = dict[str, Any]

OPEN_PATHS = ("/", "/health", "/openapi.json")
"""Paths that need no token: they reveal nothing about models or images."""
_ERRORS = {
    400: "A parameter, the form or the request is wrong.",
    401: "The token is missing or wrong.",
    404: "There is no such model, layer, head, patch or sample.",
    408: "The upload took too long.",
    413: "Too many bytes or pixels.",
    422: "An image cannot be decoded, or not in reasonable time.",
    503: "Overloaded or restarting: retry after the number of seconds in Retry-After.",
    504: "No response in time.",
}
_UPLOAD_ERRORS = (400, 404, 408, 413, 422, 503, 504)
_IMAGE_TYPES = ("image/jpeg", "image/png", "image/webp", "image/gif")


def describe_api(limits: Limits, models: Sequence[str], *, secured: bool) -> _Json:
    """The whole description; `secured` servers need a token."""
    most = limits.images
    model = _query("model", {"type": "string", "enum": list(models)}, "Default: the first.")
    top = _query("top", {"type": "integer", "minimum": 1, "maximum": 999_999_999, "default": 5})
    maps = (
        _query(
            "layer", _number_or("rollout", "all"), "Default: rollout. all: rollout and every layer."
        ),
        _query("head", _number_or("mean"), "Default: each head."),
        _query("patch", _number_or("all"), _PATCH),
    )
    one_map = (
        _query("layer", _number_or("rollout"), "Default: rollout."),
        _query("head", _number_or("mean"), "Default: mean."),
        _query("patch", _INDEX, _PATCH),
    )
    name = {"name": "name", "in": "path", "required": True, "schema": _STRING}
    # The summaries are also the operation ids, which generated clients name their functions after.
    paths = {
        "/predict": _post("The most likely classes", "Predictions", model, top, images=most),
        "/attention": _post("Attention maps", "Attention", model, *maps, images=1),
        "/attention.png": _post("One map over the image", "image/png", model, *one_map, images=1),
        "/embed": _post("Feature vectors", "Embeddings", model, images=most),
        "/model": _get("One model with its labels", "Model", model, errors=(400, 404)),
        "/models": _get("All models", "Models"),
        "/health": _get("Server health", "Health", errors=(400, 503)),
        "/metrics": _get("Counters for Prometheus", "text/plain"),
        "/samples": _get("Sample images", "Samples"),
        "/samples/{name}": _get("One sample", "image/jpeg", name, errors=(400, 404)),
        "/openapi.json": _get("This description", "Any"),
        "/": _get("The page", "text/html"),
    }
    components: _Json = {"schemas": _SCHEMAS}
    if secured:
        components["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        for path in paths.keys() - OPEN_PATHS:
            for operation in paths[path].values():
                operation["security"] = [{"token": []}]
                operation["responses"]["401"] = _error(401)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Vitrail", "version": __version__},
        "paths": paths,
        "components": components,
    }


def _get(summary: str, response: str, *parameters: _Json, errors: Sequence[int] = (400,)) -> _Json:
    return {"get": _operation(summary, response, parameters, errors)}


def _post(summary: str, response: str, *parameters: _Json, images: int) -> _Json:
    """An endpoint that takes an image by itself, or a form with at most `images`."""
    image = {"type": "string", "format": "binary"}
    files = _list(image, minItems=1, maxItems=images)
    form = {
        "schema": {"type": "object", "properties": {"file": files}, "required": ["file"]},
        "encoding": {"file": {"contentType": ", ".join(_IMAGE_TYPES)}},
    }
    body = {
        "required": True,
        "description": "The image format is detected, whatever the content type. A form has 1 to "
        f"{images} files, of any field name, and up to {EXTRA_FIELDS} other fields.",
        "content": {kind: {"schema": image} for kind in _IMAGE_TYPES}
        | {"multipart/form-data": form},
    }
    operation = _operation(summary, response, parameters, _UPLOAD_ERRORS)
    return {"post": operation | {"requestBody": body}}


def _operation(
    summary: str, response: str, parameters: Sequence[_Json], errors: Sequence[int]
) -> _Json:
    """One path and method; the response is a media type or the name of a schema."""
    if "/" in response:
        content = {response: {"schema": {} if response.startswith("image/") else _STRING}}
    else:
        content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{response}"}}}
    operation: _Json = {
        "summary": summary,
        "operationId": summary.lower().replace(" ", "-"),
        "responses": {
            "200": {"description": summary, "content": content},
            **{str(status): _error(status) for status in errors},
        },
    }
    return operation | ({"parameters": list(parameters)} if parameters else {})


def _error(status: int) -> _Json:
    response: _Json = {
        "description": _ERRORS[status],
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
    }
    if status == 503:
        response["headers"] = {"Retry-After": {"required": True, "schema": {"type": "integer"}}}
    return response


def _query(name: str, schema: _Json, text: str = "") -> _Json:
    return {"name": name, "in": "query", "schema": schema, "description": text}


def _number_or(*words: str) -> _Json:
    return {"oneOf": [_INDEX, {"type": "string", "enum": list(words)}]}


def _object(**properties: _Json) -> _Json:
    """An object with exactly these properties."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _list(items: _Json, **bounds: int) -> _Json:
    return {"type": "array", "items": items, **bounds}


def _or_null(schema: _Json) -> _Json:
    return {**schema, "type": [schema["type"], "null"]}


_PATCH = "The patch that attends. Default: what the classifier reads."
_STRING: _Json = {"type": "string"}
_COUNT: _Json = {"type": "integer", "minimum": 0}
_INDEX: _Json = {"type": "integer", "minimum": 0, "maximum": 999_999_999}
_NUMBER: _Json = {"type": "number"}
_FRACTION: _Json = {"type": "number", "minimum": 0, "maximum": 1.0001}
_PAIR = _list({"type": "integer", "minimum": 1}, minItems=2, maxItems=2)
_REPORT = {"model": _STRING, "milliseconds": _object(decode=_NUMBER, model=_NUMBER)}
_MODEL = {
    "name": _STRING,
    "variant": _STRING,
    "parameters": _COUNT,
    "classes": _COUNT,
    "size": _PAIR,
    "features": _COUNT,
    "heads": _list(_COUNT),
    "grid": _or_null(_PAIR),
    "patches": {"type": "boolean"},
}
_CLASS = _object(label=_STRING, probability=_FRACTION)
_MAP = _object(
    layer=_or_null(_COUNT),
    head=_or_null(_COUNT),
    patch=_or_null(_COUNT),
    grid=_PAIR,
    values=_list(_FRACTION, minItems=1),
)
_SCHEMAS: _Json = {
    "Any": {"type": "object"},
    "Error": _object(error=_object(code=_STRING, message=_STRING)),
    "Health": _object(
        status={"const": "ok"}, waiting={"type": "object", "additionalProperties": _COUNT}
    ),
    "Model": _object(**_MODEL, labels=_list(_STRING)),
    "Models": _object(models=_list(_object(**_MODEL), minItems=1)),
    "Samples": _object(samples=_list(_object(name=_STRING, by=_STRING))),
    "Predictions": _object(
        **_REPORT,
        results=_list(_object(name=_STRING, top=_list(_CLASS, minItems=1)), minItems=1),
    ),
    "Embeddings": _object(
        **_REPORT,
        results=_list(_object(name=_STRING, embedding=_list(_NUMBER)), minItems=1),
    ),
    "Attention": _object(
        **_REPORT,
        name=_STRING,
        crop=_list(_FRACTION, minItems=4, maxItems=4),
        maps=_list(_MAP, minItems=1),
    ),
}

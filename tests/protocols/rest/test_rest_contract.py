"""The contract as a document, and the validation of requests against it."""

from typing import Any

import jsonschema_rs
import pytest

from gateway.rest.server.openapi_pages import load_contract
from protocols.rest.contract import METHODS, Contract, Schema, assemble, check_body
from protocols.rest.errors import RestError

CONTRACT = load_contract()


def every_schema(node: Any) -> Any:
    """All schemas below a `schema` or `schemas` field."""
    if isinstance(node, dict):
        for name, value in node.items():
            if name == "schema":
                yield value
            elif name == "schemas":
                yield from value.values()
            else:
                yield from every_schema(value)
    elif isinstance(node, list):
        for value in node:
            yield from every_schema(value)


def references(node: Any) -> Any:
    if isinstance(node, dict):
        if "$ref" in node:
            yield node["$ref"]
        for value in node.values():
            yield from references(value)
    elif isinstance(node, list):
        for value in node:
            yield from references(value)


def test_the_document_is_openapi_3_1_with_every_reference_in_place() -> None:
    document = CONTRACT.document
    assert document["openapi"].startswith("3.1.")
    for reference in set(references(document)):
        node = document
        for step in reference.removeprefix("#/").split("/"):
            node = node[step]
    used = set(references(document))
    for kind in ("schemas", "responses", "parameters", "requestBodies"):
        unused = {name for name in document["components"][kind] if f"#/components/{kind}/{name}" not in used}
        assert not unused, kind
    for schema in every_schema(document):
        jsonschema_rs.meta.validate({"$schema": document["jsonSchemaDialect"], **schema})


def test_every_operation_is_described_and_its_tag_explained() -> None:
    tags = {tag["name"] for tag in CONTRACT.document["tags"] if tag["description"]}
    for path, item in CONTRACT.document["paths"].items():
        for method in METHODS:
            if method in item:
                assert item[method]["summary"], path
                assert set(item[method]["tags"]) <= tags, path
                assert item[method]["responses"].keys() >= {"400", "401", "403", "500", "503"}
    for operation in CONTRACT.operations.values():
        assert ("413" in operation.answers) >= (operation.body is not None)


def test_parts_must_not_say_the_same_thing_twice() -> None:
    operation = {"operationId": "x", "responses": {"200": {"description": "x"}}}
    first = {
        "openapi": "3.1.0",
        "paths": {"/x": {"get": operation}},
        "x-every-operation": {"400": {"description": "y"}},
    }
    document = assemble([first, {"paths": {"/x": {"post": operation}}, "tags": [{"name": "t"}]}])
    assert document["paths"]["/x"]["get"]["responses"].keys() == {"200", "400"}
    assert "x-every-operation" not in document
    with pytest.raises(ValueError, match=r"/x: get is defined in two parts"):
        assemble([first, first])
    with pytest.raises(ValueError, match="x is defined twice"):
        Contract(document)
    nameless = {"paths": {"/{a}": {"get": operation}}}
    with pytest.raises(ValueError, match="the path's parameters"):
        Contract(assemble([nameless]))


def test_a_violation_is_a_400_unless_the_schema_says_otherwise() -> None:
    schema = Schema(
        {
            "type": "object",
            "properties": {
                "a": {"type": "integer", "minimum": 0, "x-status": {"minimum": 422}},
                "b": {"type": "string"},
            },
        }
    )
    schema.check({"a": 1, "b": "x"})
    for value, status, lines in (
        ({"a": -1}, 422, ["-1 is less than the minimum of 0 - at `$.a`"]),
        ({"a": "x"}, 400, ['"x" is not of type "integer" - at `$.a`']),
        ({"a": -1, "b": 1}, 400, None),
    ):
        with pytest.raises(RestError) as caught:
            schema.check(value)
        assert caught.value.status == status
        assert lines is None or list(caught.value.validation_errors) == lines
    with pytest.raises(RestError) as caught:
        schema.check(["x" * 10_000])
    assert len(caught.value.validation_errors[0]) < 400


def test_a_violation_has_the_text_that_the_schema_sets() -> None:
    words = {"x-status": {"enum": 422}, "x-words": {"enum": "Not {value}."}}
    schema = Schema({"properties": {"a": {"enum": ["x"], **words}, "b": {"type": "string"}}})
    for value, status, message, lines in (
        ({"a": "{value}"}, 422, "Not {value}.", ()),
        ({"a": "y" * 1000}, 422, f"Not {'y' * 240}....", ()),
        ({"a": 1, "b": 2}, 400, "Validation error on: Schema validation error",
         ("Not 1.", '2 is not of type "string" - at `$.b`')),
    ):  # fmt: skip
        with pytest.raises(RestError) as caught:
            schema.check(value)
        assert (caught.value.status, caught.value.message, caught.value.validation_errors) == (status, message, lines)


@pytest.mark.parametrize(
    ("value", "kind"),
    [(None, "null"), (True, "boolean"), (1.5, "number"), ("x", "string"), ([], "array"), ({}, "object")],
)
def test_violations_in_a_flat_object_have_strimzis_texts(value: object, kind: str) -> None:
    schema = Schema(
        {
            "type": "object",
            "x-lines": "strimzi",
            "properties": {"a": {"type": ["integer"], "minimum": 1}, "b": {"items": {"type": "integer"}}},
            "additionalProperties": False,
        }
    )
    named = 'Property "a" does not match schema'
    for given, lines in (
        ({"a": value}, (named, f"Instance type {kind} is invalid. Expected integer")),
        ({"c": value}, ('Property "c" does not match additional properties schema',)),
        ({"a": 0}, (named, "0 is less than the minimum of 1")),
        ({"b": ["x"]}, ('"x" is not of type "integer" - at `$.b[0]`',)),
    ):
        with pytest.raises(RestError) as caught:
            schema.check(given)
        assert caught.value.validation_errors == lines


@pytest.mark.parametrize("body", [b"{", b"\xff", b'"\xff"', b"[" * 100_000, b""])
def test_a_body_that_is_no_json_is_a_400(body: bytes) -> None:
    with pytest.raises(RestError) as caught:
        check_body(Schema({}), body)
    assert caught.value.status == 400


def test_parameters_have_the_types_of_the_contract() -> None:
    poll = CONTRACT.operations["poll"]
    assert poll.query_values({}) == {}
    assert poll.query_values({"timeout": ["30"], "other": ["x"]}) == {"timeout": 30}
    assert CONTRACT.operations["send"].query_values({}) == {"async": False}
    assert CONTRACT.operations["send"].query_values({"async": ["true"]}) == {"async": True}
    for wrong in ("-1", "1.5", "x", "", "٣", "9" * 5000, "+1", " 1"):
        with pytest.raises(RestError) as caught:
            poll.query_values({"timeout": [wrong]})
        assert caught.value.status == 400
        assert "query parameter `timeout`" in caught.value.validation_errors[0]
    with pytest.raises(RestError, match="Validation error"):
        poll.query_values({"timeout": ["1", "2"]})
    with pytest.raises(RestError, match="Validation error"):
        CONTRACT.operations["send"].query_values({"async": ["yes"]})
    partition = CONTRACT.operations["getPartition"]
    assert partition.path_values(("t", "2147483647")) == ("t", 2**31 - 1)
    for wrong in ("-1", "x", "", "2147483648", "9" * 5000):
        with pytest.raises(RestError) as caught:
            partition.path_values(("t", wrong))
        assert caught.value.status == 400

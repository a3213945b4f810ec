import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.rest.server.openapi_pages import load_contract
from protocols.rest.contract import Operation
from protocols.rest.errors import RestError
from protocols.rest.routes import Routes

OPERATIONS = load_contract().operations
ROUTER = Routes(OPERATIONS.values())


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=lambda one: f"{one.method} {one.template}")
def test_every_operation_of_the_contract_is_found_under_its_own_path(operation: Operation) -> None:
    path = "/".join(
        f"value{i}" if part.startswith("{") else part for i, part in enumerate(operation.template.split("/"))
    )
    match = ROUTER.match(operation.method, path)
    assert match.operation is operation
    assert match.values == tuple(part for part in path.split("/") if part.startswith("value"))


def test_segments_are_decoded_after_splitting() -> None:
    match = ROUTER.match("GET", "/consumers/a%2Fb/instances/%C3%A9%20x/records")
    assert match == (OPERATIONS["poll"], ("a/b", "é x"))


@pytest.mark.parametrize(
    "path", ["/nothing", "/topics/", "/topics//partitions", "/topics/a/partitions/0/x", "/consumers/g", "//", "", "x"]
)
def test_an_unknown_path_is_a_404_or_has_another_method(path: str) -> None:
    with pytest.raises(RestError) as caught:
        ROUTER.match("GET", path)
    assert caught.value.status == (405 if path == "/consumers/g" else 404)
    if caught.value.status == 404:
        assert dict(caught.value.headers)["Link"] == '</openapi>; rel="service-desc"'


def test_a_known_path_with_another_method_says_which_it_has() -> None:
    with pytest.raises(RestError) as caught:
        ROUTER.match("PUT", "/topics/t")
    assert caught.value.status == 405
    assert str(caught.value) == "Method Not Allowed: the path has GET, HEAD, POST"
    assert caught.value.headers == (("Allow", "GET, HEAD, POST"),)


@given(st.sampled_from(["GET", "POST", "DELETE", "BREW"]), st.text(max_size=60))
def test_no_path_raises_anything_but_a_refusal(method: str, path: str) -> None:
    try:
        ROUTER.match(method, "/" + path)
    except RestError as error:
        assert error.status in (404, 405)  # noqa: PT017

import pytest
from multidict import CIMultiDict

from protocols.rest.errors import RestError
from protocols.rest.forwarded import base_uri, client_path, group_path, instance_path

PATH = "/consumers/g/instances/c"


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({"Host": "gw:8080"}, "http://gw:8080" + PATH),
        ({}, "http://127.0.0.1:1" + PATH),
        ({"Host": "gw", "Forwarded": "host=my-api.com:443;proto=https"}, "https://my-api.com:443" + PATH),
        ({"Forwarded": "host=my-api.com;proto=https"}, "https://my-api.com:443" + PATH),
        ({"Forwarded": 'for=1.2.3.4;host="a:81";proto=http, host=b;proto=https'}, "http://a:81" + PATH),
        ({"Forwarded": "host=[::1];proto=http"}, "http://[::1]:80" + PATH),
        ({"X-Forwarded-Host": "my-api.com", "X-Forwarded-Proto": "http"}, "http://my-api.com:80" + PATH),
        ({"X-Forwarded-Host": "my-api.com", "Host": "gw"}, "http://gw" + PATH),  # both or neither
        ({"host": "gw", "x-forwarded-path": "/x"}, "http://gw" + PATH),  # it is the request's, not that of others
    ],
)
def test_the_address_is_the_one_that_the_client_used(headers: dict[str, str], expected: str) -> None:
    assert base_uri(CIMultiDict(headers), PATH, secure=False, bound="127.0.0.1:1") == expected


def test_tls_is_https() -> None:
    assert base_uri(CIMultiDict(Host="gw"), PATH, secure=True, bound="").startswith("https://gw/")


def test_another_scheme_is_refused() -> None:
    with pytest.raises(RestError) as caught:
        base_uri(CIMultiDict(Forwarded="host=a;proto=mqtt"), PATH, secure=False, bound="")
    assert caught.value.status == 400


def test_names_are_encoded_in_the_path() -> None:
    assert instance_path(group_path("a/b"), "c d?") == "/consumers/a%2Fb/instances/c%20d%3F"


def test_a_requests_path_is_the_forwarded_one() -> None:
    headers = CIMultiDict({"x-forwarded-path": "/bridge/consumers/x y%20z/"})
    assert client_path(headers, "/consumers/x%20y%20z") == "/bridge/consumers/x%20y%20z"
    assert client_path(CIMultiDict(), "/consumers/g") == "/consumers/g"

"""The address that a failure is counted for; delays are tested with the authenticator."""

from __future__ import annotations

import pytest

from gateway.security.throttle import address_of


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("192.0.2.1:1883", "192.0.2.1"),
        ("192.0.2.1", "192.0.2.1"),
        ("2001:db8:1:2:3:4:5:6:50000", "2001:db8:1:2::/64"),
        ("[2001:db8::1]:50000", "2001:db8::/64"),
        ("::ffff:192.0.2.1:50000", "192.0.2.1"),
        ("", ""),
        ("unix", "unix"),
    ],
)
def test_failures_are_counted_for_the_host(peer: str, address: str) -> None:
    assert address_of(peer) == address

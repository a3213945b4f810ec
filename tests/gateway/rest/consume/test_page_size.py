"""A page has at most half of what is free for receivers, and every client gets one."""

from __future__ import annotations

import contextlib

from flowcontrol.budget import Budget, ReceiverBudget
from gateway.rest.consume.page_size import MIN_PAGE_BYTES, page_size, reserved_page

LIMIT = 80 * MIN_PAGE_BYTES
MOST = 70 * MIN_PAGE_BYTES


def test_pages_use_the_budget_of_all_receivers() -> None:
    outgoing = Budget(LIMIT, 1)
    assert page_size(outgoing, MIN_PAGE_BYTES) == MIN_PAGE_BYTES
    with contextlib.ExitStack() as stack:
        sizes = [stack.enter_context(reserved_page(outgoing, 20 * MIN_PAGE_BYTES)) // MIN_PAGE_BYTES for _ in range(8)]
        assert sizes == [20, 20, 15, 7, 3, 1, 1, 1]
        assert page_size(outgoing, LIMIT) == MIN_PAGE_BYTES
    assert outgoing.free == MOST
    ReceiverBudget(outgoing).hold(MOST)
    assert page_size(outgoing, LIMIT) == MIN_PAGE_BYTES

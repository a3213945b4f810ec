"""A page has half of what is free for receivers at most, and everybody gets one."""

from __future__ import annotations

import contextlib

from flowcontrol.budget import Budget, ReceiverBudget
from gateway.rest.consume.page_size import LEAST, page_size, promised_page

LIMIT = 80 * LEAST
MOST = 70 * LEAST


def test_pages_come_out_of_what_is_free_for_all_receivers() -> None:
    outgoing = Budget(LIMIT, 1)
    assert page_size(outgoing, LEAST) == LEAST
    with contextlib.ExitStack() as stack:
        sizes = [stack.enter_context(promised_page(outgoing, 20 * LEAST)) // LEAST for _ in range(8)]
        assert sizes == [20, 20, 15, 7, 3, 1, 1, 1]
        assert page_size(outgoing, LIMIT) == LEAST
    assert outgoing.free == MOST
    ReceiverBudget(outgoing).hold(MOST)
    assert page_size(outgoing, LIMIT) == LEAST

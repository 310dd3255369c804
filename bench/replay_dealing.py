"""Which client of a replay makes which requests, and for which tenant."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.bench.workload import Workload


def tenant_of(number: int, tenants: int) -> str:
    """The tenant that a client, counted from 0, belongs to: ``default`` if there is one only, else ``t1`` and so on."""
    return "default" if tenants == 1 else f"t{number % tenants + 1}"


def dealt(workload: Workload, clients: int, number: int, tenants: int = 1) -> Sequence[int]:
    """The requests of one of ``clients`` clients, by their numbers in the whole, in file order.

    They are dealt round-robin; with several tenants conversations are, in the order in which they begin, so that each
    stays one tenant's, and a tenant's requests to its clients. ``clients`` is a multiple of ``tenants``.
    """
    if tenants == 1:
        return range(number, workload.n_requests, clients)
    tenant = number % tenants
    mine = [i for i, conversation in enumerate(_conversations(workload)) if conversation % tenants == tenant]
    return mine[number // tenants :: clients // tenants]


def _conversations(workload: Workload) -> list[int]:
    """Of each request the number of its conversation, from 0 on; where a trace tells of none each is its own."""
    numbers: dict[int | str, int] = {}
    found: list[int] = []
    n = 0
    for request in workload.requests:
        parent = getattr(request, "parent_chat_id", None)
        number = numbers.get(request.chat_id) if request.chat_id is not None else None
        if number is None and parent is not None:
            number = numbers.get(parent)
        if number is None:
            number = n
            n += 1
        if request.chat_id is not None:
            numbers[request.chat_id] = number
        found.append(number)
    return found

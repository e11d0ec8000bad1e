"""Clients that come at once and leave at random moments leave nothing behind, and see no dishonest status."""

from __future__ import annotations

import pytest

from tests.bench.http_soak import settled
from tests.bench.http_storm import storm
from tests.e2e.conftest import RunningCluster
from tests.e2e.http_cases import MODEL

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

CONNECTIONS = 60


async def test_sixty_clients_half_of_whom_leave_leave_no_lease_and_no_request(web: RunningCluster) -> None:
    result = await storm(web.http_url, MODEL, CONNECTIONS, seed=1, leave_within_s=5.0)
    assert result.broken == []
    assert sum(result.statuses.values()) + result.left == CONNECTIONS
    assert result.statuses[200] > 0
    assert result.left > 0
    left, _after_s = settled(web.state)
    assert left == dict.fromkeys(left, 0)

"""The words in which a replica is chosen: the request, what is known of the replicas, the choice.

A policy sees arrays over the replicas that may serve the request and returns a position in them; it
holds no load of its own. `router.policies` has them by name. To add one, write a `Policy` and name it
there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from router.cost import Prediction

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_MOST_ROUTERS_ASSUMED = 16.0


@dataclass(frozen=True, slots=True, eq=False)
class RouteRequest:
    """What a policy may know of a request."""

    model: str
    prompt_token_ids: npt.NDArray[np.int32] | Sequence[int]
    revision: str = ""  # of the model: block keys of different revisions differ
    sequences: int = 1
    max_tokens: int = 1  # per sequence, the most it may generate
    lora: str = ""
    cache_salt: str = ""
    session: str = ""
    tenant: str = ""
    priority: int = 0  # lower is sooner
    service_class: int = 0  # protos ServiceClass: 0 interactive, 1 batch


@dataclass(frozen=True, slots=True)
class Candidate:
    """One replica's part in a decision, for people: spans, `Explain`. Times are predicted ms.

    The fields are those of protos `CandidateReport`.
    """

    replica: str
    epoch: str
    chosen: bool = False
    degraded: str = ""  # why it gets no cache credit, or was not picked from; empty: in order
    cached_tokens: int = 0  # resident there
    pending_tokens: int = 0  # further ones of a prompt in flight there
    pooled_tokens: int = 0  # to be fetched from the memory of its host or another
    uncached_tokens: int = 0  # to be computed
    queue_ms: float = 0.0
    prefill_ms: float = 0.0
    fetch_ms: float = 0.0
    interference_ms: float = 0.0
    overhead_ms: float = 0.0
    ttft_ms: float = 0.0
    harm_ms: float = 0.0
    affinity_ms: float = 0.0
    score_ms: float = 0.0
    sequences: int = 0  # estimated, all routers
    backlog_tokens: int = 0  # estimated, all routers
    kv_usage: float = 0.0  # 0 .. 1, as last said
    source: str = ""  # the agent of the other host, when it is to be asked first

    @property
    def key(self) -> str:
        """Names one engine's life: a restarted replica is another target."""
        return f"{self.replica}@{self.epoch}"


@dataclass(frozen=True, slots=True, eq=False)
class View:
    """What a policy chooses from: at least one replica. Arrays [n], position by position.

    Positions follow the fleet's rows, which say nothing about a replica: break ties at random.
    """

    rows: Ints  # in the fleet
    sequences: Floats  # running and waiting, estimated over all routers
    backlog: Floats  # prompt tokens accepted and not computed, estimated over all routers
    cached: Ints  # prompt tokens that need no computing there, without asking another host
    prediction: Prediction
    routers: float  # how many routers like this one seem to share the replicas; 1 .. 16


class Policy(Protocol):
    """Chooses among the replicas of a view, which are at least one."""

    @property
    def name(self) -> str: ...

    def choose(self, view: View, request: RouteRequest) -> int:
        """The chosen position, 0 .. n - 1."""
        ...


def routers_seen(reported: float, own: float) -> float:
    """How many routers like this one would explain the reported load; 1 to 16.

    `reported` sums the sequences that the replicas said they have, `own` those of them that this
    router held leases for when they said so. One sequence is added to either side, so that a single
    request of somebody else, or one that ended while its report was under way, is no second router.
    """
    return min(max((reported + 1.0) / (own + 1.0), 1.0), _MOST_ROUTERS_ASSUMED)

"""Which span of a request lies below which."""

from telemetry import spans

PARENTS = {
    spans.ROUTER_TOKENIZE: spans.ROUTER_REQUEST,
    spans.ROUTER_ROUTE: spans.ROUTER_REQUEST,
    spans.ROUTER_FORWARD: spans.ROUTER_REQUEST,
    spans.REPLICA_GENERATE: spans.ROUTER_FORWARD,
    spans.REPLICA_QUEUE: spans.REPLICA_GENERATE,
    spans.REPLICA_PREFILL: spans.REPLICA_GENERATE,
    spans.REPLICA_DECODE: spans.REPLICA_GENERATE,
}
"""Of a request that does not wait to be admitted; its router's span is the first of them."""

"""OTLP over gRPC: TraceService and MetricsService.

https://opentelemetry.io/docs/specs/otlp/#otlpgrpc
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final

import grpc
import grpc.aio

from telemetry.viewer.otlp_http import export_response
from telemetry.viewer.receiver import MalformedExportError, Receiver, ReceiverBusyError, Signal, Slots
from telemetry.viewer.security import Keys
from telemetry.viewer.settings import ViewerSettings

_SERVICES: Final[dict[Signal, str]] = {
    "traces": "opentelemetry.proto.collector.trace.v1.TraceService",
    "metrics": "opentelemetry.proto.collector.metrics.v1.MetricsService",
}
_MOST_CALLS: Final = 64


def create_server(receiver: Receiver, keys: Keys, settings: ViewerSettings) -> grpc.aio.Server:
    """A server of both services, not started and bound to no port yet."""
    server = grpc.aio.server(
        options=[
            ("grpc.so_reuseport", 0),  # two servers must not share a port in silence
            ("grpc.max_receive_message_length", settings.max_body_mib * 1024 * 1024),
            ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
        ],
        maximum_concurrent_rpcs=_MOST_CALLS,
    )
    slots = Slots(settings.max_exports)
    for signal, service in _SERVICES.items():
        # No deserializer: what cannot be read is the receiver's to refuse and to count.
        export: Any = grpc.unary_unary_rpc_method_handler(
            _export(signal, receiver, keys, slots), None, lambda message: message.SerializeToString()
        )
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {"Export": export}),))
    return server


def _export(
    signal: Signal, receiver: Receiver, keys: Keys, slots: Slots
) -> Callable[[bytes, Any], Awaitable[Any]]:
    async def export(body: bytes, context: Any) -> Any:
        given = dict(context.invocation_metadata() or ()).get("authorization", "")
        if not keys.admits(given if isinstance(given, str) else given.decode("utf-8", "replace")):
            await context.abort(
                grpc.StatusCode.UNAUTHENTICATED,
                "a key is needed: send the metadata 'authorization: Bearer KEY'",
            )
        try:
            with slots.one():
                return export_response(signal, await receiver.take(signal, body, "protobuf"))
        except MalformedExportError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except ReceiverBusyError as error:
            receiver.count(signal, "busy")
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))

    return export

"""OpenTelemetry for Kvorum: set-up, span names, context over gRPC, a local span store and its tree view."""

"""The built-in viewer: receives OTLP, shows requests and the fleet, speaks Prometheus and Jaeger."""

"""The OpenAI-compatible HTTP face of a cluster: vLLM's own API server in front of the routers."""

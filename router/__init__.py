"""The gRPC router: tokenises, picks a replica, forwards its stream. Imports no engine and no Ray."""

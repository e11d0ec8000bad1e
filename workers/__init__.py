"""Everything inside a replica: the engine, its tensor-parallel shards, its gRPC server."""

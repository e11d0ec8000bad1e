"""Wire contracts: the .proto files, their generated stubs, and what every server shares.

`make protos` regenerates the stubs; tests/unit/test_protos.py fails when they are stale.
"""

"""What operators are shown of an agent: its host's arenas, and the agents that it has asked."""

from __future__ import annotations

from protos import kvpool_pb2
from workers.kvpool.host_arenas import HostArenas
from workers.kvpool.peers import Peers


def arena_reports(arenas: HostArenas) -> list[kvpool_pb2.ArenaReport]:
    """Of those that can be opened. May block."""
    return [
        kvpool_pb2.ArenaReport(
            namespace=namespace,
            slots=usage.slots,
            ready=usage.ready,
            slot_bytes=usage.slot_bytes,
            hits=counters.hits,
            misses=counters.misses,
            stored=counters.stored,
            evicted=counters.evicted,
            refused=counters.refused,
            corrupt=counters.corrupt,
            reclaimed=counters.reclaimed,
        )
        for namespace, usage, counters in arenas.figures()
    ]


def peer_reports(peers: Peers) -> list[kvpool_pb2.PeerReport]:
    """Of those that are remembered."""
    return [
        kvpool_pb2.PeerReport(
            agent=agent,
            avoided=peer.why if avoided_s else "",
            avoided_for_s=avoided_s,
            blocks=peer.blocks,
            bytes_per_s=peer.bytes_per_s,
        )
        for agent, peer, avoided_s in peers.known()
    ]

"""One rank of `test_gloo_channel`: `python -m tests.unit.helpers_gloo_rank STORE RANK RANKS`."""

from __future__ import annotations

import json
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from workers.overlap.channel import ChannelClock, GlooChannel

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
IN_FLIGHT = 5


def main(store: str, rank: int, ranks: int) -> None:
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, ranks),
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=60),
    )
    group = dist.group.WORLD
    assert group is not None
    clock = ChannelClock()
    channel = GlooChannel(group, clock)
    chance = torch.Generator().manual_seed(rank)
    same: dict[str, bool] = {}
    for dtype in DTYPES:
        ours = [torch.randn(33, 17, generator=chance).to(dtype) for _ in range(IN_FLIGHT)]
        ours[1][0, :3] = torch.tensor([float("inf"), float("nan"), -0.0 if rank else 0.0])
        ours[2] *= 1e-3 if rank else 1e3  # sums that are rounded
        gloos = [tensor.clone() for tensor in ours]
        reductions = [channel.all_reduce(tensor) for tensor in ours]
        for reduction in (*reductions[1:], reductions[0], reductions[1]):  # in any order; twice does nothing
            reduction.wait()
        for tensor in gloos:
            dist.all_reduce(tensor)
        pairs = zip(ours, gloos, strict=True)
        same[str(dtype)] = all(torch.equal(_bits(mine), _bits(theirs)) for mine, theirs in pairs)
    print(json.dumps({"same": same, "busy": clock.busy_s > 0}))
    dist.barrier()
    dist.destroy_process_group()


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """To the last bit, but for what a NaN carries."""
    known = torch.nan_to_num(tensor, nan=7.0, posinf=tensor.new_tensor(torch.inf).item())
    return known.view(torch.int32 if tensor.dtype is torch.float32 else torch.int16)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))

"""How do packed sequences attend, each to itself only, without a varlen kernel?

Sequences of like length are padded on the right to the longest of them and go through one causal
`scaled_dot_product_attention`: under a causal mask no real token sees the padding behind it, so no mask is needed.
A long sequence is alone in its bucket and nothing is padded. Against one call a sequence: 13,300 instead of 8,200
tokens/s of forward and backward on one core (0.8 M parameters, sequences of 12 to 28 tokens), 8,800 instead of 7,500 at
200 to 700 tokens.

Under context parallelism a rank holds two chunks of every sequence, one from the front and one from the back (so that all
ranks have as much to attend to); keys and values are gathered from all ranks, and a mask says what each query sees.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from numpy.typing import NDArray

FILL = 0.75  # a sequence shares a bucket whose longest is at most 1 / FILL of it ...
SLACK_TOKENS = 16  # ... or at most so much longer: below that a call costs more than the padding


@dataclass(frozen=True, slots=True)
class Bucket:
    rows: int
    length: int  # of queries
    tokens: torch.Tensor  # [rows * length] int64, which packed token's query stands there; padding repeats a token
    keys: torch.Tensor  # [rows * key length] int64, which (gathered) token's key; the same as `tokens` without cp
    mask: torch.Tensor | None = None  # [rows, 1, length, key length] bool, under cp: which keys a query sees


@dataclass
class Packed(PackedSeqParams):  # type: ignore[misc]
    """What megatron hands down to the attention: PackedSeqParams with the buckets worked out once a micro-batch.

    `back[t]` is where packed token t stands in the buckets' queries laid end to end.
    """

    buckets: tuple[Bucket, ...] = ()
    back: torch.Tensor | None = None


def bucket_lengths(lengths: Sequence[int]) -> list[list[int]]:
    """Indices of sequences that share a bucket, longest bucket first; order within ties is the given one."""
    buckets: list[list[int]] = []
    longest = 0
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if not buckets or not (lengths[i] >= FILL * longest or longest - lengths[i] <= SLACK_TOKENS):
            buckets.append([])
            longest = lengths[i]
        buckets[-1].append(i)
    return buckets


def chunks(length: int, cp: int, rank: int) -> NDArray[np.int64]:
    """Which positions of a sequence (padded to a multiple of 2 cp) are this context-parallel rank's: as megatron and
    Transformer Engine cut, chunk `rank` and chunk 2 cp - 1 - `rank` of 2 cp."""
    if cp == 1:
        return np.arange(length)
    size = -(-length // (2 * cp))
    first = np.arange(size)
    return np.concatenate([first + rank * size, first + (2 * cp - 1 - rank) * size])


def pack(lengths: Sequence[int], device: torch.device, layout: str, cp: int = 1, rank: int = 0) -> Packed:
    """`layout` is "thd" for attention that reads cu_seqlens, "buckets" for ours (megatron then sees one sequence).
    `lengths` are whole sequences'; under context parallelism they are padded to a multiple of 2 cp."""
    whole = [len(chunks(n, cp, 0)) * cp for n in lengths]
    starts = np.concatenate([[0], np.cumsum(whole)]).astype(np.int64)
    cu = torch.from_numpy(starts.astype(np.int32)).to(device)
    longest = int(max(whole))
    shared: dict[str, Any] = {"cu_seqlens_q": cu, "cu_seqlens_kv": cu, "max_seqlen_q": longest, "max_seqlen_kv": longest}
    if layout == "thd":
        return Packed(qkv_format="thd", **shared)
    local = starts // cp  # of this rank's packed tokens
    buckets, back, offset = [], np.empty(local[-1], np.int64), 0
    for members in bucket_lengths(whole):
        n, width = len(members), whole[members[0]] // cp
        tokens = np.zeros((n, width), np.int64)
        for row, i in enumerate(members):
            tokens[row, : whole[i] // cp] = np.arange(local[i], local[i + 1])
            back[local[i] : local[i + 1]] = offset + row * width + np.arange(whole[i] // cp)
        queries = torch.from_numpy(tokens.reshape(-1)).to(device)
        if cp == 1:
            buckets.append(Bucket(n, int(width), queries, queries))
        else:
            buckets.append(_cut_bucket(queries, members, whole, local, cp, rank, device))
        offset += n * width
    return Packed(qkv_format="buckets", buckets=tuple(buckets), back=torch.from_numpy(back).to(device), **shared)


def _cut_bucket(
    queries: torch.Tensor,
    members: Sequence[int],
    whole: Sequence[int],
    local: NDArray[np.int64],
    cp: int,
    rank: int,
    device: torch.device,
) -> Bucket:
    """A bucket whose queries are this rank's and whose keys come from all: `keys` index them gathered in rank order."""
    n, long = len(members), whole[members[0]]
    keys, seen = np.zeros((n, long), np.int64), np.full((n, long // cp), long, np.int64)  # padded queries see all
    for row, i in enumerate(members):
        for peer in range(cp):
            at = chunks(whole[i], cp, peer)
            keys[row, at] = peer * local[-1] + local[i] + np.arange(len(at))
        seen[row, : whole[i] // cp] = chunks(whole[i], cp, rank)
    mask = np.arange(long)[None, None, None, :] <= seen[:, None, :, None]
    return Bucket(n, long // cp, queries, torch.from_numpy(keys.reshape(-1)).to(device), torch.from_numpy(mask).to(device))


class BucketAttention(MegatronModule):  # type: ignore[misc]
    """Core attention over `Packed` buckets; query, key, value [T, 1, heads, head_dim] -> [T, 1, heads * head_dim]."""

    def __init__(self, config: Any, layer_number: int, softmax_scale: float | None = None, **ignored: Any) -> None:
        super().__init__(config=config)
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        self.cp = config.context_parallel_size

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Packed | None = None,
    ) -> torch.Tensor:
        if packed_seq_params is None or packed_seq_params.back is None:
            raise RuntimeError("BucketAttention wants sequences packed by attention.pack")
        q, k, v = (x.squeeze(1) for x in (query, key, value))
        if self.cp > 1:  # backward sums every rank's share and hands each its own tokens'
            k, v = (_gathered(x) for x in (k, v))
        outputs = []
        for bucket in packed_seq_params.buckets:
            rows = [
                x.index_select(0, at).view(bucket.rows, -1, *x.shape[1:]).transpose(1, 2)
                for x, at in ((q, bucket.tokens), (k, bucket.keys), (v, bucket.keys))
            ]
            out = F.scaled_dot_product_attention(
                *rows,
                attn_mask=bucket.mask,
                is_causal=bucket.mask is None,
                scale=self.scale,
                enable_gqa=k.size(1) != q.size(1),
            )
            outputs.append(out.transpose(1, 2).reshape(bucket.rows * bucket.length, -1))
        flat = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return flat.index_select(0, packed_seq_params.back).unsqueeze(1)


def _gathered(x: torch.Tensor) -> torch.Tensor:
    from megatron.core import parallel_state as mpu

    group = mpu.get_context_parallel_group()
    whole: torch.Tensor = tensor_parallel.gather_from_sequence_parallel_region(x.contiguous(), group=group)
    return whole

"""What the shards of a checkpoint bring to light: parts that are absent, copies of one tensor."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from trtllm_b12x_fix.checkpoint.findings import Finding, Severity
from trtllm_b12x_fix.checkpoint.header import shown

#: As the hub names the shards of one checkpoint.
_SHARD = re.compile(r"(.*)-([0-9]{5})-of-([0-9]{5})\.safetensors", re.DOTALL)


def missing_shard(index: str, shard: str, tensors: int) -> Finding:
    """A shard that the index names and that is not there."""
    return Finding(
        Severity.NOTE,
        "missing-shard",
        f"{shown(index)} puts {tensors} tensors in {shown(shard)}, which is not there; layers in "
        "it cannot be checked",
        file=shown(shard),
    )


def one_of_several(index: str, shard: str, elsewhere: int) -> Finding:
    """One shard was asked for, and an index says that there are more."""
    return Finding(
        Severity.NOTE,
        "one-shard-of-several",
        f"{shown(index)} puts {elsewhere} more tensors in other files, which were not asked for: "
        f"only layers wholly in {shown(shard)} can be checked",
        file=shown(shard),
    )


def absent_by_name(names: Iterable[str]) -> list[Finding]:
    """Without an index, the shards that the names of the others speak of."""
    found: dict[tuple[str, str], list[str]] = {}
    for name in names:
        if match := _SHARD.fullmatch(name):
            found.setdefault((match[1], match[3]), []).append(name)
    return [
        Finding(
            Severity.NOTE,
            "one-shard-of-several",
            f"{len(shards)} of {int(total)} shards by their names, and no index says what is in "
            "the others: a layer may be incomplete",
            file=shown(shards[0]),
        )
        for (_, total), shards in found.items()
        if len(shards) < int(total)
    ]


def copies(
    index: str, weight_map: Mapping[str, str], headers: Mapping[str, Iterable[str]]
) -> list[Finding]:
    """Files that hold a tensor which the index puts in another: one note for each pair."""
    twice: dict[tuple[str, str], list[str]] = {}
    for file, tensors in headers.items():
        for tensor in tensors:
            if (owner := weight_map.get(tensor, file)) != file:
                twice.setdefault((file, owner), []).append(tensor)
    return [
        Finding(
            Severity.NOTE,
            "tensor-in-two-files",
            f"{shown(file)} holds {len(tensors)} tensors that {shown(index)} puts in "
            f"{shown(owner)}, which count; whoever loads every file takes the others",
            file=shown(file),
            tensor=tensors[0],
        )
        for (file, owner), tensors in sorted(twice.items())
    ]

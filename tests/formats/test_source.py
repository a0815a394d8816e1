"""The plan of a conversion against the published Kimi K3 folder, which no one has to download for it."""

from pathlib import Path

import pytest

from engine.presets import KIMI_K3
from formats.checkpoint import Checkpoint
from formats.inventory import expert_geometry, source_inventory
from formats.layout import Entry, Shard, extents, layout
from formats.safetensors import Tensor
from formats.source import items


@pytest.fixture(scope="module")
def plan() -> tuple[tuple[Entry, ...], tuple[Shard, ...]]:
    """Entries and shards of the NVFP4 release: FP8 attention, bf16 elsewhere."""
    fp8 = [name.removesuffix(".weight") for name in source_inventory(KIMI_K3) if ".self_attn." in name]
    wants = source_inventory(KIMI_K3, fp8)
    tensors = {name: Tensor(name, want.dtypes[0], want.shapes[0], Path(), 0, 0) for name, want in wants.items()}
    source = Checkpoint(Path(), KIMI_K3, tensors, "nvfp4", expert_geometry(KIMI_K3))
    return layout([item.spec for item in items(source)])


def test_published_k3_closes_to_the_byte(plan: tuple[tuple[Entry, ...], tuple[Shard, ...]]) -> None:
    """ftw.md, fact 2, and the sums of sections 2 and 3."""
    entries, shards = plan
    weights = [entry for entry in entries if entry.kind == "weight"]
    banks = [entry for entry in entries if entry.kind == "experts_bank"]
    assert (len(weights), len(banks), len(shards)) == (2946, 552, 194)
    assert sum(entry.nbytes for entry in weights) == 77_787_119_584
    assert banks[0].offset == 77_790_797_824
    assert sum(entry.nbytes for entry in banks) == 1_533_145_513_984
    assert sum(shard.nbytes for shard in shards) == 1_610_936_311_808


def test_rows_that_cross_files(plan: tuple[tuple[Entry, ...], tuple[Shard, ...]]) -> None:
    """92 rows of gate_up_packed and no other: ftw.md, section 2."""
    entries, shards = plan
    crossing = []
    for entry in entries:
        if entry.kind == "experts_bank":
            row = entry.nbytes // 896
            crossing += [entry.name for e in range(896) if len(extents(shards, entry.offset + e * row, row)) > 1]
    assert crossing == [f"gate_up_packed#L{layer:05d}" for layer in range(92)]


def test_offsets_inside_a_layer(plan: tuple[tuple[Entry, ...], tuple[Shard, ...]]) -> None:
    banks = [entry for entry in plan[0] if entry.kind == "experts_bank"][6:12]
    want = [0, 9_865_003_008, 11_098_128_384, 11_109_138_432, 16_041_639_936, 16_658_202_624]
    assert [entry.offset - banks[0].offset for entry in banks] == want

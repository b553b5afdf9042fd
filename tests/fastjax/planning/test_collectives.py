"""Traffic between the devices of a compiled program, in bytes on the link."""

import pytest

from fastjax.planning.collectives import Collective, collectives, link_seconds
from pallas_kernels.cards import CARDS

PROGRAM = """HloModule step

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%body (state: (s32[], u8[64,32])) -> (s32[], u8[64,32]) {
  %state = (s32[], u8[64,32]) parameter(0)
  %codes = u8[64,32] get-tuple-element(%state), index=1
  %begun = (u8[64,32], u8[256,32]) all-gather-start(%codes), replica_groups=[2,4]<=[8], dimensions={0}
  %whole = u8[256,32] all-gather-done(%begun)
  %moved = (u8[64,32], u8[64,32], u32[], u32[]) collective-permute-start(%codes), source_target_pairs={{0,1},{1,0}}
  ROOT %next = (s32[], u8[64,32]) tuple(%count, %codes)
}

ENTRY %main (p: f32[1024], q: bf16[64,16]) -> f32[1024] {
  %p = f32[1024] parameter(0)
  %q = bf16[64,16] parameter(1)
  %loop = (s32[], u8[64,32]) while(%start), condition=%more, body=%body, backend_config={"known_trip_count":{"n":"32"}}
  %parts = bf16[16,16] reduce-scatter(%q), replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={0}, to_apply=%add
  %two = (f32[1024], f32[8]) all-reduce-start(%p, %r), replica_groups={}, to_apply=%add
  ROOT %result = f32[1024] all-reduce-done(%two)
}
"""


@pytest.mark.parametrize("groups", ["[2,4]<=[8]", "mesh['data'=2,'fsdp'=4] {'fsdp'}", "mesh['x'=8] {'x':(2)4}"])
def test_the_bytes_that_a_device_sends(groups):
    found = collectives(PROGRAM.replace("[2,4]<=[8]", groups), 8)
    assert found == [
        Collective("all-gather", 32, 32 * 256 * 32 * 3 / 4),
        Collective("collective-permute", 32, 32 * 64 * 32),
        Collective("all-reduce", 1, 2 * (1024 + 8) * 4 * 7 / 8),
        Collective("reduce-scatter", 1, 16 * 16 * 2 * 3),
    ]
    assert link_seconds(found, CARDS["h200"]) < link_seconds(found, CARDS["4090"]) / 10, "no NVLink between these"


def test_the_link_of_h200s_is_the_measured_one():
    """1 GiB summed by two H200s of one host in 3.8 ms."""
    assert link_seconds([Collective("all-reduce", 1, 2**30)], CARDS["h200"]) == pytest.approx(3.8e-3, rel=0.02)

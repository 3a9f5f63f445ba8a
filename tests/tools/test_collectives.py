"""What devices exchange is counted right, from XLA's text for each kind of device."""

from tools.collectives import Exchange, collectives

CPU = """
ENTRY %main (p: f32[8,4]) -> f32[8,4] {
  %p = f32[8,4]{1,0} parameter(0)
  %all-reduce.1 = (f32[8,4]{1,0}, s32[]) all-reduce(%p, %q), channel_id=1, to_apply=%add
  %part = f32[8,4]{1,0} get-tuple-element(%all-reduce.1), index=0
  %reduce-scatter.2 = f32[2,4]{1,0} reduce-scatter(%p), channel_id=2, dimensions={0}
  %all-gather.3 = bf16[16,4]{1,0} all-gather(%r), channel_id=3, dimensions={0}
}
"""

TPU = """
%all-reduce-scatter.1 (input: f32[16]) -> f32[2] {
  %all-reduce.9 = f32[16]{0:T(128)} all-reduce(%input), channel_id=7, to_apply=%add
}
%start (p: bf16[4]) -> bf16[32] {
  %all-gather.1 = bf16[32]{0:T(256)(128)(2,1)} all-gather(%p), channel_id=4, dimensions={0}
}
%done (p: bf16[4]) -> bf16[32] {
  %all-gather.2 = bf16[32]{0:T(256)(128)(2,1)S(1)} all-gather(%p), channel_id=4, dimensions={0}
}
ENTRY %main.5 (p: f32[8,4]) -> f32[8,4] {
  %fusion = f32[2]{0} fusion(%q), kind=kCustom, calls=%all-reduce-scatter.1
  %permute.1 = (bf16[8]{0}, bf16[8]{0}, u32[]{:S(2)}) collective-permute-start(%a), channel_id=1
  %permute.2 = bf16[8]{0} collective-permute-done(%permute.1)
  %permute.3 = (bf16[8]{0}, bf16[8]{0}, u32[]{:S(2)}) collective-permute-start(%b), channel_id=1
}
"""


class Program:
    def __init__(self, text: str) -> None:
        self.text = text

    def as_text(self) -> str:
        return self.text


def test_arrays_and_bytes_are_counted_by_kind() -> None:
    assert collectives(Program(CPU)) == {
        "all-reduce": Exchange(2, 8 * 4 * 4 + 4),
        "reduce-scatter": Exchange(1, 8 * 4 * 4),
        "all-gather": Exchange(1, 16 * 4 * 2),
    }


def test_parts_of_an_operation_are_counted_once() -> None:
    assert collectives(Program(TPU)) == {
        "all-gather": Exchange(1, 32 * 2),
        "reduce-scatter": Exchange(1, 16 * 4),
        "collective-permute": Exchange(2, 2 * 8 * 2),
    }

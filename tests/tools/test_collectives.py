"""What devices exchange is counted right, from the text of XLA's compiler for TPUs."""

from tools.collectives import Exchange, collectives

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


def test_parts_of_an_operation_are_counted_once() -> None:
    assert collectives(Program(TPU)) == {
        "all-gather": Exchange(1, 32 * 2),
        "reduce-scatter": Exchange(1, 16 * 4),
        "collective-permute": Exchange(2, 2 * 8 * 2),
    }

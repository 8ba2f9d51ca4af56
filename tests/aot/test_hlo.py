"""The parser, and costs of HLO in the spelling of XLA's backends."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest

from grpojax.aot import collectives, cost, hlo
from grpojax.aot.collectives import Collective
from grpojax.aot.hlo import Shape
from grpojax.models import gpu_decode_attention
from grpojax.models.block_attention import CAUSAL
from grpojax.models.cache import KeysValues, PromptKeysValues, Slots


def computations(text):
  """Writes HLO from blocks of a line "NAME PARAMETER=SHAPE ..." and a body.

  "e" is the program's entry.
  """
  blocks = []
  for part in re.split("\n\n+", text.strip()):
    head, *lines = part.split("\n")
    name, *pairs = (word.split("=", 1) for word in head.split())
    blocks.append("ENTRY %e {" if name == ["e"] else f"%{name[0]} {{")
    for i, (key, shape) in enumerate(pairs):
      blocks.append(f"  %{key} = {shape} parameter({i})")
    blocks += [*lines, "}", ""]
  return "\n".join(blocks)


def costs(text, tokens=10):
  """Counts the costs of a program on 8 devices."""
  head = "HloModule m, is_scheduled=true, num_partitions=8\n\n"
  return cost.cost(hlo.parse(head + computations(text)), tokens)


def only(line):
  return hlo.parse_instruction("  " + line)


@pytest.mark.parametrize(
  "text, tiles, size, padded",
  [
    ("bf16[2,3]{1,0:T(8,128)(2,1)S(1)}", ((1, 128), (0, 8)), 12, 8 * 128 * 2),
    ("f32[4,9]{0,1:T(128)}", ((0, 128),), 144, 128 * 9 * 4),
    ("bf16[2,64,1]{1,0,2:T(2,128)(2,1)}", ((1, 128), (0, 2)), 256, 512),
    ("pred[5]", (), 5, 5),
    ("s4[5]", (), 3, 3),
    ("f8e4m3fn[5]", (), 5, 5),
    ("c64[5]", (), 40, 40),
    ("token[5]", (), 0, 0),
  ],
)
def test_shapes_and_bytes(text, tiles, size, padded):
  (parsed,) = hlo.parse_shapes(text)
  assert (parsed.tiles, parsed.bytes) == (tiles, size)
  assert parsed.padded_bytes == padded


def test_spellings_of_arrays_and_operands():
  text = "((bf16[<=2,3]{0}, token[]), /*index=1*/u32[]{:S(2)})"
  arrays = Shape("bf16", (2, 3)), Shape("token", ()), Shape("u32", (), 2)
  assert hlo.parse_shapes(text) == arrays
  for operands in ("%a, %b.1", "f32[2,3]{1,0} %a, f32[] /*index=1*/%b.1"):
    i = only(f"%x = f32[2,3]{{1,0}} add({operands})")
    assert i.operands == ("a", "b.1"), operands


@pytest.mark.parametrize(
  "groups, size",
  [
    ("replica_groups={{0,1},{2,3},{4,5},{6,7}}, ", 2),
    ("replica_groups={}, ", 8),
    ("", 8),
    ("replica_groups=[2,4]<=[8], ", 4),
    ("replica_groups=mesh['x'=2,'y'=4] {'x','y'}, ", 8),
    ("replica_groups=mesh['x'=2,'y'=4] {'x','y':(2)2}, ", 4),
  ],
)
def test_group_sizes(groups, size):
  i = only(f"%r = f32[4] all-reduce(%x), channel_id=1, {groups}to_apply=%a")
  assert collectives.group_size(i, 8) == size


ADD = """

add a=f32[] b=f32[]
  ROOT %s = f32[] add(%a, %b)
"""
FOURS = "replica_groups=[2,4]<=[8]"
REDUCE = f"{FOURS}, to_apply=%add"
PAIR = "source_target_pairs={{0,1},{1,0}}"
NOWHERE = "source_target_pairs={{0,0},{1,1}}"


@pytest.mark.parametrize(
  "line, kind, sent",
  [
    # 4 devices; the operand is 400 bytes.
    (f"f32[400] all-gather(%p), {FOURS}", "all-gather", 1200),
    (f"f32[25] reduce-scatter(%p), {REDUCE}", "reduce-scatter", 300),
    (f"f32[100] all-reduce(%p), {REDUCE}", "all-reduce", 600),
    (f"f32[100] all-to-all(%p), {FOURS}", "all-to-all", 300),
    (f"f32[100] collective-permute(%p), {PAIR}", "collective-permute", 400),
    (f"f32[100] collective-permute(%p), {NOWHERE}", "collective-permute", 0),
    # In the spelling of XLA:GPU.
    (f"(f32[100], f32[400]) all-gather-start(%p), {FOURS}", "all-gather", 1200),
    (f"f32[100] all-reduce-start(%p), {REDUCE}", "all-reduce", 600),
  ],
)
def test_bytes_between_devices(line, kind, sent):
  (c,) = costs(f"e p=f32[100]\n  ROOT %r = {line}{ADD}").collectives
  assert (c.kind, c.bytes, c.trips) == (kind, sent, 1)


@pytest.mark.parametrize(
  "opcode, attribute", [("call", "to_apply"), ("async", "calls")]
)
def test_asynchronous_call(opcode, attribute):
  """A collective on TPU7x's sparse cores, or on another stream of XLA:GPU."""
  counted = costs(f"""
e p=f32[100]{{0}}
  %t = token[] after-all()
  %s = ((f32[100]{{0}}, token[]), f32[400]{{0}}) {opcode}-start(%p, %t),\
 async_execution_thread="x", {attribute}=%q, metadata={{op_name="jit(f)/dot"}}
  ROOT %d = f32[400]{{0}} {opcode}-done(%s)

q q=f32[100]{{0}} t=token[]
  ROOT %g = f32[400]{{0}} all-gather(%q), {FOURS}
""")
  (i,) = counted.instructions
  assert i.collectives == (Collective("all-gather", 1200, 1, 4),)
  assert (i.op_name, i.bytes) == ("jit(f)/dot", 400 + 1600)


@pytest.mark.parametrize(
  "line, moved",
  [
    # A copy between memories counts once; S(1) is VMEM.
    ("(f32[64]{0:S(1)}, f32[64]{0}, u32[]{:S(2)}) copy-start(%p)", 256),
    ("(f32[64]{0}, f32[64]{0}, u32[]{:S(2)}) copy-start(%p)", 512),
    ("((f32[64]{0}), f32[8]{0:S(1)}, s32[]{:S(2)}) slice-start(%p), x=y", 32),
    ("f32[8]{0} slice(%p), slice={[0:8]}", 64),
    ("f32[8,8]{1,0} bitcast(%p)", 0),
    ('f32[64]{0} custom-call(), custom_call_target="AllocateBuffer"', 0),
    ('f32[64]{0} custom-call(%p), custom_call_target="ConcatBitcast"', 0),
    ('f32[64]{0} custom-call(%p), custom_call_target="mine"', 512),
    ("f32[50]{0} quantum-sort(%p, how=well), novelty={yes}", 256 + 200),
  ],
)
def test_bytes_of_an_instruction(line, moved):
  counted = costs(f"e p=f32[64]{{0}}\n  ROOT %r = {line}")
  assert (counted.flops, counted.bytes) == (0, moved)


def test_cache_write_moves_whole_tiles():
  """Slots are the last dimension in memory, so a token is read and written."""
  counted = costs("""
e cache=bf16[4,64,256]{2,1,0:T(8,128)(2,1)}\
 new=bf16[4,64,1]{2,1,0:T(8,128)(2,1)S(1)} i=s32[]
  %z = s32[] constant(0)
  ROOT %y = bf16[4,64,256]{2,1,0:T(8,128)(2,1)}\
 dynamic-update-slice(%cache, %new, %z, %z, %i)
""")
  assert counted.bytes == 2 * 4 * 64 * 128 * 2 + 2 * 4  # and two indices


def test_gpu_decode_attention_reads_live_slots():
  """XLA:GPU only knows that the kernel updates the cache of a stack in place.

  L 5, B 2, G 3, K 2, R 4, C 256, P 32, E 64.
  """
  array = jax.ShapeDtypeStruct
  q = array((2, 3, 2, 4, 64), jnp.bfloat16)
  token = (array((2, 3, 2, 64), jnp.bfloat16),) * 2
  cache = (array((5, 2, 3, 2, 256, 64), jnp.bfloat16),) * 2
  prompt = (array((2, 2, 32, 64), jnp.bfloat16),) * 2
  layer, lengths, rows = (array(x, jnp.int32) for x in ((), (2,), (2, 3)))
  new = KeysValues(*token), Slots(*token)
  scalars = rows, rows, PromptKeysValues(*prompt), lengths, rows
  args = q, *new, Slots(*cache), layer, *scalars
  attend = functools.partial(gpu_decode_attention.attend, scale=1.0)
  name = re.search(r"decode_attention\w+", str(jax.make_jaxpr(attend)(*args)))
  counted = costs(f"""
e q=bf16[2,3,2,4,64] keys=bf16[5,2,3,2,256,64] values=bf16[5,2,3,2,256,64]
  ROOT %r = (bf16[2,3,2,4,64], bf16[5,2,3,2,256,64], bf16[5,2,3,2,256,64])\
 custom-call(%q, %keys, %values), custom_call_target="__gpu$xla.gpu.triton",\
 output_to_operand_aliasing={{{{1}}: (1, {{}}), {{2}}: (2, {{}})}},\
 metadata={{op_name="jit(f)/while/body/{name[0]}/pallas_call"}}
""")
  queries = 2 * 3 * 2 * 4 * 64
  assert counted.flops == 4 * queries * (256 // 2 + 32)
  live = 2 * (2 * 3 * 2 * 256 * 64) // 2  # keys and values of a layer
  prompts = 2 * (2 * 2 * 32 * 64)  # once per group
  tokens = 3 * 2 * (2 * 3 * 2 * 64)  # new; as stored: read and written
  scalars = 1 + 2 + 3 * (2 * 3)
  moved = 2 * (live + prompts + 2 * queries + tokens) + 4 * scalars
  assert counted.bytes == moved


DOT = "lhs_contracting_dims={1}, rhs_contracting_dims={0}"
RAGGED = (
  "lhs_ragged_dims={0}, lhs_contracting_dims={%s}, rhs_contracting_dims={%s}"
)
ONEDNN = 'custom_call_target="__onednn$matmul"'
PADDED = "window={size=3 pad=1_1}, dim_labels=0bf_0io->0bf"


@pytest.mark.parametrize(
  "line, flops",
  [
    (f"f32[4,8] custom-call(%a, %b), {ONEDNN}", 2 * 4 * 8 * 16),
    # Without padding, 4 outputs of a window of 3 over 4 inputs are 10 pairs.
    (f"f32[4,1,8] convolution(%w, %c), {PADDED}", 2 * 16 * 8 * 10),
    # A row meets a single matrix; then the gradient of the matrices.
    (f"f32[64,32] ragged-dot(%x, %m, %g), {RAGGED % (1, 1)}", 2 * 64 * 16 * 32),
    (f"f32[8,16,32] ragged-dot(%x, %y, %g), {RAGGED % (0, 0)}", 2 * 64 * 512),
  ],
)
def test_flops(line, flops):
  counted = costs(
    "e a=f32[4,16] b=f32[16,8] c=f32[3,16,8] w=f32[4,1,16] x=f32[64,16]"
    f" y=f32[64,32] m=f32[8,16,32] g=s32[8]\n  ROOT %r = {line}"
  )
  assert counted.flops == flops


def test_ragged_fusion():
  """libtpu 0.0.52: cycles are as if all 4 groups had all rows."""
  counted = costs("""
e m=bf16[4,8,32] x=bf16[64,8] s=pred[4,64]
  ROOT %r = bf16[64,32] fusion(%m, %x, %s), kind=kCustom, calls=%f,\
 backend_config={"estimated_cycles":"4917277","is_ragged_dot":true,\
"iteration_skipper_mode":"ITERATION_SKIPPER_MODE_GROUP_STARTS"}

f m=bf16[4,8,32] x=bf16[64,8] s=pred[4,64]
  %all = bf16[4,64,8] broadcast(%x), dimensions={1,2}
  %y = bf16[4,64,32] convolution(%all, %m),\
 window={size=4 stride=3 lhs_dilate=4}, dim_labels=0bf_0io->0bf
  %mask = pred[4,64,32] broadcast(%s), dimensions={0,1}
  %zero = bf16[] constant(0)
  %zeros = bf16[4,64,32] broadcast(%zero), dimensions={}
  %masked = bf16[4,64,32] select(%mask, %y, %zeros)
  ROOT %sum = bf16[64,32] reduce(%masked, %zero), dimensions={0}, to_apply=%add

add a=bf16[] b=bf16[]
  ROOT %c = bf16[] add(%a, %b)
""")
  (product,) = counted.instructions
  assert (product.flops, product.cycles) == (2 * 64 * 8 * 32, 0)
  assert product.bytes == 2 * (4 * 8 * 32 + 64 * 8 + 64 * 32) + 4 * 64


LOOP = """
e x=f32[8,8]
  %start = s32[] constant(START)
  %limit = s32[] constant(7)
  %copied = s32[] copy(%start)
  %t = STATE tuple(%copied, %x, %limit)
  ROOT %w = STATE while(%t), condition=%cond, body=%body

cond s=STATE
  ELEMENTS
  %five = s32[] constant(5)
  ROOT %c = pred[] CONDITION

body s=STATE
  ELEMENTS
  %one = s32[] constant(1)
  %two = s32[] constant(2)
  PRODUCT
  %next = s32[] STEP
  ROOT %r = STATE tuple(%next, %y, %limit)

less a=s32[] b=s32[]
  ROOT %c = pred[] compare(%a, %b), direction=LT
"""
WORDS = {
  "STATE": "(s32[],f32[8,8],s32[])",
  "PAIRED": "(s32[],f32[8,8])",
  "ELEMENTS": "%i = s32[] get-tuple-element(%s), index=0\n"
  "  %x = f32[8,8] get-tuple-element(%s), index=1\n"
  "  %limit = s32[] get-tuple-element(%s), index=2",
  "PRODUCT": f"%y = f32[8,8] dot(%x, %x), {DOT}",
}
LESS = "compare(%i, %five), direction=LT"
ENDED = 'custom-call(%x), custom_call_target="all"'


def written(text, **words):
  for word, replacement in (words | WORDS).items():
    text = text.replace(word, replacement)
  return text


@pytest.mark.parametrize(
  "trips, condition, step, start",
  [
    (5, LESS, "add(%i, %one)", 0),
    (7, "compare(%i, %limit), direction=LT", "add(%i, %one)", 0),
    (5, "fusion(%i, %five), calls=%less", "add(%i, %one)", 0),
    (0, LESS, "add(%i, %one)", 9),
    (3, LESS, "add(%i, %two)", 0),
    (3, LESS.replace("LT", "GE"), "subtract(%i, %one)", 7),
    # Token loops; the first also ends with all samples, after at most 5.
    (-5, "and(%l, %all)", "add(%i, %one)", 0),
    (-100, LESS, "multiply(%i, %one)", 0),
    (-100, LESS, "add(%i, %i)", 0),
  ],
)
def test_trip_counts(trips, condition, step, start):
  """A while over (counter, array, limit); token loops have negative trips."""
  words = {"CONDITION": condition, "STEP": step, "START": str(start)}
  text = LOOP
  if "%all" in condition:
    both = f"  %l = pred[] {LESS}\n  %all = pred[] {ENDED}\n  ROOT %c"
    text = text.replace("  ROOT %c", both, 1)
  counted = costs(written(text, **words), tokens=100)
  assert counted.flops == abs(trips) * 2 * 8 * 8 * 8
  assert counted.in_token_loop.flops == counted.flops * (trips < 0)


@pytest.mark.parametrize("name, trips", [("cond", 12), (f"{CAUSAL}/cond", 6)])
def test_known_trip_count_and_the_heavier_branch(name, trips):
  """Queries see 1 to 12 of 12 causal blocks: 6.5 on average, rounded down."""
  text = f"""
e s=PAIRED
  ROOT %w = PAIRED while(%s), condition=%any, body=%body,\
 backend_config={{"known_trip_count":{{"n":"12"}}}}

body s=PAIRED
  %i = s32[] get-tuple-element(%s), index=0
  %x = f32[8,8] get-tuple-element(%s), index=1
  %y = f32[8,8] conditional(%i, %x, %x),\
 branch_computations={{%light, %heavy}}, metadata={{op_name="a/{name}"}}
  ROOT %r = PAIRED tuple(%i, %y)

light x=f32[8,8]
  ROOT %y = f32[8,8] copy(%x)

heavy x=f32[8,8]
  ROOT PRODUCT

any s=PAIRED
  ROOT %c = pred[] custom-call(%s), custom_call_target="any"
"""
  counted = costs(written(text))
  assert counted.flops == trips * 2 * 8 * 8 * 8
  assert not counted.in_token_loop.instructions

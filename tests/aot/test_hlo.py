"""The parser, and costs of HLO as XLA's versions and backends spell it."""

import pytest

from grpojax.aot import collectives, cost, hlo
from grpojax.aot.hlo import Shape
from grpojax.models.block_attention import CAUSAL


def block(name, parameters, *lines):
  """Text of a computation; "e" is the program's entry."""
  start = "ENTRY %e" if name == "e" else f"%{name}"
  given = [
    f"  %{key} = {shape} parameter({i})"
    for i, (key, shape) in enumerate(parameters.items())
  ]
  return "\n".join([f"{start} {{", *given, *(f"  {x}" for x in lines), "}"])


def costs(*computations, tokens=10):
  """Costs of a program on 8 devices."""
  head = "HloModule m, is_scheduled=true, num_partitions=8"
  return cost.cost(hlo.parse("\n\n".join([head, *computations])), tokens)


def only(line):
  return hlo.parse_instruction("  " + line)


@pytest.mark.parametrize(
  "text, shapes",
  [
    ("f32[]", [Shape("f32", ())]),
    (
      "bf16[2,3]{1,0:T(8,128)(2,1)S(1)}",
      [Shape("bf16", (2, 3), 1, ((1, 128), (0, 8)))],
    ),
    ("f32[4,9]{0,1:T(128)}", [Shape("f32", (4, 9), 0, ((0, 128),))]),
    ("s32[<=8]{0}", [Shape("s32", (8,))]),
    (
      "((f32[2]{0}, token[]), /*index=1*/u32[]{:S(2)})",
      [Shape("f32", (2,)), Shape("token", ()), Shape("u32", (), 2)],
    ),
  ],
)
def test_shapes(text, shapes):
  assert hlo.parse_shapes(text) == tuple(shapes)


@pytest.mark.parametrize(
  "dtype, size",
  [("pred", 5), ("s4", 3), ("f8e4m3fn", 5), ("bf16", 10), ("c64", 40)]
  + [("token", 0)],
)
def test_bytes(dtype, size):
  assert Shape(dtype, (5,)).bytes == size


@pytest.mark.parametrize(
  "shape, size",
  [
    ("f32[10,64]{1,0:T(8,128)}", 16 * 128 * 4),
    ("bf16[2,10,128]{2,1,0:T(8,128)(2,1)}", 2 * 16 * 128 * 2),
    ("bf16[2,64,1]{1,0,2:T(2,128)(2,1)}", 2 * 128 * 2),
    ("f32[5]{0}", 20),
  ],
)
def test_bytes_of_whole_tiles(shape, size):
  (shape,) = hlo.parse_shapes(shape)
  assert shape.padded_bytes == size


def test_a_token_in_a_cache_costs_its_tiles():
  """Slots are the last dimension in memory; a token is read and written."""
  found = costs(
    block(
      "e",
      {
        "cache": "bf16[4,64,256]{2,1,0:T(8,128)(2,1)}",
        "new": "bf16[4,64,1]{2,1,0:T(8,128)(2,1)S(1)}",
        "i": "s32[]",
      },
      "%z = s32[] constant(0)",
      "ROOT %y = bf16[4,64,256]{2,1,0:T(8,128)(2,1)}"
      " dynamic-update-slice(%cache, %new, %z, %z, %i)",
    )
  )
  assert found.bytes == 2 * 4 * 64 * 128 * 2 + 2 * 4  # and two indices


def test_an_instruction():
  i = only(
    "ROOT %while.1 = (s32[], f32[4]{0}) while(%tuple.8), condition=%c.2,"
    ' body=%b.3, metadata={op_name="jit(f)/while" stack_frame_id=8}'
  )
  assert (i.name, i.opcode, i.is_root) == ("while.1", "while", True)
  assert i.operands == ("tuple.8",)
  assert i.called == (("condition", "c.2"), ("body", "b.3"))
  assert i.op_name == "jit(f)/while"
  assert i.shapes == (Shape("s32", ()), Shape("f32", (4,)))


@pytest.mark.parametrize(
  "operands",
  ["%a, %b.1", "f32[2,3]{1,0} %a, f32[] %b.1", "%a, /*index=1*/%b.1"],
)
def test_operands(operands):
  i = only(f"%x = f32[2,3]{{1,0}} add({operands})")
  assert i.operands == ("a", "b.1")


@pytest.mark.parametrize(
  "groups, size",
  [
    ("{{0,1},{2,3},{4,5},{6,7}}", 2),
    ("{{0,1,2,3,4,5,6,7}}", 8),
    ("{}", 8),
    ("[2,4]<=[8]", 4),
    ("[4,2]<=[2,4]T(1,0)", 2),
    ("mesh['x'=2,'y'=4] {'y'}", 4),
    ("mesh['x'=2,'y'=4] {'x','y'}", 8),
    ("mesh['x'=2,'y'=4] {'x','y':(2)2}", 4),
  ],
)
def test_group_sizes(groups, size):
  i = only(
    f"%r = f32[4]{{0}} all-reduce(%x), channel_id=1, replica_groups={groups},"
    " use_global_device_ids=true, to_apply=%add"
  )
  assert collectives.group_size(i, 8) == size


def test_no_group_is_all():
  assert (
    collectives.group_size(only("%r = f32[4] all-reduce(%x), to_apply=%a"), 6)
    == 6
  )


@pytest.mark.parametrize("text", ["", "module @jit_f {}", "HloModule m\n"])
def test_what_is_no_module_is_refused(text):
  with pytest.raises(ValueError, match="not the text|no ENTRY"):
    hlo.parse(text)


def test_an_unknown_opcode_costs_its_bytes():
  line = "ROOT %n = f32[50]{0} quantum-sort(%p, how=well), novelty={yes}"
  found = costs(block("e", {"p": "f32[100]{0}"}, line))
  assert (found.flops, found.bytes) == (0, 400 + 200)


ADD = block("add", {"a": "f32[]", "b": "f32[]"}, "ROOT %s = f32[] add(%a, %b)")
FOURS = "replica_groups=[2,4]<=[8]"
PAIR = "source_target_pairs={{0,1},{1,0}}"
NOWHERE = "source_target_pairs={{0,0},{1,1}}"


@pytest.mark.parametrize(
  "line, kind, sent",
  [
    # 4 devices; the operand is 400 bytes.
    (f"f32[400] all-gather(%p), {FOURS}", "all-gather", 1200),
    (f"f32[25] reduce-scatter(%p), {FOURS}, to_apply=%add",)
    + ("reduce-scatter", 300),
    (f"f32[100] all-reduce(%p), {FOURS}, to_apply=%add", "all-reduce", 600),
    (f"f32[100] all-to-all(%p), {FOURS}", "all-to-all", 300),
    (f"f32[100] collective-permute(%p), {PAIR}", "collective-permute", 400),
    (f"f32[100] collective-permute(%p), {NOWHERE}", "collective-permute", 0),
    ("f32[100] all-reduce(%p), replica_groups=[8,1]<=[8], to_apply=%add",)
    + ("all-reduce", 0),
    # As XLA:GPU spells them.
    (f"(f32[100], f32[400]) all-gather-start(%p), {FOURS}", "all-gather", 1200),
    (f"f32[100] all-reduce-start(%p), {FOURS}, to_apply=%add",)
    + ("all-reduce", 600),
  ],
)
def test_bytes_between_devices(line, kind, sent):
  lines = [f"ROOT %r = {line}"]
  if "-start" in line:
    done = line.split("(%p)")[0].split()[-1].replace("-start", "-done")
    lines = [f"%s = {line}", f"ROOT %r = f32[100] {done}(%s)"]
  (c,) = costs(block("e", {"p": "f32[100]"}, *lines), ADD).collectives
  assert (c.kind, c.bytes, c.trips) == (kind, sent, 1)


@pytest.mark.parametrize("whole", [False, True])
def test_several_arrays_reduced_and_cut_together(whole):
  """XLA:TPU scatters several arrays by one all-reduce and a slice of each.

  If any of them is used whole, it is an all-reduce.
  """
  second = "%y" if whole else "%t"
  parameters = {"p": "f32[64]{0}", "q": "f32[32]{0}"}
  scatter = block(
    "scatter",
    parameters,
    "%i = u32[] partition-id()",
    f"%r = (f32[64]{{0}}, f32[32]{{0}}) all-reduce(%p, %q), {FOURS},"
    " to_apply=%add",
    "%x = f32[64]{0} get-tuple-element(%r), index=0",
    "%y = f32[32]{0} get-tuple-element(%r), index=1",
    "%s = f32[16]{0} dynamic-slice(%x, %i), dynamic_slice_sizes={16}",
    "%t = f32[8]{0} dynamic-slice(%y, %i), dynamic_slice_sizes={8}",
    f"ROOT %o = (f32[16]{{0}}, f32[32]{{0}}) tuple(%s, {second})",
  )
  line = "ROOT %f = (f32[16]{0}, f32[8]{0}) fusion(%p, %q), kind=kCustom,"
  line += " calls=%scatter"
  (c,) = costs(block("e", parameters, line), ADD, scatter).collectives
  want = ("all-reduce", 2 * 288) if whole else ("reduce-scatter", 288)
  assert (c.kind, c.bytes) == want  # 3 of 4 pieces of 384 bytes


@pytest.mark.parametrize("nested", [False, True])
def test_a_chain_of_fusions_is_one_collective(nested):
  """XLA:TPU, a gather beside a product or a loop: start, product, done."""
  gather = (
    "%g = f32[128]{0} all-gather(%p0), channel_id=2,"
    " replica_groups=[1,8]<=[8], dimensions={0},"
    ' frontend_attributes={chain_id="0"}'
  )
  start = block(
    "start",
    {"p0": "f32[16]{0}"},
    gather,
    "ROOT %c = (f32[16]{0}, f32[128]{0}, u32[]{:S(2)}) custom-call(%g),"
    ' custom_call_target="AsyncCollectiveStart"',
  )
  product = block(
    "beside",
    {"p0": "f32[16]{0}", "p1": "f32[8,8]{1,0}"},
    "%d = f32[8,8]{1,0} convolution(%p1, %p1), dim_labels=bf_io->bf",
    gather,
    "ROOT %t = (f32[8,8]{1,0}, f32[128]{0}) tuple(%d, %g)",
  )
  done = block(
    "done",
    {"p0": "f32[16]{0}", "p1": "f32[128]{0}"},
    gather,
    "ROOT %c = f32[128]{0} custom-call(%p0, %p1, %g),"
    ' custom_call_target="AsyncCollectiveDone"',
  )
  beside = "(f32[8,8]{1,0}, f32[128]{0}) fusion(%a, %w), calls=%beside"
  inner = {"a": "f32[16]{0}", "w": "f32[8,8]{1,0}"}
  inner = block("inner", inner, f"ROOT %i = {beside}")
  if nested:
    beside = "(f32[8,8]{1,0}, f32[128]{0}) call(%a, %w), to_apply=%inner"
  found = costs(
    block(
      "e",
      {"x": "f32[16]{0}", "w": "f32[8,8]{1,0}"},
      "%s = (f32[16]{0}, f32[128]{0}, u32[]{:S(2)}) fusion(%x), calls=%start",
      "%a = f32[16]{0} get-tuple-element(%s), index=0",
      "%b = f32[128]{0} get-tuple-element(%s), index=1",
      f"%f = {beside}",
      "%c = f32[128]{0} get-tuple-element(%f), index=1",
      "ROOT %r = f32[128]{0} fusion(%a, %c), kind=kCustom, calls=%done",
    ),
    start,
    product,
    inner,
    done,
  )
  (c,) = found.collectives
  assert (c.kind, c.bytes, c.name) == ("all-gather", 4 * 16 * 7, "s")
  assert found.flops == 2 * 8 * 8 * 8
  # The start reads 64 bytes and writes all 512, the product has an operand and
  # a result of 256 bytes each.
  assert [i.bytes for i in found.instructions] == [64 + 512, 256 + 256, 0]


@pytest.mark.parametrize(
  "spelling", ["call-start to_apply", "async-start calls"]
)
def test_a_call_beside(spelling):
  """TPU7x, a collective on the sparse cores; XLA:GPU, on another stream."""
  opcode, attribute = spelling.split()
  called = block(
    "called",
    {"q": "f32[100]{0}", "t": "token[]"},
    f"ROOT %g = f32[400]{{0}} all-gather(%q), {FOURS}",
  )
  found = costs(
    block(
      "e",
      {"p": "f32[100]{0}"},
      "%t = token[] after-all()",
      f"%s = ((f32[100]{{0}}, token[]), f32[400]{{0}}) {opcode}(%p, %t),"
      f' async_execution_thread="sparsecore", {attribute}=%called,'
      ' metadata={op_name="jit(f)/dot"}',
      f"ROOT %d = f32[400]{{0}} {opcode.replace('start', 'done')}(%s)",
    ),
    called,
  )
  (c,) = found.collectives
  assert (c.kind, c.bytes, c.op_name) == ("all-gather", 1200, "jit(f)/dot")
  assert found.bytes == 400 + 1600


@pytest.mark.parametrize(
  "line, moved",
  [
    # A copy between memories counts once; S(1) is VMEM.
    ("(f32[64]{0:S(1)}, f32[64]{0}, u32[]{:S(2)}) copy-start(%p)", 256),
    ("(f32[64]{0}, f32[64]{0}, u32[]{:S(2)}) copy-start(%p)", 512),
    (
      "((f32[64]{0}), f32[8]{0:S(1)}, s32[]{:S(2)}) slice-start(%p),"
      " slice={[0:8]}",
      32,
    ),
    ("f32[8]{0} slice(%p), slice={[0:8]}", 64),
    ("f32[64]{0} negate(%p)", 512),
    ("f32[8,8]{1,0} bitcast(%p)", 0),
    ('f32[64]{0} custom-call(), custom_call_target="AllocateBuffer"', 0),
    ('f32[64]{0} custom-call(%p), custom_call_target="ConcatBitcast"', 0),
    ('f32[64]{0} custom-call(%p), custom_call_target="mine"', 512),
  ],
)
def test_bytes_of_one_instruction(line, moved):
  found = costs(block("e", {"p": "f32[64]{0}"}, f"ROOT %r = {line}"))
  assert found.bytes == moved


def test_a_fusion_reads_what_it_slices_and_writes_what_it_updates():
  inner = block(
    "inner",
    {"a": "f32[10,64]{1,0}", "i": "s32[]"},
    "%z = s32[] constant(0)",
    "%two = f32[] constant(2)",
    "%k = f32[10,64]{1,0} broadcast(%two), dimensions={}",
    "%m = f32[10,64]{1,0} multiply(%a, %k)",
    "%s = f32[1,64]{1,0} dynamic-slice(%m, %i, %z), dynamic_slice_sizes={1,64}",
    "ROOT %b = f32[64]{0} bitcast(%s)",
  )
  parameters = {"a": "f32[10,64]{1,0}", "c": "f32[5,64]{1,0}"}
  outer = block(
    "outer",
    parameters | {"i": "s32[]"},
    "%z = s32[] constant(0)",
    "%f = f32[64]{0} fusion(%a, %i), kind=kLoop, calls=%inner",
    "%n = f32[64]{0} negate(%f)",
    "%u = f32[1,64]{1,0} reshape(%n)",
    "ROOT %r = f32[5,64]{1,0} dynamic-update-slice(%c, %u, %i, %z)",
  )
  line = "ROOT %r = f32[5,64]{1,0} fusion(%a, %c, %i), kind=kLoop, calls=%outer"
  entry = block("e", parameters | {"i": "s32[]{:S(6)}"}, line)
  found = costs(entry, inner, outer)
  # One row of `a` read, one of `c` written; the index, as fused, is 4 bytes.
  assert found.bytes == 256 + 256 + 4


DOT = "lhs_contracting_dims={1}, rhs_contracting_dims={0}"


@pytest.mark.parametrize(
  "a, line, flops",
  [
    (
      "f32[4,16]",
      'f32[4,8] custom-call(%a, %b), custom_call_target="__onednn$matmul"',
      2 * 4 * 8 * 16,
    ),
    ("f32[4,16]", f"f32[4,8] dot(%a, %b), {DOT}", 2 * 4 * 8 * 16),
    # Padding meets nothing: 4 outputs of a window of 3 over 4 inputs, 10 pairs.
    (
      "f32[4,1,16]",
      "f32[4,1,8] convolution(%a, %c), window={size=3 pad=1_1},"
      " dim_labels=0bf_0io->0bf",
      2 * 16 * 8 * 10,
    ),
    (  # A kernel says what it does.
      "f32[4,16]",
      'f32[4,8] custom-call(%a), custom_call_target="tpu_custom_call",'
      ' backend_config={"custom_call_config":{"body":"TUzvUg==",'
      '"cost_estimate":{"flops":"12345","transcendentals":"0"}}}',
      12345,
    ),
  ],
)
def test_flops(a, line, flops):
  parameters = {"a": a, "b": "f32[16,8]", "c": "f32[3,16,8]"}
  assert costs(block("e", parameters, f"ROOT %r = {line}")).flops == flops


@pytest.mark.parametrize(
  "lhs, rhs, result, contracted",
  [
    ("f32[64,16]", "f32[8,16,32]", "f32[64,32]", 1),
    ("f32[64,16]", "f32[64,32]", "f32[8,16,32]", 0),  # its gradient
  ],
)
def test_a_ragged_dot_meets_one_matrix_a_row(lhs, rhs, result, contracted):
  line = (
    f"ROOT %r = {result} ragged-dot(%a, %b, %g),"
    f" lhs_contracting_dims={{{contracted}}},"
    f" rhs_contracting_dims={{{contracted}}}, lhs_ragged_dims={{0}}"
  )
  found = costs(block("e", {"a": lhs, "b": rhs, "g": "s32[8]"}, line))
  assert found.flops == 2 * 64 * 16 * 32


STATE = "(s32[], f32[8,8], s32[])"
ELEMENTS = (
  "%i = s32[] get-tuple-element(%s), index=0",
  "%x = f32[8,8] get-tuple-element(%s), index=1",
  "%limit = s32[] get-tuple-element(%s), index=2",
)
PRODUCT = f"%y = f32[8,8] dot(%x, %x), {DOT}"
COMPARE = block(
  "compare",
  {"a": "s32[]", "b": "s32[]"},
  "ROOT %c = pred[] compare(%a, %b), direction=LT",
)


def loop(condition, step="add(%i, %one)", start=0):
  """A while over (counter, array, limit), with a fixed limit of 7."""
  entry = block(
    "e",
    {"x": "f32[8,8]"},
    f"%start = s32[] constant({start})",
    "%limit = s32[] constant(7)",
    "%copied = s32[] copy(%start)",
    f"%t = {STATE} tuple(%copied, %x, %limit)",
    f"ROOT %w = {STATE} while(%t), condition=%cond, body=%body,"
    ' metadata={op_name="the loop"}',
  )
  five = "%five = s32[] constant(5)"
  cond = block("cond", {"s": STATE}, *ELEMENTS, five, condition)
  body = block(
    "body",
    {"s": STATE},
    *ELEMENTS,
    "%one = s32[] constant(1)",
    "%two = s32[] constant(2)",
    PRODUCT,
    f"%next = s32[] {step}",
    f"ROOT %r = {STATE} tuple(%next, %y, %limit)",
  )
  return costs(entry, cond, body, COMPARE, tokens=100)


LESS = "ROOT %c = pred[] compare(%i, %five), direction=LT"


@pytest.mark.parametrize(
  "trips, arguments",
  [
    (5, (LESS,)),
    (6, (LESS.replace("LT", "LE"),)),
    (5, (LESS.replace("LT", "NE"),)),
    (5, ("ROOT %c = pred[] compare(%five, %i), direction=GT",)),
    (7, ("ROOT %c = pred[] compare(%i, %limit), direction=LT",)),
    (5, ("ROOT %c = pred[] fusion(%i, %five), calls=%compare",)),
    (0, (LESS, "add(%i, %one)", 9)),
    (3, (LESS, "add(%one, %i)", 2)),
    (3, (LESS, "add(%i, %two)")),
    (3, (LESS.replace("LT", "GE"), "subtract(%i, %one)", 7)),
  ],
)
def test_trip_counts(trips, arguments):
  found = loop(*arguments)
  assert found.flops == trips * 2 * 8 * 8 * 8
  assert found.token_loops == () and found.in_token_loop.flops == 0


@pytest.mark.parametrize(
  "trips, arguments",
  [
    # Whether all samples have ended is asked, too: five times at the most.
    (
      5,
      (
        LESS.replace("ROOT ", "")
        + '\n  %all = pred[] custom-call(%x), custom_call_target="all"'
        + "\n  ROOT %a = pred[] and(%c, %all)",
      ),
    ),
    (100, (LESS, "multiply(%i, %one)")),
    (100, (LESS, "add(%i, %i)")),
  ],
)
def test_any_other_loop_is_the_token_loop(trips, arguments):
  found = loop(*arguments)
  assert found.flops == trips * 2 * 8 * 8 * 8
  assert found.token_loops == ("the loop",)
  assert found.in_token_loop.flops == found.flops


PAIRED = "(s32[], f32[8,8])"
ANY = block(
  "any",
  {"s": PAIRED},
  'ROOT %c = pred[] custom-call(%s), custom_call_target="any"',
)


@pytest.mark.parametrize("causal", [False, True])
def test_known_trip_count_and_the_heavier_branch(causal):
  """Of 12 causal blocks queries see 1 to 12: 6.5 on average, rounded down."""
  name = f"a/{CAUSAL}/cond" if causal else "a/cond"
  array = {"x": "f32[8,8]"}
  light = block("light", array, "ROOT %y = f32[8,8] copy(%x)")
  heavy = block("heavy", array, f"ROOT {PRODUCT}")
  found = costs(
    block(
      "e",
      {"s": PAIRED},
      f"ROOT %w = {PAIRED} while(%s), condition=%any, body=%body,"
      ' backend_config={"known_trip_count":{"n":"12"}}',
    ),
    ANY,
    block(
      "body",
      {"s": PAIRED},
      *ELEMENTS[:2],
      "%y = f32[8,8] conditional(%i, %x, %x),"
      " branch_computations={%light, %heavy},"
      f' metadata={{op_name="{name}"}}',
      f"ROOT %r = {PAIRED} tuple(%i, %y)",
    ),
    light,
    heavy,
  )
  assert found.flops == (6 if causal else 12) * 2 * 8 * 8 * 8
  assert found.token_loops == ()


def test_an_unknown_loop_in_the_token_loop_counts_once():
  loop = f"ROOT %w = {PAIRED} while(%s), condition=%any, body="
  found = costs(
    block("e", {"s": PAIRED}, f"{loop}%token"),
    ANY,
    block("token", {"s": PAIRED}, f"{loop}%search"),
    block(
      "search",
      {"s": PAIRED},
      *ELEMENTS[:2],
      PRODUCT,
      f"ROOT %r = {PAIRED} tuple(%i, %y)",
    ),
  )
  assert found.flops == 10 * 2 * 8 * 8 * 8
  assert len(found.token_loops) == 2

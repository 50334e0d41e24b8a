"""Integer weights: the layout, the product against float64, and the kernels without a GPU."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.cross_compile import Launch, compile_for_hopper, recorded
from tests.ops.int_cases import CODES, Fp4Operands, IntCase, Operands, fp4_operands, operands, weight_values
from tests.ops.interpreted import run_interpreted
from torchweave.ops.quant.int_linear import (
    MAX_TOKENS,
    IntConfig,
    choose,
    configs,
    dequantize_int,
    int_linear,
    kernels_support,
    launch_samples,
    pack_int4,
    unpack_int4,
)

FP4 = ("mxfp4", "nvfp4")
CASES = [
    IntCase(4, group=128),
    IntCase(4, group=32, zero=True),
    IntCase(4, group=64, order=True, bias=True),
    IntCase(4, group=0, zero=True, bias=True),
    IntCase(4, group=48),
    IntCase(8, group=128, zero=True),
    IntCase(8, group=32),
    IntCase(8, group=0, order=True, bias=True),
]


@pytest.mark.parametrize("width", [8, 96, 128, 200, 512])
def test_packing_keeps_every_integer(width: int) -> None:
    q = torch.randint(0, 16, (5, width), dtype=torch.uint8)
    packed = pack_int4(q)
    assert packed.dtype == torch.int32 and packed.shape == (5, -(-width // 128) * 16)
    assert torch.equal(unpack_int4(packed, width), q)


def test_words_hold_the_inputs_that_the_kernels_expect() -> None:
    """Nibble i of word c is input 16 j + m: j = i % 4, + 4 in odd words; m the even (i < 4) or odd column of a pair of words."""
    for k in range(128):
        q = torch.zeros(1, 128, dtype=torch.uint8)
        q[0, k] = 15
        (word,) = pack_int4(q).nonzero()[:, 1].tolist()
        nibble = next(i for i in range(8) if int(pack_int4(q)[0, word]) >> (4 * i) & 15)
        j, m = nibble % 4 + 4 * (word % 2), word - word % 2 + nibble // 4
        assert 16 * j + m == k


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("tokens", [0, 1, 7])
def test_the_product_is_that_of_the_values(case: IntCase, tokens: int) -> None:
    made = operands(case, tokens, 48, 208)
    got = int_linear(made.x[None], *made.weight, made.bias, made.group)
    assert got.shape == (1, tokens, 48) and got.dtype == torch.float32
    torch.testing.assert_close(got[0].double(), made.expected(), rtol=1e-5, atol=1e-4)
    half = int_linear(made.x.bfloat16(), *made.weight, made.bias, made.group)
    exact = made.x.bfloat16().double() @ made.values().t() + (0 if made.bias is None else made.bias.double())
    torch.testing.assert_close(half.double(), exact, rtol=2**-8, atol=1e-4)


@pytest.mark.parametrize("kind", FP4)
@pytest.mark.parametrize("tokens", [0, 1, 7])
def test_the_product_with_e2m1_numbers_is_that_of_the_values(kind: str, tokens: int) -> None:
    made = fp4_operands(kind, tokens, 48, 224, bias=True)
    values = dequantize_int(made.w, made.scale, None, 224, made.group, torch.float32, made.row_scale)
    torch.testing.assert_close(values.double(), made.values, rtol=1e-6, atol=0)
    got = int_linear(*made.arguments)
    torch.testing.assert_close(got.double(), made.expected(), rtol=1e-5, atol=1e-4)
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(int_linear, made.arguments, test_utils=checks[1:] if kind == "nvfp4" else checks)


def test_values_are_rounded_once() -> None:
    made = operands(IntCase(4, group=32, zero=True), 1, 16, 64)
    w, scale, zero, _ = made.weight
    got = dequantize_int(w, scale, zero, 64, 32, torch.bfloat16)
    assert torch.equal(got, weight_values(made).to(torch.bfloat16))


@pytest.mark.parametrize("case", CASES[:4], ids=str)
def test_opcheck(case: IntCase) -> None:
    made = operands(case, 5, 48, 208)
    torch.library.opcheck(int_linear, (made.x[None], *made.weight, made.bias, made.group))


def test_rows_of_weights_can_be_stacked() -> None:
    """What `merge_int_linears` does: every tensor of a weight has N in front."""
    parts = [operands(IntCase(4, group=64, zero=True), 3, rows, 192, seed=rows) for rows in (16, 40)]
    x = parts[0].x
    stacked: list[Tensor | None] = [torch.cat([part.weight[at] for part in parts]) for at in range(3)]  # type: ignore[misc]
    got = int_linear(x, *stacked, None, None, 64)  # type: ignore[arg-type]
    alone = [int_linear(x, *part.weight, None, 64) for part in parts]
    torch.testing.assert_close(got, torch.cat(alone, 1), rtol=1e-6, atol=1e-6)


def test_choice() -> None:
    assert choose(1, 6144, 4096, 4).kernel == "row" and choose(1, 6144, 4096, 8).kernel == "split"  # type: ignore[union-attr]
    for bits, kernels in ((4, ("split", "split", "tile", "tile", "tile", "tile")), (8, ("split",) * 5)):
        for tokens, kernel in zip((3, 9, 32, 33, 64, 200), kernels, strict=False):
            config = choose(tokens, 28672, 4096, bits)
            assert config is not None and config.kernel == kernel and config.programs == 1
            assert config.block_t >= min(tokens, 128) and (config.kernel == "tile") == (bits == 4 and tokens > 16)
            known = {replace(each, programs=min(each.programs, 2)) for each in configs(tokens, 4096, bits)}
            for rows in (512, 4096, 6144, 14336, 28672):
                chosen = choose(tokens, rows, 4096, bits)
                assert chosen is not None and replace(chosen, programs=min(chosen.programs, 2)) in known
        last = MAX_TOKENS[bits]
        assert choose(last, 4096, 4096, bits) and choose(last + 1, 4096, 4096, bits) is None
        assert choose(0, 6144, 4096, bits) is None
    assert choose(384, 6144, 4096, 4) is None, "144 tiles would leave most of a second wave idle"
    assert choose(1, 4096, 4096, 4) != choose(1, 6144, 4096, 4) != choose(1, 4096, 14336, 4)
    assert choose(8, 4096, 256, 4).programs == 1, "as many blocks as two warps divide"  # type: ignore[union-attr]
    assert not choose(1, 6144, 4096, 4, hopper=False).hopper  # type: ignore[union-attr]
    supported = [group for group in (16, 32, 64, 96, 128, 256, 4096) if kernels_support(4096, group, torch.bfloat16)]
    assert supported == [32, 64, 128, 256, 4096] and not kernels_support(4096, 128, torch.float32)
    assert choose(1, 6144, 4096, 4, e2m1=True).kernel == "split"  # type: ignore[union-attr]
    assert kernels_support(4096, 16, torch.float16, torch.float8_e4m3fn), "e2m1 times e4m3 is exact in 16 bits"
    assert not kernels_support(4096, 32, torch.float16, torch.uint8), "a power of two may not fit float16"


def test_samples_run_without_a_gpu() -> None:
    made = operands(CASES[0], 2, 16, 128)
    launch_samples(made.x, *made.weight, None, 128)


@pytest.mark.parametrize("part", ["row", "split", "tile", "byte", "dequantize", "fp4"])
def test_kernels_in_the_interpreter(part: str) -> None:
    run_interpreted("tests.ops.quant.interpreted_int_linear", part)


def assembled(lines: str, words: tuple[int, ...], outputs: int) -> list[int]:
    """What PTX of shifts, LOP3, PRMT, sums and pairwise differences computes of words: the registers, without GPU."""
    registers: dict[str, int] = {f"${outputs + at}": word for at, word in enumerate(words)}

    def number(text: str) -> int:
        return registers[text] if text in registers else int(text, 0)

    for line in filter(None, (each.strip() for each in lines.strip("{}").replace("\n", "").split(";"))):
        if line.startswith(".reg"):
            continue
        op, _, rest = line.partition(" ")
        to, *sources = (each.strip() for each in rest.split(","))
        values = [number(each) for each in sources]
        if op.startswith("lop3"):
            assert values[3] == 0xEA, "(a & b) | c"
            registers[to] = (values[0] & values[1]) | values[2]
        elif op.startswith("sh"):
            registers[to] = (values[0] << values[1] if op.startswith("shl") else values[0] >> values[1]) & 0xFFFFFFFF
        elif op.startswith("mov"):
            registers[to] = values[0]
        elif op.startswith("and"):
            registers[to] = values[0] & values[1]
        elif op.startswith("xor"):
            registers[to] = values[0] ^ values[1]
        elif op.endswith(".u32"):
            registers[to] = {"add": int.__add__, "sub": int.__sub__, "mul": int.__mul__}[op[:3]](*values) & 0xFFFFFFFF
        elif op.startswith("prmt"):
            table = (values[0] | values[1] << 32).to_bytes(8, "little")
            chosen = [(table[values[2] >> 4 * at & 7], values[2] >> 4 * at & 8) for at in range(4)]
            registers[to] = int.from_bytes((0xFF * (byte >> 7) if sign else byte for byte, sign in chosen), "little")
        else:
            kind = torch.bfloat16 if "bf16" in op else torch.float16
            a, b = (torch.tensor([each]).to(torch.int32).view(kind) for each in values)
            registers[to] = int((a * b if op.startswith("mul") else a - b).view(torch.int32)) & 0xFFFFFFFF
    return [registers[f"${at}"] for at in range(outputs)]


def test_assembly_unpacks_two_words() -> None:
    """The instructions that the interpreter cannot run, by hand: every nibble to its input, exactly."""
    pytest.importorskip("triton")
    from torchweave.ops.kernels.quant import int_linear as kernels
    from torchweave.ops.kernels.quant import int_rows

    q = torch.randint(0, 16, (1, 128), dtype=torch.uint8)
    packed = [int(word) & 0xFFFFFFFF for word in pack_int4(q)[0]]
    for pair in range(8):
        words = packed[2 * pair], packed[2 * pair + 1]
        floats = torch.tensor(assembled(int_rows.float_code(), words, 16)).to(torch.int32).view(torch.float32)
        for at, value in enumerate(floats.tolist()):
            j, odd = at // 2, at % 2
            scales = (int_rows.ODD_SCALES if odd else int_rows.EVEN_SCALES).value
            assert (value - 1) * scales[j % 4] == int(q[0, 16 * j + 2 * pair + odd])
        for half, word in enumerate(words):
            numbers = [
                float(CODES[int(q[0, 16 * (4 * half + j) + 2 * pair + odd])]) for j in range(4) for odd in range(2)
            ]
            floats = torch.tensor(assembled(int_rows.e2m1_float_code(), (word,), 8)).to(torch.int32).view(torch.float32)
            for at, value in enumerate(floats.tolist()):
                odd_input = at // 2 % 2
                error = numbers[at - 2] * 2.0**-16 if odd_input else 0.0
                assert value - int_rows.E2M1_ONES.value[odd_input] == numbers[at] + error
        for codes, kind in ((kernels.INT_BFLOAT_PAIRS, torch.bfloat16), (kernels.INT_HALF_PAIRS, torch.float16)):
            for j, code in enumerate(codes.value):
                two = torch.tensor(assembled(code, words, 1)).to(torch.int32).view(kind).tolist()
                assert two == [int(q[0, 16 * j + 2 * pair + odd]) - 8 for odd in range(2)]
        for codes, kind in ((kernels.E2M1_BFLOAT_PAIRS, torch.bfloat16), (kernels.E2M1_HALF_PAIRS, torch.float16)):
            for j, code in enumerate(codes.value):
                two = torch.tensor(assembled(code, words, 1)).to(torch.int32).view(kind).tolist()
                assert two == [float(CODES[int(q[0, 16 * j + 2 * pair + odd])]) for odd in range(2)]


def assembly_pairs_columns(compiled: Any) -> bool:
    """Whether words reach assembly, which takes two registers at a time; then they must be neighboring columns of a row."""
    text = compiled.asm["ttgir"]
    layouts = dict(re.findall(r"^(#\w+) = (#ttg.*)$", text, re.MULTILINE))
    found = re.findall(r"tt.elementwise_inline_asm .*\} %\S+ : tensor<[\dx]+xi32, (.*?)>+ ->", text)
    for name in found:
        layout = layouts.get(name, name)
        if "dot_op" in layout:
            assert int(re.search(r"kWidth = (\d+)", layout)[1]) >= 2  # type: ignore[index]
            continue
        if layout.startswith("#ttg.linear"):
            assert "register = [[0, 1]" in layout, layout
            continue
        assert layout.startswith("#ttg.blocked")
        sizes, order = (
            [int(each) for each in re.search(rf"{key} = \[([\d, ]+)\]", layout)[1].split(",")]  # type: ignore[index]
            for key in ("sizePerThread", "order")
        )
        assert order[0] == len(sizes) - 1 and sizes[-1] % 2 == 0, layout
    return bool(found)


def launches_of(config: IntConfig, made: Operands | Fp4Operands) -> list[Launch]:
    """The launches of a product of 256 outputs, not executed."""
    from torchweave.ops.kernels.quant import int_linear as kernels
    from torchweave.ops.kernels.quant import int_rows, int_tiles

    x, (w, scale, zero), row_scale = made.x, made.weight[:3], made.row_scale if isinstance(made, Fp4Operands) else None
    out = torch.empty(len(x), 256, dtype=x.dtype)
    names = ("split_kernel", "byte_kernel", "add_kernel")
    few, many = recorded(int_rows, "row_kernel"), recorded(int_tiles, "tile_kernel")
    with recorded(kernels, *names) as launches, few as rows, many as tiles:
        config.run(x, w, scale, zero, made.bias, made.group, out, row_scale)
    return [*rows, *tiles, *launches]


@pytest.mark.parametrize("case", [CASES[0], CASES[1], IntCase(4, group=64, bias=True), CASES[5]], ids=str)
@pytest.mark.parametrize("tokens", [1, 8, 32, 64, 128])
def test_kernels_build_for_hopper(case: IntCase, tokens: int) -> None:
    pytest.importorskip("triton")
    made = operands(case, tokens, 256, 4096, torch.bfloat16)
    config = choose(tokens, 28672 if case.group == 128 else 256, 4096, case.bits)
    if config is None:
        assert (tokens, case.bits) == (128, 8)
        return
    compiled = compile_for_hopper(launches_of(config, made)[0])
    ptx = compiled.asm["ptx"]
    assert "griddepcontrol.wait" in ptx and compiled.metadata.shared <= 227 << 10
    if case.bits == 4:
        assert assembly_pairs_columns(compiled)
        copied = re.search(r"local_load .*xbf16.*opIdx = 0", compiled.asm["ttgir"])
        assert copied is None, "unpacked words pass through shared memory"
        assert "lop3.b32" in ptx and (config.kernel == "row" or "sub.rn.bf16x2" in ptx)
    assert config.kernel == "row" or ("wgmma" if config.kernel == "tile" else "mma.sync") in ptx


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", FP4)
def test_kernels_with_e2m1_numbers_build_for_hopper(kind: str, dtype: torch.dtype) -> None:
    pytest.importorskip("triton")
    from torchweave.ops.kernels.quant import dequantize

    made, config = fp4_operands(kind, 8, 256, 4096, dtype), choose(8, 256, 4096, 4, e2m1=True)
    assert config is not None and config.kernel == "split"
    with recorded(dequantize, "dequantize_words_kernel") as others:
        out = torch.empty(256, 4096, dtype=dtype)
        dequantize.launch_dequantize(made.w, made.scale, None, made.group, out, made.row_scale)
    product = compile_for_hopper(launches_of(config, made)[0])
    assert "mma.sync" in product.asm["ptx"] and assembly_pairs_columns(product)
    assert "mul.ftz" not in product.asm["ptx"], "codes of 0.5 are subnormal before their product"
    launch = others[0]
    weight = compile_for_hopper(replace(launch, kwargs=launch.kwargs | {"ASSEMBLY": True}))
    assert assembly_pairs_columns(weight)
    assert ("mul.rn.bf16x2" in weight.asm["ptx"]) == (dtype == torch.bfloat16)


def warnings_of(compiled: Any) -> str:
    """What the assembler says of a compiled kernel."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".ptx") as file:
        file.write(compiled.asm["ptx"].encode())
        file.flush()
        command = [knobs.nvidia.ptxas.path, "--verbose", "--gpu-name=sm_90a", file.name, "--output-file", "/dev/null"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


TILES = [
    IntConfig("tile", 64, 4, 3, 64),
    IntConfig("tile", 128, 8, 4, 64, 2),
    IntConfig("tile", 128, 4, 3, 128),
    IntConfig("tile", 128, 8, 4, 128, 2),
    IntConfig("tile", 256, 8, 4, 128),
]


@pytest.mark.parametrize("case", [CASES[0], CASES[1], IntCase(4, group=64, bias=True), "mxfp4", "nvfp4"], ids=str)
@pytest.mark.parametrize("config", TILES, ids=str)
def test_products_of_blocks_are_asynchronous_and_keep_their_registers(config: IntConfig, case: IntCase | str) -> None:
    pytest.importorskip("triton")
    tokens, dtype = config.block_t, torch.float16 if case == "nvfp4" else torch.bfloat16
    made = (
        operands(case, tokens, 256, 2048, dtype)
        if isinstance(case, IntCase)
        else fp4_operands(case, tokens, 256, 2048, dtype)
    )
    compiled = compile_for_hopper(launches_of(config, made)[0])
    assert assembly_pairs_columns(compiled) and compiled.metadata.shared <= 227 << 10
    products, waits = (
        re.findall(pattern, compiled.asm["ttgir"])
        for pattern in (r"ttng\.warp_group_dot %", r"ttng\.warp_group_dot_wait .*pendings = (\d+)")
    )
    in_flight = len(products) - 1  # Triton 3.6 divides a product into eight, Triton 3.8 into two
    assert in_flight and waits == [str(in_flight)] * len(products) + ["0"], "instructions of a product are waited for"
    assert "serialized" not in warnings_of(compiled)
    loop = compiled.asm["ptx"]
    loop = loop[loop.rindex("Inner Loop Header", 0, loop.index("wgmma.mma_async")) :]
    unpacked = loop.index("mul.rn" if isinstance(case, str) else "sub.rn")
    assert loop.index("wgmma.wait_group.sync.aligned 0") < unpacked, "registers of a product in flight are written"


CONFIGS = [
    IntConfig("split", 64, 4, 3, 32, 2),
    IntConfig("tile", 128, 4, 5, 32, 4),
    IntConfig("split", 64, 4, 3, 32, 2, hopper=False),
]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_programs_that_divide_the_inputs_build_for_hopper(config: IntConfig) -> None:
    pytest.importorskip("triton")
    launches = launches_of(config, operands(IntCase(4, group=128, bias=True), 32, 256, 4096, torch.bfloat16))
    rows = 256 // config.block_n
    grid = (1, rows, config.programs) if config.kernel == "tile" else (rows, 1, config.programs)
    assert [launch.grid for launch in launches] == [grid, (32, 1)]
    products, added = (compile_for_hopper(launch) for launch in launches)
    assert ("wgmma" if config.kernel == "tile" else "mma.sync") in products.asm["ptx"]
    assert assembly_pairs_columns(products) == config.hopper
    assert products.metadata.shared <= 227 << 10 and ("griddepcontrol.wait" in added.asm["ptx"]) == config.hopper


@pytest.mark.parametrize("case", [CASES[1], CASES[5]], ids=str)
def test_dequantization_builds_for_hopper(case: IntCase) -> None:
    pytest.importorskip("triton")
    from torchweave.ops.kernels.quant import dequantize

    made = operands(case, 1, 64, 1024, torch.bfloat16)
    with recorded(dequantize, "dequantize_words_kernel", "dequantize_bytes_kernel") as launches:
        dequantize.launch_dequantize(*made.weight[:3], made.group, torch.empty(64, 1024, dtype=torch.bfloat16))
    launch = launches[0]
    if case.bits == 4:
        launch = replace(launch, kwargs=launch.kwargs | {"ASSEMBLY": True})
    compiled = compile_for_hopper(launch)
    ptx = compiled.asm["ptx"]
    assert assembly_pairs_columns(compiled) == (case.bits == 4)
    assert "st.global.v2" in ptx or "st.global.v4" in ptx, "vectors of 16-bit numbers"

#!/usr/bin/env python3
"""Runs recorded jobs on the PTX that nvcc emitted: kernels_ptx.py KERNELS.ptx FOLDER_OF_JOBS [NAME ...]

The emulator replaces the inline assembly of kernels/platform.cuh by plain code; this interpreter
executes the instructions themselves: addresses, operands, modifiers and what the compiler made of
them. Threads of a block run in lock step, so it cannot see missing barriers (the emulator does).

The jobs are those of tests/cuda_emulated (small.rs), made by the Rust launch code, with what the
f64 reference expects. The parameters of each kernel are compared with the arguments of its launch.
"""
import re
import struct
import sys
import time
from pathlib import Path

import numpy as np

TYPES = {
    **{f"{kind}{bits}": np.dtype(f"{'i' if kind == 's' else 'u'}{bits // 8}")
       for kind in "sub" for bits in (8, 16, 32, 64)},
    "f16": np.dtype("f2"), "bf16": np.dtype("u2"), "f32": np.dtype("f4"), "f64": np.dtype("f8"),
}
SIZE = {name: dtype.itemsize for name, dtype in TYPES.items()}
UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
LANES = np.arange(32)


def bf16_to_f32(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


def f32_to_bf16(x):
    bits = x.astype(np.float32).view(np.uint32)
    rounded = (bits.astype(np.uint64) + (((bits >> 16) & 1) + 0x7FFF)) >> 16
    return np.where(np.isnan(x), 0x7FFF, rounded).astype(np.uint16)


class Fault(Exception):
    pass


class Memory:
    """Global memory: every buffer between forbidden bytes, unused bytes 0xFF (NaN)."""

    BASE = 1 << 32
    GAP = 4096

    def __init__(self, buffers):
        self.start, at = [], self.GAP
        for data in buffers:
            # Right aligned to 16 bytes within its place: a start of 16, and an end that is checked.
            self.start.append(at)
            at += (len(data) + 255) // 256 * 256 + self.GAP
        self.bytes = np.full(at, 0xFF, np.uint8)
        self.valid = np.zeros(at, bool)
        for start, data in zip(self.start, buffers):
            self.bytes[start:start + len(data)] = data
            self.valid[start:start + len(data)] = True

    def address(self, buffer, offset):
        return self.BASE + self.start[buffer] + offset


class Kernel:
    """The instructions of one entry point."""

    def __init__(self, text, entry):
        found = re.search(r"\.entry " + entry + r"\(([^)]*)\)[^{]*\{\n(.*?)\n\}", text, re.S)
        if not found:
            raise Fault(f"no entry {entry}")
        self.params = re.findall(r"\.param \.(\w+)(?: \.ptr)?(?: \.align \d+)? (\w+)", found[1])
        self.dynamic = re.findall(r"\.extern \.shared .*? (\w+)\[\]", text)
        self.code, self.labels, self.shared, self.shared_size = [], {}, {}, 0
        for line in found[2].split("\n"):
            self.line(re.sub(r"//.*", "", line).strip())

    def line(self, line):
        if not line:
            return
        braces = re.match(r"^\{\s*(.*;)\s*\}$", line)
        line = braces[1].strip() if braces else line
        if line.endswith(":"):
            self.labels[line[:-1]] = len(self.code)
            return
        shared = re.match(r"\.shared \.align (\d+) \.b8 (\w+)\[(\d+)\]", line)
        if shared:
            align = int(shared[1])
            self.shared[shared[2]] = -(-self.shared_size // align) * align
            self.shared_size = self.shared[shared[2]] + int(shared[3])
            return
        if line[0] in ".{}":
            return
        for statement in filter(None, (s.strip() for s in line.split(";"))):
            guard = re.match(r"@(!?)(%\w+)\s+(.*)", statement)
            text = guard[3] if guard else statement
            name, _, operands = text.replace("\t", " ").partition(" ")
            operands = [o.strip() for o in re.findall(r"(?:\{[^}]*\}|\[[^\]]*\]|[^,])+", operands) if o.strip()]
            predicate = (guard[2], guard[1] == "!") if guard else None
            self.code.append((predicate, name.split("."), operands, text))


def register_list(operand):
    return [r.strip() for r in operand.strip("{}").split(",")]


class Machine:
    """Runs the blocks of a launch one after the other. A register is an array with one entry per
    thread; the threads with the lowest program counter go first, so that they meet again."""

    def __init__(self, kernel, memory, grid, threads, dynamic, arguments):
        self.kernel, self.memory, self.grid, self.threads = kernel, memory, grid, threads
        self.parameters = dict(zip((name for _, name in kernel.params), arguments))
        base = -(-kernel.shared_size // 16) * 16
        self.shared_size = base + dynamic if dynamic else kernel.shared_size
        self.symbols = {**kernel.shared, **{name: base for name in kernel.dynamic}}
        self.steps = 0

    def run(self):
        with np.errstate(all="ignore"):
            for z in range(self.grid[2]):
                for y in range(self.grid[1]):
                    for x in range(self.grid[0]):
                        self.block = (x, y, z)
                        self.run_block()
        return self.steps

    def fault(self, message):
        raise Fault(f'block {self.block}, "{self.text}": {message}')

    def run_block(self):
        self.registers = {}
        self.shared = np.full(max(self.shared_size, 1), 0xFF, np.uint8)
        self.groups, self.open_group = [], []
        code, end = self.kernel.code, len(self.kernel.code)
        counter = np.zeros(self.threads, np.int64)
        waiting = np.zeros(self.threads, bool)
        while True:
            running = (counter < end) & ~waiting
            if not running.any():
                if not waiting.any():
                    return
                if (counter[waiting] != counter[waiting][0]).any():
                    self.fault("threads wait at different barriers")
                counter[waiting] += 1
                waiting[:] = False
                continue
            at = int(counter[running].min())
            active = np.nonzero(running & (counter == at))[0]
            predicate, op, operands, self.text = code[at]
            self.steps += 1
            chosen = active
            if predicate:
                value = self.registers[predicate[0]][active] != 0
                chosen = active[~value if predicate[1] else value]
            counter[active] = at + 1
            if not len(chosen):
                continue
            if op[0] == "bra":
                counter[chosen] = self.kernel.labels[operands[0]]
            elif op[0] == "ret":
                counter[chosen] = end
            elif op[:2] == ["bar", "sync"]:
                waiting[chosen] = True
                counter[chosen] = at
            elif op[0] == "bar":
                self.warps(chosen)
            else:
                method = getattr(self, "do_" + op[0], None)
                (method or self.arithmetic)(op, operands, chosen)

    # ---- operands

    def get(self, operand, kind, threads):
        dtype, count = TYPES[kind], len(threads)
        if operand in self.registers:
            return self.registers[operand][threads].astype(UNSIGNED[SIZE[kind]]).view(dtype)
        if operand[0] == "%":
            special = {"%tid.x": threads, "%tid.y": 0, "%tid.z": 0, "%ntid.x": self.threads, "%laneid": threads % 32}
            for axis, name in enumerate("xyz"):
                special[f"%ctaid.{name}"] = self.block[axis]
                special[f"%nctaid.{name}"] = self.grid[axis]
            if operand not in special:
                self.fault("uninitialised register " + operand)
            value = np.broadcast_to(np.asarray(special[operand], np.uint32), count)
            return value.astype(UNSIGNED[SIZE[kind]]).view(dtype)
        if operand[:2] in ("0f", "0F"):
            return np.full(count, int(operand[2:], 16), np.uint32).view(np.float32).astype(dtype)
        if operand in self.symbols:
            return np.full(count, self.symbols[operand], dtype)
        number = int(operand, 0) & (2 ** (8 * SIZE[kind]) - 1)
        return np.full(count, number, UNSIGNED[SIZE[kind]]).view(dtype)

    def put(self, operand, kind, threads, value):
        register = self.registers.setdefault(operand, np.zeros(self.threads, np.uint64))
        register[threads] = np.asarray(value).astype(TYPES[kind]).view(UNSIGNED[SIZE[kind]])

    def address(self, operand, threads, kind):
        found = re.match(r"\[([^+\]]+)(?:\+(-?\d+))?\]", operand)
        return self.get(found[1], kind, threads).astype(np.int64) + int(found[2] or 0)

    def global_bytes(self, address, count):
        if (address % count).any():
            self.fault("misaligned global access")
        at = address - Memory.BASE
        valid = self.memory.valid
        if (at < 0).any() or (at + count > valid.size).any() or not (valid[at] & valid[at + count - 1]).all():
            self.fault("global access outside every buffer")
        return at[:, None] + np.arange(count)

    def shared_bytes(self, address, count):
        if (address % count).any():
            self.fault("misaligned shared access")
        if (address < 0).any() or (address + count > self.shared_size).any():
            self.fault("shared access outside the block's memory")
        return address[:, None] + np.arange(count)

    def warps(self, threads):
        warps = np.unique(threads // 32)
        if len(warps) * 32 != len(threads):
            self.fault("warp instruction without all lanes")
        return len(warps)

    # ---- memory

    def do_ld(self, op, operands, threads):
        kind = op[-1]
        if op[1] == "param":
            value = self.parameters[operands[1].strip("[]")]
            raw = np.frombuffer(value, UNSIGNED[SIZE[kind]]).view(TYPES[kind])
            return self.put(operands[0], kind, threads, np.full(len(threads), raw[0]))
        memory, index, _ = self.access(op, operands[1], threads)
        data = np.ascontiguousarray(memory[index]).view(UNSIGNED[SIZE[kind]])
        for column, register in enumerate(register_list(operands[0])):
            self.put(register, f"b{8 * SIZE[kind]}", threads, data[:, column])

    def do_st(self, op, operands, threads):
        memory, index, count = self.access(op, operands[0], threads)
        values = [self.get(r, op[-1], threads) for r in register_list(operands[1])]
        memory[index] = np.stack(values, 1).view(np.uint8).reshape(len(threads), count)

    def access(self, op, operand, threads):
        vector = int(op[-2][1]) if op[-2] in ("v2", "v4") else 1
        count = SIZE[op[-1]] * vector
        if op[1] == "global":
            return self.memory.bytes, self.global_bytes(self.address(operand, threads, "u64"), count), count
        if op[1] == "shared":
            return self.shared, self.shared_bytes(self.address(operand, threads, "u32"), count), count
        self.fault("address space " + op[1])

    def do_cp(self, op, operands, threads):
        if op[2] == "commit_group":
            self.groups.append(self.open_group)
            self.open_group = []
        elif op[2] == "wait_group":
            while len(self.groups) > int(operands[0]):
                for target, source, valid in self.groups.pop(0):
                    self.shared[target] = np.where(valid[:, None], self.memory.bytes[source], 0)
        else:
            target = self.shared_bytes(self.address(operands[0], threads, "u32"), 16)
            valid = np.ones(len(threads), bool)
            if len(operands) > 3:
                valid = self.get(operands[3], "u32", threads) == 16
            source = self.address(operands[1], threads, "u64")
            if (source % 16).any():
                self.fault("misaligned cp.async source")
            source = np.where(valid, source, Memory.BASE + self.memory.start[0])
            self.open_group.append((target, self.global_bytes(source, 16), valid))

    # ---- warp instructions

    def do_ldmatrix(self, op, operands, threads):
        self.warps(threads)
        address = self.address(operands[1], threads, "u32")
        self.shared_bytes(address, 16)
        lane = np.arange(len(threads))
        warp, row, column = lane // 32 * 32, lane % 32 // 4, lane % 4

        def read(at, count, kind):
            return self.shared[at[:, None] + np.arange(count)].copy().view(kind)[:, 0].astype(np.uint32)

        for i, register in enumerate(register_list(operands[0])):
            if "trans" in op:
                low, high = (read(address[warp + 8 * i + 2 * column + e] + 2 * row, 2, np.uint16) for e in (0, 1))
                value = low | high << 16
            else:
                value = read(address[warp + 8 * i + row] + 4 * column, 4, np.uint32)
            self.put(register, "b32", threads, value)

    def do_mma(self, op, operands, threads):
        d, a, b, c = map(register_list, operands)
        warps = self.warps(threads)
        row, column = LANES // 4, LANES % 4

        def pair(register):
            bits = self.get(register, "b32", threads).copy()
            value = bits.view(np.float16) if op[7] == "f16" else bf16_to_f32(bits.view(np.uint16))
            return value.astype(np.float64).reshape(warps, 32, 2)

        ma, mb, mc = np.zeros((warps, 16, 16)), np.zeros((warps, 16, 8)), np.zeros((warps, 16, 8))
        for i in range(4):
            x = pair(a[i])
            for e in (0, 1):
                ma[:, row + 8 * (i & 1), 2 * column + e + 8 * (i >> 1)] = x[:, :, e]
            mc[:, row + 8 * (i >> 1), 2 * column + (i & 1)] = self.get(c[i], "f32", threads).reshape(warps, 32)
        for i in range(2):
            x = pair(b[i])
            for e in (0, 1):
                mb[:, 2 * column + e + 8 * i, row] = x[:, :, e]
        result = mc + ma @ mb
        for i in range(4):
            self.put(d[i], "f32", threads, result[:, row + 8 * (i >> 1), 2 * column + (i & 1)].reshape(-1))

    def do_shfl(self, op, operands, threads):
        self.warps(threads)
        value = self.get(operands[1], "b32", threads)
        offset = self.get(operands[2], "u32", threads).astype(np.int64)
        if op[2] != "bfly" or (self.get(operands[3], "u32", threads) != 31).any():
            self.fault("only full-warp butterflies are known")
        lane = np.arange(len(threads))
        self.put(operands[0].split("|")[0], "b32", threads, value[lane - lane % 32 + (lane % 32 ^ offset)])

    # ---- values

    def do_setp(self, op, operands, threads):
        kind, test = op[-1], op[1]
        x, y = self.get(operands[1], kind, threads), self.get(operands[2], kind, threads)
        unordered = test in ("ltu", "leu", "gtu", "geu", "equ", "neu")
        test = test[:-1] if unordered else test
        nan = np.isnan(x) | np.isnan(y) if kind[0] == "f" else np.zeros(len(threads), bool)
        compare = {"eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater,
                   "ge": np.greater_equal, "nan": lambda p, q: nan, "num": lambda p, q: ~nan}
        result = compare[test](x, y)
        if unordered:
            result = result | nan
        elif test == "ne":
            result = result & ~nan
        self.put(operands[0], "b8", threads, result)

    def do_selp(self, op, operands, threads):
        x, y = self.get(operands[1], op[-1], threads), self.get(operands[2], op[-1], threads)
        self.put(operands[0], op[-1], threads, np.where(self.get(operands[3], "b8", threads) != 0, x, y))

    def do_cvta(self, op, operands, threads):
        self.put(operands[0], op[-1], threads, self.get(operands[1], op[-1], threads))

    def do_mov(self, op, operands, threads):
        kind = "b8" if op[-1] == "pred" else op[-1]
        target, source = operands
        if source[0] == "{":
            parts = register_list(source)
            bits = 8 * SIZE[kind] // len(parts)
            value = np.zeros(len(threads), UNSIGNED[SIZE[kind]])
            for i, part in enumerate(parts):
                value |= self.get(part, f"b{bits}", threads).astype(value.dtype) << np.array(bits * i, value.dtype)
            self.put(target, kind, threads, value)
        elif target[0] == "{":
            parts = register_list(target)
            bits = 8 * SIZE[kind] // len(parts)
            value = self.get(source, kind, threads)
            for i, part in enumerate(parts):
                piece = value >> np.array(bits * i, value.dtype) & np.array(2 ** bits - 1, value.dtype)
                self.put(part, f"b{bits}", threads, piece)
        else:
            self.put(target, kind, threads, self.get(source, kind, threads))

    def do_cvt(self, op, operands, threads):
        to, source = op[-2], op[-1]
        x = self.get(operands[1], source, threads)
        if source == "bf16":
            x = bf16_to_f32(x)
        if to == "bf16":
            x = f32_to_bf16(x)
        elif source[0] == "f" and to[0] in "us":
            x = {"rzi": np.trunc, "rni": np.rint, "rmi": np.floor, "rpi": np.ceil}[op[1]](x)
        self.put(operands[0], to, threads, x.astype(TYPES[to]))

    def do_bfi(self, op, operands, threads):
        value, into = self.get(operands[1], op[-1], threads), self.get(operands[2], op[-1], threads)
        first, count = (self.get(o, "u32", threads).astype(value.dtype) for o in operands[3:5])
        one = np.array(1, value.dtype)
        mask = ((one << count) - one) << first
        self.put(operands[0], op[-1], threads, into & ~mask | value << first & mask)

    def shift(self, op, operands, threads):
        kind, bits = op[-1], 8 * SIZE[op[-1]]
        x, count = self.get(operands[1], kind, threads), self.get(operands[2], "u32", threads)
        small = np.minimum(count, bits - 1).astype(x.dtype)
        result = x << small if op[0] == "shl" else x >> small
        if kind[0] == "s" and op[0] == "shr":
            return self.put(operands[0], kind, threads, result)
        self.put(operands[0], kind, threads, np.where(count >= bits, 0, result))

    do_shl = do_shr = shift

    def arithmetic(self, op, operands, threads):
        name, kind = op[0], op[-1]
        if kind == "pred":
            a = [self.get(o, "b8", threads) for o in operands[1:]]
            logic = {"and": lambda: a[0] & a[1], "or": lambda: a[0] | a[1], "xor": lambda: a[0] ^ a[1],
                     "not": lambda: a[0] ^ 1}
            return self.put(operands[0], "b8", threads, logic[name]())
        a = [self.get(o, kind, threads) for o in operands[1:]]
        target = kind
        if "wide" in op:
            target = kind[0] + str(2 * int(kind[1:]))
            a = [x.astype(TYPES[target]) for x in a]
        is_float = kind[0] == "f"

        def quotient():
            if (a[1] == 0).any():
                self.fault("division by 0")
            whole = np.abs(a[0].astype(object)) // np.abs(a[1].astype(object))
            sign = np.where((a[0] < 0) != (a[1] < 0), -1, 1)
            return (whole * sign).astype(a[0].dtype)

        table = {
            "add": lambda: a[0] + a[1], "sub": lambda: a[0] - a[1], "mul": lambda: a[0] * a[1],
            "mad": lambda: a[0] * a[1] + a[2],
            "fma": lambda: (a[0].astype(np.float64) * a[1] + a[2]).astype(a[0].dtype),
            "min": lambda: np.fmin(a[0], a[1]) if is_float else np.minimum(a[0], a[1]),
            "max": lambda: np.fmax(a[0], a[1]) if is_float else np.maximum(a[0], a[1]),
            "div": lambda: a[0] / a[1] if is_float else quotient(),
            "rem": lambda: a[0] - quotient() * a[1],
            "and": lambda: a[0] & a[1], "or": lambda: a[0] | a[1], "xor": lambda: a[0] ^ a[1],
            "not": lambda: ~a[0], "neg": lambda: -a[0], "abs": lambda: np.abs(a[0]),
            # copysign d, a, b: the sign of a, the size of b
            "copysign": lambda: np.copysign(a[1], a[0]),
            "rcp": lambda: (np.float32(1) / a[0]).astype(a[0].dtype), "ex2": lambda: np.exp2(a[0]),
        }
        if name not in table:
            self.fault("unknown instruction")
        self.put(operands[0], target, threads, table[name]())


class Reader:
    def __init__(self, data):
        self.data, self.at = data, 0

    def get(self, code):
        value = struct.unpack_from("<" + code, self.data, self.at)
        self.at += struct.calcsize("<" + code)
        return value[0] if len(value) == 1 else value

    def take(self, count):
        self.at += count
        return self.data[self.at - count:self.at]

    def name(self):
        return self.take(self.get("I")).decode()


def run_job(text, kernels, data):
    """Runs a job file; returns steps, and what is wrong as a list of texts."""
    r = Reader(data)
    assert r.take(4) == b"JOB1"
    r.take(16)
    buffers = []
    for _ in range(r.get("I")):
        r.name()
        size = r.get("Q")
        buffers.append(np.frombuffer(r.take(size), np.uint8) if r.get("B") else np.full(size, 0xFF, np.uint8))
    memory = Memory(buffers)
    steps = 0
    for _ in range(r.get("I")):
        name = r.name()
        *grid, threads, shared, count = r.get("6I")
        if name not in kernels:
            kernels[name] = Kernel(text, name)
        kernel = kernels[name]
        arguments = []
        for index in range(count):
            tag = r.get("B")
            kind = {0: "u64", 1: "u64", 2: "u32", 3: "u64", 4: "f32"}[tag]
            if index >= len(kernel.params) or kernel.params[index][0].replace("b", "u") != kind:
                return steps, [f"{name}: argument {index} is {kind}, the parameters are {kernel.params}"]
            if tag == 0:
                value = struct.pack("<Q", memory.address(*r.get("IQ")))
            else:
                value = struct.pack("<Q", 0) if tag == 1 else r.take(8 if tag == 3 else 4)
            arguments.append(value)
        if count != len(kernel.params):
            return steps, [f"{name}: {count} arguments for {len(kernel.params)} parameters"]
        steps += Machine(kernel, memory, grid, threads, shared, arguments).run()
    r.take(4 * r.get("I"))
    wrong = []
    for _ in range(r.get("I")):
        index, code, row_len = r.get("3I")
        first, count = r.get("2Q")
        tolerance = r.get("d")
        want = np.frombuffer(r.take(8 * count), np.float64).reshape(-1, row_len)
        kind = (np.float32, np.float16, np.uint16)[code]
        at = memory.start[index] + first
        raw = memory.bytes[at:at + count * np.dtype(kind).itemsize].view(kind)
        got = (bf16_to_f32(raw) if code == 2 else raw).astype(np.float64).reshape(-1, row_len)
        size = np.linalg.norm(want, axis=1)
        size = np.maximum(size, 1) if row_len == 1 else size
        with np.errstate(invalid="ignore"):
            off = np.linalg.norm(got - want, axis=1)
            good = (off <= tolerance * size) | (got == want).all(axis=1)  # NaN is not good
        if not good.all():
            row = int(np.argmin(good))
            wrong.append(f"row {row} of {len(good)} off by {off[row] / size[row]:.2e}: {got[row][:4]}, not {want[row][:4]}")
    return steps, wrong


def main():
    text = Path(sys.argv[1]).read_text()
    jobs = sorted(Path(sys.argv[2]).glob("*.job"))
    wanted = sys.argv[3:]
    jobs = [j for j in jobs if not wanted or any(w in j.stem for w in wanted)]
    kernels, failed, begin = {}, 0, time.time()
    for job in jobs:
        start = time.time()
        try:
            steps, wrong = run_job(text, kernels, job.read_bytes())
        except Fault as fault:
            steps, wrong = 0, [str(fault)]
        failed += bool(wrong)
        print(f"{job.stem:32} {steps:8} steps {time.time() - start:6.2f} s  {'ok' if not wrong else 'WRONG: ' + wrong[0]}")
    print(f"{len(jobs)} jobs, {len(kernels)} kernels, {failed} wrong, {time.time() - begin:.0f} s")
    sys.exit(1 if failed or not jobs else 0)


main()

"""Compares the scalar reference of the specs with ml_dtypes: python tests/oracle/quantization.py build/tetrain

tests/oracle/quantization.lua prints every conversion. Out of range the reference saturates and ml_dtypes need not, so
what that is given is clipped; a NaN is compared as NaN, but for float4, which has none: there it is left out.
"""
import subprocess
import sys

import ml_dtypes
import numpy as np

FORMATS = {
    "float8_e4m3": (ml_dtypes.float8_e4m3fn, 448.0),
    "float8_e5m2": (ml_dtypes.float8_e5m2, 57344.0),
    "float4_e2m1": (ml_dtypes.float4_e2m1fn, 6.0),
}


def columns(rows):
    return np.array([row[1] for row in rows], np.float64).astype(np.uint32).view(np.float32), np.array(
        [row[2] for row in rows], np.float64).astype(np.uint8)


def main(program):
    script = __file__.replace(".py", ".lua")
    text = subprocess.run([program, script], capture_output=True, text=True, check=True).stdout
    lines = [line.split("\t") for line in text.split("\n")]
    wrong = total = 0
    for name, (dtype, limit) in FORMATS.items():
        values, codes = columns([line for line in lines if line[0] == name])
        numbers = ~np.isnan(values) if name == "float4_e2m1" else np.ones(len(values), bool)
        values, codes = values[numbers], codes[numbers]
        with np.errstate(invalid="ignore"):
            want = np.where(np.isnan(values), values, np.clip(values, -limit, limit)).astype(dtype)
        got = codes.view(dtype)
        both_nan = np.isnan(want.astype(np.float32)) & np.isnan(got.astype(np.float32))
    encoded = (want.view(np.uint8) == codes) | both_nan
        values_of, all_codes = columns([line for line in lines if line[0] == "decode:" + name])
        meant = all_codes.view(dtype).astype(np.float32)
        decoded = (values_of.view(np.uint32) == meant.view(np.uint32)) | (np.isnan(values_of) & np.isnan(meant))
        for i in np.nonzero(~encoded)[0][:5]:
            print(f"{name}: {values[i]!r} gives {codes[i]:#x}, ml_dtypes {want.view(np.uint8)[i]:#x}")
        for i in np.nonzero(~decoded)[0][:5]:
            print(f"{name}: {all_codes[i]:#x} is {values_of[i]!r}, ml_dtypes {meant[i]!r}")
        wrong += int((~encoded).sum() + (~decoded).sum())
        total += len(values) + len(all_codes)
    print(f"{total} conversions, {wrong} differ")
    return 1 if wrong or not total else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))

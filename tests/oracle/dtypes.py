"""Compares our conversions from float32 with those of ml_dtypes: python tests/oracle/dtypes.py build/test_dtype

`test_dtype dump` writes one line per conversion: format, bits of the float32, code that came out. Out of range FP8
saturates here and not there, so what ml_dtypes is given is clipped; NaN is compared as NaN.
"""
import subprocess
import sys

import ml_dtypes
import numpy as np

FORMATS = {
    "bf16": (ml_dtypes.bfloat16, np.uint16, None),
    "f16": (np.float16, np.uint16, None),
    "f8e4m3": (ml_dtypes.float8_e4m3fn, np.uint8, 448.0),
    "f8e5m2": (ml_dtypes.float8_e5m2, np.uint8, 57344.0),
}


def main(program):
    lines = subprocess.run([program, "dump"], capture_output=True, text=True, check=True).stdout.split("\n")
    wrong = total = 0
    for name, (dtype, code_type, limit) in FORMATS.items():
        rows = [line.split() for line in lines if line.startswith(name + " ")]
        values = np.array([int(row[1], 16) for row in rows], np.uint32).view(np.float32)
        codes = np.array([int(row[2], 16) for row in rows], code_type)
        clipped = values if limit is None else np.where(np.isnan(values), values, np.clip(values, -limit, limit))
        with np.errstate(over="ignore", invalid="ignore"):
            want = clipped.astype(dtype)
        got = codes.view(dtype)
        same = (want.view(code_type) == codes) | (np.isnan(want.astype(np.float32)) & np.isnan(got.astype(np.float32)))
        for i in np.nonzero(~same)[0][:5]:
            print(f"{name}: {values[i]!r} gives {codes[i]:#x}, ml_dtypes {want.view(code_type)[i]:#x}")
        wrong += int((~same).sum())
        total += len(rows)
    print(f"{total} conversions, {wrong} differ")
    return 1 if wrong or not total else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))

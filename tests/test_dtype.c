/* test_dtype.c - conversions between element types, against values computed from the formats' definitions: every code
 * of the 8 and 16 bit formats, and every float32 at, between and just beside neighbouring values. `test_dtype dump`
 * prints conversions for oracle/dtypes.py to compare with another implementation. */
#include "test.h"

#include "kernels/dtype.h"

typedef struct format {
    const char *name;
    te_dtype    dtype;
    int         exponent_bits, mantissa_bits, bias;
    int         largest;      /* code of the largest finite value */
    bool        saturates;
    uint32_t (*from_f32)(float);
    uint32_t (*from_f64)(double);
    float (*to_f32)(uint32_t);
} format;

#define WRAP(name, code_type)                                                                    \
    static uint32_t from_##name(float x) { return te_f32_to_##name(x); }                         \
    static uint32_t from64_##name(double x) { return te_f64_to_##name(x); }                      \
    static float    to_##name(uint32_t code) { return te_##name##_to_f32((code_type)code); }
WRAP(bf16, uint16_t)
WRAP(f16, uint16_t)
WRAP(f8e4m3, uint8_t)
WRAP(f8e5m2, uint8_t)

static const format formats[] = {
    {"bf16", TE_BF16, 8, 7, 127, 0x7f7f, false, from_bf16, from64_bf16, to_bf16},
    {"f16", TE_F16, 5, 10, 15, 0x7bff, false, from_f16, from64_f16, to_f16},
    {"f8e4m3", TE_F8E4M3, 4, 3, 7, 0x7e, true, from_f8e4m3, from64_f8e4m3, to_f8e4m3},
    {"f8e5m2", TE_F8E5M2, 5, 2, 15, 0x7b, true, from_f8e5m2, from64_f8e5m2, to_f8e5m2},
};

/* Value of a positive code, from the definition; one past the largest gives where infinity would stand. */
static double value_of(const format *f, int code)
{
    int mantissa = code & ((1 << f->mantissa_bits) - 1), exponent = code >> f->mantissa_bits;
    if (exponent == 0) return ldexp(mantissa, 1 - f->bias - f->mantissa_bits);
    return ldexp(mantissa + (1 << f->mantissa_bits), exponent - f->bias - f->mantissa_bits);
}

/* Code for |x| by bisection over all values: nearest, ties to the even code. */
static int nearest_code(const format *f, double x)
{
    int over = f->largest + 1;
    if (x >= value_of(f, over)) return f->saturates ? f->largest : over;
    int low = 0, high = over;
    while (high - low > 1) {
        int middle = (low + high) / 2;
        if (value_of(f, middle) <= x) low = middle;
        else high = middle;
    }
    double below = x - value_of(f, low), above = value_of(f, high) - x;
    int    code = below < above || (below == above && low % 2 == 0) ? low : high;
    return f->saturates && code == over ? f->largest : code;
}

static void check_from(const format *f, double x)
{
    uint32_t sign = f->exponent_bits + f->mantissa_bits == 7 ? 0x80u : 0x8000u;
    uint32_t want = (uint32_t)nearest_code(f, x);
    CHECK_MSG(f->from_f64(x) == want, "%s from %a: %x, want %x", f->name, x, f->from_f64(x), want);
    CHECK(f->from_f64(-x) == (want | sign));
    if ((double)(float)x != x) return;
    CHECK_MSG(f->from_f32((float)x) == want, "%s from %a: %x, want %x", f->name, x, f->from_f32((float)x), want);
    CHECK(f->from_f32(-(float)x) == (want | sign));
}

static void check_format(const format *f)
{
    uint32_t sign = f->exponent_bits + f->mantissa_bits == 7 ? 0x80u : 0x8000u;
    for (int code = 0; code <= f->largest; code++) {
        double value = value_of(f, code), middle = (value + value_of(f, code + 1)) / 2;
        CHECK((double)f->to_f32((uint32_t)code) == value);
        CHECK((double)f->to_f32((uint32_t)code | sign) == -value && signbit(f->to_f32((uint32_t)code | sign)));
        float exact = (float)value, half = (float)middle;
        check_from(f, value);
        check_from(f, middle);
        check_from(f, (double)nextafterf(exact, INFINITY));
        check_from(f, (double)nextafterf(half, INFINITY));
        check_from(f, (double)nextafterf(half, 0));
        check_from(f, nextafter(middle, INFINITY)); /* would round the other way through float32 */
        check_from(f, nextafter(middle, 0));
        if (code) check_from(f, (double)nextafterf(exact, 0));
    }
    uint64_t state = 42;
    for (int i = 0; i < 200000; i++) {
        double x = fabs((double)te_f32_from_bits(test_random(&state)));
        if (isfinite(x)) check_from(f, x);
    }
    uint32_t infinity = f->from_f32(INFINITY);
    CHECK(infinity == (uint32_t)(f->saturates ? f->largest : f->largest + 1));
    CHECK(f->from_f64(1e300) == infinity && f->from_f64(-INFINITY) == (infinity | sign) && f->from_f64(1e-300) == 0);
    for (uint32_t bits = 0x7f800001u; bits < 0x7fffffffu; bits += 40503) {
        CHECK(isnan(f->to_f32(f->from_f32(te_f32_from_bits(bits)))));
        CHECK(isnan(f->to_f32(f->from_f32(te_f32_from_bits(bits | 0x80000000u)))));
    }
}

/* All codes beyond the largest: infinities where the format has them, NaN otherwise; a NaN stays one, and quiet. */
static void check_specials(void)
{
    CHECK(te_f16_to_f32(0x7c00) == INFINITY && te_f16_to_f32(0xfc00) == -INFINITY);
    CHECK(te_bf16_to_f32(0x7f80) == INFINITY && te_f8e5m2_to_f32(0xfc) == -INFINITY);
    CHECK(isnan(te_f8e4m3_to_f32(0x7f)) && isnan(te_f8e4m3_to_f32(0xff)) && te_f8e4m3_to_f32(0x7e) == 448.0f);
    CHECK(te_f8e5m2_to_f32(0x7b) == 57344.0f && te_f16_to_f32(0x7bff) == 65504.0f);
    for (unsigned code = 0x7c01; code <= 0x7fff; code++) {
        float x = te_f16_to_f32((uint16_t)code);
        CHECK(isnan(x) && (te_f32_bits(x) & 0x400000u) && te_f32_to_f16(x) == (code | 0x200u));
    }
    for (unsigned code = 0x7f81; code <= 0x7fff; code++)
        CHECK(te_f32_to_bf16(te_bf16_to_f32((uint16_t)code)) == (code | 0x40u));
    CHECK(te_f32_to_f8e4m3(NAN) == 0x7f && te_f32_to_f8e5m2(-NAN) == 0x7f);
}

static void check_integers(void)
{
    CHECK(te_f32_to_i32(-1.9f) == -1 && te_f32_to_i32(3e9f) == INT32_MAX && te_f32_to_i32(-INFINITY) == INT32_MIN);
    CHECK(te_f32_to_i32(NAN) == 0 && te_f32_to_i32(-0x1p31f) == INT32_MIN &&
          te_f32_to_i32(0x1.fffffep30f) == 0x7fffff80);
    CHECK(te_f64_to_i32(2147483647.9) == INT32_MAX && te_f64_to_i32(-2147483648.9) == INT32_MIN &&
          te_f64_to_i32(NAN) == 0);
    CHECK(te_f32_to_i64(1e19f) == INT64_MAX && te_f32_to_i64(-1e19f) == INT64_MIN && te_f32_to_i64(-7.5f) == -7);
    CHECK(te_f64_to_i64(NAN) == 0 && te_f64_to_i64(0x1p62) == (int64_t)1 << 62);
    CHECK(te_f32_to_u8(-3.0f) == 0 && te_f32_to_u8(255.9f) == 255 && te_f32_to_u8(1e9f) == 255 &&
          te_f32_to_u8(NAN) == 0);
    CHECK(te_f64_to_u8(17.99) == 17 && te_f64_to_u8(-INFINITY) == 0);
}

static void check_elements(void)
{
    for (int d = 0; d < TE_DTYPE_COUNT; d++) {
        te_dtype      dtype = (te_dtype)d;
        unsigned char data[24] = {0};
        te_store_f64(data, dtype, 1, 1.0);
        te_store_f64(data, dtype, 2, 0.0);
        CHECK(te_load_f64(data, dtype, 1) == 1.0 && te_load_f64(data, dtype, 2) == 0.0 &&
              te_load_f64(data, dtype, 0) == 0.0);
        CHECK(te_dtype_from_name(te_dtype_name(dtype)) == dtype && te_dtype_size(dtype) > 0);
    }
    CHECK(te_dtype_from_name("float") == TE_DTYPE_COUNT && te_dtype_from_name("") == TE_DTYPE_COUNT);
    CHECK(te_dtype_from_name("float16x") == TE_DTYPE_COUNT && te_dtype_size(TE_DTYPE_COUNT) == 0);
    CHECK(te_dtype_is_float(TE_F8E5M2) && !te_dtype_is_float(TE_I32) && te_dtype_is_integer(TE_U8));
    CHECK(!te_dtype_is_integer(TE_BOOL) && !te_dtype_is_float8(TE_F16));
}

static void dump(void)
{
    for (size_t i = 0; i < sizeof formats / sizeof formats[0]; i++)
        for (uint64_t bits = 0; bits < (uint64_t)1 << 32; bits += 40009)
            printf("%s %08x %x\n", formats[i].name, (unsigned)bits,
                   formats[i].from_f32(te_f32_from_bits((uint32_t)bits)));
}

int main(int argc, char **argv)
{
    if (argc > 1 && strcmp(argv[1], "dump") == 0) {
        dump();
        return 0;
    }
    for (size_t i = 0; i < sizeof formats / sizeof formats[0]; i++) check_format(&formats[i]);
    check_specials();
    check_integers();
    check_elements();
    return TEST_END();
}

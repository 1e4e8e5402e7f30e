/* ops.h - the operations of row programs on one value of type te_real: te_op_NAME for every opcode that has arguments.
 *
 * The source defines te_real and TE_REAL_IS_F32 before. The bits are those of the CPU's loops (program_blocks_body.h);
 * in float64 the elementary functions are the device library's.
 */
#if TE_REAL_IS_F32
#define TE_REAL_FN(name) te_##name
TE_HD static inline float te_floor(float x) { return floorf(x); }
TE_HD static inline float te_ceil(float x) { return ceilf(x); }
TE_HD static inline float te_rint(float x) { return rintf(x); }
TE_HD static inline float te_trunc(float x) { return truncf(x); }
TE_HD static inline float te_sqrt(float x) { return TE_SQRT(x); }
TE_HD static inline uint16_t te_to_bf16(float x) { return te_f32_to_bf16(x); }
TE_HD static inline uint16_t te_to_f16(float x) { return te_f32_to_f16(x); }
#else
#define TE_REAL_FN(name) te_wide_##name
TE_HD static inline double te_wide_abs(double x) { return fabs(x); }
TE_HD static inline double te_wide_floor(double x) { return floor(x); }
TE_HD static inline double te_wide_ceil(double x) { return ceil(x); }
TE_HD static inline double te_wide_rint(double x) { return rint(x); }
TE_HD static inline double te_wide_trunc(double x) { return trunc(x); }
TE_HD static inline double te_wide_sqrt(double x) { return sqrt(x); }
TE_HD static inline double te_wide_exp(double x) { return exp(x); }
TE_HD static inline double te_wide_log(double x) { return log(x); }
TE_HD static inline double te_wide_sin(double x) { return sin(x); }
TE_HD static inline double te_wide_cos(double x) { return cos(x); }
TE_HD static inline double te_wide_tanh(double x) { return tanh(x); }
TE_HD static inline double te_wide_erf(double x) { return erf(x); }
TE_HD static inline double te_wide_pow(double x, double y) { return pow(x, y); }
TE_HD static inline double te_wide_sigmoid(double x)
{
    double e = exp(-fabs(x));
    return (x < 0 ? e : 1) / (1 + e);
}
TE_HD static inline uint16_t te_wide_to_bf16(double x) { return te_f64_to_bf16(x); }
TE_HD static inline uint16_t te_wide_to_f16(double x) { return te_f64_to_f16(x); }
#endif

#define TE_UNARY(name, expression)  TE_HD static inline te_real te_op_##name(te_real x) { return expression; }
#define TE_BINARY(name, expression)                                                                                    \
    TE_HD static inline te_real te_op_##name(te_real x, te_real y) { return expression; }
#define TE_TRUE(condition)          ((condition) ? (te_real)1 : (te_real)0)

TE_UNARY(neg, -x)
TE_UNARY(abs, TE_REAL_FN(abs)(x))
TE_UNARY(sign, x > 0 ? (te_real)1 : (x < 0 ? (te_real)-1 : (x == 0 ? (te_real)0 : x)))
TE_UNARY(floor, TE_REAL_FN(floor)(x))
TE_UNARY(ceil, TE_REAL_FN(ceil)(x))
TE_UNARY(round, TE_REAL_FN(rint)(x))
TE_UNARY(trunc, TE_REAL_FN(trunc)(x))
TE_UNARY(sqrt, TE_REAL_FN(sqrt)(x))
TE_UNARY(rsqrt, (te_real)1 / TE_REAL_FN(sqrt)(x))
TE_UNARY(recip, (te_real)1 / x)
TE_UNARY(exp, TE_REAL_FN(exp)(x))
TE_UNARY(log, TE_REAL_FN(log)(x))
TE_UNARY(sin, TE_REAL_FN(sin)(x))
TE_UNARY(cos, TE_REAL_FN(cos)(x))
TE_UNARY(tanh, TE_REAL_FN(tanh)(x))
TE_UNARY(sigmoid, TE_REAL_FN(sigmoid)(x))
TE_UNARY(erf, TE_REAL_FN(erf)(x))
TE_UNARY(isnan, TE_TRUE(x != x))
TE_UNARY(isfinite, TE_TRUE(x - x == 0))
TE_UNARY(to_bf16, (te_real)te_bf16_to_f32(TE_REAL_FN(to_bf16)(x)))
TE_UNARY(to_f16, (te_real)te_f16_to_f32(TE_REAL_FN(to_f16)(x)))
TE_UNARY(to_f32, (te_real)(float)x)

TE_BINARY(add, x + y)
TE_BINARY(sub, x - y)
TE_BINARY(mul, x * y)
TE_BINARY(div, x / y)
TE_BINARY(pow, TE_REAL_FN(pow)(x, y))
TE_BINARY(min, ((y < x) | (y != y)) ? y : x)
TE_BINARY(max, ((x > y) | (x != x)) ? x : y)
TE_BINARY(lt, TE_TRUE(x < y))
TE_BINARY(le, TE_TRUE(x <= y))
TE_BINARY(eq, TE_TRUE(x == y))
TE_BINARY(ne, TE_TRUE(x != y))

TE_HD static inline te_real te_op_where(te_real x, te_real y, te_real z) { return x != 0 ? y : z; }

/* How a value joins what a reduction holds. A NaN stays held by a maximum or minimum; an amax ignores it. */
TE_BINARY(join_rowsum, x + y)
TE_BINARY(join_rowmax, ((y > x) | (y != y)) ? y : x)
TE_BINARY(join_rowmin, ((y < x) | (y != y)) ? y : x)
TE_BINARY(join_sum, x + y)
TE_BINARY(join_amax, TE_REAL_FN(abs)(y) > x ? TE_REAL_FN(abs)(y) : x)

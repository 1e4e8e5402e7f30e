/* ops.h - the operations of row programs on one value of type te_real: te_op_NAME for every opcode that has arguments.
 *
 * The source defines te_real and TE_REAL_IS_F32 before; most of the list, which is also the CPU's, follows in
 * program_values.h. In float64 the elementary functions are the device library's.
 */
#if TE_REAL_IS_F32
#define TE_REAL_FN(name) te_##name
TE_HD static inline float te_fabs(float x) { return te_abs(x); }
TE_HD static inline float te_floor(float x) { return floorf(x); }
TE_HD static inline float te_ceil(float x) { return ceilf(x); }
TE_HD static inline float te_rint(float x) { return rintf(x); }
TE_HD static inline float te_trunc(float x) { return truncf(x); }
TE_HD static inline float te_sqrt(float x) { return TE_SQRT(x); }
TE_HD static inline float te_round_bf16(float x) { return te_f32_round_bf16(x); }
TE_HD static inline uint16_t te_to_f16(float x) { return te_f32_to_f16(x); }
#else
#define TE_REAL_FN(name) te_wide_##name
TE_HD static inline double te_wide_fabs(double x) { return fabs(x); }
TE_HD static inline double te_wide_floor(double x) { return floor(x); }
TE_HD static inline double te_wide_ceil(double x) { return ceil(x); }
TE_HD static inline double te_wide_rint(double x) { return rint(x); }
TE_HD static inline double te_wide_trunc(double x) { return trunc(x); }
TE_HD static inline double te_wide_sqrt(double x) { return sqrt(x); }
TE_HD static inline double te_wide_exp(double x) { return exp(x); }
TE_HD static inline double te_wide_exp_negative(double x) { return exp(x); }
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
TE_HD static inline float te_wide_round_bf16(double x) { return te_bf16_to_f32(te_f64_to_bf16(x)); }
TE_HD static inline uint16_t te_wide_to_f16(double x) { return te_f64_to_f16(x); }
#endif

#define TE_UNARY(name, expression)  TE_HD static inline te_real te_op_##name(te_real x) { return expression; }
#define TE_BINARY(name, expression)                                                                                    \
    TE_HD static inline te_real te_op_##name(te_real x, te_real y) { return expression; }
#define TE_TRUE(condition)          ((condition) ? (te_real)1 : (te_real)0)

TE_UNARY(exp_negative, TE_REAL_FN(exp_negative)(x)) /* exp of what is not above 0 */
TE_UNARY(sin, TE_REAL_FN(sin)(x))
TE_UNARY(cos, TE_REAL_FN(cos)(x))
TE_BINARY(pow, TE_REAL_FN(pow)(x, y))

TE_HD static inline te_real te_op_where(te_real x, te_real y, te_real z) { return x != 0 ? y : z; }

/* How a value joins what a reduction holds. A NaN stays held by a maximum or minimum; an amax ignores it. */
TE_BINARY(join_rowsum, x + y)
TE_BINARY(join_rowmax, ((y > x) | (y != y)) ? y : x)
TE_BINARY(join_rowmin, ((y < x) | (y != y)) ? y : x)
TE_BINARY(join_sum, x + y)
TE_BINARY(join_amax, TE_REAL_FN(fabs)(y) > x ? TE_REAL_FN(fabs)(y) : x)

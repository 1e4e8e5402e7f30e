/* program_blocks_table.h - a table of block functions. A part of program_blocks_body.h, which may include it twice: as
 * TE_BLOCKS_TABLE, with TE_STORE_BF16 and, for float32, chains that TE_CHAIN runs. */
const te_blocks TE_BLOCKS_TABLE = {
    .size = sizeof(te_real),
    .op = {TE_ROW1(NEG, neg), TE_ROW1(ABS, abs), TE_ROW1(SIGN, sign), TE_ROW1(FLOOR, floor), TE_ROW1(CEIL, ceil),
           TE_ROW1(ROUND, round), TE_ROW1(TRUNC, trunc), TE_ROW1(SQRT, sqrt), TE_ROW1(RSQRT, rsqrt),
           TE_ROW1(RECIP, recip), TE_ROW1(EXP, exp), TE_ROW1(LOG, log), TE_ROW1(SIN, sin), TE_ROW1(COS, cos),
           TE_ROW1(TANH, tanh), TE_ROW1(SIGMOID, sigmoid), TE_ROW1(ERF, erf), TE_ROW1(ISNAN, isnan),
           TE_ROW1(ISFINITE, isfinite), TE_ROW1(TO_BF16, to_bf16), TE_ROW1(TO_F16, to_f16), TE_ROW1(TO_F32, to_f32),
           TE_ROW2(ADD, add), TE_ROW2(SUB, sub), TE_ROW2(MUL, mul), TE_ROW2(DIV, div), TE_ROW2(POW, pow),
           TE_ROW2(MIN, min), TE_ROW2(MAX, max), TE_ROW2(LT, lt), TE_ROW2(LE, le), TE_ROW2(EQ, eq), TE_ROW2(NE, ne),
           [TE_PW_WHERE] = {op_where_0, op_where_1, op_where_2, op_where_3, op_where_4, op_where_5, op_where_6},
           TE_ROW_PAIR(ADD, ADD, add_add), TE_ROW_PAIR(ADD, SUB, add_sub), TE_ROW_PAIR(ADD, FROM, add_from),
           TE_ROW_PAIR(ADD, MUL, add_mul), TE_ROW_PAIR(SUB, ADD, sub_add), TE_ROW_PAIR(SUB, SUB, sub_sub),
           TE_ROW_PAIR(SUB, FROM, sub_from), TE_ROW_PAIR(SUB, MUL, sub_mul), TE_ROW_PAIR(MUL, ADD, mul_add),
           TE_ROW_PAIR(MUL, SUB, mul_sub), TE_ROW_PAIR(MUL, FROM, mul_from), TE_ROW_PAIR(MUL, MUL, mul_mul),
#if TE_REAL_IS_F32
           [TE_BLOCK_LOOK_UP] = {[2] = op_look_up},
#endif
    },
    .load = {[TE_F32] = load_f32, [TE_BF16] = load_bf16, [TE_F16] = load_f16, [TE_F64] = load_f64, [TE_I64] = load_i64,
             [TE_I32] = load_i32, [TE_U8] = load_u8, [TE_BOOL] = load_bool, [TE_F8E4M3] = load_f8e4m3,
             [TE_F8E5M2] = load_f8e5m2},
    .store = {[TE_F32] = store_f32, [TE_BF16] = TE_STORE_BF16, [TE_F16] = store_f16, [TE_F64] = store_f64,
              [TE_I64] = store_i64, [TE_I32] = store_i32, [TE_U8] = store_u8, [TE_BOOL] = store_bool,
              [TE_F8E4M3] = store_f8e4m3, [TE_F8E5M2] = store_f8e5m2},
    .set = set_value,
    .get = get_value,
    .column = fill_columns,
    .random = fill_random,
    .repeat = repeat_rows,
    .fold_start = fold_start,
    .fold_add = fold_add,
    .fold_finish = fold_finish,
    .fold_rows = fold_rows,
    .fold_columns = fold_columns,
#if TE_REAL_IS_F32
#if TE_WIDTH >= 8
    .fold_across = fold_across,
#endif
    .load_small = load_small,
    .integers = fill_integers,
    .strip = STRIP,
    .chain = TE_CHAIN,
#endif
};

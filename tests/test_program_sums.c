/* test_program_sums.c - sums that share what they read, as the gradients of norms have them: two sums of a row, and two
 * of the columns, over float32 and bfloat16. What they add and in which order is stated in program_blocks.h, so that
 * the bits follow. Also how values are rounded to bfloat16, whatever a machine has for that. */
#include "program_hand.h"

#include "kernels/dtype.h"

enum { MOST_ROWS = 32, WIDEST = 3072, MOST = MOST_ROWS * WIDEST };

typedef struct tensor {
    te_dtype dtype;
    int64_t  row; /* elements from one row to the next, 0: all are the same */
    float    values[MOST];
    union {
        float    f32[MOST];
        uint16_t bf16[MOST];
    } data;
} tensor;

static void fill(tensor *t, te_dtype dtype, int64_t rows, int64_t columns, bool one_row, uint64_t *state)
{
    t->dtype = dtype;
    t->row = one_row ? 0 : columns;
    for (int64_t i = 0; i < (one_row ? 1 : rows) * columns; i++) {
        float v = (float)test_uniform(state, -2, 2);
        t->data.f32[dtype == TE_F32 ? i : 0] = dtype == TE_F32 ? v : t->data.f32[0];
        if (dtype == TE_BF16) t->data.bf16[i] = te_f32_to_bf16(v);
        t->values[i] = dtype == TE_BF16 ? te_bf16_to_f32(t->data.bf16[i]) : v;
    }
}

static float at(const tensor *t, int64_t r, int64_t j) { return t->values[r * t->row + j]; }

static te_operand operand_of(tensor *t)
{
    return (te_operand){.data = &t->data, .dtype = t->dtype, .stride = {t->row, 1}};
}

/* 64 lanes, joined as a balanced tree. */
static float join(float *lanes)
{
    for (int half = 32; half > 0; half /= 2)
        for (int i = 0; i < half; i++) lanes[i] += lanes[i + half];
    return lanes[0];
}

/* Which of the sums there are. */
enum { AFFINE = 1, CENTERED = 2, BESIDE = 4, FORMS = 8 };

static struct sums_case {
    tensor x, y, z;
    float  mean[MOST_ROWS], scale[MOST_ROWS];
    float  want_of[MOST_ROWS], want_beside[MOST_ROWS], want_columns[WIDEST], want_beside_columns[WIDEST];
    float  of[MOST_ROWS], beside[MOST_ROWS], columns[WIDEST], beside_columns[WIDEST], out[MOST], want_out[MOST];
} c;

/* g = y z, d = x - mean: rowsum(g d), rowsum(g), and the columns' sums of y (d scale) and y. */
static void build(built *b, int form)
{
    begin(b, "sums");
    int x = input(b, TE_RATE_ELEM), y = input(b, TE_RATE_ELEM), z = input(b, TE_RATE_ELEM);
    int mean = input(b, TE_RATE_ROW), scale = input(b, TE_RATE_ROW);
    int g = form & AFFINE ? emit(b, TE_PW_MUL, y, z, -1) : y, d = form & CENTERED ? emit(b, TE_PW_SUB, x, mean, -1) : x;
    int of = reduce(b, TE_PW_ROWSUM, emit(b, TE_PW_MUL, g, d, -1));
    int beside = form & BESIDE ? reduce(b, TE_PW_ROWSUM, g) : of;
    output(b, TE_OUT_ROW, of);
    output(b, TE_OUT_ROW, beside);
    output(b, TE_OUT_COLSUM, emit(b, TE_PW_MUL, y, emit(b, TE_PW_MUL, d, scale, -1), -1));
    output(b, TE_OUT_COLSUM, y);
    output(b, TE_OUT_ELEM, emit(b, TE_PW_SUB, emit(b, TE_PW_MUL, g, scale, -1), emit(b, TE_PW_MUL, d, beside, -1), -1));
}

static void work_out(int form, int64_t rows, int64_t columns)
{
    for (int64_t j = 0; j < columns; j++) c.want_columns[j] = c.want_beside_columns[j] = 0;
    for (int64_t r = 0; r < rows; r++) {
        float of[64] = {0}, beside[64] = {0};
        for (int64_t j = 0; j < columns; j++) {
            float y = at(&c.y, r, j), g = form & AFFINE ? y * at(&c.z, r, j) : y;
            float d = form & CENTERED ? at(&c.x, r, j) - c.mean[r] : at(&c.x, r, j), scaled = d * c.scale[r];
            of[j % 64] += g * d;
            beside[j % 64] += g;
            c.want_columns[j] += y * scaled;
            c.want_beside_columns[j] += y;
        }
        c.want_of[r] = join(of);
        c.want_beside[r] = form & BESIDE ? join(beside) : c.want_of[r];
        for (int64_t j = 0; j < columns; j++) {
            float g = form & AFFINE ? at(&c.y, r, j) * at(&c.z, r, j) : at(&c.y, r, j);
            float d = form & CENTERED ? at(&c.x, r, j) - c.mean[r] : at(&c.x, r, j);
            c.want_out[r * columns + j] = g * c.scale[r] - d * c.want_beside[r];
        }
    }
}

static bool same(const float *a, const float *b, int64_t n) { return memcmp(a, b, (size_t)n * sizeof *a) == 0; }

/* `left_out`: a bit per output that nobody wants. */
static void check_run(te_exec *exec, built *b, int64_t rows, int64_t columns, int left_out)
{
    te_operand in[5] = {operand_of(&c.x), operand_of(&c.y), operand_of(&c.z)}, out[5];
    float     *data[5] = {c.of, c.beside, c.columns, c.beside_columns, c.out};
    in[3] = (te_operand){.data = c.mean, .dtype = TE_F32, .stride = {1, 0}};
    in[4] = (te_operand){.data = c.scale, .dtype = TE_F32, .stride = {1, 0}};
    for (int o = 0; o < 5; o++) {
        bool row = o < 2, sum = o == 2 || o == 3;
        out[o] = (te_operand){.data = left_out >> o & 1 ? NULL : data[o], .dtype = TE_F32,
                              .stride = {row ? 1 : sum ? 0 : columns, row ? 0 : 1}};
    }
    te_run run = {.ndim = 2, .shape = {rows, columns}, .inputs = in, .outputs = out};
    bool   right = te_cpu_program_run(exec, &b->program, &run, 1) == TE_OK;
    right = right && same(c.of, c.want_of, rows) && same(c.beside, c.want_beside, rows);
    right = right && (left_out & 4 || same(c.columns, c.want_columns, columns));
    right = right && (left_out & 8 || same(c.beside_columns, c.want_beside_columns, columns));
    right = right && same(c.out, c.want_out, rows * columns);
    CHECK_MSG(right, "%lld x %lld, %s, %d threads, without %d, of types %d %d %d", (long long)rows, (long long)columns,
              te_cpu_isa_name(te_cpu(exec)->isa), exec->threads, left_out, (int)c.x.dtype, (int)c.y.dtype,
              (int)c.z.dtype);
}

static void check_sums(int64_t rows, int64_t columns)
{
    static const te_dtype types[][3] = {{TE_F32, TE_F32, TE_F32},
                                        {TE_BF16, TE_BF16, TE_F32},
                                        {TE_BF16, TE_BF16, TE_BF16},
                                        {TE_F32, TE_BF16, TE_F32},
                                        {TE_BF16, TE_F32, TE_BF16}};
    uint64_t state = 11;
    for (int i = 0; i < 2 * 5; i++) {
        fill(&c.x, types[i / 2][0], rows, columns, false, &state);
        fill(&c.y, types[i / 2][1], rows, columns, false, &state);
        fill(&c.z, types[i / 2][2], rows, columns, i % 2, &state);
        for (int64_t r = 0; r < rows; r++) {
            c.mean[r] = (float)test_uniform(&state, -1, 1);
            c.scale[r] = 1 + c.mean[r] / 2;
        }
        for (int form = 0; form < FORMS; form++) {
            static built b;
            build(&b, form);
            work_out(form, rows, columns);
            for (int d = 0; d < n_devices; d++)
                check_run(&devices[d], &b, rows, columns, (form + d) % 3 ? 0 : 4 << (d & 1));
            release(&b);
        }
    }
}

/* Every sign, exponent and kept part of the fraction, with what is cut off just around where rounding turns. */
static void check_rounding(te_exec *exec)
{
    enum { N = 65536, TAILS = 6 };
    static const uint32_t tails[TAILS] = {0, 1, 0x7fff, 0x8000, 0x8001, 0xffff};
    static float          x[N];
    static uint16_t       y[2][N];
    static built          b;
    begin(&b, "round");
    int v = input(&b, TE_RATE_ELEM);
    output(&b, TE_OUT_ELEM, v);
    output(&b, TE_OUT_ELEM, emit(&b, TE_PW_NEG, v, -1, -1));
    for (int t = 0; t < TAILS; t++) {
        for (uint32_t i = 0; i < N; i++) x[i] = te_f32_from_bits((i * 40503u & 0xffffu) << 16 | tails[t]);
        te_operand in = {.data = x, .dtype = TE_F32, .stride = {1}};
        te_operand out[2] = {{.data = y[0], .dtype = TE_BF16, .stride = {1}},
                             {.data = y[1], .dtype = TE_BF16, .stride = {1}}};
        te_run     run = {.ndim = 1, .shape = {N}, .inputs = &in, .outputs = out};
        bool       right = te_cpu_program_run(exec, &b.program, &run, 1) == TE_OK;
        for (int i = 0; i < N; i++)
            right = right && y[0][i] == te_f32_to_bf16(x[i]) &&
                    y[1][i] == te_f32_to_bf16(te_f32_from_bits(te_f32_bits(x[i]) ^ 0x80000000u));
        CHECK_MSG(right, "rounding with the tail %x, %s", tails[t], te_cpu_isa_name(te_cpu(exec)->isa));
    }
    release(&b);
}

/* y = (x + 1) x, with the sums of its columns and of those of y x: they add y as it was before it was rounded. */
static void build_beside(built *b)
{
    begin(b, "beside");
    int x = input(b, TE_RATE_ELEM), y = emit(b, TE_PW_MUL, emit(b, TE_PW_ADD, x, number(b, 1), -1), x, -1);
    output(b, TE_OUT_ELEM, y);
    output(b, TE_OUT_COLSUM, y);
    output(b, TE_OUT_COLSUM, emit(b, TE_PW_MUL, y, x, -1));
}

static bool beside_is_right(const te_operand *x, const te_operand *y, const float *sums, int64_t rows, int64_t columns)
{
    bool right = true, half = y->dtype == TE_BF16;
    for (int64_t j = 0; j < columns; j++) {
        float sum = 0, dot = 0;
        for (int64_t i = j; i < rows * columns; i += columns) {
            float v = (float)te_load_f64(x->data, x->dtype, i), z = (v + 1) * v;
            right &= half ? ((const uint16_t *)y->data)[i] == te_f32_to_bf16(z) : ((const float *)y->data)[i] == z;
            sum += z, dot += z * v;
        }
        right &= sums[j] == sum && sums[columns + j] == dot;
    }
    return right;
}

/* Few enough rows that there is one part of the sums. */
static void check_beside(int64_t rows, int64_t columns, te_dtype from, te_dtype to)
{
    size_t     n = (size_t)(rows * columns);
    float     *x = calloc(n, sizeof *x), *y = aligned_alloc(64, (n * sizeof *y + 63) / 64 * 64);
    float     *sums = calloc(2 * (size_t)columns, sizeof *sums);
    te_operand in = {.data = x, .dtype = from, .stride = {columns, 1}};
    te_operand out[3] = {{.data = y, .dtype = to, .stride = {columns, 1}},
                         {.data = sums, .dtype = TE_F32, .stride = {0, 1}},
                         {.data = sums + columns, .dtype = TE_F32, .stride = {0, 1}}};
    te_run     run = {.ndim = 2, .shape = {rows, columns}, .inputs = &in, .outputs = out};
    uint64_t   state = 5;
    built      b;
    build_beside(&b);
    for (size_t i = 0; i < n; i++) te_store_f64(x, from, (int64_t)i, test_uniform(&state, -2, 2));
    for (int d = 0; d < n_devices; d++) {
        memset(y, 0, n * sizeof *y), memset(sums, 0, 2 * (size_t)columns * sizeof *sums);
        bool right = te_cpu_program_run(&devices[d], &b.program, &run, 1) == TE_OK &&
                     beside_is_right(&in, out, sums, rows, columns);
        CHECK_MSG(right, "sums beside an output: %lld x %lld, types %d %d, %s, %d threads", (long long)rows,
                  (long long)columns, (int)from, (int)to, te_cpu_isa_name(te_cpu(&devices[d])->isa),
                  devices[d].threads);
    }
    release(&b);
    free(x), free(y), free(sums);
}

static void check_all_beside(void)
{
    static const int64_t shapes[][2] = {{1, 768},  {3, 64},   {32, 128}, {21, 768}, {6, 2560},
                                        {13, 100}, {5, 3000}, {9, 17},   {31, 5003}};
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++) {
        check_beside(shapes[i][0], shapes[i][1], TE_F32, TE_F32);
        check_beside(shapes[i][0], shapes[i][1], TE_BF16, TE_BF16);
        check_beside(shapes[i][0], shapes[i][1], TE_F16, TE_BF16);
    }
    check_beside(32, 3 << 16, TE_F32, TE_F32); /* outputs leave the caches */
    check_beside(32, (3 << 16) + 8, TE_BF16, TE_BF16);
}

static struct rounded_case {
    tensor   a, b;
    uint16_t s[MOST], want_s[MOST], y[2][MOST], want_y[MOST];
    float    total[MOST_ROWS], want_total[MOST_ROWS], want_copy[MOST];
    union {
        float    f32[MOST];
        uint16_t bf16[MOST];
    } copy;
} rounded;

/* s = a + b, rounded; d = s - rowsum(s); y = d rowsum(d d): s twice, y twice. */
static void build_rounded(built *b)
{
    begin(b, "rounded");
    int x = input(b, TE_RATE_ELEM), sum = emit(b, TE_PW_ADD, x, input(b, TE_RATE_ELEM), -1);
    int s = emit(b, TE_PW_TO_BF16, sum, -1, -1), d = emit(b, TE_PW_SUB, s, reduce(b, TE_PW_ROWSUM, s), -1);
    int total = reduce(b, TE_PW_ROWSUM, emit(b, TE_PW_MUL, d, d, -1)), y = emit(b, TE_PW_MUL, d, total, -1);
    output(b, TE_OUT_ELEM, s), output(b, TE_OUT_ELEM, s), output(b, TE_OUT_ROW, total);
    output(b, TE_OUT_ELEM, y), output(b, TE_OUT_ELEM, y);
}

static void work_out_rounded(int64_t rows, int64_t columns)
{
    for (int64_t r = 0; r < rows; r++) {
        float    sum[64] = {0}, squares[64] = {0}, *s = rounded.want_copy + r * columns;
        uint16_t *y = rounded.want_y + r * columns;
        for (int64_t j = 0; j < columns; j++) {
            rounded.want_s[r * columns + j] = te_f32_to_bf16(at(&rounded.a, r, j) + at(&rounded.b, r, j));
            s[j] = te_bf16_to_f32(rounded.want_s[r * columns + j]);
            sum[j % 64] += s[j];
        }
        join(sum);
        for (int64_t j = 0; j < columns; j++) squares[j % 64] += (s[j] - sum[0]) * (s[j] - sum[0]);
        rounded.want_total[r] = join(squares);
        for (int64_t j = 0; j < columns; j++) y[j] = te_f32_to_bf16((s[j] - sum[0]) * squares[0]);
    }
}

/* What is rounded to bfloat16 and read again may be read as it was stored. The last row is below the normal numbers. */
static void check_rounded(te_exec *exec, int64_t rows, int64_t columns, te_dtype copy)
{
    static built b;
    size_t       bytes = (size_t)(rows * columns) * sizeof(uint16_t);
    uint64_t     state = 5;
    fill(&rounded.a, TE_F32, rows, columns, false, &state);
    fill(&rounded.b, TE_BF16, rows, columns, false, &state);
    for (int64_t i = (rows - 1) * columns; i < rows * columns; i++) {
        rounded.a.values[i] = rounded.a.data.f32[i] *= 1e-39f;
        rounded.b.values[i] = rounded.b.data.bf16[i] = 0;
    }
    build_rounded(&b);
    work_out_rounded(rows, columns);
    te_operand in[2] = {operand_of(&rounded.a), operand_of(&rounded.b)};
    te_operand out[5] = {{.data = rounded.s, .dtype = TE_BF16, .stride = {columns, 1}},
                         {.data = &rounded.copy, .dtype = copy, .stride = {columns, 1}},
                         {.data = rounded.total, .dtype = TE_F32, .stride = {1, 0}},
                         {.data = rounded.y[0], .dtype = TE_BF16, .stride = {columns, 1}},
                         {.data = rounded.y[1], .dtype = TE_BF16, .stride = {columns, 1}}};
    te_run     run = {.ndim = 2, .shape = {rows, columns}, .inputs = in, .outputs = out};
    bool       right = te_cpu_program_run(exec, &b.program, &run, 1) == TE_OK;
    right = right && same(rounded.total, rounded.want_total, rows) && !memcmp(rounded.s, rounded.want_s, bytes);
    right = right && !memcmp(&rounded.copy, copy == TE_BF16 ? (void *)rounded.want_s : rounded.want_copy,
                             copy == TE_BF16 ? bytes : 2 * bytes);
    right = right && !memcmp(rounded.y[0], rounded.want_y, bytes) && !memcmp(rounded.y[1], rounded.want_y, bytes);
    CHECK_MSG(right, "rounded, %lld x %lld, %s, %d threads", (long long)rows, (long long)columns,
              te_cpu_isa_name(te_cpu(exec)->isa), exec->threads);
    release(&b);
}

int main(void)
{
    open_devices();
    for (int d = 0; d < n_devices; d++) {
        static const int64_t shapes[][2] = {{1, 768}, {32, 128}, {7, 768}, {21, 100}, {9, 17}, {5, 3000}};
        check_rounding(&devices[d]);
        for (int i = 0; i < 2 * 6; i++)
            check_rounded(&devices[d], shapes[i / 2][0], shapes[i / 2][1], i % 2 ? TE_BF16 : TE_F32);
    }
    check_all_beside();
    check_sums(1, 768);
    check_sums(3, 64);
    check_sums(32, 128);
    check_sums(21, 768);
    check_sums(6, 2560);
    check_sums(13, 100);
    check_sums(5, 3000);
    check_sums(5, 3072);
    check_sums(9, 17);
    close_devices();
    return TEST_END();
}

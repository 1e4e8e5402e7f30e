/* print.c - tostring of tensors: dtype, shape and values, aligned; large ones show only the ends of each dimension.
 *
 *     float32 tensor {2, 3}
 *     {{ 1.0000,  2.5000, -3.0000},
 *      { 4.0000,  5.0000,  6.0000}}
 */
#include "bindings.h"

#include "core/quantized_parameter.h"
#include "kernels/numerals.h"

#include <math.h>

enum { SHOWN_WHOLE = 1000 };

typedef struct printer {
    const te_tensor *t;
    bool             elided;
    int64_t          edge;   /* entries shown at each end of an elided dimension */
    double          *values; /* of the shown elements, in order; of int64 tensors int64_t */
    int64_t          n;
    int              width;
    const char      *format;
    luaL_Buffer      buffer;
} printer;

static bool dim_elided(const printer *p, int dim) { return p->elided && p->t->shape[dim] > 2 * p->edge; }
static int64_t dim_shown(const printer *p, int dim) { return dim_elided(p, dim) ? 2 * p->edge : p->t->shape[dim]; }

/* Position of the i-th shown entry. */
static int64_t dim_position(const printer *p, int dim, int64_t i)
{
    return dim_elided(p, dim) && i >= p->edge ? p->t->shape[dim] - 2 * p->edge + i : i;
}

/* Reads the shown elements under `offset` from dimension dim on. */
static te_status collect(printer *p, te_tensor *t, int dim, int64_t offset)
{
    if (dim < t->ndim - 1) {
        te_status status = TE_OK;
        for (int64_t i = 0; i < dim_shown(p, dim) && status == TE_OK; i++)
            status = collect(p, t, dim + 1, offset + dim_position(p, dim, i) * t->stride[dim]);
        return status;
    }
    int     pieces = t->ndim && dim_elided(p, dim) ? 2 : 1;
    int64_t length = t->ndim ? dim_shown(p, dim) / pieces : 1;
    for (int k = 0; k < pieces && length > 0; k++) {
        int64_t    start = t->ndim ? dim_position(p, dim, k * length) * t->stride[dim] : 0;
        te_tensor *piece = te_tensor_alias(t, 1, &length, t->ndim ? &t->stride[dim] : (int64_t[]){1}, offset + start);
        if (!piece) return t->ctx->status;
        te_status status = te_tensor_read(piece, t->dtype == TE_I64 ? TE_I64 : TE_F64, p->values + p->n);
        te_tensor_release(piece);
        if (status != TE_OK) return status;
        p->n += length;
    }
    return TE_OK;
}

static int value_text(const printer *p, char *text, size_t size, const double *value)
{
    if (p->t->dtype == TE_I64) return snprintf(text, size, "%lld", (long long)*(const int64_t *)(const void *)value);
    return te_snprintf(text, size, p->format, isnan(*value) ? NAN : *value); /* a NaN's sign says nothing */
}

/* Whole numbers as such, others with four digits after the point, or in exponent form when their sizes differ much. */
static void choose_format(printer *p)
{
    bool   whole = true;
    double most = 0, least = INFINITY;
    for (int64_t i = 0; i < p->n && p->t->dtype != TE_I64; i++) {
        double v = fabs(p->values[i]);
        if (!isfinite(v)) continue;
        whole = whole && v == floor(v);
        if (v > most) most = v;
        if (v > 0 && v < least) least = v;
    }
    bool fixed = most < 1e5 && (least >= 1e-4 || most == 0);
    if (whole && most < 1e15)
        p->format = "%.0f";
    else
        p->format = fixed ? "%.4f" : "%.4e";
    for (int64_t i = 0; i < p->n; i++) {
        int width = value_text(p, NULL, 0, &p->values[i]);
        if (width > p->width) p->width = width;
    }
}

static void add_value(printer *p, const double *value)
{
    char digits[48], text[64];
    value_text(p, digits, sizeof digits, value);
    snprintf(text, sizeof text, "%*s", p->width, digits);
    if (p->t->dtype == TE_BOOL)
        luaL_addstring(&p->buffer, *value != 0 ? "true" : "false");
    else
        luaL_addstring(&p->buffer, text);
}

/* Between entries of a dimension: the next one stands behind the last one, rows under one another. */
static void add_separator(printer *p, int dim, const char *text)
{
    bool last = dim == p->t->ndim - 1;
    luaL_addstring(&p->buffer, text);
    luaL_addstring(&p->buffer, last ? ", " : ",\n");
    for (int k = 0; !last && k <= dim; k++) luaL_addchar(&p->buffer, ' ');
}

static const double *add_rows(printer *p, int dim, const double *values)
{
    if (dim == p->t->ndim) {
        add_value(p, values);
        return values + 1;
    }
    luaL_addchar(&p->buffer, '{');
    for (int64_t i = 0; i < dim_shown(p, dim); i++) {
        if (i > 0) add_separator(p, dim, "");
        if (dim_elided(p, dim) && i == p->edge) add_separator(p, dim, "...");
        values = add_rows(p, dim + 1, values);
    }
    luaL_addchar(&p->buffer, '}');
    return values;
}

/* "float32 tensor {2, 3}": the shape as a script writes it. */
static void add_heading(printer *p)
{
    char size[24];
    luaL_addstring(&p->buffer, te_dtype_name(p->t->dtype));
    luaL_addstring(&p->buffer, " tensor {");
    for (int i = 0; i < p->t->ndim; i++) {
        snprintf(size, sizeof size, "%s%lld", i ? ", " : "", (long long)p->t->shape[i]);
        luaL_addstring(&p->buffer, size);
    }
    luaL_addchar(&p->buffer, '}');
}

/* ", stored as float8_e4m3 with float32 factors of 1 x 128". */
static void add_storage(lua_State *L, printer *p, const te_quantizer *q)
{
    lua_pushfstring(L, ", stored as %s with ", te_element_names[q->element]);
    luaL_addvalue(&p->buffer);
    if (q->block_rows > 0)
        lua_pushfstring(L, "%s factors of %d x %d", te_scale_names[q->scale], q->block_rows, q->block_cols);
    else
        lua_pushliteral(L, "one factor");
    luaL_addvalue(&p->buffer);
}

int te_lua_tensor_tostring(lua_State *L)
{
    te_lua        *rt = te_lua_runtime(L);
    te_lua_tensor *u = te_lua_to_tensor(L, 1);
    if (!u || !u->t) {
        lua_pushliteral(L, "released tensor");
        return 1;
    }
    te_lua_enter(rt, L, "tostring");
    te_lua_tensors held = te_lua_new_tensors(L, 1);
    te_tensor     *t = te_lua_check_tensor(L, 1, "tostring", "self");
    te_quantizer   quantizer = {.block_rows = 0};
    bool           stored = te_tensor_is_quantized(t);
    if (stored) quantizer = t->storage->quantized->copies.quantizer;
    te_lua_call call = te_lua_begin(rt, L);
    te_tensor_retain(t);
    held.t[0] = te_tensor_dequantized(t);
    te_tensor_release(t);
    te_lua_end(rt, call);
    t = held.t[0];
    if (!t) return te_lua_raise(rt, L, "tostring", rt->ctx->status);
    printer p = {.t = t, .elided = te_tensor_numel(t) > SHOWN_WHOLE, .edge = t->ndim <= 3 ? 3 : t->ndim <= 5 ? 2 : 1};
    int64_t    shown = 1;
    for (int i = 0; i < t->ndim; i++) shown *= dim_shown(&p, i);
    p.values = te_lua_scratch(L, (size_t)(shown ? shown : 1) * sizeof *p.values);
    call = te_lua_begin(rt, L);
    te_status status = shown ? collect(&p, t, 0, t->offset) : TE_OK;
    te_lua_end(rt, call);
    if (status != TE_OK) return te_lua_raise(rt, L, "tostring", status);
    choose_format(&p);
    luaL_buffinit(L, &p.buffer);
    add_heading(&p);
    if (strcmp(te_tensor_device(t), "cpu") != 0) {
        lua_pushfstring(L, " on %s", te_tensor_device(t));
        luaL_addvalue(&p.buffer);
    }
    if (stored) add_storage(L, &p, &quantizer);
    if (shown) {
        luaL_addchar(&p.buffer, '\n');
        add_rows(&p, 0, p.values);
    }
    luaL_pushresult(&p.buffer);
    te_lua_drop_tensors(&held);
    return 1;
}

/* create.c - making tensors: from Lua values, filled, counted and drawn; create_file.c makes them from files.
 *
 * Shapes are tables or numbers in a row; the options dtype, device and requires_grad come last. Whole numbers that a
 * program's floating point might not hold are counted on the host, and drawn by a kernel of their own.
 */
#include "create.h"

#include <math.h>

static const char *const creation_options[] = {"dtype", "device", "requires_grad", NULL};

te_lua_creation te_lua_read_creation(te_lua *rt, lua_State *L, int index, const char *function, te_dtype dtype,
                                     const char *const *known)
{
    te_lua_creation c = {.function = function, .dtype = dtype};
    const char *device = rt->device;
    char        text[256];
    te_lua_enter(rt, L, function);
    te_lua_check_count(L, index, function);
    if (!lua_isnoneornil(L, index)) {
        te_lua_check_options(L, index, function, known);
        lua_getfield(L, index, "dtype");
        if (!lua_isnil(L, -1)) c.dtype = te_lua_check_dtype(L, -1, function, "dtype");
        lua_getfield(L, index, "requires_grad");
        if (!lua_isnil(L, -1) && !lua_isboolean(L, -1))
            te_lua_fail(L, function, "requires_grad: expected true or false, got %s",
                        te_lua_describe(L, -1, text, sizeof text));
        c.requires_grad = lua_toboolean(L, -1);
        lua_getfield(L, index, "device");
        if (!lua_isnil(L, -1)) {
            device = te_lua_check_text(L, -1, function, "device");
        }
        lua_pop(L, 3);
    }
    c.device = te_context_device(rt->ctx, device);
    if (!c.device) te_lua_raise(rt, L, function, rt->ctx->status);
    return c;
}

static te_lua_creation read_creation(te_lua *rt, lua_State *L, int index, const char *function, te_dtype dtype)
{
    return te_lua_read_creation(rt, L, index, function, dtype, creation_options);
}

/* The shape at `index` and the options behind it. */
static te_lua_creation read_shape(te_lua *rt, lua_State *L, int index, const char *function, te_dtype dtype, int *ndim,
                                  int64_t *shape)
{
    int taken = te_lua_check_shape(L, index, function, "shape", ndim, shape);
    return read_creation(rt, L, index + taken, function, dtype);
}

te_tensor *te_lua_push_created(te_lua *rt, lua_State *L, const te_lua_creation *c, int ndim, const int64_t *shape)
{
    te_lua_tensor *u = te_lua_new_tensor(L);
    te_lua_call call = te_lua_begin(rt, L);
    u->t = te_tensor_new(rt->ctx, c->device, c->dtype, ndim, shape);
    te_lua_end(rt, call);
    if (!u->t) te_lua_raise(rt, L, c->function, rt->ctx->status);
    return u->t;
}

static te_status fill(te_lua *rt, lua_State *L, te_tensor *t, double value)
{
    te_lua_call call = te_lua_begin(rt, L);
    te_status   status = te_tensor_fill(t, value);
    te_lua_end(rt, call);
    return status;
}

/* Has the operation called `name` write into the tensor that is args[0]. */
static te_status write_with(te_lua *rt, lua_State *L, const char *name, const te_arg *args, int n)
{
    te_lua_call  call = te_lua_begin(rt, L);
    const te_op *op = te_op_find(rt->ctx, name);
    te_status    status = op ? te_op_run_inplace(rt->ctx, op, args, n) : rt->ctx->status;
    te_lua_end(rt, call);
    return status;
}

/* What fills a tensor is an operation of another name, such as te.fill for te.ones. */
static int raise_filling(te_lua *rt, lua_State *L, const te_lua_creation *c, te_status status)
{
    const char *message = te_context_error(rt->ctx), *rest = strchr(message, ':');
    if (strncmp(message, "te.", 3) == 0 && rest) status = te_fail(rt->ctx, status, "te.%s%s", c->function, rest);
    return te_lua_raise(rt, L, c->function, status);
}

int te_lua_finish_created(te_lua *rt, lua_State *L, const te_lua_creation *c, te_status status)
{
    te_tensor *t = te_lua_to_tensor(L, -1)->t;
    te_lua_call call = te_lua_begin(rt, L);
    if (status == TE_OK && c->requires_grad) status = te_tensor_set_requires_grad(t, true);
    te_lua_end(rt, call);
    if (status != TE_OK) return raise_filling(rt, L, c, status);
    te_lua_charge(rt, L);
    return 1;
}

/* Host memory for the elements of a tensor to come, contiguous: a tensor itself, so that limits count it and the
 * userdata on the stack frees it. Raises when the shape is impossible. */
static void *push_buffer(te_lua *rt, lua_State *L, const char *function, te_dtype dtype, int ndim, const int64_t *shape,
                         int64_t *numel)
{
    te_lua_tensor *u = te_lua_new_tensor(L);
    te_lua_call call = te_lua_begin(rt, L);
    u->t = te_tensor_empty(rt->ctx, dtype, ndim, shape);
    te_lua_end(rt, call);
    if (!u->t) te_lua_raise(rt, L, function, rt->ctx->status);
    *numel = te_tensor_numel(u->t);
    return te_tensor_data(u->t);
}

/* The tensor that a buffer was filled for, and the buffer given back, unless it is that already. */
static int finish_buffer(te_lua *rt, lua_State *L, const te_lua_creation *c)
{
    te_tensor *buffer = te_lua_to_tensor(L, -1)->t;
    if (buffer->dtype == c->dtype && buffer->storage->device == c->device)
        return te_lua_finish_created(rt, L, c, TE_OK);
    te_tensor *t = te_lua_push_created(rt, L, c, buffer->ndim, buffer->shape);
    te_lua_call call = te_lua_begin(rt, L);
    te_status   status = TE_OK;
    if (te_tensor_numel(t))
        status = buffer->storage->device == c->device ? te_tensor_copy_data(t, buffer)
                                                      : te_tensor_write(t, buffer->dtype, te_tensor_data(buffer));
    te_lua_end(rt, call);
    te_lua_to_tensor(L, -2)->t = NULL;
    te_tensor_release(buffer);
    return te_lua_finish_created(rt, L, c, status);
}

/* --- filled ------------------------------------------------------------------------------------------------------- */

static int filled(lua_State *L, const char *function, const double *value)
{
    te_lua    *rt = te_lua_runtime(L);
    int        ndim;
    int64_t    shape[TE_MAX_DIMS];
    te_lua_creation c = read_shape(rt, L, 1, function, TE_F32, &ndim, shape);
    te_tensor *t = te_lua_push_created(rt, L, &c, ndim, shape);
    return te_lua_finish_created(rt, L, &c, value ? fill(rt, L, t, *value) : TE_OK);
}

static int create_empty(lua_State *L) { return filled(L, "empty", NULL); }
static int create_zeros(lua_State *L) { return filled(L, "zeros", &(double){0}); }
static int create_ones(lua_State *L) { return filled(L, "ones", &(double){1}); }

static int create_full(lua_State *L)
{
    te_lua  *rt = te_lua_runtime(L);
    int64_t  shape[TE_MAX_DIMS];
    int      ndim = te_lua_check_ints(L, 1, "full", "shape", shape);
    bool     truth = lua_isboolean(L, 2); /* as te.tensor(true) is of bool */
    double   value = truth ? lua_toboolean(L, 2) : te_lua_check_number(L, 2, "full", "value");
    te_lua_creation c = read_creation(rt, L, 3, "full", truth ? TE_BOOL : TE_F32);
    return te_lua_finish_created(rt, L, &c, fill(rt, L, te_lua_push_created(rt, L, &c, ndim, shape), value));
}

/* As argument 1, of which the options at `index` say what is different. The shape is a copy: what is made next may cost
 * the tensor. */
static te_lua_creation read_like(te_lua *rt, lua_State *L, int index, const char *function, int *ndim, int64_t *shape)
{
    te_lua_creation c = read_creation(rt, L, index, function, te_lua_check_tensor(L, 1, function, "x")->dtype);
    bool     elsewhere = false;
    if (lua_istable(L, index)) {
        lua_getfield(L, index, "device");
        elsewhere = !lua_isnil(L, -1);
        lua_pop(L, 1);
    }
    const te_tensor *x = te_lua_check_tensor(L, 1, function, "x"); /* options may be a table that runs code */
    if (!elsewhere) c.device = x->storage->device;
    *ndim = x->ndim;
    memcpy(shape, x->shape, sizeof x->shape);
    return c;
}

static int filled_like(lua_State *L, const char *function, int options, const double *value)
{
    te_lua    *rt = te_lua_runtime(L);
    int        ndim;
    int64_t    shape[TE_MAX_DIMS];
    te_lua_creation   c = read_like(rt, L, options, function, &ndim, shape);
    te_tensor *t = te_lua_push_created(rt, L, &c, ndim, shape);
    return te_lua_finish_created(rt, L, &c, value ? fill(rt, L, t, *value) : TE_OK);
}

static int create_empty_like(lua_State *L) { return filled_like(L, "empty_like", 2, NULL); }
static int create_zeros_like(lua_State *L) { return filled_like(L, "zeros_like", 2, &(double){0}); }
static int create_ones_like(lua_State *L) { return filled_like(L, "ones_like", 2, &(double){1}); }
static int create_full_like(lua_State *L)
{
    double value = te_lua_check_number(L, 2, "full_like", "value");
    return filled_like(L, "full_like", 3, &value);
}

static int create_eye(lua_State *L)
{
    te_lua  *rt = te_lua_runtime(L);
    int64_t  n = te_lua_check_int(L, 1, "eye", "n"), numel;
    te_lua_creation c = read_creation(rt, L, 2, "eye", TE_F32);
    if (n < 0) return te_lua_fail(L, "eye", "n: negative size %lld", (long long)n);
    float *values = push_buffer(rt, L, "eye", TE_F32, 2, (int64_t[]){n, n}, &numel);
    if (numel) memset(values, 0, (size_t)numel * sizeof *values);
    for (int64_t i = 0; i < n; i++) values[i * n + i] = 1;
    return finish_buffer(rt, L, &c);
}

/* Whole numbers that float32 holds: a program counts them, so that the host brings a device nothing. */
static int counted(te_lua *rt, lua_State *L, const te_lua_creation *c, int64_t n, double first, double step)
{
    te_tensor *t = te_lua_push_created(rt, L, c, 1, &n);
    te_arg     args[] = {{.kind = TE_ARG_TENSOR, .as.tensor = t}, {.kind = TE_ARG_NUMBER, .as.number = first},
                         {.kind = TE_ARG_NUMBER, .as.number = step}};
    return te_lua_finish_created(rt, L, c, write_with(rt, L, "sequence", args, 3));
}

/* Whole numbers below 2^53 where the host may write them. */
static int counted_here(te_lua *rt, lua_State *L, const te_lua_creation *c, int64_t n, int64_t first, int64_t step)
{
    int64_t *values = te_tensor_data(te_lua_push_created(rt, L, c, 1, &n));
    for (int64_t i = 0; i < n; i++) values[i] = first + i * step;
    return te_lua_finish_created(rt, L, c, TE_OK);
}

/* first, first + step, … up to last, which is included when it is hit. */
static int create_arange(lua_State *L)
{
    te_lua  *rt = te_lua_runtime(L);
    int      options = 2;
    double   first = te_lua_check_number(L, 1, "arange", "first"), last = first, step = 1;
    int64_t  numel;
    bool     alone = lua_isnoneornil(L, 2) || lua_istable(L, 2);
    if (alone) {
        first = 1;
    } else {
        last = te_lua_check_number(L, 2, "arange", "last");
        options = 3;
        if (lua_type(L, 3) == LUA_TNUMBER || (lua_isnil(L, 3) && !lua_isnoneornil(L, 4))) options = 4;
        if (lua_type(L, 3) == LUA_TNUMBER) step = lua_tonumber(L, 3);
    }
    if (!isfinite(first) || !isfinite(last) || !isfinite(step) || step == 0)
        return te_lua_fail(L, "arange", "from %g to %g by %g is no range", first, last, step);
    bool     whole = first == floor(first) && step == floor(step);
    te_lua_creation c = read_creation(rt, L, options, "arange", whole ? TE_I64 : TE_F32);
    double   count = floor((last - first) / step * (1 + 0x1p-50)) + 1; /* 0.1 to 0.3 by 0.1 has three */
    if (count >= 0x1p53) return te_lua_fail(L, "arange", "from %g to %g by %g are too many values", first, last, step);
    int64_t  n = count > 0 ? (int64_t)count : 0;
    double   largest = fmax(fabs(first), fabs(first + (double)n * step));
    bool     here = c.device->exec.backend->host_memory;
    if (whole && n > 0 && largest < 0x1p24 && (!here || c.dtype == TE_F32)) return counted(rt, L, &c, n, first, step);
    if (whole && n > 0 && largest < 0x1p53 && here && c.dtype == TE_I64)
        return counted_here(rt, L, &c, n, (int64_t)first, (int64_t)step);
    double  *values = push_buffer(rt, L, "arange", TE_F64, 1, &n, &numel);
    for (int64_t i = 0; i < n; i++) values[i] = first + (double)i * step;
    return finish_buffer(rt, L, &c);
}

/* --- from Lua values ---------------------------------------------------------------------------------------------- */

typedef struct nested {
    lua_State *L;
    int        ndim;
    int64_t    shape[TE_MAX_DIMS], at[TE_MAX_DIMS]; /* at: where it reads */
    bool       booleans;
    double    *values;
} nested;

/* Follows first elements downwards: the shape, if the table is regular. Leaves them on the stack. */
static void measure_nested(nested *v, int index)
{
    lua_State *L = v->L;
    lua_pushvalue(L, index);
    while (lua_type(L, -1) == LUA_TTABLE) {
        if (v->ndim == TE_MAX_DIMS) te_lua_fail(L, "tensor", "tables nested more than %d deep", TE_MAX_DIMS);
        size_t n = te_lua_check_list(L, -1, "tensor", "value");
        v->shape[v->ndim++] = (int64_t)n;
        if (n == 0) break;
        lua_rawgeti(L, -1, 1);
    }
    v->booleans = lua_type(L, -1) == LUA_TBOOLEAN;
}

static int bad_value(nested *v, int depth)
{
    char text[256], place[TE_MAX_DIMS * 24 + 8] = "value";
    size_t used = strlen(place);
    te_lua_describe(v->L, -1, text, sizeof text);
    for (int d = 0; d < depth; d++)
        used += (size_t)snprintf(place + used, sizeof place - used, "[%lld]", (long long)v->at[d]);
    if (depth < v->ndim)
        return te_lua_fail(v->L, "tensor", "%s: expected a table of %lld entries, got %s", place,
                           (long long)v->shape[depth], text);
    return te_lua_fail(v->L, "tensor", "%s: expected %s, got %s", place, v->booleans ? "true or false" : "a number",
                       text);
}

/* Reads the value on top, `depth` levels down. */
static void fill_nested(nested *v, int depth)
{
    lua_State *L = v->L;
    if (depth == v->ndim) {
        if (lua_type(L, -1) != (v->booleans ? LUA_TBOOLEAN : LUA_TNUMBER)) bad_value(v, depth);
        *v->values++ = v->booleans ? lua_toboolean(L, -1) : lua_tonumber(L, -1);
        return;
    }
    if (lua_type(L, -1) != LUA_TTABLE) bad_value(v, depth);
    int64_t n = (int64_t)te_lua_check_list(L, -1, "tensor", "value");
    if (n != v->shape[depth])
        te_lua_fail(L, "tensor", "rows of different length: %lld and %lld entries at depth %d",
                    (long long)v->shape[depth], (long long)n, depth + 1);
    for (int64_t i = 1; i <= n; i++) {
        lua_rawgeti(L, -1, (int)i);
        v->at[depth] = i;
        fill_nested(v, depth + 1);
        lua_pop(L, 1);
    }
}

/* A copy of another tensor, without history. */
static int copy_tensor(te_lua *rt, lua_State *L)
{
    te_lua_creation       c = read_creation(rt, L, 2, "tensor", te_lua_check_tensor(L, 1, "tensor", "value")->dtype);
    te_lua_tensor *u = te_lua_new_tensor(L);
    te_tensor     *source = te_tensor_retain(te_lua_check_tensor(L, 1, "tensor", "value"));
    te_lua_call call = te_lua_begin(rt, L);
    u->t = te_tensor_new(rt->ctx, c.device, c.dtype, source->ndim, source->shape);
    te_status status = u->t ? te_tensor_copy_data(u->t, source) : rt->ctx->status;
    te_lua_end(rt, call);
    te_tensor_release(source);
    return te_lua_finish_created(rt, L, &c, status);
}

static int create_tensor(lua_State *L)
{
    te_lua *rt = te_lua_runtime(L);
    char    text[256];
    if (te_lua_to_tensor(L, 1)) return copy_tensor(rt, L);
    int type = lua_type(L, 1);
    if (type != LUA_TTABLE && type != LUA_TNUMBER && type != LUA_TBOOLEAN)
        return te_lua_fail(L, "tensor", "value: expected a number or a nested table, got %s",
                           te_lua_describe(L, 1, text, sizeof text));
    if (type == LUA_TTABLE && te_lua_is_options(L, 1, false))
        return te_lua_fail(L, "tensor", "value: expected a number or a nested table, got a table with names");
    int top = lua_gettop(L);
    nested v = {.L = L};
    luaL_checkstack(L, 2 * TE_MAX_DIMS + 8, "te.tensor");
    measure_nested(&v, 1);
    lua_settop(L, top);
    te_lua_creation c = read_creation(rt, L, 2, "tensor", v.booleans ? TE_BOOL : TE_F32);
    int64_t  numel;
    v.values = push_buffer(rt, L, "tensor", TE_F64, v.ndim, v.shape, &numel);
    lua_pushvalue(L, 1);
    fill_nested(&v, 0);
    lua_pop(L, 1);
    return finish_buffer(rt, L, &c);
}

/* --- random ------------------------------------------------------------------------------------------------------- */

static int drawn(te_lua *rt, lua_State *L, te_lua_creation c, int ndim, const int64_t *shape, const char *op_name)
{
    if (!te_dtype_is_float(c.dtype))
        return te_lua_fail(L, c.function, "dtype: %s holds no such numbers; te.randint draws whole ones",
                           te_dtype_name(c.dtype));
    te_tensor *t = te_lua_push_created(rt, L, &c, ndim, shape);
    te_arg     self = {.kind = TE_ARG_TENSOR, .as.tensor = t};
    return te_lua_finish_created(rt, L, &c, write_with(rt, L, op_name, &self, 1));
}

static int drawn_shape(lua_State *L, const char *function, const char *op_name)
{
    te_lua  *rt = te_lua_runtime(L);
    int      ndim;
    int64_t  shape[TE_MAX_DIMS];
    te_lua_creation c = read_shape(rt, L, 1, function, TE_F32, &ndim, shape);
    return drawn(rt, L, c, ndim, shape, op_name);
}

static int drawn_like(lua_State *L, const char *function, const char *op_name)
{
    te_lua  *rt = te_lua_runtime(L);
    int      ndim;
    int64_t  shape[TE_MAX_DIMS];
    te_lua_creation c = read_like(rt, L, 2, function, &ndim, shape);
    return drawn(rt, L, c, ndim, shape, op_name);
}

static int create_rand(lua_State *L) { return drawn_shape(L, "rand", "uniform"); }
static int create_randn(lua_State *L) { return drawn_shape(L, "randn", "normal"); }
static int create_rand_like(lua_State *L) { return drawn_like(L, "rand_like", "uniform"); }
static int create_randn_like(lua_State *L) { return drawn_like(L, "randn_like", "normal"); }

/* Whether a dtype of whole numbers holds all from low to high. */
static bool holds(te_dtype dtype, int64_t low, int64_t high)
{
    switch (dtype) {
    case TE_BOOL: return low >= 0 && high <= 1;
    case TE_U8: return low >= 0 && high <= UINT8_MAX;
    case TE_I32: return low >= INT32_MIN && high <= INT32_MAX;
    default: return true;
    }
}

/* Whole numbers from low to high, both included. */
static int create_randint(lua_State *L)
{
    te_lua  *rt = te_lua_runtime(L);
    int      ndim;
    int64_t  shape[TE_MAX_DIMS];
    int64_t  low = te_lua_check_int(L, 1, "randint", "low"), high = te_lua_check_int(L, 2, "randint", "high");
    te_lua_creation c = read_shape(rt, L, 3, "randint", TE_I64, &ndim, shape);
    if (high < low)
        return te_lua_fail(L, "randint", "no whole number from %lld to %lld", (long long)low, (long long)high);
    if (!holds(c.dtype, low, high))
        return te_lua_fail(L, "randint", "dtype: %s does not hold all numbers from %lld to %lld",
                           te_dtype_name(c.dtype), (long long)low, (long long)high);
    te_exec        *exec = &c.device->exec;
    te_lua_creation made = c;
    if (exec->backend->host_memory || te_dtype_is_float(c.dtype)) made.dtype = TE_I64;
    te_tensor  *t = te_lua_push_created(rt, L, &made, ndim, shape);
    int64_t     numel = te_tensor_numel(t);
    te_integers drawn = {te_context_draw(rt->ctx, 2 * (uint64_t)numel), low, (uint64_t)(high - low) + 1};
    te_lua_call call = te_lua_begin(rt, L);
    te_status   status = exec->backend->integers(exec, te_tensor_pointer(t), made.dtype, numel, &drawn);
    te_lua_end(rt, call);
    if (status != TE_OK) return te_lua_raise(rt, L, "randint", te_fail_exec(rt->ctx, status, exec, "randint"));
    return finish_buffer(rt, L, &c);
}

const luaL_Reg te_lua_create_functions[] = {
    {"tensor", create_tensor},   {"empty", create_empty}, {"zeros", create_zeros}, {"ones", create_ones},
    {"full", create_full},       {"eye", create_eye},     {"arange", create_arange}, {"rand", create_rand},
    {"randn", create_randn},     {"randint", create_randint},
    {"empty_like", create_empty_like}, {"zeros_like", create_zeros_like}, {"ones_like", create_ones_like},
    {"full_like", create_full_like}, {"rand_like", create_rand_like}, {"randn_like", create_randn_like}, {NULL, NULL},
};

/* create.c - making tensors: from Lua values, filled, counted, drawn and from files.
 *
 * Shapes are tables or numbers in a row; the options dtype, device and requires_grad come last. Whole numbers are
 * computed on the host, since programs compute in floating point.
 */
#include "bindings.h"

#include <math.h>

static const char *const creation_options[] = {"dtype", "device", "requires_grad", NULL};

/* What the options of a new tensor say. */
typedef struct creation {
    const char *function;
    te_dtype    dtype;
    te_device  *device;
    bool        requires_grad;
} creation;

/* What the options at `index`, the last argument, say; `known` are the names that it may hold. */
static creation read_options(te_lua *rt, lua_State *L, int index, const char *function, te_dtype dtype,
                             const char *const *known)
{
    creation    c = {.function = function, .dtype = dtype};
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

static creation read_creation(te_lua *rt, lua_State *L, int index, const char *function, te_dtype dtype)
{
    return read_options(rt, L, index, function, dtype, creation_options);
}

/* The shape at `index` and the options behind it. */
static creation read_shape(te_lua *rt, lua_State *L, int index, const char *function, te_dtype dtype, int *ndim,
                           int64_t *shape)
{
    int taken = te_lua_check_shape(L, index, function, "shape", ndim, shape);
    return read_creation(rt, L, index + taken, function, dtype);
}

/* Pushes an uninitialised tensor. */
static te_tensor *push_empty(te_lua *rt, lua_State *L, const creation *c, int ndim, const int64_t *shape)
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

/* Last step of every function here: the tensor is on top. */
static int finish(te_lua *rt, lua_State *L, const creation *c, te_status status)
{
    te_tensor *t = te_lua_to_tensor(L, -1)->t;
    te_lua_call call = te_lua_begin(rt, L);
    if (status == TE_OK && c->requires_grad) status = te_tensor_set_requires_grad(t, true);
    te_lua_end(rt, call);
    if (status != TE_OK) return te_lua_raise(rt, L, c->function, status);
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
static int finish_buffer(te_lua *rt, lua_State *L, const creation *c)
{
    te_tensor *buffer = te_lua_to_tensor(L, -1)->t;
    if (buffer->dtype == c->dtype && buffer->storage->device == c->device) return finish(rt, L, c, TE_OK);
    te_tensor *t = push_empty(rt, L, c, buffer->ndim, buffer->shape);
    te_lua_call call = te_lua_begin(rt, L);
    te_status  status = te_tensor_numel(t) ? te_tensor_write(t, buffer->dtype, te_tensor_data(buffer)) : TE_OK;
    te_lua_end(rt, call);
    te_lua_to_tensor(L, -2)->t = NULL;
    te_tensor_release(buffer);
    return finish(rt, L, c, status);
}

/* --- filled ------------------------------------------------------------------------------------------------------- */

static int filled(lua_State *L, const char *function, const double *value)
{
    te_lua    *rt = te_lua_runtime(L);
    int        ndim;
    int64_t    shape[TE_MAX_DIMS];
    creation   c = read_shape(rt, L, 1, function, TE_F32, &ndim, shape);
    te_tensor *t = push_empty(rt, L, &c, ndim, shape);
    return finish(rt, L, &c, value ? fill(rt, L, t, *value) : TE_OK);
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
    creation c = read_creation(rt, L, 3, "full", truth ? TE_BOOL : TE_F32);
    return finish(rt, L, &c, fill(rt, L, push_empty(rt, L, &c, ndim, shape), value));
}

/* As argument 1, of which the options at `index` say what is different. The shape is a copy: what is made next may cost
 * the tensor. */
static creation read_like(te_lua *rt, lua_State *L, int index, const char *function, int *ndim, int64_t *shape)
{
    creation c = read_creation(rt, L, index, function, te_lua_check_tensor(L, 1, function, "x")->dtype);
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
    creation   c = read_like(rt, L, options, function, &ndim, shape);
    te_tensor *t = push_empty(rt, L, &c, ndim, shape);
    return finish(rt, L, &c, value ? fill(rt, L, t, *value) : TE_OK);
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
    creation c = read_creation(rt, L, 2, "eye", TE_F32);
    if (n < 0) return te_lua_fail(L, "eye", "n: negative size %lld", (long long)n);
    float *values = push_buffer(rt, L, "eye", TE_F32, 2, (int64_t[]){n, n}, &numel);
    if (numel) memset(values, 0, (size_t)numel * sizeof *values);
    for (int64_t i = 0; i < n; i++) values[i * n + i] = 1;
    return finish_buffer(rt, L, &c);
}

/* Whole numbers that float32 holds: a program counts them, so that the host brings a device nothing. */
static int counted(te_lua *rt, lua_State *L, const creation *c, int64_t n, double first, double step)
{
    te_tensor *t = push_empty(rt, L, c, 1, &n);
    te_arg     args[] = {{.kind = TE_ARG_TENSOR, .as.tensor = t}, {.kind = TE_ARG_NUMBER, .as.number = first},
                         {.kind = TE_ARG_NUMBER, .as.number = step}};
    return finish(rt, L, c, write_with(rt, L, "sequence", args, 3));
}

/* Whole numbers below 2^53 where the host may write them. */
static int counted_here(te_lua *rt, lua_State *L, const creation *c, int64_t n, int64_t first, int64_t step)
{
    int64_t *values = te_tensor_data(push_empty(rt, L, c, 1, &n));
    for (int64_t i = 0; i < n; i++) values[i] = first + i * step;
    return finish(rt, L, c, TE_OK);
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
    creation c = read_creation(rt, L, options, "arange", whole ? TE_I64 : TE_F32);
    double   count = floor((last - first) / step * (1 + 0x1p-50)) + 1; /* 0.1 to 0.3 by 0.1 has three */
    int64_t  n = count > 0 ? count < 0x1p40 ? (int64_t)count : INT64_C(1) << 41 : 0;
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
    creation       c = read_creation(rt, L, 2, "tensor", te_lua_check_tensor(L, 1, "tensor", "value")->dtype);
    te_lua_tensor *u = te_lua_new_tensor(L);
    te_tensor     *source = te_tensor_retain(te_lua_check_tensor(L, 1, "tensor", "value"));
    te_lua_call call = te_lua_begin(rt, L);
    u->t = te_tensor_new(rt->ctx, c.device, c.dtype, source->ndim, source->shape);
    te_status status = u->t ? te_tensor_copy_data(u->t, source) : rt->ctx->status;
    te_lua_end(rt, call);
    te_tensor_release(source);
    return finish(rt, L, &c, status);
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
    creation c = read_creation(rt, L, 2, "tensor", v.booleans ? TE_BOOL : TE_F32);
    int64_t  numel;
    v.values = push_buffer(rt, L, "tensor", TE_F64, v.ndim, v.shape, &numel);
    lua_pushvalue(L, 1);
    fill_nested(&v, 0);
    lua_pop(L, 1);
    return finish_buffer(rt, L, &c);
}

/* --- random ------------------------------------------------------------------------------------------------------- */

static int drawn(te_lua *rt, lua_State *L, creation c, int ndim, const int64_t *shape, const char *op_name)
{
    if (!te_dtype_is_float(c.dtype))
        return te_lua_fail(L, c.function, "dtype: %s holds no such numbers; te.randint draws whole ones",
                           te_dtype_name(c.dtype));
    te_tensor *t = push_empty(rt, L, &c, ndim, shape);
    te_arg     self = {.kind = TE_ARG_TENSOR, .as.tensor = t};
    return finish(rt, L, &c, write_with(rt, L, op_name, &self, 1));
}

static int drawn_shape(lua_State *L, const char *function, const char *op_name)
{
    te_lua  *rt = te_lua_runtime(L);
    int      ndim;
    int64_t  shape[TE_MAX_DIMS];
    creation c = read_shape(rt, L, 1, function, TE_F32, &ndim, shape);
    return drawn(rt, L, c, ndim, shape, op_name);
}

static int drawn_like(lua_State *L, const char *function, const char *op_name)
{
    te_lua  *rt = te_lua_runtime(L);
    int      ndim;
    int64_t  shape[TE_MAX_DIMS];
    creation c = read_like(rt, L, 2, function, &ndim, shape);
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
    int64_t  shape[TE_MAX_DIMS], numel;
    int64_t  low = te_lua_check_int(L, 1, "randint", "low"), high = te_lua_check_int(L, 2, "randint", "high");
    creation c = read_shape(rt, L, 3, "randint", TE_I64, &ndim, shape);
    if (high < low)
        return te_lua_fail(L, "randint", "no whole number from %lld to %lld", (long long)low, (long long)high);
    if (!holds(c.dtype, low, high))
        return te_lua_fail(L, "randint", "dtype: %s does not hold all numbers from %lld to %lld",
                           te_dtype_name(c.dtype), (long long)low, (long long)high);
    int64_t *values = push_buffer(rt, L, "randint", TE_I64, ndim, shape, &numel);
    te_integers drawn = {te_context_draw(rt->ctx, 2 * (uint64_t)numel), low, (uint64_t)(high - low) + 1};
    te_exec    *host = &te_lua_to_tensor(L, -1)->t->storage->device->exec;
    te_status   status = host->backend->integers(host, values, numel, &drawn);
    if (status != TE_OK) return te_lua_raise(rt, L, "randint", te_fail_exec(rt->ctx, status, host, "randint"));
    return finish_buffer(rt, L, &c);
}

/* --- files -------------------------------------------------------------------------------------------------------- */

/* A file's bytes, mapped or in a block of memory behind this. */
typedef struct file_memory {
    te_mem mem;
    void  *mapped; /* NULL: they follow */
    size_t size;   /* of the mapping, or of the block */
} file_memory;

enum { FILE_HEADER = 64 }; /* keeps the data aligned */

static void release_file(void *user)
{
    file_memory *file = user;
    te_mem       mem = file->mem;
    if (file->mapped) te_io_posix.unmap(te_io_posix.user, file->mapped, file->size);
    te_mem_free(&mem, file, file->mapped ? FILE_HEADER : file->size);
}

/* What te.from_file is asked for. */
typedef struct file_part {
    const char *path;
    int64_t     element, offset, count; /* bytes of one, where they begin, how many: -1 for all */
    bool        map;
} file_part;

static file_part check_part(lua_State *L, te_dtype dtype)
{
    char      text[256];
    file_part p = {te_lua_check_text(L, 1, "from_file", "path"), (int64_t)te_dtype_size(dtype), 0, -1, true};
    if (!lua_istable(L, 3)) return p;
    lua_getfield(L, 3, "offset");
    if (!lua_isnil(L, -1)) p.offset = te_lua_check_int(L, -1, "from_file", "offset");
    lua_getfield(L, 3, "count");
    if (!lua_isnil(L, -1)) p.count = te_lua_check_int(L, -1, "from_file", "count");
    if (p.offset < 0 || (p.count < 0 && !lua_isnil(L, -1)))
        te_lua_fail(L, "from_file", "offset and count are not negative");
    lua_getfield(L, 3, "map");
    if (!lua_isnil(L, -1) && !lua_isboolean(L, -1))
        te_lua_fail(L, "from_file", "map: expected true or false, got %s", te_lua_describe(L, -1, text, sizeof text));
    p.map = lua_isnil(L, -1) || lua_toboolean(L, -1);
    lua_pop(L, 3);
    return p;
}

/* Maps the part, or reads it where it cannot be mapped: nothing has no pages, and elements at odd places are not
 * aligned. *data is its first byte; the owner, for the deleter, or NULL with the error on the context. */
static file_memory *open_part(te_context *ctx, const file_part *p, int fd, const char **data)
{
    te_io_error  error;
    te_mem       mem = ctx->mem;
    size_t       bytes = (size_t)(p->count * p->element), before = (size_t)(p->offset % TE_IO_PAGE);
    bool         map = p->map && bytes && p->offset % p->element == 0 && te_io_posix.map;
    size_t       size = map ? FILE_HEADER : bytes + FILE_HEADER;
    file_memory *file = te_mem_alloc(&mem, size);
    int          code = 0;
    if (!file) {
        te_fail_memory(ctx, "te.from_file");
        return NULL;
    }
    *file = (file_memory){.mem = mem, .size = map ? bytes + before : size};
    *data = (char *)file + FILE_HEADER;
    if (map &&
        (code = te_io_posix.map(te_io_posix.user, fd, file->size, p->offset - (int64_t)before, &file->mapped)) == 0)
        *data = (char *)file->mapped + before;
    else if (map)
        te_io_fail_errno(&error, code, p->path, "cannot be mapped");
    else if (te_io_read(&te_io_posix, fd, p->path, (char *)file + FILE_HEADER, bytes, p->offset, &error) != TE_OK)
        code = -1;
    if (code == 0) return file;
    te_fail(ctx, error.status, "%s", error.message);
    te_mem_free(&mem, file, size);
    return NULL;
}

static te_status check_bools(te_context *ctx, const file_part *p, const char *data)
{
    for (int64_t i = 0; i < p->count; i++)
        if (data[i] & ~1)
            return te_fail(ctx, TE_ERROR_IO, "%.400s: byte %lld is %d, which is no bool", p->path,
                           (long long)(p->offset + i), (unsigned char)data[i]);
    return TE_OK;
}

/* te.from_file(path, dtype, {offset=, count=, map = true, device=, requires_grad=}): the elements of a file, one
 * dimension. Without count they are all that follow, with no bytes left over. Mapped: a page is read when it is used
 * first, and whoever truncates the file ends the process with the next use of what is gone. map = false reads
 * everything at once. */
static int create_from_file(lua_State *L)
{
    static const char *const options[] = {"offset", "count", "map", "dtype", "device", "requires_grad", NULL};
    te_lua     *rt = te_lua_runtime(L);
    te_io_error error;
    int         fd;
    int64_t     size, end;
    const char *data = NULL;
    te_lua_check_text(L, 1, "from_file", "path");
    te_dtype dtype = te_lua_check_dtype(L, 2, "from_file", "dtype");
    creation c = read_options(rt, L, 3, "from_file", dtype, options);
    if (c.dtype != dtype)
        te_lua_fail(L, "from_file", "dtype: %s and, among the options, %s", te_dtype_name(dtype),
                    te_dtype_name(c.dtype));
    file_part   p = check_part(L, dtype);
    te_lua_enter(rt, L, "from_file");
    te_lua_tensor *result = te_lua_new_tensor(L);
    if (te_io_open_read(&te_io_posix, p.path, &fd, &size, &error) != TE_OK)
        return te_lua_raise_io(rt, L, "from_file", &error);
    bool whole = p.count >= 0 || size <= p.offset || (size - p.offset) % p.element == 0;
    if (p.count < 0) p.count = size > p.offset ? (size - p.offset) / p.element : 0;
    bool fits = !__builtin_mul_overflow(p.count, p.element, &end) && !__builtin_add_overflow(end, p.offset, &end) &&
                end <= size;
    file_memory *file = fits && whole ? open_part(rt->ctx, &p, fd, &data) : NULL;
    te_status    status = file ? TE_OK : rt->ctx->status;
    if (!fits)
        status =
            te_fail(rt->ctx, TE_ERROR_ARGUMENT, "%.400s: %lld bytes long; %lld elements of %s at byte %lld do not fit",
                    p.path, (long long)size, (long long)p.count, te_dtype_name(dtype), (long long)p.offset);
    else if (!whole)
        status = te_fail(rt->ctx, TE_ERROR_ARGUMENT, "%.400s: %lld bytes from byte %lld on are no whole number of %s",
                         p.path, (long long)(size - p.offset), (long long)p.offset, te_dtype_name(dtype));
    te_io_posix.close(te_io_posix.user, fd);
    if (file && dtype == TE_BOOL) status = check_bools(rt->ctx, &p, data);
    if (file && status != TE_OK) {
        release_file(file);
    } else if (file) {
        te_lua_call call = te_lua_begin(rt, L);
        result->t = te_tensor_from_data(rt->ctx, (void *)data, dtype, 1, &p.count, release_file, file);
        te_lua_end(rt, call);
        if (result->t) result->t->storage->read_only = TE_OF_FILE;
        else release_file(file);
        if (!result->t) status = rt->ctx->status;
    }
    if (status == TE_OK && !c.device->exec.backend->host_memory) {
        te_tensor  *there = push_empty(rt, L, &c, 1, &p.count);
        te_lua_call call = te_lua_begin(rt, L);
        status = te_tensor_copy_data(there, result->t);
        te_lua_end(rt, call);
    }
    return finish(rt, L, &c, status);
}

const luaL_Reg te_lua_create_functions[] = {
    {"tensor", create_tensor},   {"empty", create_empty}, {"zeros", create_zeros}, {"ones", create_ones},
    {"full", create_full},       {"eye", create_eye},     {"arange", create_arange}, {"rand", create_rand},
    {"randn", create_randn},     {"randint", create_randint},
    {"empty_like", create_empty_like}, {"zeros_like", create_zeros_like}, {"ones_like", create_ones_like},
    {"full_like", create_full_like}, {"rand_like", create_rand_like}, {"randn_like", create_randn_like}, {NULL, NULL},
};

const luaL_Reg te_lua_create_file_functions[] = {{"from_file", create_from_file}, {NULL, NULL}};

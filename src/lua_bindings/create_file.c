/* create_file.c - te.from_file: the elements of a file as a tensor, mapped or read. */
#include "create.h"

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
    bool      counted = false;
    file_part p = {te_lua_check_text(L, 1, "from_file", "path"), (int64_t)te_dtype_size(dtype), 0, -1, true};
    if (!lua_istable(L, 3)) return p;
    lua_getfield(L, 3, "offset");
    if (!lua_isnil(L, -1)) p.offset = te_lua_check_int(L, -1, "from_file", "offset");
    lua_getfield(L, 3, "count");
    if ((counted = !lua_isnil(L, -1))) p.count = te_lua_check_int(L, -1, "from_file", "count");
    if (p.offset < 0) te_lua_fail(L, "from_file", "offset: %lld is negative", (long long)p.offset);
    if (counted && p.count < 0) te_lua_fail(L, "from_file", "count: %lld is negative", (long long)p.count);
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
    te_lua_creation c = te_lua_read_creation(rt, L, 3, "from_file", dtype, options);
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
        te_tensor  *there = te_lua_push_created(rt, L, &c, 1, &p.count);
        te_lua_call call = te_lua_begin(rt, L);
        status = te_tensor_copy_data(there, result->t);
        te_lua_end(rt, call);
    }
    return te_lua_finish_created(rt, L, &c, status);
}

const luaL_Reg te_lua_create_file_functions[] = {{"from_file", create_from_file}, {NULL, NULL}};

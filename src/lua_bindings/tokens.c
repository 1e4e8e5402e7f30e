/* tokens.c - token streams and loaders of batches for te.data. Not there in restricted runtimes.
 *
 *     local text = te._core.encode_text(text, points)            a stream in memory; points nil: bytes
 *     local ids = te._core.token_stream({ 1, 2 }, "f", "ids")    of a list or a tensor; f and ids are for messages
 *     te._core.token_stream_write(path, ids, "uint16")           a shard
 *     local loader = te._core.tokens_open { tokens = text, batch = 12, block = 64, seed = 1 }
 *     local x, y = loader:next()                                 int32 {12, 64}; y is x one token later
 */
#include "bindings.h"

#include "core/tokens.h"

#include <math.h>

enum { DATA_STREAM = 1 }; /* keeps the draws of batches apart from those of the engine, whose stream is 0 */

static const char loader_tag[] = "te.TokenLoader";

/* Both keep the context: its memory hook frees them. */
typedef struct token_stream {
    te_lua_owner     owner;
    te_token_stream *stream;
} token_stream;

typedef struct token_loader {
    const void *tag;
    te_context *ctx;
    te_tokens  *tokens; /* NULL: closed */
    int64_t     n_tokens, batch, block;
    te_dtype    dtype;
} token_loader;

/* --- streams ------------------------------------------------------------------------------------------------------ */

static void release_stream(void *object)
{
    token_stream *s = object;
    te_token_stream_close(s->stream);
    s->stream = NULL;
}

static const te_lua_kind stream_kind = {sizeof(token_stream), release_stream};

static int stream_len(lua_State *L)
{
    token_stream *s = te_lua_to_object(L, 1, &stream_kind, sizeof *s);
    lua_pushnumber(L, s && s->stream ? (double)te_token_stream_length(s->stream) : 0);
    return 1;
}

static void fill_stream(te_lua *rt, lua_State *L)
{
    (void)rt;
    lua_pushcfunction(L, stream_len);
    lua_setfield(L, -2, "__len");
    lua_pushliteral(L, "te.TokenStream");
    lua_setfield(L, -2, "__metatable");
}

static token_stream *push_stream(te_lua *rt, lua_State *L)
{
    return te_lua_push_owner(rt, L, &stream_kind, fill_stream);
}

/* Ids in a block of memory that the stream releases. */
typedef struct id_block {
    te_mem mem;
    size_t size;
} id_block;

enum { ID_HEADER = 64 };

static void release_ids(void *user)
{
    id_block *block = user;
    te_mem    mem = block->mem;
    te_mem_free(&mem, block, block->size);
}

static int32_t *new_ids(te_lua *rt, size_t n)
{
    size_t    size = ID_HEADER + n * sizeof(int32_t);
    id_block *block = te_mem_alloc(&rt->ctx->mem, size);
    if (!block) return NULL;
    *block = (id_block){rt->ctx->mem, size};
    return (int32_t *)(void *)((char *)block + ID_HEADER);
}

static void *ids_block(int32_t *ids) { return (char *)ids - ID_HEADER; }

static te_status adopt_ids(token_stream *s, int32_t *ids, size_t n, te_io_error *error)
{
    te_token_memory memory = {
        .tokens = ids, .type = TE_TOKEN_U32, .count = (int64_t)n, .release = release_ids, .user = ids_block(ids)};
    te_status       status = te_token_stream_from_memory(&s->stream, &s->owner.ctx->mem, &memory, error);
    if (status != TE_OK) release_ids(ids_block(ids));
    return status;
}

/* Encodes by a list of code points; the id of a character is its place in the list. */
static te_status encode_points(te_lua *rt, const char *text, size_t size, int32_t *ids, size_t *n,
                               const uint32_t *points, size_t n_points, te_io_error *error)
{
    te_text_table *table;
    te_status      status = te_text_table_new(&table, &rt->ctx->mem, points, n_points, error);
    if (status != TE_OK) return status;
    status = te_text_table_encode(table, (const unsigned char *)text, size, ids, n, error);
    te_text_table_free(table);
    return status;
}

static int encode_text(lua_State *L)
{
    te_lua     *rt = te_lua_runtime(L);
    te_io_error error;
    size_t      size, n_points = 0;
    const char *text = luaL_checklstring(L, 1, &size);
    uint32_t   *points = NULL;
    te_lua_enter(rt, L, "encode_text");
    if (!lua_isnoneornil(L, 2)) {
        luaL_checktype(L, 2, LUA_TTABLE);
        n_points = lua_objlen(L, 2);
        points = te_lua_scratch(L, (n_points + 1) * sizeof *points);
        for (size_t i = 0; i < n_points; i++) {
            lua_rawgeti(L, 2, (int)i + 1);
            points[i] = (uint32_t)te_lua_check_range(L, -1, "encode_text", "points", 0, UINT32_MAX);
            lua_pop(L, 1);
        }
    }
    token_stream *s = push_stream(rt, L);
    int32_t      *ids = new_ids(rt, size);
    size_t        n = size;
    te_status     status = TE_OK;
    if (!ids) return te_lua_raise(rt, L, "encode_text", te_fail_memory(rt->ctx, "te.encode_text"));
    if (points) {
        status = encode_points(rt, text, size, ids, &n, points, n_points, &error);
    } else {
        for (size_t i = 0; i < size; i++) ids[i] = (unsigned char)text[i];
    }
    if (status != TE_OK)
        release_ids(ids_block(ids));
    else
        status = adopt_ids(s, ids, n, &error);
    return status == TE_OK ? 1 : te_lua_raise_io(rt, L, "encode_text", &error);
}

/* text_points(text): the code points that occur, ascending; a stray byte counts as U+DC00 + byte. */
static int text_points(lua_State *L)
{
    te_lua     *rt = te_lua_runtime(L);
    te_io_error error;
    size_t      size, count;
    uint32_t   *points;
    const char *text = luaL_checklstring(L, 1, &size);
    te_lua_enter(rt, L, "text_points");
    enum { MOST_POINTS = 0x110000 + 256 };
    uint32_t *copy = te_lua_scratch(L, (size < MOST_POINTS ? size + 1 : MOST_POINTS) * sizeof *copy);
    if (te_text_points(&rt->ctx->mem, (const unsigned char *)text, size, &points, &count, &error) != TE_OK)
        return te_lua_raise_io(rt, L, "text_points", &error);
    memcpy(copy, points, count * sizeof *copy);
    te_mem_free(&rt->ctx->mem, points, count * sizeof *points);
    lua_createtable(L, (int)count, 0);
    for (size_t i = 0; i < count; i++) {
        lua_pushnumber(L, copy[i]);
        lua_rawseti(L, -2, (int)i + 1);
    }
    return 1;
}

/* --- opening ------------------------------------------------------------------------------------------------------ */

/* Pushes a stream of the list of ids at `index`. */
static token_stream *push_list(te_lua *rt, lua_State *L, int index, const char *function, const char *argument)
{
    te_io_error   error;
    size_t        n = te_lua_check_list(L, index, function, argument);
    int32_t      *staged = te_lua_scratch(L, (n + 1) * sizeof *staged);
    token_stream *s = push_stream(rt, L);
    for (size_t i = 0; i < n; i++) {
        lua_rawgeti(L, index, (int)i + 1);
        staged[i] = (int32_t)te_lua_check_range(L, -1, function, argument, 0, INT32_MAX);
        lua_pop(L, 1);
    }
    int32_t *ids = new_ids(rt, n);
    if (!ids) te_lua_raise(rt, L, function, te_fail_memory(rt->ctx, function));
    memcpy(ids, staged, n * sizeof *ids);
    if (adopt_ids(s, ids, n, &error) != TE_OK) te_lua_raise_io(rt, L, function, &error);
    return s;
}

/* token_stream(ids, function, argument): a stream of a list or of a tensor {n}; the texts are for messages. */
static int new_stream(lua_State *L)
{
    te_lua     *rt = te_lua_runtime(L);
    te_io_error error;
    const char *function = luaL_checkstring(L, 2), *argument = luaL_checkstring(L, 3);
    te_lua_enter(rt, L, function);
    if (lua_istable(L, 1)) {
        push_list(rt, L, 1, function, argument);
        return 1;
    }
    token_stream *s = push_stream(rt, L);
    te_tensor    *t = te_lua_check_tensor(L, 1, function, argument);
    size_t        n = (size_t)te_tensor_numel(t);
    int32_t      *ids = new_ids(rt, n);
    if (!ids) return te_lua_raise(rt, L, function, te_fail_memory(rt->ctx, function));
    te_lua_call call = te_lua_begin(rt, L);
    te_tensor_retain(t);
    te_status status = te_tensor_read(t, TE_I32, ids);
    te_tensor_release(t);
    te_lua_end(rt, call);
    if (status != TE_OK) {
        release_ids(ids_block(ids));
        return te_lua_raise(rt, L, function, status);
    }
    if (adopt_ids(s, ids, n, &error) != TE_OK) return te_lua_raise_io(rt, L, function, &error);
    return 1;
}

/* token_stream_write(path, stream, dtype): writes a shard of "uint16" or "uint32". */
static int write_stream(lua_State *L)
{
    static const char *const names[] = {"uint16", "uint32", NULL};
    te_lua       *rt = te_lua_runtime(L);
    te_io_error   error;
    const char   *path = te_lua_check_text(L, 1, "data.write_tokens", "path");
    token_stream *s = te_lua_to_object(L, 2, &stream_kind, sizeof *s);
    te_token_type type = luaL_checkoption(L, 3, NULL, names) == 0 ? TE_TOKEN_U16 : TE_TOKEN_U32;
    te_lua_enter(rt, L, "data.write_tokens");
    if (!s || !s->stream) return te_lua_fail(L, "data.write_tokens", "expected a stream");
    if (te_token_stream_write(s->stream, &te_io_posix, &rt->ctx->mem, path, type, &error) != TE_OK)
        return te_lua_raise_io(rt, L, "data.write_tokens", &error);
    return 0;
}

/* Pushes the stream of the options at 1: tokens (a stream or a list of ids) or paths. */
static token_stream *push_source(te_lua *rt, lua_State *L)
{
    te_io_error error;
    lua_getfield(L, 1, "tokens");
    token_stream *given = te_lua_to_object(L, -1, &stream_kind, sizeof *given);
    if (given) return given;
    if (lua_istable(L, -1)) return push_list(rt, L, lua_gettop(L), "data.open", "tokens");
    lua_getfield(L, 1, "paths");
    if (!lua_istable(L, -1))
        te_lua_fail(L, "data.open", "paths (a list of files, folders or patterns) or tokens is needed");
    int          list = lua_gettop(L);
    size_t       n = lua_objlen(L, list);
    const char **paths = te_lua_scratch(L, (n + 1) * sizeof *paths);
    token_stream *s = push_stream(rt, L);
    for (size_t i = 0; i < n; i++) { /* nothing is made from here on: a finalizer could take texts out of the list */
        lua_rawgeti(L, list, (int)i + 1);
        paths[i] = te_lua_check_text(L, -1, "data.open", "paths");
        lua_pop(L, 1);
    }
    if (te_token_stream_open(&s->stream, &te_io_posix, &rt->ctx->mem, paths, n, &error) != TE_OK)
        te_lua_raise_io(rt, L, "data.open", &error);
    return s;
}

static int64_t int_field(lua_State *L, const char *name, int64_t otherwise)
{
    lua_getfield(L, 1, name);
    int64_t value = lua_isnil(L, -1) ? otherwise : te_lua_check_int(L, -1, "data.open", name);
    lua_pop(L, 1);
    return value;
}

static te_tokens_options read_options(lua_State *L, int64_t length)
{
    te_tokens_options o = {.begin = int_field(L, "begin", 0),
                           .end = int_field(L, "end", length),
                           .batch = int_field(L, "batch", 1),
                           .block = int_field(L, "block", 1),
                           .vocab_size = int_field(L, "vocab_size", 0),
                           .dtype = TE_I32};
    lua_getfield(L, 1, "prefetch");
    if (!lua_isnil(L, -1))
        o.prefetch = (int)te_lua_check_range(L, -1, "data.open", "prefetch", 0, TE_TOKENS_MAX_PREFETCH);
    lua_pop(L, 1);
    o.rng = (te_rng){.seed = (uint64_t)int_field(L, "seed", 0), .stream = DATA_STREAM};
    lua_getfield(L, 1, "sequential");
    o.sequential = lua_toboolean(L, -1);
    lua_getfield(L, 1, "dtype");
    if (!lua_isnil(L, -1)) o.dtype = te_lua_check_dtype(L, -1, "data.open", "dtype");
    lua_pop(L, 2);
    return o;
}

/* --- loaders ------------------------------------------------------------------------------------------------------ */

static token_loader *check_loader(lua_State *L, const char *function)
{
    token_loader *l = te_lua_to_object(L, 1, loader_tag, sizeof *l);
    if (!l) te_lua_fail(L, NULL, "%s: expected a token loader", function);
    if (!l->tokens) te_lua_fail(L, NULL, "%s: the token loader is closed", function);
    return l;
}

static int loader_next(lua_State *L)
{
    te_lua         *rt = te_lua_runtime(L);
    token_loader   *l = check_loader(L, "next");
    te_tokens_batch batch;
    te_io_error     error;
    te_status       status = TE_OK;
    te_lua_enter(rt, L, "next");
    te_lua_tensor *results[2] = {te_lua_new_tensor(L), te_lua_new_tensor(L)};
    for (int i = 0; i < 2; i++) {
        te_lua_call call = te_lua_begin(rt, L);
        results[i]->t = te_tensor_empty(rt->ctx, l->dtype, 2, (int64_t[]){l->batch, l->block});
        te_lua_end(rt, call);
        if (!results[i]->t) return te_lua_raise(rt, L, "next", rt->ctx->status);
    }
    check_loader(L, "next"); /* a finalizer may have closed it by now; none runs from here on */
    if (te_tokens_next(l->tokens, &batch, &error) != TE_OK) return te_lua_raise_io(te_lua_runtime(L), L, NULL, &error);
    const void *sources[2] = {batch.x, batch.y};
    te_lua_call call = te_lua_begin(rt, L);
    for (int i = 0; i < 2 && status == TE_OK; i++) status = te_tensor_write(results[i]->t, l->dtype, sources[i]);
    te_lua_end(rt, call);
    if (status != TE_OK) return te_lua_raise(rt, L, "next", status);
    te_lua_charge(rt, L);
    return 2;
}

static int loader_seek(lua_State *L)
{
    token_loader *l = check_loader(L, "seek");
    te_io_error   error;
    int64_t       index = te_lua_check_int(L, 2, NULL, "batch number");
    if (te_tokens_seek(l->tokens, index, &error) != TE_OK) return te_lua_raise_io(te_lua_runtime(L), L, NULL, &error);
    return 0;
}

static int loader_position(lua_State *L)
{
    lua_pushnumber(L, (double)te_tokens_position(check_loader(L, "position")->tokens));
    return 1;
}

static int loader_batches(lua_State *L)
{
    lua_pushnumber(L, (double)te_tokens_batches(check_loader(L, "batches")->tokens));
    return 1;
}

static int loader_close(lua_State *L)
{
    token_loader *l = te_lua_to_object(L, 1, loader_tag, sizeof *l);
    if (!l || !l->ctx) return 0;
    te_tokens_close(l->tokens);
    te_context_unref(l->ctx);
    l->tokens = NULL;
    l->ctx = NULL;
    return 0;
}

static int loader_index(lua_State *L)
{
    token_loader *l = te_lua_to_object(L, 1, loader_tag, sizeof *l);
    if (l && lua_type(L, 2) == LUA_TSTRING && strcmp(lua_tostring(L, 2), "n_tokens") == 0) {
        lua_pushnumber(L, (double)l->n_tokens);
        return 1;
    }
    lua_settop(L, 2);
    lua_rawget(L, lua_upvalueindex(2));
    return 1;
}

static const luaL_Reg loader_methods[] = {
    {"next", loader_next},       {"seek", loader_seek},   {"position", loader_position},
    {"batches", loader_batches}, {"close", loader_close}, {NULL, NULL},
};

static token_loader *push_loader(te_lua *rt, lua_State *L)
{
    token_loader *l = lua_newuserdata(L, sizeof *l);
    *l = (token_loader){.tag = loader_tag, .ctx = rt->ctx};
    te_context_retain(rt->ctx);
    if (te_lua_push_metatable(L, loader_tag)) {
        lua_pushcfunction(L, loader_close);
        lua_setfield(L, -2, "__gc");
        te_lua_push_anchor(L);
        lua_newtable(L);
        te_lua_register(rt, L, loader_methods);
        lua_pushcclosure(L, loader_index, 2);
        lua_setfield(L, -2, "__index");
        lua_pushliteral(L, "te.TokenLoader");
        lua_setfield(L, -2, "__metatable");
        te_lua_keep_copy(L, loader_tag);
    }
    lua_setmetatable(L, -2);
    return l;
}

static int tokens_open(lua_State *L)
{
    static const char *const known[] = {"paths", "tokens",     "begin",    "end",   "batch",      "block",
                                        "seed",  "sequential", "prefetch", "dtype", "vocab_size", NULL};
    te_lua     *rt = te_lua_runtime(L);
    te_io_error error;
    luaL_checktype(L, 1, LUA_TTABLE);
    lua_settop(L, 1);
    te_lua_check_options(L, 1, "data.open", known);
    te_lua_enter(rt, L, "data.open");
    token_stream     *source = push_source(rt, L);
    int64_t           length = source->stream ? te_token_stream_length(source->stream) : 0;
    te_tokens_options o = read_options(L, length);
    token_loader     *l = push_loader(rt, L);
    l->n_tokens = length;
    l->batch = o.batch;
    l->block = o.block;
    l->dtype = o.dtype;
    if (!source->stream) return te_lua_fail(L, "data.open", "tokens: the stream is closed");
    if (te_tokens_open(&l->tokens, &te_io_posix, &rt->ctx->mem, source->stream, &o, &error) != TE_OK)
        return te_lua_raise_io(rt, L, "data.open", &error);
    return 1;
}

const luaL_Reg te_lua_token_functions[] = {
    {"encode_text", encode_text}, {"text_points", text_points},         {"tokens_open", tokens_open},
    {"token_stream", new_stream}, {"token_stream_write", write_stream}, {NULL, NULL},
};

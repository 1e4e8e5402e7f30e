/* tokenizer.c - byte-pair tokenizers as userdata, for te.tokenizer.load. Not there in restricted runtimes.
 *
 *     local t = te._core.tokenizer {
 *         tokens = { "a", "b", "ab", "<end>" }, bytes of the tokens from id 0 on
 *         merges = { 0, 1, 2 },             left, right and the token that both become, one merge after the other
 *         added = { "<end>", 3, false },    text, id, whether it is looked for after normalization
 *         steps = { "\\s+", false, false, false }, pattern and whether it is literal; false in place of a pattern: the
 *                                           space, and whether it is put at the start of the text alone
 *         opaque = { 3 },                   ids that no text leads to by merging
 *         fallback = { … },                 ids of the 256 bytes; none: pieces begin as bytes
 *         decoded = { … },                  what ids stand for, like tokens; none: those themselves
 *         whole_first = false, blanks = false, space = false, nfc = false, as in core/tokenizer.h
 *         name = "tokenizer.json",          which messages begin with
 *     }
 *     t:encode(text) → { ids }    t:decode(ids) → text    t:id(text) → id or nil
 */
#include "bindings.h"

#include "core/tokenizer.h"

typedef struct tokenizer {
    te_lua_owner  owner; /* whose context's memory hook frees the tokenizer */
    te_tokenizer *t;
} tokenizer;

/* The ids of one call. A finalizer that runs while they are handed over may encode with the same tokenizer, so they
 * are not the tokenizer's. */
typedef struct result {
    te_lua_owner owner;
    te_bpe_ids   ids;
} result;

static void release_tokenizer(void *object)
{
    tokenizer *u = object;
    te_tokenizer_free(u->t);
    u->t = NULL;
}

static void release_result(void *object) { te_bpe_ids_free(&((result *)object)->ids); }

static const te_lua_kind tokenizer_kind = {sizeof(tokenizer), release_tokenizer};
static const te_lua_kind result_kind = {sizeof(result), release_result};

/* --- options ------------------------------------------------------------------------------------------------------ */

enum { TOKENS = 2, MERGES, ADDED, STEPS, OPAQUE, FALLBACK, DECODED }; /* places of the lists on the stack */

/* Lists are read without making a value, so that the texts in them stay where they are. */
static const char *text_at(lua_State *L, int list, size_t i, size_t *size)
{
    lua_rawgeti(L, list, (int)i + 1);
    if (lua_type(L, -1) != LUA_TSTRING) te_lua_fail(L, "tokenizer", "entry %d is no text", (int)i + 1);
    const char *text = lua_tolstring(L, -1, size);
    lua_pop(L, 1);
    return text;
}

static uint32_t id_at(lua_State *L, int list, size_t i)
{
    lua_rawgeti(L, list, (int)i + 1);
    uint32_t id = (uint32_t)te_lua_check_range(L, -1, "tokenizer", "id", 0, INT32_MAX);
    lua_pop(L, 1);
    return id;
}

static bool flag_at(lua_State *L, int list, size_t i)
{
    lua_rawgeti(L, list, (int)i + 1);
    bool flag = lua_toboolean(L, -1);
    lua_pop(L, 1);
    return flag;
}

static void push_options(lua_State *L)
{
    static const char *const lists[] = {"tokens", "merges", "added", "steps", "opaque", "fallback", "decoded"};
    lua_settop(L, 1);
    luaL_checktype(L, 1, LUA_TTABLE);
    for (int i = 0; i < 7; i++) {
        lua_getfield(L, 1, lists[i]);
        bool absent = i + TOKENS >= FALLBACK && lua_isnil(L, -1);
        if (!lua_istable(L, -1) && !absent) te_lua_fail(L, "tokenizer", "%s: expected a list", lists[i]);
    }
}

static bool flag_field(lua_State *L, const char *name)
{
    lua_getfield(L, 1, name);
    bool flag = lua_toboolean(L, -1);
    lua_pop(L, 1);
    return flag;
}

/* Raises what making a tokenizer failed with, and which one. */
static int raise_named(te_lua *rt, lua_State *L, const te_io_error *error)
{
    lua_getfield(L, 1, "name");
    const char *name = lua_type(L, -1) == LUA_TSTRING ? lua_tostring(L, -1) : "a tokenizer";
    return te_lua_raise(rt, L, "tokenizer.load", te_fail(rt->ctx, error->status, "%s: %s", name, error->message));
}

/* Fills what the options point to, in scratch memory that stays on the stack. */
static te_tokenizer_options read_options(lua_State *L)
{
    te_tokenizer_options o = {.bpe = {.n_tokens = lua_objlen(L, TOKENS),
                                      .n_merges = lua_objlen(L, MERGES) / 3,
                                      .whole_first = flag_field(L, "whole_first")},
                              .n_added = lua_objlen(L, ADDED) / 3,
                              .n_steps = lua_objlen(L, STEPS) / 2,
                              .blanks = flag_field(L, "blanks"),
                              .space = flag_field(L, "space"),
                              .nfc = flag_field(L, "nfc")};
    te_bpe_token      *tokens = te_lua_scratch(L, (o.bpe.n_tokens + 1) * sizeof *tokens);
    te_bpe_merge      *merges = te_lua_scratch(L, (o.bpe.n_merges + 1) * sizeof *merges);
    te_added_token    *added = te_lua_scratch(L, (o.n_added + 1) * sizeof *added);
    te_tokenizer_step *steps = te_lua_scratch(L, (o.n_steps + 1) * sizeof *steps);
    int32_t           *fallback = te_lua_scratch(L, 256 * sizeof *fallback);
    size_t             n_decoded = lua_istable(L, DECODED) ? lua_objlen(L, DECODED) : 0;
    te_bpe_token      *decoded = te_lua_scratch(L, (n_decoded + 1) * sizeof *decoded);
    /* nothing is allocated from here on: a finalizer could take texts out of the lists */
    for (size_t i = 0; i < o.bpe.n_tokens; i++) {
        tokens[i].bytes = text_at(L, TOKENS, i, &tokens[i].size);
        tokens[i].text = true;
    }
    for (size_t i = 0, n = lua_objlen(L, OPAQUE); i < n; i++) {
        uint32_t id = id_at(L, OPAQUE, i);
        if (id < o.bpe.n_tokens) tokens[id].text = false;
    }
    for (size_t i = 0; i < o.bpe.n_merges; i++)
        merges[i] = (te_bpe_merge){id_at(L, MERGES, 3 * i), id_at(L, MERGES, 3 * i + 1), id_at(L, MERGES, 3 * i + 2)};
    for (size_t i = 0; i < o.n_added; i++) {
        added[i].bytes = text_at(L, ADDED, 3 * i, &added[i].size);
        added[i].id = (int32_t)id_at(L, ADDED, 3 * i + 1);
        added[i].normalized = flag_at(L, ADDED, 3 * i + 2);
        if (added[i].size == 0 || (size_t)added[i].id >= o.bpe.n_tokens)
            te_lua_fail(L, "tokenizer", "added token %d is empty or no token", (int)i + 1);
    }
    for (size_t i = 0; i < o.n_steps; i++) {
        steps[i] = (te_tokenizer_step){.at_start = flag_at(L, STEPS, 2 * i + 1)};
        if (!flag_at(L, STEPS, 2 * i)) continue;
        steps[i].pattern = text_at(L, STEPS, 2 * i, &steps[i].size);
        steps[i].literal = flag_at(L, STEPS, 2 * i + 1);
    }
    size_t n_fallback = lua_istable(L, FALLBACK) ? lua_objlen(L, FALLBACK) : 0;
    if (n_fallback != 0 && n_fallback != 256) te_lua_fail(L, "tokenizer", "fallback: expected 256 ids or none");
    for (size_t i = 0; i < n_fallback; i++) fallback[i] = (int32_t)id_at(L, FALLBACK, i);
    if (n_fallback) o.bpe.fallback = fallback;
    if (n_decoded != 0 && n_decoded != o.bpe.n_tokens)
        te_lua_fail(L, "tokenizer", "decoded: expected %d texts or none", (int)o.bpe.n_tokens);
    for (size_t i = 0; i < n_decoded; i++) decoded[i].bytes = text_at(L, DECODED, i, &decoded[i].size);
    if (n_decoded) o.bpe.decoded = decoded;
    o.bpe.tokens = tokens;
    o.bpe.merges = merges;
    o.added = added;
    o.steps = steps;
    return o;
}

/* --- methods ------------------------------------------------------------------------------------------------------ */

static tokenizer *check_tokenizer(lua_State *L)
{
    tokenizer *u = te_lua_to_object(L, 1, &tokenizer_kind, sizeof *u);
    if (!u || !u->t) te_lua_fail(L, "tokenizer", "expected a tokenizer");
    return u;
}

static result *push_result(te_lua *rt, lua_State *L)
{
    result *r = te_lua_push_owner(rt, L, &result_kind, NULL);
    r->ids.mem = &rt->ctx->mem;
    return r;
}

static int encode(lua_State *L)
{
    te_lua     *rt = te_lua_runtime(L);
    tokenizer  *u = check_tokenizer(L);
    te_io_error error;
    size_t      size;
    if (lua_type(L, 2) != LUA_TSTRING) te_lua_fail(L, "tokenizer", "encode: expected a text");
    const char *text = lua_tolstring(L, 2, &size);
    result     *r = push_result(rt, L);
    check_tokenizer(L); /* a finalizer may have run */
    if (te_tokenizer_encode(u->t, text, size, &r->ids, &error) != TE_OK)
        return te_lua_raise_io(rt, L, "tokenizer", &error);
    if (r->ids.n > INT32_MAX) te_lua_fail(L, "tokenizer", "a text of %.0f tokens is too long", (double)r->ids.n);
    lua_createtable(L, (int)r->ids.n, 0);
    for (size_t i = 0; i < r->ids.n; i++) {
        lua_pushnumber(L, r->ids.ids[i]);
        lua_rawseti(L, -2, (int)i + 1);
    }
    te_bpe_ids_free(&r->ids);
    return 1;
}

/* The bytes of entry i of the list at 2; raises where it is no token. */
static const char *bytes_at(lua_State *L, const tokenizer *u, size_t i, size_t *size)
{
    char shown[128];
    lua_rawgeti(L, 2, (int)i + 1);
    lua_Number  id = lua_type(L, -1) == LUA_TNUMBER ? lua_tonumber(L, -1) : -1;
    bool        whole = id >= 0 && id < INT32_MAX && id == (double)(int32_t)id;
    const char *bytes = whole ? te_bpe_bytes(te_tokenizer_bpe(u->t), (uint64_t)id, size) : NULL;
    if (!bytes)
        te_lua_fail(L, "tokenizer", "entry %d: no token is %s", (int)i + 1,
                    te_lua_describe(L, -1, shown, sizeof shown));
    lua_pop(L, 1);
    return bytes;
}

static int decode(lua_State *L)
{
    tokenizer *u = check_tokenizer(L);
    size_t     total = 0, at = 0, size;
    if (!lua_istable(L, 2)) te_lua_fail(L, "tokenizer", "decode: expected a list of ids");
    size_t n = lua_objlen(L, 2);
    for (size_t i = 0; i < n; i++) {
        bytes_at(L, u, i, &size);
        total += size;
    }
    char *text = te_lua_scratch(L, total);
    check_tokenizer(L); /* a finalizer may have changed everything by now; none runs from here on */
    for (size_t i = 0; i < n; i++, at += size) {
        const char *bytes = bytes_at(L, u, i, &size);
        if (size > total - at) te_lua_fail(L, "tokenizer", "decode: the list was changed meanwhile");
        memcpy(text + at, bytes, size);
    }
    lua_pushlstring(L, text, at);
    return 1;
}

static int find(lua_State *L)
{
    tokenizer *u = check_tokenizer(L);
    size_t     size;
    if (lua_type(L, 2) != LUA_TSTRING) te_lua_fail(L, "tokenizer", "id: expected a text");
    const char *text = lua_tolstring(L, 2, &size);
    int32_t     id = te_tokenizer_find(u->t, text, size);
    if (id < 0) return 0;
    lua_pushinteger(L, id);
    return 1;
}

static const luaL_Reg methods[] = {{"encode", encode}, {"decode", decode}, {"id", find}, {NULL, NULL}};

static void fill_metatable(te_lua *rt, lua_State *L)
{
    lua_newtable(L);
    te_lua_register(rt, L, methods);
    lua_setfield(L, -2, "__index");
    lua_pushliteral(L, "te.Tokenizer");
    lua_setfield(L, -2, "__metatable");
}

static int new_tokenizer(lua_State *L)
{
    te_lua     *rt = te_lua_runtime(L);
    te_io_error error;
    te_lua_enter(rt, L, "tokenizer");
    push_options(L);
    tokenizer           *u = te_lua_push_owner(rt, L, &tokenizer_kind, fill_metatable);
    int                  made = lua_gettop(L);
    te_tokenizer_options options = read_options(L);
    if (te_tokenizer_new(&u->t, &rt->ctx->mem, &options, &error) != TE_OK) return raise_named(rt, L, &error);
    lua_settop(L, made);
    return 1;
}

const luaL_Reg te_lua_tokenizer_functions[] = {{"tokenizer", new_tokenizer}, {NULL, NULL}};

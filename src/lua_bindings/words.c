/* words.c - te._core.words(text, flags) → the words of a text as core/words.h cuts it, for WordPiece tokenizers. flags
 * are the letters of what to do: "c" clean, "i" ideographs apart, "a" accents away, "l" lowercase, "w" cut into words.
 * Not there in restricted runtimes. */
#include "bindings.h"

#include "core/words.h"

/* The words of one call; a collector's, as handing them over may raise. */
typedef struct result {
    te_lua_owner owner;
    te_words     words;
} result;

static void release_result(void *object) { te_words_free(&((result *)object)->words); }

static const te_lua_kind result_kind = {sizeof(result), release_result};

static result *push_result(te_lua *rt, lua_State *L)
{
    result *r = te_lua_push_owner(rt, L, &result_kind, NULL);
    r->words.mem = &rt->ctx->mem;
    return r;
}

static int words(lua_State *L)
{
    te_lua     *rt = te_lua_runtime(L);
    te_io_error error;
    size_t      size, begin = 0;
    if (lua_type(L, 1) != LUA_TSTRING || lua_type(L, 2) != LUA_TSTRING)
        te_lua_fail(L, "tokenizer", "words: expected a text and flags");
    const char      *text = lua_tolstring(L, 1, &size), *flags = lua_tostring(L, 2);
    te_words_options options = {.clean = strchr(flags, 'c'),
                                .chinese = strchr(flags, 'i'),
                                .accents = strchr(flags, 'a'),
                                .lowercase = strchr(flags, 'l'),
                                .cuts = strchr(flags, 'w')};
    result          *r = push_result(rt, L);
    if (te_words_cut(&r->words, &options, text, size, &error) != TE_OK)
        return te_lua_raise_io(rt, L, "tokenizer", &error);
    if (r->words.n > INT32_MAX) te_lua_fail(L, "tokenizer", "a text of %.0f words is too long", (double)r->words.n);
    lua_createtable(L, (int)r->words.n, 0);
    for (size_t i = 0; i < r->words.n; begin = r->words.ends[i++]) {
        lua_pushlstring(L, (const char *)r->words.bytes + begin, r->words.ends[i] - begin);
        lua_rawseti(L, -2, (int)i + 1);
    }
    te_words_free(&r->words);
    return 1;
}

const luaL_Reg te_lua_words_functions[] = {{"words", words}, {NULL, NULL}};

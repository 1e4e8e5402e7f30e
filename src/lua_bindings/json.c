/* json.c - JSON texts as Lua values.
 *
 *     te._core.json '{"a": [1, true]}'      { a = { 1, true } }
 *
 * Objects and arrays become tables, null becomes nil: an object has no such entry, an array a hole. jansson refuses
 * what is no JSON, keys that occur twice, invalid UTF-8, and values nested deeper than 2048 times. Its memory is not
 * the context's, so restricted runtimes do without.
 */
#include "bindings.h"

#include <jansson.h>

typedef struct json_document {
    const void *tag;
    json_t     *root;
} json_document;

static const char document_tag[] = "te.json";

static int release(lua_State *L)
{
    json_document *document = te_lua_to_object(L, 1, document_tag, sizeof *document);
    if (!document) return 0;
    json_decref(document->root);
    document->root = NULL;
    return 0;
}

static void push_value(lua_State *L, const json_t *value);

static void push_array(lua_State *L, const json_t *array)
{
    size_t n = json_array_size(array);
    lua_createtable(L, (int)n, 0);
    for (size_t i = 0; i < n; i++) {
        push_value(L, json_array_get(array, i));
        lua_rawseti(L, -2, (int)i + 1);
    }
}

static void push_object(lua_State *L, json_t *object)
{
    const char *key;
    json_t     *value;
    lua_createtable(L, 0, (int)json_object_size(object));
    json_object_foreach(object, key, value)
    {
        lua_pushstring(L, key);
        push_value(L, value);
        lua_rawset(L, -3);
    }
}

static void push_value(lua_State *L, const json_t *value)
{
    luaL_checkstack(L, 4, "JSON is nested too deep");
    switch (json_typeof(value)) {
    case JSON_OBJECT: push_object(L, (json_t *)(uintptr_t)value); break;
    case JSON_ARRAY: push_array(L, value); break;
    case JSON_STRING: lua_pushlstring(L, json_string_value(value), json_string_length(value)); break;
    case JSON_INTEGER: lua_pushnumber(L, (double)json_integer_value(value)); break;
    case JSON_REAL: lua_pushnumber(L, json_real_value(value)); break;
    case JSON_TRUE: lua_pushboolean(L, true); break;
    case JSON_FALSE: lua_pushboolean(L, false); break;
    case JSON_NULL: lua_pushnil(L); break;
    }
}

/* json(text): the value; raises "line 1, column 3: …" without a place in the script, which says nothing. */
static int json(lua_State *L)
{
    json_error_t what;
    size_t       size;
    const char  *text = luaL_checklstring(L, 1, &size);
    json_document *document = te_lua_scratch(L, sizeof *document);
    *document = (json_document){.tag = document_tag};
    te_lua_set_collector(L, release);
    document->root = json_loadb(text, size, JSON_REJECT_DUPLICATES | JSON_DECODE_ANY | JSON_ALLOW_NUL, &what);
    if (!document->root) {
        lua_pushfstring(L, "line %d, column %d: %s", what.line, what.column, what.text);
        return lua_error(L);
    }
    push_value(L, document->root);
    json_decref(document->root);
    document->root = NULL;
    return 1;
}

const luaL_Reg te_lua_json_functions[] = {{"json", json}, {NULL, NULL}};

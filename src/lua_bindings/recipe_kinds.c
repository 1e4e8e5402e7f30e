/* recipe_kinds.c - the engine's table of recipes, for lua/te/recipe.lua: te._core.*
 *
 *     recipe_kinds()                      by name a table of options by name, as lua/te/options.lua declares them:
 *                                         { type, default, choices =, min =, max =, help = }
 *     recipe_names()                      { name, short name } of each that is no function's, in the table's order
 *     check_recipe(name, options)         raises where options, all of the recipe's, contradict each other
 *     recipe_quantizer(name, options, role, attention)
 *                                         the fields of an operand's quantizer; nil: it stays in high precision
 *     recipe_hands_on(name, options)      whether attention's result goes on as it is
 *
 * An option may have a value that is none of its choices, such as a function: what it says is the script's business. */
#include "bindings.h"

#include "core/recipe.h"
#include "core/recipe_kinds.h"

#include <math.h>

/* --- the table ---------------------------------------------------------------------------------------------------- */

static const char *type_of(const te_option_info *o)
{
    static const char *const names[] = {"boolean", "integer", "number", "string"};
    return o->type == TE_OPTION_INTEGER && o->min == 1 && isinf(o->max) ? "size" : names[o->type];
}

static void push_default(lua_State *L, const te_option_info *o)
{
    if (o->type == TE_OPTION_SWITCH)
        lua_pushboolean(L, o->number != 0);
    else if (o->type != TE_OPTION_CHOICE)
        lua_pushnumber(L, o->number);
    else if (o->number < 0)
        lua_pushnil(L);
    else
        lua_pushstring(L, o->choices[(int)o->number]);
}

static void push_limit(lua_State *L, const char *name, double limit)
{
    if (isinf(limit)) return;
    lua_pushnumber(L, limit);
    lua_setfield(L, -2, name);
}

static void push_option(lua_State *L, const te_option_info *o)
{
    lua_createtable(L, 2, 2);
    lua_pushstring(L, type_of(o));
    lua_rawseti(L, -2, 1);
    push_default(L, o);
    lua_rawseti(L, -2, 2);
    lua_pushstring(L, o->doc);
    lua_setfield(L, -2, "help");
    if (o->type == TE_OPTION_INTEGER || o->type == TE_OPTION_NUMBER) {
        push_limit(L, "min", o->min);
        push_limit(L, "max", o->max);
    }
    if (o->type != TE_OPTION_CHOICE) return;
    lua_newtable(L);
    for (int i = 0; o->choices[i]; i++) {
        lua_pushstring(L, o->choices[i]);
        lua_rawseti(L, -2, i + 1);
    }
    lua_setfield(L, -2, "choices");
}

static void push_kind(lua_State *L, const te_recipe_kind *kind)
{
    lua_newtable(L);
    for (int i = 0; kind->options[i].name; i++) {
        push_option(L, &kind->options[i]);
        lua_setfield(L, -2, kind->options[i].name);
    }
    lua_setfield(L, -2, kind->name);
}

static int recipe_kinds(lua_State *L)
{
    lua_newtable(L);
    for (int i = 0; te_recipe_kind_at(i); i++) push_kind(L, te_recipe_kind_at(i));
    push_kind(L, &te_recipe_kind_custom);
    return 1;
}

static int recipe_names(lua_State *L)
{
    const te_recipe_kind *kind;
    lua_newtable(L);
    for (int i = 0; (kind = te_recipe_kind_at(i)); i++) {
        lua_createtable(L, 2, 0);
        lua_pushstring(L, kind->name);
        lua_rawseti(L, -2, 1);
        lua_pushstring(L, kind->short_name);
        lua_rawseti(L, -2, 2);
        lua_rawseti(L, -2, i + 1);
    }
    return 1;
}

/* --- settings ----------------------------------------------------------------------------------------------------- */

/* The value on top of the stack, whose type was checked by what declares the option. */
static double read_value(lua_State *L, const te_option_info *o)
{
    if (o->type == TE_OPTION_SWITCH) return lua_toboolean(L, -1);
    if (o->type != TE_OPTION_CHOICE) return lua_isnumber(L, -1) ? lua_tonumber(L, -1) : o->number;
    const char *text = lua_type(L, -1) == LUA_TSTRING ? lua_tostring(L, -1) : NULL;
    for (int i = 0; text && o->choices[i]; i++)
        if (strcmp(o->choices[i], text) == 0) return i;
    return o->number;
}

static te_recipe_settings read_settings(lua_State *L)
{
    const char *name = luaL_checkstring(L, 1);
    const te_recipe_kind *kind = te_recipe_kind_find(name);
    te_lua_check_stack(te_lua_runtime(L), L);
    luaL_checktype(L, 2, LUA_TTABLE);
    if (!kind) te_lua_fail(L, "recipe", "there is no recipe %s", name);
    te_recipe_settings s = te_recipe_defaults(kind);
    for (int i = 0; kind->options[i].name; i++) {
        lua_getfield(L, 2, kind->options[i].name);
        s.values[i] = read_value(L, &kind->options[i]);
        lua_pop(L, 1);
    }
    return s;
}

static int check_recipe(lua_State *L)
{
    te_lua *rt = te_lua_runtime(L);
    te_recipe_settings s = read_settings(L);
    te_lua_enter(rt, L, "recipe");
    te_status status = s.kind->check ? s.kind->check(rt->ctx, &s) : TE_OK;
    return status == TE_OK ? 0 : te_lua_raise(rt, L, "recipe", status);
}

static int recipe_quantizer(lua_State *L)
{
    te_recipe_settings s = read_settings(L);
    te_role role = (te_role)luaL_checkoption(L, 3, NULL, te_role_names);
    te_quantizer q;
    if (!te_recipe_operand(&s, role, lua_toboolean(L, 4), &q)) return 0;
    te_lua_push_quantizer(L, &q);
    return 1;
}

static int recipe_hands_on(lua_State *L)
{
    te_recipe_settings s = read_settings(L);
    lua_pushboolean(L, te_recipe_hands_on(&s));
    return 1;
}

const luaL_Reg te_lua_recipe_kind_functions[] = {{"recipe_kinds", recipe_kinds},
                                                 {"recipe_names", recipe_names},
                                                 {"check_recipe", check_recipe},
                                                 {"recipe_quantizer", recipe_quantizer},
                                                 {"recipe_hands_on", recipe_hands_on},
                                                 {NULL, NULL}};

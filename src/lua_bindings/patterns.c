/* patterns.c - string.find, match, gmatch and gsub for runtimes whose scripts can be stopped at any time.
 *
 * LuaJIT's own cannot be stopped, and a few characters of pattern keep them busy for years ("(.-)(.-)(.-)(.-)x" on a
 * long text). These match the same patterns, count every step as an instruction of the script, and end as the script's
 * own loops do: at the instruction limit and when the host interrupts.
 *
 * A pattern is a list of items: one character or class, with * + - ? behind it or not; a capture; %b; %f; a back
 * reference. An item that repeats tries its lengths in order and asks the rest of the pattern each time. Only that
 * question recurses, so the depth is the number of items, and bounded.
 */
#include "host.h"

#include <ctype.h>

enum { MAX_CAPTURES = 32, MAX_DEPTH = 200, CHECK_EVERY = 4096 };
enum { OPEN = -1, POSITION = -2 }; /* lengths of captures that are no texts */

typedef struct matcher {
    lua_State  *L;
    tetrain    *host;
    const char *text, *text_end;
    const char *pattern_end;
    int         n_captures, depth;
    unsigned    steps;
    struct {
        const char *start;
        ptrdiff_t   length;
    } captures[MAX_CAPTURES];
} matcher;

static const char *match_here(matcher *m, const char *s, const char *p);

static void step(matcher *m)
{
    if (++m->steps < CHECK_EVERY) return;
    unsigned n = m->steps;
    m->steps = 0;
    tetrain_count_work(m->host, m->L, n);
}

/* Of going through so many characters of a pattern or a text. */
static void step_over(matcher *m, ptrdiff_t n)
{
    m->steps += (unsigned)(n < 1 << 24 ? n / 16 : 1 << 20);
    step(m);
}

/* --- single characters -------------------------------------------------------------------------------------------- */

static bool in_class(int c, int letter)
{
    bool found;
    switch (tolower(letter)) {
    case 'a': found = isalpha(c); break;
    case 'c': found = iscntrl(c); break;
    case 'd': found = isdigit(c); break;
    case 'l': found = islower(c); break;
    case 'p': found = ispunct(c); break;
    case 's': found = isspace(c); break;
    case 'u': found = isupper(c); break;
    case 'w': found = isalnum(c); break;
    case 'x': found = isxdigit(c); break;
    case 'z': found = c == 0; break;
    default: return letter == c;
    }
    return isupper(letter) ? !found : found;
}

/* The end of the item's first part, without what repeats it. */
static const char *item_end(matcher *m, const char *p)
{
    char c = *p++;
    if (c == '%') {
        if (p == m->pattern_end) luaL_error(m->L, "malformed pattern (ends with '%%')");
        return p + 1;
    }
    if (c != '[') return p;
    const char *first = p;
    if (p < m->pattern_end && *p == '^') p++;
    do { /* the first one belongs to the set, even a ']' */
        if (p == m->pattern_end) luaL_error(m->L, "malformed pattern (missing ']')");
        if (*p++ == '%' && p < m->pattern_end) p++;
    } while (p == m->pattern_end || *p != ']');
    step_over(m, p - first);
    return p + 1;
}

/* Whether c is in the set that begins at p and whose ']' is at last. */
static bool in_set(int c, const char *p, const char *last)
{
    bool wanted = true;
    if (*++p == '^') {
        wanted = false;
        p++;
    }
    for (; p < last; p++) {
        if (*p == '%') {
            if (in_class(c, (unsigned char)*++p)) return wanted;
        } else if (p[1] == '-' && p + 2 < last) {
            if ((unsigned char)p[0] <= c && c <= (unsigned char)p[2]) return wanted;
            p += 2;
        } else if ((unsigned char)*p == c) {
            return wanted;
        }
    }
    return !wanted;
}

static bool single(matcher *m, const char *s, const char *p, const char *end)
{
    step(m);
    if (s >= m->text_end) return false;
    int c = (unsigned char)*s;
    switch (*p) {
    case '.': return true;
    case '%': return in_class(c, (unsigned char)p[1]);
    case '[': step_over(m, end - p); return in_set(c, p, end - 1);
    default: return (unsigned char)*p == c;
    }
}

/* --- items -------------------------------------------------------------------------------------------------------- */

static const char *match_longest(matcher *m, const char *s, const char *p, const char *end)
{
    ptrdiff_t n = 0;
    while (single(m, s + n, p, end)) n++;
    for (; n >= 0; n--) {
        const char *e = match_here(m, s + n, end + 1);
        if (e) return e;
    }
    return NULL;
}

static const char *match_shortest(matcher *m, const char *s, const char *p, const char *end)
{
    for (;;) {
        const char *e = match_here(m, s, end + 1);
        if (e) return e;
        if (!single(m, s++, p, end)) return NULL;
    }
}

static const char *open_capture(matcher *m, const char *s, const char *p, ptrdiff_t kind)
{
    if (m->n_captures == MAX_CAPTURES) luaL_error(m->L, "too many captures");
    m->captures[m->n_captures].start = s;
    m->captures[m->n_captures++].length = kind;
    const char *e = match_here(m, s, p);
    if (!e) m->n_captures--;
    return e;
}

static const char *close_capture(matcher *m, const char *s, const char *p)
{
    int i = m->n_captures - 1;
    while (i >= 0 && m->captures[i].length != OPEN) i--;
    if (i < 0) luaL_error(m->L, "invalid pattern capture");
    m->captures[i].length = s - m->captures[i].start;
    const char *e = match_here(m, s, p);
    if (!e) m->captures[i].length = OPEN;
    return e;
}

/* %bxy: from x to the y that closes it. */
static const char *match_balance(matcher *m, const char *s, const char *p)
{
    if (m->pattern_end - p < 2) luaL_error(m->L, "unbalanced pattern");
    if (s >= m->text_end || *s != p[0]) return NULL;
    int depth = 1;
    while (++s < m->text_end) {
        step(m);
        if (*s == p[1]) {
            if (--depth == 0) return s + 1;
        } else if (*s == p[0]) {
            depth++;
        }
    }
    return NULL;
}

/* %f[set]: between a character that is not in the set and one that is; the ends of the text count as zero bytes. */
static const char *match_frontier(matcher *m, const char *s, const char *p, const char **end)
{
    if (p >= m->pattern_end || *p != '[') luaL_error(m->L, "missing '[' after '%%f' in pattern");
    *end = item_end(m, p);
    step_over(m, 2 * (*end - p));
    int before = s == m->text ? 0 : (unsigned char)s[-1], here = s < m->text_end ? (unsigned char)*s : 0;
    return !in_set(before, p, *end - 1) && in_set(here, p, *end - 1) ? s : NULL;
}

static const char *match_back_reference(matcher *m, const char *s, int digit)
{
    int i = digit - '1';
    if (i < 0 || i >= m->n_captures || m->captures[i].length == OPEN) luaL_error(m->L, "invalid capture index");
    if (m->captures[i].length < 0) return NULL; /* a position */
    size_t n = (size_t)m->captures[i].length;
    step_over(m, (ptrdiff_t)(n / 4));
    return (size_t)(m->text_end - s) >= n && memcmp(m->captures[i].start, s, n) == 0 ? s + n : NULL;
}

/* An item that is one character or class, and what repeats it; *next is where to go on, NULL when all is said in the
 * result. */
static const char *match_single(matcher *m, const char *s, const char *p, const char **next)
{
    const char *end = item_end(m, p), *e;
    *next = NULL;
    switch (end < m->pattern_end ? *end : 0) {
    case '*': return match_longest(m, s, p, end);
    case '+': return single(m, s, p, end) ? match_longest(m, s + 1, p, end) : NULL;
    case '-': return match_shortest(m, s, p, end);
    case '?':
        if (single(m, s, p, end) && (e = match_here(m, s + 1, end + 1))) return e;
        *next = end + 1;
        return s;
    default:
        *next = end;
        return single(m, s, p, end) ? s + 1 : NULL;
    }
}

/* %b, %f and back references; false when the item is none of them. */
static bool match_special(matcher *m, const char **s, const char **p)
{
    const char *rest = *p + 2;
    if (**p != '%' || *p + 1 >= m->pattern_end) return false;
    int letter = (unsigned char)(*p)[1];
    if (letter == 'b') {
        *s = match_balance(m, *s, rest);
        *p = rest + 2;
    } else if (letter == 'f') {
        *s = match_frontier(m, *s, rest, p);
    } else if (isdigit(letter)) {
        *s = match_back_reference(m, *s, letter);
        *p = rest;
    } else {
        return false;
    }
    return true;
}

/* The end of what the pattern from p on matches at s; NULL when it does not. */
static const char *match_here(matcher *m, const char *s, const char *p)
{
    if (++m->depth > MAX_DEPTH) luaL_error(m->L, "pattern too complex");
    while (s && p && p < m->pattern_end) {
        step(m);
        if (*p == '(') {
            bool position = p + 1 < m->pattern_end && p[1] == ')';
            s = open_capture(m, s, p + 1 + position, position ? POSITION : OPEN);
            break;
        }
        if (*p == ')') {
            s = close_capture(m, s, p + 1);
            break;
        }
        if (*p == '$' && p + 1 == m->pattern_end) {
            if (s != m->text_end) s = NULL;
            break;
        }
        if (!match_special(m, &s, &p)) s = match_single(m, s, p, &p);
    }
    m->depth--;
    return s;
}

/* --- the functions ------------------------------------------------------------------------------------------------ */

static void push_capture(const matcher *m, int i, const char *start, const char *end)
{
    if (i >= m->n_captures) {
        if (i > 0) luaL_error(m->L, "invalid capture index");
        lua_pushlstring(m->L, start, (size_t)(end - start)); /* the whole match */
    } else if (m->captures[i].length == POSITION) {
        lua_pushinteger(m->L, m->captures[i].start - m->text + 1);
    } else if (m->captures[i].length == OPEN) {
        luaL_error(m->L, "unfinished capture");
    } else {
        lua_pushlstring(m->L, m->captures[i].start, (size_t)m->captures[i].length);
    }
}

/* All captures; the whole match when there are none and `whole`. */
static int push_captures(const matcher *m, const char *start, const char *end, bool whole)
{
    int n = m->n_captures == 0 && whole ? 1 : m->n_captures;
    luaL_checkstack(m->L, n, "too many captures");
    for (int i = 0; i < n; i++) push_capture(m, i, start, end);
    return n;
}

static void start_matcher(matcher *m, lua_State *L, const char *text, size_t size, const char *pattern_end)
{
    *m = (matcher){.L = L, .host = te_lua_attached(L)->host, .text = text, .text_end = text + size,
                    .pattern_end = pattern_end};
}

static const char *try_at(matcher *m, const char *s, const char *p)
{
    m->n_captures = m->depth = 0;
    step(m);
    return match_here(m, s, p);
}

/* The first place from s on where `word` stands; NULL: nowhere. */
static const char *find_plain(matcher *m, const char *s, const char *word, size_t size)
{
    for (; (size_t)(m->text_end - s) >= size; s++) {
        size_t n = 0;
        while (n < size && s[n] == word[n]) {
            n++;
            step(m);
        }
        if (n == size) return s;
        step(m);
    }
    return NULL;
}

/* Whether a pattern is more than a text; LuaJIT does not count closing brackets. */
static bool is_pattern(const char *p, size_t size)
{
    for (size_t i = 0; i < size; i++)
        if (p[i] && strchr("^$*+?.([%-", p[i])) return true;
    return false;
}

static int find_or_match(lua_State *L, bool find)
{
    size_t      size, p_size;
    const char *text = luaL_checklstring(L, 1, &size), *p = luaL_checklstring(L, 2, &p_size), *end = NULL;
    double      init = luaL_optnumber(L, 3, 1);
    matcher     m;
    if (init < 0) init += (double)size + 1;
    if (!(init >= 1)) init = 1;
    if (init > (double)size + 1) init = (double)size + 1;
    const char *s = text + (size_t)init - 1;
    start_matcher(&m, L, text, size, p + p_size);
    if (find && (lua_toboolean(L, 4) || !is_pattern(p, p_size))) {
        if ((s = find_plain(&m, s, p, p_size))) end = s + p_size;
    } else {
        bool anchored = p_size && *p == '^';
        while (!(end = try_at(&m, s, p + anchored)) && !anchored && s < m.text_end) s++;
    }
    if (!end) {
        lua_pushnil(L);
        return 1;
    }
    if (!find) return push_captures(&m, s, end, true);
    lua_pushinteger(L, s - text + 1);
    lua_pushinteger(L, end - text);
    return 2 + push_captures(&m, s, end, false);
}

static int find(lua_State *L) { return find_or_match(L, true); }
static int match(lua_State *L) { return find_or_match(L, false); }

/* The iterator of gmatch: upvalues are text, pattern and the position to go on from. */
static int next_match(lua_State *L)
{
    size_t      size, p_size;
    const char *text = lua_tolstring(L, lua_upvalueindex(1), &size),
               *p = lua_tolstring(L, lua_upvalueindex(2), &p_size), *end;
    matcher     m;
    start_matcher(&m, L, text, size, p + p_size);
    for (const char *s = text + lua_tointeger(L, lua_upvalueindex(3)); s <= m.text_end; s++) {
        if (!(end = try_at(&m, s, p))) continue;
        lua_pushinteger(L, end - text + (end == s));
        lua_replace(L, lua_upvalueindex(3));
        return push_captures(&m, s, end, true);
    }
    return 0;
}

static int gmatch(lua_State *L)
{
    luaL_checkstring(L, 1);
    luaL_checkstring(L, 2);
    lua_settop(L, 2);
    lua_pushinteger(L, 0);
    lua_pushcclosure(L, next_match, 3);
    return 1;
}

/* Adds the replacement text at 3 with its %0 to %9. */
static void add_template(matcher *m, luaL_Buffer *b, const char *start, const char *end)
{
    size_t      size;
    const char *t = lua_tolstring(m->L, 3, &size), *t_end = t + size;
    for (; t < t_end; t++) {
        step(m);
        if (*t != '%') {
            luaL_addchar(b, *t);
        } else if (++t < t_end && isdigit((unsigned char)*t)) {
            if (*t == '0')
                lua_pushlstring(m->L, start, (size_t)(end - start));
            else
                push_capture(m, *t - '1', start, end);
            luaL_addvalue(b);
        } else {
            luaL_addchar(b, t < t_end ? *t : '%');
        }
    }
}

/* Adds what stands for a match: from the text, table or function at 3; nil and false keep the match. */
static void add_replacement(matcher *m, luaL_Buffer *b, const char *start, const char *end)
{
    lua_State *L = m->L;
    int        kind = lua_type(L, 3);
    if (kind == LUA_TSTRING || kind == LUA_TNUMBER) {
        add_template(m, b, start, end);
        return;
    }
    if (kind == LUA_TTABLE) {
        push_capture(m, 0, start, end);
        lua_gettable(L, 3);
    } else {
        lua_pushvalue(L, 3);
        lua_call(L, push_captures(m, start, end, true), 1);
    }
    if (!lua_toboolean(L, -1)) {
        lua_pop(L, 1);
        lua_pushlstring(L, start, (size_t)(end - start));
    } else if (!lua_isstring(L, -1)) {
        luaL_error(L, "invalid replacement value (a %s)", luaL_typename(L, -1));
    }
    luaL_addvalue(b);
}

static int gsub(lua_State *L)
{
    size_t      size, p_size;
    const char *text = luaL_checklstring(L, 1, &size), *p = luaL_checklstring(L, 2, &p_size), *s = text;
    int         kind = lua_type(L, 3), n = 0;
    double      most = luaL_optnumber(L, 4, (double)size + 1);
    bool        anchored = p_size && *p == '^';
    luaL_Buffer b;
    matcher     m;
    luaL_argcheck(L, kind == LUA_TSTRING || kind == LUA_TNUMBER || kind == LUA_TTABLE || kind == LUA_TFUNCTION, 3,
                  "string/function/table expected");
    if (kind == LUA_TNUMBER) lua_tostring(L, 3);
    start_matcher(&m, L, text, size, p + p_size);
    luaL_buffinit(L, &b);
    while (n < most) {
        const char *end = try_at(&m, s, p + anchored);
        if (end) {
            n++;
            add_replacement(&m, &b, s, end);
        }
        if (end && end > s)
            s = end;
        else if (s < m.text_end)
            luaL_addchar(&b, *s++);
        else
            break;
        if (anchored) break;
    }
    luaL_addlstring(&b, s, (size_t)(m.text_end - s));
    luaL_pushresult(&b);
    lua_pushinteger(L, n);
    return 2;
}

void tetrain_bound_patterns(lua_State *L)
{
    static const luaL_Reg functions[] = {
        {"find", find}, {"match", match}, {"gmatch", gmatch}, {"gsub", gsub}, {NULL, NULL}};
    lua_getglobal(L, LUA_STRLIBNAME);
    luaL_register(L, NULL, functions);
    lua_pushnil(L);
    lua_setfield(L, -2, "gfind"); /* an old name of gmatch */
    lua_pop(L, 1);
}

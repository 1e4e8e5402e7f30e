/* test_host_patterns.c - the string functions of runtimes whose scripts can be stopped against LuaJIT's own: 40,000
 * random patterns and texts, then patterns that would keep LuaJIT's busy for years. */
#include "test.h"

#include "tetrain/tetrain.h"

#include <pthread.h>
#include <unistd.h>

static tetrain_status run(tetrain *rt, const char *code) { return tetrain_run_string(rt, code, strlen(code), "=test"); }

/* Leaves one hash per case in the tensor `hashes`; describe(i) is the text of case i. */
static const char cases[] =
    "local te = require 'te'\n"
    "local pieces = {'a', 'b', '.', '%a', '%d', '[ab]', '[^a]', '[a-c]', '[%d%s]', '[]a]', '[^]]', '%b()', '%f[%a]', "
    "'(', ')', '()',\n"
    "  '*', '+', '-', '?', '%1', '%2', '^', '$', '%', '[', ']', '%w*', '.-', '(a)', '(.-)', '(b*)', '%A', '%S+', '%%', "
    "'%x', '%z'}\n"
    "local letters = {'a', 'b', 'c', '1', ' ', '(', ')', 'a', 'b', '%', ']', '\\0'}\n"
    "local seed\n"
    "local function random(n) seed = seed * 16807 % 2147483647 return seed % n + 1 end\n"
    "local function some(list, most) local t = {} for i = 1, random(most + 1) - 1 do t[i] = list[random(#list)] end "
    "return table.concat(t) end\n"
    "local function text_of(...)\n"
    "  local t = {} for i = 1, select('#', ...) do t[i] = tostring((select(i, ...))) end\n"
    "  return t[1] == 'false' and 'error' or table.concat(t, '|')\n"
    "end\n"
    "local templates = {'<%0>', '%1x', 'y', '%2%1', {a = 'A', b = false}, function(a, b) return b or a end}\n"
    "function describe(i)\n"
    "  seed = i * 7919 + 1 random(2)\n"
    "  local p, t, init = some(pieces, 5), some(letters, 14), random(20) - 10\n"
    "  local parts = {p, t, text_of(pcall(string.find, t, p, init)), text_of(pcall(string.match, t, p)), "
    "text_of(pcall(string.find, t, p, init, true))}\n"
    "  parts[6] = text_of(pcall(string.gsub, t, p, templates[random(6)], random(4) > 1 and random(3) or nil))\n"
    "  parts[7] = text_of(pcall(function() local found = {} for a, b in t:gmatch(p) do found[#found + 1] = tostring(a) "
    ".. tostring(b) end\n"
    "    return table.concat(found, ',') end))\n"
    "  return table.concat(parts, ' ~ ')\n"
    "end\n"
    "local list = {}\n"
    "for i = 1, 40000 do\n"
    "  local text, hash = describe(i), 7\n"
    "  for k = 1, #text do hash = (hash * 31 + text:byte(k)) % 2147483647 end\n"
    "  list[i] = hash\n"
    "end\n"
    "hashes = te.tensor(list, {dtype = 'int64'})\n";

static void keep_line(void *user, int level, const char *message)
{
    (void)level;
    snprintf(user, 1024, "%s", message);
}

static void test_same(void)
{
    char            line[1024] = "";
    tetrain_options options = {
        .struct_size = sizeof options, .threads = 1, .flags = TETRAIN_RESTRICTED, .log = keep_line, .user = line};
    tetrain        *ours = tetrain_open(&options), *theirs = tetrain_open(NULL);
    CHECK_MSG(run(ours, cases) == TETRAIN_OK, "%s", tetrain_error(ours));
    CHECK_MSG(run(theirs, cases) == TETRAIN_OK, "%s", tetrain_error(theirs));
    te_tensor *a = tetrain_get_tensor(ours, "hashes"), *b = tetrain_get_tensor(theirs, "hashes");
    CHECK(a && b && te_tensor_numel(a) == 40000);
    int64_t *x = te_tensor_data(a), *y = te_tensor_data(b);
    int      different = 0;
    for (int i = 0; i < 40000; i++) {
        if (x[i] == y[i]) continue;
        char code[64];
        snprintf(code, sizeof code, "print(describe(%d))", i + 1);
        run(ours, code);
        CHECK_MSG(++different > 10, "case %d: %s", i + 1, line);
    }
    CHECK_MSG(different == 0, "%d cases differ", different);
    te_tensor_release(a);
    te_tensor_release(b);
    tetrain_close(ours);
    tetrain_close(theirs);
}

static const char *const endless[] = {
    "local s = ('a'):rep(100000) s:find(('.-'):rep(20) .. 'b')",
    "local s = ('a'):rep(100000) s:match(('(.*)'):rep(20) .. 'b')",
    "local s = ('a'):rep(100000) s:gsub(('a*'):rep(20) .. 'b', '')",
    "for _ in (('a'):rep(100000)):gmatch(('a?'):rep(60) .. 'b') do end",
    "pcall(string.find, ('a'):rep(100000), ('.-'):rep(20) .. 'b') while true do end",
    "local s = ('('):rep(300000) s:find('%b()')",
    "local s = ('a'):rep(1000000) s:find(('a'):rep(500000) .. 'b', 1, true)",
    "local s = ('ab'):rep(100000) s:find('(.+)%1%1%1c')",
    "string.find(('a'):rep(30000), ('a-'):rep(30) .. 'b')",
};

static void *interrupt_later(void *rt)
{
    usleep(20000);
    tetrain_interrupt(rt);
    return NULL;
}

static void test_limited(unsigned flags)
{
    tetrain_options options = {
        .struct_size = sizeof options, .threads = 1, .instruction_limit = 20000000, .flags = flags};
    tetrain        *rt = tetrain_open(&options);
    for (size_t i = 0; i < sizeof endless / sizeof *endless; i++) {
        CHECK_MSG(run(rt, endless[i]) == TETRAIN_ERROR_LIMIT, "%s: %s", endless[i], tetrain_error(rt));
        CHECK(run(rt, "assert(('key = value'):match('^(%w+)%s*=%s*(%w+)$') == 'key')") == TETRAIN_OK);
    }
    CHECK(run(rt, "('x'):rep(1000):find(('(x)'):rep(33))") == TETRAIN_ERROR_SCRIPT &&
          strstr(tetrain_error(rt), "too many captures"));
    CHECK(run(rt, "('x'):rep(1000):find(('x*'):rep(300))") == TETRAIN_ERROR_SCRIPT &&
          strstr(tetrain_error(rt), "too complex"));
    tetrain_close(rt);
}

static void test_interrupted(tetrain_options options)
{
    options.struct_size = sizeof options;
    options.threads = 1;
    tetrain *rt = tetrain_open(&options);
    for (size_t i = 0; i < 5; i++) {
        pthread_t thread;
        CHECK(pthread_create(&thread, NULL, interrupt_later, rt) == 0);
        CHECK_MSG(run(rt, endless[i]) == TETRAIN_ERROR_INTERRUPTED, "%s: %s", endless[i], tetrain_error(rt));
        pthread_join(thread, NULL);
    }
    tetrain_close(rt);
}

int main(void)
{
    test_same();
    test_limited(TETRAIN_RESTRICTED);
    test_limited(0);
    test_interrupted((tetrain_options){.flags = TETRAIN_RESTRICTED});
    test_interrupted((tetrain_options){.flags = TETRAIN_INTERPRETED});
    test_interrupted((tetrain_options){.lua_memory_limit = 64 << 20});
    return TEST_END();
}

/* lua_call.h - calling functions of the Lua tools with text, for what the executable leaves to Lua. */
#ifndef TETRAIN_LUA_CALL_H
#define TETRAIN_LUA_CALL_H

#include <tetrain/tetrain.h>

/* Up to two texts that a call returned; NULL where the result was nil. To be freed with lua_texts_free. */
typedef struct lua_texts {
    char *first, *second;
} lua_texts;

/* Calls require(module)[function](text). False when it raised or memory is exhausted; results may be NULL. What runs
 * here is short and must not be interrupted, so it is no call of the host interface. */
bool lua_call_text(tetrain *rt, const char *module, const char *function, const char *text, size_t size,
                   lua_texts *results);
void lua_texts_free(lua_texts *texts);

/* Sets the global `arg` to the arguments, with `name` at 0. */
bool lua_set_arguments(tetrain *rt, const char *name, int argc, const char *const *argv);

#endif

/* files.c - folders and safetensors files. Not there in restricted runtimes. */
#include "bindings.h"

#include "core/safetensors.h"
#include "kernels/environment.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

static const char *check_path(lua_State *L, int index, const char *function)
{
    return te_lua_check_text(L, index, function, "path");
}

/* --- folders ------------------------------------------------------------------------------------------------------ */

static int push_names(lua_State *L)
{
    const te_io_names *names = lua_touserdata(L, 1);
    lua_createtable(L, (int)names->count, 0);
    for (size_t i = 0; i < names->count; i++) {
        lua_pushstring(L, names->names[i]);
        lua_rawseti(L, -2, (int)i + 1);
    }
    return 1;
}

/* list_dir(path): names in a folder, sorted. */
static int list_dir(lua_State *L)
{
    te_lua     *rt = te_lua_runtime(L);
    const char *path = check_path(L, 1, "list_dir");
    te_io_names names;
    te_io_error error;
    te_lua_enter(rt, L, "list_dir");
    lua_pushcfunction(L, push_names);
    if (te_io_list(&te_io_posix, &rt->ctx->mem, path, &names, &error) != TE_OK)
        return te_lua_raise_io(rt, L, "list_dir", &error);
    lua_pushlightuserdata(L, &names);
    int failed = lua_pcall(L, 1, 1, 0);
    te_io_names_free(&names);
    return failed ? lua_error(L) : 1;
}

/* stat(path): {type = "file", "directory" or "other", size =, mtime =, id = a text that is this file's alone}, or nil
 * where there is nothing. */
static int stat_path(lua_State *L)
{
    struct stat s;
    const char *path = check_path(L, 1, "stat");
    if (stat(path, &s) != 0) {
        lua_pushnil(L);
        lua_pushfstring(L, "%s: %s", path, strerror(errno));
        return 2;
    }
    char id[64];
    snprintf(id, sizeof id, "%llx:%llx", (unsigned long long)s.st_dev, (unsigned long long)s.st_ino);
    lua_createtable(L, 0, 4);
    lua_pushstring(L, id);
    lua_setfield(L, -2, "id");
    lua_pushstring(L, S_ISREG(s.st_mode) ? "file" : S_ISDIR(s.st_mode) ? "directory" : "other");
    lua_setfield(L, -2, "type");
    lua_pushnumber(L, (double)s.st_size);
    lua_setfield(L, -2, "size");
    lua_pushnumber(L, (double)s.st_mtime);
    lua_setfield(L, -2, "mtime");
    return 1;
}

/* mkdir(path): makes the folder and those above it; one that exists is fine. */
static int make_folder(lua_State *L)
{
    te_lua     *rt = te_lua_runtime(L);
    const char *path = check_path(L, 1, "mkdir");
    te_io_error error;
    te_lua_enter(rt, L, "mkdir");
    if (te_io_make_folder(&te_io_posix, &rt->ctx->mem, path, &error) != TE_OK)
        return te_lua_raise_io(rt, L, "mkdir", &error);
    return 0;
}

/* write_file(path, text): the text in the file's place, whole or not at all. */
static int write_file(lua_State *L)
{
    te_lua     *rt = te_lua_runtime(L);
    const char *path = check_path(L, 1, "write_file");
    size_t      size;
    const char *text = luaL_checklstring(L, 2, &size);
    te_io_error error;
    te_lua_enter(rt, L, "write_file");
    if (te_io_write_file(&te_io_posix, &rt->ctx->mem, path, text, size, &error) == TE_OK) return 0;
    return te_lua_raise_io(rt, L, NULL, &error); /* the message begins with the path */
}

/* cache_folder(): where tetrain keeps what it measured; nothing where there is no such folder. It need not be there. */
static int cache_folder(lua_State *L)
{
    char path[512];
    if (!te_environment_cache(path, sizeof path)) return 0;
    lua_pushstring(L, path);
    return 1;
}

static const char lock_tag[] = "te.lock";

typedef struct folder_lock {
    const void *tag;
    int         fd; /* -1: none */
} folder_lock;

static int unlock(lua_State *L)
{
    folder_lock *lock = te_lua_to_object(L, 1, lock_tag, sizeof *lock);
    if (!lock) return 0;
    if (lock->fd >= 0) close(lock->fd);
    *lock = (folder_lock){.fd = -1};
    return 0;
}

/* lock_folder(path): a value that keeps other processes from locking the folder for as long as it lives; false where
 * one holds it. Where the file system has no locks the value holds nothing. */
static int lock_folder(lua_State *L)
{
    const char  *path = check_path(L, 1, "lock_folder");
    folder_lock *lock = te_lua_scratch(L, sizeof *lock);
    *lock = (folder_lock){.tag = lock_tag, .fd = -1};
    te_lua_set_collector(L, unlock);
    lock->fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (lock->fd < 0) return te_lua_fail(L, "lock_folder", "%s: %s", path, strerror(errno));
    if (flock(lock->fd, LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK) return 1;
    lua_pushboolean(L, false);
    return 1;
}

/* --- safetensors: writing ----------------------------------------------------------------------------------------- */

/* The tensors, contiguous copies of them, and the items that describe them, in userdata. */
typedef struct saving {
    te_lua_tensors           given, copies;
    te_safetensors_item     *items;
    te_safetensors_pair     *pairs;
    int                      n_pairs;
    te_safetensors_contents contents;
} saving;

static void *push_array(lua_State *L, size_t n, size_t size)
{
    void *p = te_lua_scratch(L, (n ? n : 1) * size);
    memset(p, 0, (n ? n : 1) * size);
    return p;
}

/* Reads {{name, tensor}, …} at 2 into items. The table at `names` keeps the names. */
static void read_items(lua_State *L, saving *s, int names)
{
    char text[256];
    for (int i = 0; i < s->given.n; i++) {
        lua_rawgeti(L, 2, i + 1);
        if (!lua_istable(L, -1)) te_lua_fail(L, "save", "entry %d: expected {name, tensor}", i + 1);
        lua_rawgeti(L, -1, 1);
        lua_rawgeti(L, -2, 2);
        if (lua_type(L, -2) != LUA_TSTRING)
            te_lua_fail(L, "save", "name %d: expected a string, got %s", i + 1,
                        te_lua_describe(L, -2, text, sizeof text));
        s->items[i].name = lua_tostring(L, -2);
        if (strlen(s->items[i].name) != lua_objlen(L, -2)) te_lua_fail(L, "save", "name %d holds a zero byte", i + 1);
        s->given.t[i] = te_tensor_retain(te_lua_check_tensor(L, -1, "save", s->items[i].name));
        lua_pushvalue(L, -2);
        lua_rawseti(L, names, i + 1);
        lua_pop(L, 3);
    }
}

static int by_key(const void *a, const void *b)
{
    return strcmp(((const te_safetensors_pair *)a)->key, ((const te_safetensors_pair *)b)->key);
}

/* Sorted, so that equal contents make equal files. The table at `texts` keeps the texts behind its first n entries. */
static void read_pairs(lua_State *L, saving *s, int texts)
{
    int n = 0;
    if (!lua_istable(L, 3)) return;
    for (lua_pushnil(L); lua_next(L, 3); lua_pop(L, 1)) {
        char text[256];
        if (lua_type(L, -2) != LUA_TSTRING)
            te_lua_fail(L, "save", "metadata: names are strings, got %s",
                        te_lua_describe(L, -2, text, sizeof text));
        if (lua_type(L, -1) != LUA_TSTRING)
            te_lua_fail(L, "save", "metadata %.200s: expected a string, got %s", lua_tostring(L, -2),
                        te_lua_describe(L, -1, text, sizeof text));
        if (strlen(lua_tostring(L, -2)) != lua_objlen(L, -2) || strlen(lua_tostring(L, -1)) != lua_objlen(L, -1))
            te_lua_fail(L, "save", "metadata %.200s: a zero byte in its name or text", lua_tostring(L, -2));
        if (n == s->n_pairs) te_lua_fail(L, "save", "metadata changed meanwhile"); /* a finalizer can do that */
        for (int k = 0; k < 2; k++) {
            lua_pushvalue(L, -2 + k);
            lua_rawseti(L, texts, s->given.n + 2 * n + k + 1);
        }
        s->pairs[n++] = (te_safetensors_pair){lua_tostring(L, -2), lua_tostring(L, -1)};
    }
    qsort(s->pairs, (size_t)n, sizeof *s->pairs, by_key);
    s->contents.n_metadata = n;
}

/* Bytes of a contiguous tensor that the host cannot address. */
static te_status read_tensor(void *user, int64_t offset, void *to, size_t size, te_io_error *error)
{
    te_tensor *t = user;
    te_exec   *exec = &t->storage->device->exec;
    te_status status =
        exec->backend->memory_copy(exec, to, (char *)te_tensor_pointer(t) + offset, size, TE_COPY_DEVICE_TO_HOST);
    return status == TE_OK ? TE_OK : te_io_fail(error, status, NULL, "%s", exec->message);
}

static te_status make_copies(saving *s)
{
    for (int i = 0; i < s->given.n; i++) {
        te_safetensors_item *item = &s->items[i];
        te_tensor           *t = s->copies.t[i] = te_tensor_contiguous_copy(s->given.t[i]);
        if (!t) return s->given.t[i]->ctx->status;
        item->dtype = t->dtype;
        item->ndim = t->ndim;
        memcpy(item->shape, t->shape, sizeof item->shape);
        item->data = te_tensor_numel(t) ? te_tensor_data(t) : item;
        item->read = read_tensor;
        item->user = t;
    }
    return TE_OK;
}

/* safetensors_write(path, {{name, tensor}, …}, metadata) */
static int safetensors_write(lua_State *L)
{
    te_lua     *rt = te_lua_runtime(L);
    saving      s = {0};
    te_io_error error;
    const char *path = check_path(L, 1, "save");
    lua_settop(L, 3);
    luaL_checktype(L, 2, LUA_TTABLE);
    if (!lua_isnil(L, 3)) luaL_checktype(L, 3, LUA_TTABLE);
    if (lua_istable(L, 3))
        for (lua_pushnil(L); lua_next(L, 3); lua_pop(L, 1)) s.n_pairs++;
    int n = (int)lua_objlen(L, 2);
    lua_createtable(L, n + 2 * s.n_pairs, 0);
    s.given = te_lua_new_tensors(L, n);
    s.copies = te_lua_new_tensors(L, n);
    s.items = push_array(L, (size_t)n, sizeof *s.items);
    s.pairs = push_array(L, (size_t)s.n_pairs, sizeof *s.pairs);
    read_items(L, &s, 4);
    read_pairs(L, &s, 4);
    s.contents = (te_safetensors_contents){s.items, n, s.pairs, s.contents.n_metadata};
    te_lua_enter(rt, L, "save");
    te_lua_call call = te_lua_begin(rt, L);
    te_status status = make_copies(&s);
    te_lua_end(rt, call);
    bool      copied = status == TE_OK;
    rt->saving = copied;
    if (copied) status = te_safetensors_write(&te_io_posix, &rt->ctx->mem, path, &s.contents, &error);
    rt->saving = false;
    te_lua_drop_tensors(&s.given);
    te_lua_drop_tensors(&s.copies);
    if (status == TE_OK) return 0;
    return copied ? te_lua_raise_io(te_lua_runtime(L), L, "save", &error) : te_lua_raise(rt, L, "save", status);
}

/* --- safetensors: reading ----------------------------------------------------------------------------------------- */

typedef struct loading {
    te_lua         *rt;
    bool            chosen; /* whether a function says which tensors are wanted */
    te_safetensors *file;
    te_io_error     error;
    te_status       status; /* of the engine; TE_OK with an empty message: none */
} loading;

/* Reads one tensor into the userdata on top. */
static bool load_tensor(lua_State *L, loading *job, te_lua_tensor *u, int i)
{
    te_lua *rt = job->rt;
    const te_safetensors_entry *e = te_safetensors_get(job->file, i);
    job->status = te_safetensors_check_dtype(job->file, i, &job->error);
    if (job->status == TE_OK) {
        te_lua_call call = te_lua_begin(rt, L);
        u->t = te_tensor_empty(rt->ctx, e->dtype, e->ndim, e->shape);
        te_lua_end(rt, call);
        if (!u->t) {
            job->status = rt->ctx->status;
            return false;
        }
        if (e->size == 0) return true;
        job->status = te_safetensors_read(job->file, i, te_tensor_data(u->t), (size_t)e->size, &job->error);
    }
    if (job->status != TE_OK) te_fail(rt->ctx, job->status, "te.load: %s", job->error.message);
    return job->status == TE_OK;
}

/* Whether the function at 2 says yes to the name on top. */
static bool is_wanted(lua_State *L, const loading *job)
{
    if (!job->chosen) return true;
    lua_pushvalue(L, 2);
    lua_pushvalue(L, -2);
    lua_call(L, 1, 1);
    bool wanted = lua_toboolean(L, -1);
    lua_pop(L, 1);
    return wanted;
}

/* Runs protected, since the file is open: leaves the names, the tensors and the metadata. */
static int load_all(lua_State *L)
{
    loading *job = lua_touserdata(L, 1);
    int      n = te_safetensors_count(job->file), place = 0;
    lua_newtable(L);
    lua_newtable(L);
    lua_newtable(L);
    for (int i = 0; i < n; i++) {
        lua_pushstring(L, te_safetensors_get(job->file, i)->name);
        if (is_wanted(L, job)) {
            lua_pushvalue(L, -1);
            lua_rawseti(L, 3, ++place);
            lua_pushvalue(L, -1);
            if (!load_tensor(L, job, te_lua_new_tensor(L), i)) return 0;
            lua_rawset(L, 4);
        }
        lua_pop(L, 1);
    }
    for (int i = 0; i < te_safetensors_metadata_count(job->file); i++) {
        const te_safetensors_pair *pair = te_safetensors_metadata(job->file, i);
        lua_pushstring(L, pair->value);
        lua_setfield(L, 5, pair->key);
    }
    return 3;
}

/* safetensors_read(path, wanted): names in file order, tensors by name, metadata; only of tensors whose name
 * wanted(name) says yes to, where it is given. */
static int safetensors_read(lua_State *L)
{
    te_lua *rt = te_lua_runtime(L);
    loading job = {.rt = rt};
    const char *path = check_path(L, 1, "load"); /* stands at index 1 */
    te_lua_enter(rt, L, "load");
    lua_settop(L, 2);
    job.chosen = lua_isfunction(L, 2);
    lua_pushcfunction(L, load_all);
    lua_pushlightuserdata(L, &job);
    lua_pushvalue(L, 2);
    if (te_safetensors_open(&job.file, &te_io_posix, &rt->ctx->mem, path, &job.error) != TE_OK)
        return te_lua_raise_io(te_lua_runtime(L), L, "load", &job.error);
    int failed = lua_pcall(L, 2, 3, 0);
    te_safetensors_close(job.file);
    if (failed) return lua_error(L);
    if (job.status != TE_OK) return te_lua_raise(rt, L, "load", job.status);
    te_lua_charge(rt, L);
    return 3;
}

static void push_entry(lua_State *L, const te_safetensors_entry *e)
{
    double numel = 1;
    lua_createtable(L, 0, 5);
    lua_pushstring(L, e->name);
    lua_setfield(L, -2, "name");
    bool same = e->dtype < TE_DTYPE_COUNT && strcmp(e->stored, te_safetensors_dtype_name(e->dtype)) == 0;
    lua_pushstring(L, same ? te_dtype_name(e->dtype) : e->stored);
    lua_setfield(L, -2, "dtype");
    lua_pushboolean(L, e->dtype < TE_DTYPE_COUNT);
    lua_setfield(L, -2, "readable");
    lua_createtable(L, e->ndim, 0);
    for (int i = 0; i < e->ndim; i++) {
        numel *= (double)e->shape[i];
        lua_pushnumber(L, (double)e->shape[i]);
        lua_rawseti(L, -2, i + 1);
    }
    lua_setfield(L, -2, "shape");
    lua_pushnumber(L, numel);
    lua_setfield(L, -2, "numel");
    lua_pushnumber(L, (double)e->bytes);
    lua_setfield(L, -2, "bytes");
}

/* Runs protected, since the file is open: leaves the list of entries and the metadata. */
static int list_entries(lua_State *L)
{
    te_safetensors *file = lua_touserdata(L, 1);
    int             n = te_safetensors_count(file);
    lua_createtable(L, n, 0);
    for (int i = 0; i < n; i++) {
        push_entry(L, te_safetensors_get(file, i));
        lua_rawseti(L, -2, i + 1);
    }
    lua_newtable(L);
    for (int i = 0; i < te_safetensors_metadata_count(file); i++) {
        const te_safetensors_pair *pair = te_safetensors_metadata(file, i);
        lua_pushstring(L, pair->value);
        lua_setfield(L, -2, pair->key);
    }
    return 2;
}

/* safetensors_entries(path): {name, dtype, readable, shape, numel, bytes} of every tensor and the metadata, from the
 * header alone. A dtype that tensors do not have is named as in the file. */
static int safetensors_entries(lua_State *L)
{
    te_lua         *rt = te_lua_runtime(L);
    te_safetensors *file;
    te_io_error     error;
    const char     *path = check_path(L, 1, "safetensors_entries");
    te_lua_enter(rt, L, "safetensors_entries");
    lua_pushcfunction(L, list_entries);
    if (te_safetensors_open(&file, &te_io_posix, &rt->ctx->mem, path, &error) != TE_OK)
    {
        lua_pushstring(L, error.message); /* asked for by name: the place in the tool says nothing */
        return lua_error(L);
    }
    lua_pushlightuserdata(L, file);
    int failed = lua_pcall(L, 1, 2, 0);
    te_safetensors_close(file);
    return failed ? lua_error(L) : 2;
}

const luaL_Reg te_lua_file_functions[] = {
    {"list_dir", list_dir}, {"stat", stat_path}, {"mkdir", make_folder}, {"write_file", write_file},
    {"lock_folder", lock_folder}, {"cache_folder", cache_folder},
    {"safetensors_write", safetensors_write}, {"safetensors_read", safetensors_read},
    {"safetensors_entries", safetensors_entries}, {NULL, NULL},
};

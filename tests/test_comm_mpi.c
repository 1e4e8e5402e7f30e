/* test_comm_mpi.c - joining over MPI itself, by a process that is alone. */
#include "test.h"

#include "core/comm.h"

#include <dlfcn.h>

/* Under AddressSanitizer: MPI keeps things to the end. */
__attribute__((visibility("default"))) const char *__asan_default_options(void);
const char *__asan_default_options(void) { return "detect_leaks=0"; }

static te_context *new_context(void)
{
    return te_context_open(&(te_context_options){.struct_size = sizeof(te_context_options), .threads = 1});
}

static void test_joins(const te_messenger *messenger)
{
    te_context *a = new_context(), *b = new_context();
    te_comm    *first = te_comm_join(a, messenger);
    CHECK_MSG(first, "%s", te_context_error(a));
    te_peers *peers = first->peers;
    CHECK(!te_comm_join(b, messenger) && strstr(te_context_error(b), "another runtime of this process"));
    te_comm_release(first);
    te_comm *second = te_comm_join(b, messenger);
    CHECK_MSG(second && second->peers == peers, "what was left is taken again: %s", te_context_error(b));
    CHECK(!te_comm_join(a, messenger));
    second->peers->over = true;
    te_comm_release(second);
    te_comm *third = te_comm_join(a, messenger);
    CHECK_MSG(third && third->peers != peers && !third->peers->over, "but not what is of no use: %s",
              te_context_error(a));
    te_comm_release(third);
    te_context_release(b);
    te_context_release(a);
}

int main(void)
{
    void                      *library = dlopen("./libtetrain_mpi.so", RTLD_NOW | RTLD_LOCAL);
    te_messenger_get_function *get = NULL;
    if (library) *(void **)&get = dlsym(library, TE_MESSENGER_ENTRY);
    if (get) test_joins(get());
    return TEST_END();
}
